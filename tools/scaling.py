"""Train a ladder of small models and fit the law of their losses (docs/planning.md).

    python tools/scaling.py train --output runs/ladder --jobs 2      # widths x tokens; the same command continues
    python tools/scaling.py fit runs/ladder                          # law.json, for ctxlm plan --budget --ladder

    L = E + A / N'^a + B / D'^b        as in ctxlm_ds/apps/plan/budget.py

Tokens that are read again count less, and so do parameters that the text is not enough for. Widths share initial
values and rates by model.base_width. A run that is not past its plateau is left out. The largest run is held
back: the law of the others has to foretell its loss.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from ctxlm_ds.apps.study.definition import Size, Study
from ctxlm_ds.atomic import write_text
from ctxlm_ds.console import aligned, at_least, run_command, setup_logging
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.words import parse_words

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ctxlm_ds.apps.study.runs import StudyRuns

BASE_WIDTH, HEAD_SIZE = 128, 32
RESAMPLES, SEED = 200, 0
HUBER = 1e-3
"""Residual of the logarithm from which it counts linearly (Hoffmann et al. 2022, section D.2)."""
LAW = "law.json"


class Point(NamedTuple):
    """One run."""

    parameters: float
    tokens: float
    unique: float
    """Tokens of the training text."""
    loss: float
    flops: float
    """Units of 10^12, with the head."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train the runs")
    train.add_argument("--output", type=Path, required=True, metavar="DIR")
    train.add_argument("--recipe", default="modernbert-docstrings", help="default: modernbert-docstrings")
    train.add_argument("--corpus", nargs="+", default=[], metavar="FILE", help="your text in place of docstrings")
    train.add_argument("--widths", type=int, nargs="+", default=[64, 96, 128, 192], metavar="W")
    train.add_argument("--tokens", type=parse_words, nargs="+", default=[1_000_000, 2_000_000, 4_000_000], metavar="N")
    train.add_argument("--rate", type=float, default=0.5, metavar="X", help="factor of the recipe's rates (0.5)")
    train.add_argument("--jobs", type=at_least(1), default=1, metavar="N", help="runs at a time")
    fit = commands.add_parser("fit", help="fit the law, and foretell the largest run")
    fit.add_argument("folder", type=Path)
    arguments = parser.parse_args(argv)
    setup_logging()
    if arguments.command == "train":
        for tokens in arguments.tokens:
            runs = ladder_runs(arguments.output, arguments.recipe, arguments.widths, tokens, arguments.rate)
            runs.prepare(Path("ladder.yaml"), arguments.corpus)
            runs.train(runs.compared(), arguments.jobs)
        return
    points = read_points(arguments.folder)
    print("\n".join(describe(points, arguments.folder)))


def ladder_runs(folder: Path, recipe: str, widths: Sequence[int], tokens: int, rate: float) -> StudyRuns:
    """Return the runs of all widths on so many tokens."""
    from ctxlm_ds.apps.study.runs import StudyRuns

    arms = {
        f"w{width}": {"set": {"model": {
            "base_width": BASE_WIDTH, "hidden_size": width, "num_attention_heads": width // HEAD_SIZE,
            "intermediate_size": 2 * width,
        }}} for width in widths
    }  # fmt: skip
    text = {
        "title": "Ladder", "recipe": recipe, "arms": arms, "rates": [rate],
        "claim": {"text": "wider is better", "source": "Hoffmann et al. 2022", "order": list(arms)[:2]},
        "sizes": {"tiny": {"budget": {"tokens": tokens}, "seeds": 1, "set": {"training": {"global_batch_size": 16}}}},
    }  # fmt: skip
    try:
        study = Study.model_validate(text)
    except ValidationError as error:
        reason = f"{error.errors()[0]['msg']}; give at least two widths, and numbers above 0 such as 1000000 or 1M"
        raise ConfigError(f"--widths, --tokens, --rate: {reason}") from None
    return StudyRuns(folder / f"tokens-{tokens}", study, study.sizes["tiny"])


def read_points(folder: Path) -> list[Point]:
    """Return the runs that are past their plateau. Raises ConfigError if they are too few for a law."""
    from ctxlm_ds.apps.study.runs import StudyRuns

    points = []
    for settings in sorted(folder.glob("tokens-*/settings.json")):
        known = json.loads(settings.read_text(encoding="utf-8"))
        runs = StudyRuns(settings.parent, Study.model_validate(known["study"]), Size.model_validate(known["size"]))
        runs.prepare(Path("ladder.yaml"), known["corpus"])
        for job in runs.compared():
            figures = runs.figures(job)
            if figures is not None and figures["loss"] < figures["gate"]:
                points.append(_point(runs, job.arm, figures))
    if len(points) < 6:
        raise ConfigError(f"{folder}: {len(points)} runs are past their plateau; the law has five constants, and one "
                          "run is held back: train more widths and tokens")  # fmt: skip
    return points


