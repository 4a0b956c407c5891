"""A study whose runs have figures, as if they had trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxlm_ds.apps.study.definition import Study
from ctxlm_ds.apps.study.measure import FIGURES
from ctxlm_ds.apps.study.runs import Job, StudyRuns
from ctxlm_ds.apps.study.scores import SCORES

SPENT = {"steps": 10, "words": 1000, "tokens": 1300, "predicted": 200, "flops": 0.5, "seconds": 20.0}
ITEMS = 30


@pytest.fixture
def study() -> Study:
    return Study.model_validate(
        {
            "title": "Masks",
            "recipe": "bert-docstrings",
            "claim": {"text": "fewer", "source": "nobody", "order": ["few", "many"], "seen_at": "a large size"},
            "arms": {"few": {"set": {"objective": {"mask_prob": 0.1}}}, "many": {}},
            "sizes": {"tiny": {"budget": {"tokens": "1M"}, "seeds": 3}},
            "measures": ["conll2003-pos"],
        }
    )


@pytest.fixture
def runs(study: Study, tmp_path: Path) -> StudyRuns:
    return StudyRuns(tmp_path, study, study.sizes["tiny"])


Complete = Callable[..., None]


@pytest.fixture
def complete() -> Complete:
    """Write the figures of a run with a mean loss, above a gate or below it."""

    def write(runs: StudyRuns, job: Job, loss: float, gate: float = 9.0, score: float | None = None) -> None:
        folder = runs.run_dir(job)
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng([job.seed, job.arm == "few"])
        items = loss + 0.001 * rng.normal(size=ITEMS) + np.linspace(-1, 1, ITEMS)
        found: dict[str, Any] = {**SPENT, "loss": float(items.mean()), "items": items.tolist(), "gate": gate,
                                 "held_out": "same"}  # fmt: skip
        (folder / FIGURES).write_text(json.dumps(found))
        lines = [{"step": step, "eval/heldout/loss": loss + 1 / step} for step in (5, 10)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if score is not None:
            (folder / SCORES).write_text(json.dumps({"conll2003-pos": {"items": [score, score]}}))

    return write
