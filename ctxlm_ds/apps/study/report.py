"""The report of a study: a table of its arms, their paired differences, the verdict on the claim, and curves."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from ctxlm_ds.apps.report.charts import page, table
from ctxlm_ds.apps.study.definition import LOSS, MIX, UNTRAINED, Arm, Claim
from ctxlm_ds.apps.study.runs import Job, StudyRuns
from ctxlm_ds.apps.study.statistics import Difference, Items, difference, interval
from ctxlm_ds.atomic import write_text
from ctxlm_ds.console import aligned
from ctxlm_ds.process.run_files import HELD_OUT, METRICS_NAME, read_lines

COSTS = {"steps": "steps", "words": "words", "tokens": "tokens", "predicted": "predicted tokens",
         "flops": "10^12 FLOPs", "seconds": "seconds"}  # fmt: skip
NOT_MEASURED, PLATEAU, FAILED = "not measured", "not past the plateau", "failed"
Row = list[str]


@dataclass(frozen=True)
class ArmResult:
    """The runs of an arm that are complete, in the order of their seeds."""

    name: str
    jobs: Sequence[Job]
    figures: Sequence[dict[str, Any]]
    factor: str
    settings: Arm = Arm()

    def items(self, measure: str) -> Items | None:
        """Return the values [s, n] of a measure; None if a run lacks them, or this reading of it."""
        scores = [{LOSS: {"items": run["items"]}, **run["scores"]} for run in self.figures]
        found = [of_run.get(measure, {}).get("items") for of_run in scores]
        if any(isinstance(items, dict) for items in found):
            found = [items and items.get(self.settings.reading) for items in found]
        elif self.settings.of is not None:
            return None
        return np.array(found) if found and all(found) else None

    @property
    def is_past_plateau(self) -> bool:
        """Return whether the mean loss is below the gate; vectors that come from no training of the arm have none."""
        if self.settings.reading in UNTRAINED:
            return True
        known = [run for run in self.figures if run["gate"] is not None]
        return not known or bool(np.mean([run["loss"] - run["gate"] for run in known]) < 0)

    def cell(self, measure: str) -> str:
        items = self.items(measure)
        if len(self.figures) < len(self.jobs):
            return FAILED if not self.figures else f"{FAILED}: {len(self.jobs) - len(self.figures)} of {len(self.jobs)}"
        if items is None:
            return NOT_MEASURED
        if not self.is_past_plateau:
            return PLATEAU
        low, high = interval(items)
        return f"{items.mean():.4f} [{low:.4f}, {high:.4f}]"


def results_of(runs: StudyRuns) -> list[ArmResult]:
    found, compared = [], runs.compared()
    for arm, settings in runs.study.arms.items():
        jobs = [job for job in compared if job.arm == (settings.of or arm)]
        done = [figures for job in jobs if (figures := runs.figures(job)) is not None]
        factor, factors = jobs[0].factor, runs.study.rates
        at_edge = len(factors) > 1 and factor in (min(factors), max(factors))
        found.append(ArmResult(arm, jobs, done, f"{factor:g}{', the edge' if at_edge else ''}", settings))
    return found


def arm_table(runs: StudyRuns, arms: Sequence[ArmResult]) -> list[Row]:
    """Return a row for each arm: every measure, the rate, and what a run has spent on average."""
    measures = (LOSS, *runs.study.measures)
    rows = [["arm", *measures, "seeds", "rate", *COSTS.values()]]
    for arm in arms:
        means = [np.mean([run[name] for run in arm.figures]) if arm.figures else 0.0 for name in COSTS]
        costs = [f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}" for mean in means]
        costs = costs if arm.settings.of is None else [f"of {arm.settings.of}", *[""] * (len(COSTS) - 1)]
        rows.append([arm.name, *map(arm.cell, measures), str(len(arm.figures)), arm.factor, *costs])
    return rows


def layer_table(runs: StudyRuns, arms: Sequence[ArmResult]) -> list[Row]:
    """Return a row for each arm and task on words: the mean accuracy of each layer, and figures of the best layer."""
    rows = [["arm", "task", "layers, from the embeddings", "mix", "selectivity", "code length / uniform"]]
    for arm in (one for one in arms if one.settings.of is None):
        for measure in runs.study.measures:
            scores = [found for run in arm.figures if "accuracy" in (found := run["scores"].get(measure, {}))]
            if scores:
                accuracy = {name: np.mean([one["accuracy"][name] for one in scores]) for name in scores[0]["accuracy"]}
                code = [one["bits"] / one["uniform_bits"] for one in scores]
                figures = [accuracy.pop(MIX), np.mean([one["selectivity"] for one in scores]), np.mean(code)]
                layers = " ".join(f"{value:.4f}" for value in accuracy.values())
                rows.append([arm.name, measure, layers, *(f"{value:.4f}" for value in figures)])
    return rows


def differences(runs: StudyRuns, arms: Sequence[ArmResult]) -> dict[tuple[str, str], Difference]:
    """Return the paired differences of all arms that count, on the measure of the verdict.

    Losses of other held-out tokens (of rows of another form) are paired by seed alone. p is adjusted for the
    comparisons of the study (Holm 1979).
    """
    from statsmodels.stats.multitest import multipletests

    usable = {arm.name: items for arm in arms if len(arm.figures) == len(arm.jobs) and arm.is_past_plateau
              and (items := arm.items(runs.study.compare)) is not None}  # fmt: skip
    predicted = {(run["held_out"], len(run["items"])) for arm in arms if arm.name in usable for run in arm.figures}
    if runs.study.compare == LOSS and len(predicted) > 1:
        usable = {name: items.mean(axis=1, keepdims=True) for name, items in usable.items()}
    found = {pair: difference(usable[pair[0]], usable[pair[1]]) for pair in combinations(usable, 2)}
    adjusted = multipletests([one.p for one in found.values()], method="holm")[1] if found else ()
    return {pair: replace(found[pair], p=float(p)) for pair, p in zip(found, adjusted, strict=True)}


def difference_table(found: dict[tuple[str, str], Difference]) -> list[Row]:
    rows = [["difference", "mean", "95 % interval", "p (paired t, Holm)", "smallest that would be seen"]]
    for (first, second), one in found.items():
        interval = f"[{one.low:+.4f}, {one.high:+.4f}]"
        rows.append([f"{second} - {first}", f"{one.mean:+.4f}", interval, f"{one.p:.3g}", f"{one.smallest:.4f}"])
    return rows


def verdict(claim: Claim, compare: str, found: dict[tuple[str, str], Difference]) -> str:
    """Say whether the claim's order shows, arm by arm.

    A difference counts if it is seen, and as none if its interval is within the claim's bounds for that.
    """
    better, none, said = -1.0 if compare == LOSS else 1.0, claim.equal_within or 0.0, []
    for best, worse in zip(claim.order, claim.order[1:], strict=False):
        one = found.get((worse, best))
        sign = better if one is not None else -better
        one = one or found.get((best, worse))
        if one is None:
            said.append((f"{best}, {worse}", "undecided", "an arm has no result that counts"))
        elif -none < one.low and one.high < none:
            said.append((f"{best}, {worse}", "agrees", f"less than {none:g} apart"))
        elif not one.is_seen or max(one.low, -one.high) <= none:
            said.append((f"{best}, {worse}", "undecided", f"a difference of {one.smallest:.4f} would have been seen"))
        else:
            agrees = sign * one.mean > 0 and not none
            said.append((f"{best}, {worse}", "agrees" if agrees else "disagrees", f"{abs(one.mean):.4f} apart"))
    words = {word for _, word, _ in said}
    total = next(word for word in ("disagrees", "undecided", "agrees") if word in words)
    return f"{total} ({'; '.join(f'{pair}: {word}, {why}' for pair, word, why in said)})"


def draw_curves(runs: StudyRuns, arms: Sequence[ArmResult], path: Path) -> None:
    """Draw the held-out loss by step: the mean of the seeds of each arm, in a band from lowest to highest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="held-out loss, all terms (nats)")
    for arm in (one for one in arms if one.settings.of is None):
        curves = [_curve(runs.run_dir(job)) for job in arm.jobs]
        steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
        values = np.array([[curve[step] for step in steps] for curve in curves])
        if steps:
            axes.plot(steps, values.mean(axis=0), label=arm.name)
            axes.fill_between(steps, values.min(axis=0), values.max(axis=0), alpha=0.2)
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=120)


