"""Nine families train as they did at the commit whose figures are kept: rows, losses, norms, weights, bit for bit.

Rows are compared on their own, so that a change of the data is told from a change of the model. On a machine that
rounds differently (another CPU, another torch) rows are still the same, losses and norms alike within a tolerance.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dist.runner import ranks_of_this_file  # noqa: F401 (commands leave signals and loggers behind)
from tests.golden.cases import CASES, STREAMS, Case
from tests.golden.run_case import machine, run_figures, stream_figures

FIGURES = json.loads((Path(__file__).parent / "figures.json").read_text())
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
EXACT_EVERYWHERE = ("step", "learning_rate", "epoch", "tokens")
OPTIONAL = ("token_type_ids", "prediction_positions", "cls_positions")
"""Fields that every batch had then, and now only those of an objective whose models read them."""
INCOMPARABLE = ("accuracy", "perplexity")
"""Ends of names: counts of a few rows, and what multiplies a loss's rounding."""


OF_ANOTHER = ("roberta", "gpt1")
"""Families whose layers are those of BERT and GPT-2, split in every run of the tests."""
OF_CONTRACT = ("bert-fp32-split", "gpt2-fp32-split")
"""Runs of which tests/families/test_contract.py compares the layouts in this precision."""


def marks_of(case: Case) -> list[pytest.MarkDecorator]:
    """Marks by the number of ranks."""
    soak = [pytest.mark.soak] * (case.family in OF_ANOTHER or case.name in OF_CONTRACT)
    return [pytest.mark.dist, *soak] if case.ranks > 1 else []


@pytest.mark.parametrize("stream", STREAMS)
def test_rows_are_the_same(golden_data: Path, stream: str) -> None:
    kept, found = FIGURES["streams"][stream], stream_figures(golden_data, stream)
    assert [len(step) for step in found] == [len(step) for step in kept]
    differing = [
        f"step {step}, micro-batch {number}: {name}"
        for step, micro_batches in enumerate(kept)
        for number, fields in enumerate(micro_batches)
        for name, digest in fields.items()
        if found[step][number].get(name) != digest and not (name in OPTIONAL and name not in found[step][number])
    ]
    assert not differing, differing


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=marks_of(case)) for case in CASES])
def test_runs_are_the_same(golden_data: Path, case: Case) -> None:
    kept, found = FIGURES["runs"][case.name], run_figures(golden_data, case)
    bitwise = kept.get("machine", FIGURES["machine"]).items() <= machine().items()
    differing = list(step_differences(kept["steps"], found["steps"], None if bitwise else TOLERANCE[case.precision]))
    assert kept["weights"].keys() == found["weights"].keys()
    if bitwise:
        for part in ("weights", "moments"):
            differing += [f"{part}: {name}" for name, digest in kept[part].items() if found[part].get(name) != digest]
    assert not differing, "\n".join(differing)


def step_differences(kept: list[Any], found: list[Any], tolerance: float | None) -> Iterator[str]:
    """Every kept figure that is not found again: as it was, or within a relative tolerance."""
    assert len(found) == len(kept)
    for before, now in zip(kept, found, strict=True):
        for name, value in before.items():
            got = now.get(name)
            if tolerance is not None and name not in EXACT_EVERYWHERE:
                if name.endswith(INCOMPARABLE) or got == pytest.approx(value, rel=tolerance):
                    continue
            elif got == value:
                continue
            yield f"step {before['step']}: {name} was {value!r}, is {got!r}"
