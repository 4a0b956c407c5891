"""What the report of a study says of runs with known figures."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from itertools import accumulate, combinations
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_rel

from ctxlm_ds.apps.study.definition import Study
from ctxlm_ds.apps.study.report import arm_table, differences, layer_table, results_of, verdict, write_report
from ctxlm_ds.apps.study.runs import StudyRuns
from tests.unit.apps.study.conftest import Complete

SCORES_OF = {"best-layer": 0.7, "mix": 0.8, "word2vec": 0.6}


def finish(runs: StudyRuns, complete: Complete, losses: Mapping[str, float], **more: Any) -> None:
    for job in runs.search:
        complete(runs, job, losses[job.arm] + abs(job.factor - 2))
    for job in runs.compared():
        complete(runs, job, losses[job.arm], **more)


def verdict_of(runs: StudyRuns) -> str:
    return verdict(runs.study.claim, runs.study.compare, differences(runs, results_of(runs)))


@pytest.mark.parametrize(("losses", "word"), [
    ((4.0, 4.2), "agrees"), ((4.2, 4.0), "disagrees"), ((4.1, 4.1), "undecided"),
])  # fmt: skip
def test_the_verdict_is_that_of_the_interval(
    losses: tuple[float, float], word: str, runs: StudyRuns, complete: Complete
) -> None:
    finish(runs, complete, dict(zip(("few", "many"), losses, strict=True)))
    assert verdict_of(runs).startswith(word)
    if word == "undecided":
        assert "a difference of 0.00" in verdict_of(runs)


def test_losses_of_other_tokens_are_paired_by_seed_alone(runs: StudyRuns, complete: Complete) -> None:
    finish(runs, complete, {"few": 4.0, "many": 4.2})
    paired = differences(runs, results_of(runs))["few", "many"]
    for job in runs.compared():
        figures = runs.run_dir(job) / "study.json"
        figures.write_text(figures.read_text().replace('"same"', f'"{job.arm}"'))
    alone = differences(runs, results_of(runs))["few", "many"]
    for job in runs.compared():
        figures = runs.run_dir(job) / "study.json"
        kept = json.loads(figures.read_text())
        figures.write_text(json.dumps(kept | {"held_out": "same", "items": kept["items"][job.arm == "few" :]}))
    other_batches = differences(runs, results_of(runs))["few", "many"]
    assert other_batches.p < 1.0
    assert alone.mean == pytest.approx(paired.mean) and alone.p == pytest.approx(paired.p)
    assert (alone.low, alone.high) != (paired.low, paired.high)


@pytest.mark.parametrize(("apart", "within", "word"), [
    (0.2, 0.05, "disagrees"), (0.02, 0.05, "agrees"), (0.05, 0.05, "undecided"), (0.0, 1e-6, "undecided"),
])  # fmt: skip
def test_an_equal_claim_needs_an_interval_within_its_bounds(
    apart: float, within: float, word: str, runs: StudyRuns, complete: Complete
) -> None:
    finish(runs, complete, {"few": 4.0, "many": 4.0 + apart})
    equal = runs.study.claim.model_copy(update={"equal_within": within})
    assert verdict(equal, "loss", differences(runs, results_of(runs))).startswith(word)


def test_p_is_that_of_the_paired_test_by_holm(study: Study, tmp_path: Path, complete: Complete) -> None:
    """Holm 1979: the smallest times 3, the next times 2, none below one before it."""
    text = study.model_dump(mode="json")
    text["arms"]["third"] = {}
    runs = StudyRuns(tmp_path, Study.model_validate(text), study.sizes["tiny"])
    finish(runs, complete, {"few": 4.0, "many": 4.0005, "third": 4.001})
    of = {arm.name: [run["loss"] for run in arm.figures] for arm in results_of(runs)}
    plain = sorted((float(ttest_rel(of[second], of[first]).pvalue), (first, second))
                   for first, second in combinations(of, 2))  # fmt: skip
    wanted = list(accumulate((min(1.0, p * factor) for (p, _), factor in zip(plain, (3, 2, 1), strict=True)), max))
    found = differences(runs, results_of(runs))
    assert [found[pair].p for _, pair in plain] == pytest.approx(wanted)


def test_a_score_is_better_if_higher(runs: StudyRuns, complete: Complete, study: Study) -> None:
    runs.study = study.model_copy(update={"compare": "conll2003-pos"})
    finish(runs, complete, {"few": 4.0, "many": 4.2})
    for job in runs.compared():
        complete(runs, job, 4.0, score=0.8 + 0.05 * (job.arm == "few") + 0.001 * job.seed)
    assert verdict_of(runs).startswith("agrees")


def test_an_arm_on_its_plateau_does_not_count(runs: StudyRuns, complete: Complete) -> None:
    finish(runs, complete, {"few": 4.0, "many": 4.2}, gate=4.1)
    few, many = arm_table(runs, results_of(runs))[1:]
    assert few[1].startswith("4.") and many[1] == "not past the plateau"
    assert verdict_of(runs).startswith("undecided") and "no result that counts" in verdict_of(runs)


def test_an_arm_that_failed_is_shown_and_the_others_stand(runs: StudyRuns, complete: Complete) -> None:
    finish(runs, complete, {"few": 4.0, "many": 4.2})
    for job in runs.compared():
        if job.arm == "many":
            (runs.run_dir(job) / "study.json").unlink()
    few, many = arm_table(runs, results_of(runs))[1:]
    assert few[1].startswith("4.") and many[1] == "failed" and many[3] == "0"


def test_arms_that_read_the_runs_of_another(study: Study, tmp_path: Path, complete: Complete) -> None:
    """A model on its plateau says nothing of word2vec, and minimal pairs know no readings."""
    text = study.model_dump(mode="json") | {"compare": "conll2003-pos", "measures": ["conll2003-pos", "minimal-pairs"]}
    text["arms"] |= {"mixed": {"of": "few", "reading": "mix"}, "static": {"of": "few", "reading": "word2vec"}}
    text["claim"]["order"] = ["mixed", "few", "static"]
    runs = StudyRuns(tmp_path, Study.model_validate(text), study.sizes["tiny"])
    finish(runs, complete, {"few": 4.0, "many": 4.2})
    assert {job.arm for job in runs.compared()} == {"few", "many"}
    for job in runs.compared():
        items = {name: [value, value + 0.01 * job.seed] for name, value in SCORES_OF.items()}
        accuracy = {"0": 0.5, "1": 0.7 + 0.01 * job.seed, "mix": 0.8}
        figures = {"items": items, "accuracy": accuracy, "selectivity": 0.1, "bits": 50.0, "uniform_bits": 200.0}
        found = {"conll2003-pos": figures, "minimal-pairs": {"items": [1.0, 0.0]}}
        (runs.run_dir(job) / "scores.json").write_text(json.dumps(found))
    arms = results_of(runs)
    rows = {row[0]: row[1:4] for row in arm_table(runs, arms)[1:]}
    assert [row[1][:4] for row in rows.values()] == ["0.71", "0.71", "0.81", "0.61"]
    assert rows["few"][2].startswith("0.5") and rows["mixed"][2] == rows["static"][2] == "not measured"
    assert verdict_of(runs).startswith("agrees")
    assert layer_table(runs, arms)[1:] == [
        [name, "conll2003-pos", "0.5000 0.7200", "0.8000", "0.1000", "0.2500"] for name in ("few", "many")
    ]
    for job in runs.compared():
        figures_of = runs.run_dir(job) / "study.json"
        figures_of.write_text(figures_of.read_text().replace('"gate": 9.0', '"gate": 1.0'))
    cells = [row[2] for row in arm_table(runs, results_of(runs))[1:]]
    assert cells[:3] == ["not past the plateau"] * 3 and cells[3].startswith("0.61")


def test_the_report_has_every_part(runs: StudyRuns, complete: Complete) -> None:
    finish(runs, complete, {"few": 4.2, "many": 4.0})
    text = "\n".join(write_report(runs))
    assert "the publication saw it at: a large size" in text and "not measured" in text and "2, the edge" in text
    page = (runs.folder / "report.html").read_text()
    assert "data:image/png;base64," in page and "disagrees" in page and "many - few" in page
    assert (runs.folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.reader((runs.folder / "results.csv").open()))
    assert rows[0][:3] == ["arm", "loss", "conll2003-pos"] and [row[0] for row in rows[1:3]] == ["few", "many"]
