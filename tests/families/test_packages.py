"""What `pytest tests/families --package NAME` runs (for a real package: tests/integration/test_extending.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ctxlm_ds.registry import FAMILIES
from tests.families.packages import recipe_of, registered_by
from tests.families.test_contract import differences


def test_families_and_objectives_are_those_of_its_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, groups in {"toys": ("families", "objectives", "trackers"), "figures": ("trackers",)}.items():
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (folder / "entry_points.txt").write_text("".join(f"[ctxlm_ds.{each}]\nmy_{each} = a:B\n" for each in groups))
    assert registered_by("toys") == (["my_families"], ["my_objectives"])
    for name, why in {"toyz": "no package", "figures": "it has no entry points ctxlm_ds.families or"}.items():
        with pytest.raises(pytest.UsageError, match=f"--package {name}: {why}"):
            registered_by(name)


def test_an_objective_runs_with_the_first_family_that_it_goes_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FAMILIES, "_added", {"toy": "tests.families.toy:TOY"})
    data = {"sample_format": "blocks", "seq_length": 32}
    assert recipe_of("causal_lm", ["toy"]) == (
        "toy+causal_lm",
        ("toy", {"objective": {"name": "causal_lm"}, "data": data}),
    )
    name, (family, sections) = recipe_of("distillation", ["toy"])
    assert (name, family, sections["teacher"]) == ("bert+distillation", "bert", {"path": "teacher"})


def test_weights_are_judged_by_a_norm_of_their_tensor() -> None:
    """A rounded weight among many is no mistake of a layout; the name and the step of mistakes are told."""
    wanted = {"table": torch.zeros(3072), "bias": torch.zeros(4)}
    got = {name: value.clone() for name, value in wanted.items()}
    got["table"][7] = 1.29e-5
    assert differences(got, wanted, 2) == []
    got["bias"][0], got["table"][3] = 4e-5, float("nan")
    found = {"table": "nan", "bias": "2.0e-05"}
    assert differences(got, wanted, 2) == [
        f"{name} after step 2: {rms} (root mean square)" for name, rms in found.items()
    ]
