"""The export takes families from the registry, those of other packages too; formats of families' own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.base import FamilyExport, OwnFormat, Tensors, all_exports, export_of, own_format_in, own_format_of
from ctxlm_ds.export.hf_config import from_hf_config
from ctxlm_ds.export.huggingface import from_hf, is_exported, to_hf
from ctxlm_ds.export.initial_weights import load_initial_weights
from ctxlm_ds.export.safetensors_files import DEFAULT_SHARD_BYTES
from ctxlm_ds.export.verify import compare_weights
from ctxlm_ds.families.bert.config import BERT, BertSection
from ctxlm_ds.families.bert.export import BertExport
from ctxlm_ds.families.elmo.export import FORMAT
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.registry import FAMILIES, Registry
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.checkpoints import WORDS, random_weights, write_run


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


SHARD = 20_000
"""Bytes that the softmax exceeds with the other weights, so that they are in several files."""


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, RunConfig, dict[str, torch.Tensor]]:
    """An ELMo's run."""
    train_tokenizer("elmo", iter([" ".join(WORDS)] * 3), len(WORDS) + 3, tmp_path / "tokenizer")
    sections = FAMILIES.get("elmo").tiny() | {"tokenizer": {"path": str(tmp_path / "tokenizer")}}
    sections["model"] |= {"vocab_size": load_tokenizer(tmp_path / "tokenizer").output_size, "num_sampled": 8}
    config = RunConfig.model_validate(sections | {"name": "elmo"})
    weights = random_weights(config)
    return write_run(tmp_path / "run", config, weights), config, weights


@pytest.mark.parametrize(("dtype", "shard_bytes"), [("fp32", DEFAULT_SHARD_BYTES), ("fp32", SHARD), ("bf16", SHARD)])
def test_a_checkpoint_becomes_a_folder_and_initial_weights(
    run: tuple[Path, RunConfig, dict[str, torch.Tensor]], tmp_path: Path, dtype: str, shard_bytes: int
) -> None:
    """Of bf16 the softmax is rounded, which the authors' files do not hold."""
    folder, config, weights = run
    done = to_hf(folder, tmp_path / "out", dtype, shard_bytes)
    assert done.hf_class == FORMAT.title and done.loading == FORMAT.loading
    assert is_exported(folder, tmp_path / "out", dtype, shard_bytes)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"options.json", "weights.hdf5", "config.json", "vocab.txt", "exported_from.json"} <= names
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "elmo"
    stored = {name: x for path in (tmp_path / "out").glob("*.safetensors") for name, x in load_file(path).items()}
    assert stored.keys() == weights.keys()
    outputs = tuple(sorted(FAMILIES.get("elmo").outputs))
    for name, value in load_initial_weights(tmp_path / "out", config.model, outputs, lambda name: weights[name] * 0):
        rounded = dtype == "bf16" and name.startswith("softmax")
        assert torch.equal(value, weights[name].bfloat16().float() if rounded else weights[name]), name


def test_a_folder_without_the_softmax_gives_the_other_weights(
    run: tuple[Path, RunConfig, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """As AllenNLP's folders are."""
    _, config, weights = run
    FORMAT.write(tmp_path, config.model, Tensors(weights))
    outputs = tuple(sorted(FAMILIES.get("elmo").outputs))
    with pytest.raises(ExportError, match=r"need no conversion: give the folder as initialize_from"):
        from_hf(tmp_path, tmp_path / "imported")
    found = dict(load_initial_weights(tmp_path, config.model, outputs, lambda name: weights[name] * 0 + 7))
    assert found.keys() == weights.keys()
    for name, value in found.items():
        assert torch.equal(value, weights[name] * 0 + 7 if name.startswith("softmax") else weights[name]), name


def test_another_vocabulary_is_refused(run: tuple[Path, RunConfig, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, config, weights = run
    model = config.model.model_copy(update={"vocab_size": 8})
    smaller = {name: value[:8] if name.startswith("softmax") else value for name, value in weights.items()}
    other = write_run(tmp_path / "other", config.model_copy(update={"model": model}), smaller)
    with pytest.raises(ExportError, match="if tokens were added to the model.s tokenizer, add rows"):
        to_hf(other, tmp_path / "out")


def test_only_families_without_a_class_have_a_format(tmp_path: Path) -> None:
    assert own_format_of("bert") is None
    assert own_format_in(tmp_path) is None


def test_the_largest_difference_counts() -> None:
    ours = Tensors({"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([[2.0]])})
    same = compare_weights(ours, Tensors({"b": torch.tensor([[2.0]])}), 0.0)
    assert same.holds and same.relative == 0.0
    other = compare_weights(ours, Tensors({"a": torch.tensor([1.0, -3.0]), "b": torch.tensor([[2.0]])}), 0.2)
    assert (other.largest_difference, other.logit_scale, other.relative) == (1.0, 4.0, 0.25) and not other.holds
    assert ours.shape("b") == (1, 1)