def _point(runs: StudyRuns, arm: str, figures: dict[str, Any]) -> Point:
    from ctxlm_ds.data.dataset.reader import IndexedDataset
    from ctxlm_ds.models.program import plain_program
    from ctxlm_ds.objectives.base import build_objective
    from ctxlm_ds.tokenizers.load import open_tokenizer

    config = runs.config(arm)
    tokenizer, size = open_tokenizer(config.tokenizer.path, config.model.vocab_size)
    model = config.model.model_copy(update={"vocab_size": size})
    outputs = build_objective(config.objective, tokenizer).outputs
    unique = sum(len(IndexedDataset(source.path).tokens) for source in config.data.train)
    parameters = plain_program(model, outputs).num_parameters
    return Point(parameters, figures["tokens"], unique, figures["loss"], figures["flops"])


def describe(points: Sequence[Point], folder: Path) -> list[str]:
    """Fit the law, write law.json, and return the lines of a table and of the forecast."""
    import numpy as np

    held_back = max(points, key=lambda point: (point.flops, point.parameters))
    known = [point for point in points if point is not held_back]
    law = fit_law(known)
    every = resampled_laws(known, law)
    forecast, foretold = [predicted(constants, held_back) for constants in every], predicted(law, held_back)
    low, high = np.percentile(forecast, (2.5, 97.5))
    names = ("E", "A", "a", "B", "b")
    ends = np.percentile(np.array(every), (2.5, 97.5), axis=0)
    rows = [["parameters", "tokens", "10^12 FLOPs", "loss", "law"]]
    rows += [[f"{point.parameters:,.0f}", f"{point.tokens:,.0f}", f"{point.flops:.3g}", f"{point.loss:.4f}",
              f"{predicted(law, point):.4f}"] for point in sorted(points, key=lambda point: point.flops)]  # fmt: skip
    fitted = fit_law(points)
    constants = dict(zip(("e", "a", "alpha", "b", "beta"), map(float, fitted), strict=True))
    largest = max(point.parameters for point in points)
    write_text(folder / LAW, json.dumps({"law": {**constants, "largest": largest}}, indent=1) + "\n")
    inside = "inside" if low <= held_back.loss <= high else "outside"
    return [
        *aligned(rows), "",
        *(f"{name} = {value:.4g} [{below:.4g}, {above:.4g}]"
          for name, value, below, above in zip(names, law, *ends, strict=True)),
        f"held back: {held_back.parameters:,.0f} parameters, {held_back.tokens:,.0f} tokens: loss "
        f"{held_back.loss:.4f}; the others foretell {foretold:.4f} [{low:.4f}, {high:.4f}], {inside}",
        f"the law of all runs: {folder / LAW}",
    ]  # fmt: skip


def predicted(constants: Iterable[float], point: Point) -> float:
    """Return the loss by a law (e, a, alpha, b, beta)."""
    from ctxlm_ds.apps.plan.budget import Law

    return Law("", *map(float, constants)).loss(point.parameters, point.tokens, point.unique)


def fit_law(points: Sequence[Point], near: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Return e, a, alpha, b and beta with the least Huber loss of the logarithms (Hoffmann et al. 2022, section D.2).

    The search begins at the constants `near`, or at several places.
    """
    import numpy as np
    from scipy.optimize import least_squares

    losses = np.log([point.loss for point in points])

    def residuals(x: NDArray[np.float64]) -> NDArray[np.float64]:
        log_e, log_a, alpha, log_b, beta = x
        constants = (np.exp(log_e), np.exp(log_a), alpha, np.exp(log_b), beta)
        return np.asarray(np.log([predicted(constants, point) for point in points]) - losses)

    bounds = ([-10, -10, 0.01, -10, 0.01], [5, 40, 2, 40, 2])
    starts = [[log_e, a, alpha, b, beta] for log_e in (0.0, 1.0) for a, alpha in ((2.0, 0.2), (8.0, 0.6))
              for b, beta in ((2.0, 0.2), (8.0, 0.6))]  # fmt: skip
    if near is not None:
        starts = [[np.log(near[0]), np.log(near[1]), near[2], np.log(near[3]), near[4]]]
    fits = [least_squares(residuals, start, bounds=bounds, loss="huber", f_scale=HUBER, x_scale="jac", max_nfev=300)
            for start in starts]  # fmt: skip
    log_e, log_a, alpha, log_b, beta = min(fits, key=lambda one: float(one.cost)).x
    return np.array([np.exp(log_e), np.exp(log_a), alpha, np.exp(log_b), beta])


def resampled_laws(points: Sequence[Point], law: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """Return the laws of points drawn with replacement, searched from the law of all."""
    import numpy as np

    rng, found = np.random.default_rng(SEED), []
    for _ in range(RESAMPLES):
        drawn = [points[at] for at in rng.integers(len(points), size=len(points))]
        found.append(fit_law(drawn, near=law))
    return found


if __name__ == "__main__":
    run_command(main)