def _curve(run_dir: Path) -> dict[int, float]:
    return {line["step"]: value for line in read_lines(run_dir / METRICS_NAME) for key, value in line.items()
            if key.startswith(HELD_OUT) and key.endswith("/loss")}  # fmt: skip


def write_report(runs: StudyRuns) -> list[str]:
    """Write report.html, curves.png and results.csv; return the lines for a terminal."""
    claim, arms = runs.study.claim, results_of(runs)
    found = differences(runs, arms)
    rows, pairs, layers = arm_table(runs, arms), difference_table(found), layer_table(runs, arms)
    said = verdict(claim, runs.study.compare, found)
    where = f"; the publication saw it at: {claim.seen_at}" if claim.seen_at and not said.startswith("agrees") else ""
    facts = [("published", f"{claim.text} ({claim.source})"), ("here", said + where)]
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([*rows, [], *pairs, [], *layers, [], *facts])
    write_text(runs.folder / "results.csv", file.getvalue())
    picture = runs.folder / "curves.png"
    draw_curves(runs, arms, picture)
    encoded = base64.b64encode(picture.read_bytes()).decode()
    image = f'<img alt="held-out loss" src="data:image/png;base64,{encoded}">'
    sections = {"Claim": [table(["", ""], facts)], "Arms": [table(rows[0], rows[1:])], "Curves": [image],
                f"Differences of {runs.study.compare}": [table(pairs[0], pairs[1:])]}  # fmt: skip
    if len(layers) > 1:
        sections["Frozen layers"] = [table(layers[0], layers[1:])]
    write_text(runs.folder / "report.html", page(escape(runs.study.title), sections))
    lines = [runs.study.title, "", *aligned(rows, left=(0,)), "", *aligned(pairs, left=(0,))]
    lines += ["", *aligned(layers, left=(0, 1, 2))] if len(layers) > 1 else []
    return [*lines, "", *(f"{name}: {text}" for name, text in facts)]
