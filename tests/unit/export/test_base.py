"""The export takes families from the registry, those of other packages too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import BertConfig

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.base import FamilyExport, OwnFormat, all_exports, export_of, own_format_of
from ctxlm_ds.export.hf_config import from_hf_config
from ctxlm_ds.families.bert.config import BERT, BertSection
from ctxlm_ds.families.bert.export import BertExport
from ctxlm_ds.registry import FAMILIES, Registry


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """The registry, whose additions end with the test."""
    monkeypatch.setattr(FAMILIES, "_added", {})
    monkeypatch.setattr(FAMILIES, "_loaded", {})
    return FAMILIES


class OtherSection(BertSection):
    """Settings of a family of another package."""

    family: str = "other"


class OtherExport(BertExport):
    """An export of another package."""

    section = OtherSection
    model_type = "other"


EXPORT = OtherExport()


def test_every_family_of_this_package_says_what_it_exports() -> None:
    for family in map(FAMILIES.get, FAMILIES.shipped_names()):
        assert (family.export is None) == (family.own_format is not None)
        if family.export is None:
            assert isinstance(own_format_of(family.name), OwnFormat)
            continue
        export = export_of(family.name)
        assert export.section is family.section
        assert all(outputs <= family.outputs for outputs in export.hf_classes)
        assert export.settings.keys() <= family.section.model_fields.keys()
    by_type = [export.model_type for export in all_exports() if type(export).claims is FamilyExport.claims]
    assert len(by_type) == len(set(by_type))
    claiming = {export.model_type for export in all_exports()} - set(by_type)
    assert not claiming, "the type of a family that claims single folders is that of another family"


def test_a_family_of_another_package_is_imported(families: Registry, tmp_path: Path) -> None:
    families.register("other", replace(BERT, name="other", section=OtherSection, export=f"{__name__}:EXPORT"))
    BertConfig(hidden_size=32, num_attention_heads=4).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "model_type": "other"}))
    found = from_hf_config(tmp_path)
    assert type(found.model) is OtherSection and found.model.hidden_size == 32


def test_a_family_without_a_class_in_transformers_says_so(families: Registry) -> None:
    families.register("lonely", replace(BERT, name="lonely", export=None))
    with pytest.raises(ExportError, match="model.family lonely has no class in transformers"):
        export_of("lonely")
    assert [export.model_type for export in all_exports()][-1] != "lonely"
