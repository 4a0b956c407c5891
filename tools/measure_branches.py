"""Measure what branches of a run give: decays from one trunk, averages of checkpoints, growth (docs/studies.md).

Each step is one of the project's commands, printed before it runs. The same command again continues.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from ctxlm_ds.apps.demo.pretrain_default import CTXLM, run_step
from ctxlm_ds.atomic import write_text
from ctxlm_ds.console import aligned, at_least, run_command, setup_logging
from ctxlm_ds.process.run_files import METRICS_NAME, read_lines
from ctxlm_ds.recipe.yaml_source import write_yaml

LOSS, EMA_LOSS = "eval/heldout/masked_lm_loss", "eval/heldout/ema_masked_lm_loss"
EMA = 0.99
"""Decay of the moving average of each run, which changes nothing in its training."""
DECAY = 0.2
"""Part of a run in which its rate decays."""
SAVES = 25
"""Checkpoints of a run of --steps."""
SMALL = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 320}
LARGE = {"num_layers": 4, "hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 480}
SEQ_LENGTH = 64
Rows = list[tuple[str, ...]]


class Measured:
    """Runs in a folder on one corpus; a run that is complete is not started again."""

    def __init__(self, folder: Path, train: str, heldout: str, tokenizer: str, steps: int) -> None:
        self.folder, self.steps = folder, steps
        settings = {
            "extends": "modernbert-laptop",
            "model": SMALL | {"max_position_embeddings": SEQ_LENGTH, "global_attention_every": 1},
            "tokenizer": {"path": str(Path(tokenizer).absolute())},
            "data": {
                "seq_length": SEQ_LENGTH, "train": [str(Path(train).absolute())],
                "validation": [{"name": "heldout", "path": str(Path(heldout).absolute())}],
            },
            # Such small models leave the plateau of word frequencies within some hundred steps of Muon, not of AdamW.
            "optimizer": {"name": "muon", "learning_rate": 5e-3, "matrix_learning_rate": 0.02,
                          "matrix_scale": "original", "eps": 1e-8},
            "schedule": {"name": "constant", "warmup_fraction": None, "warmup_steps": steps // 50},
            "training": {
                "precision": "fp32", "global_batch_size": 32, "micro_batch_size": 32, "max_steps": steps, "ema": EMA,
            },
            "evaluation": {"interval_steps": 0, "max_rows": 2048, "mask_prob": 0.15},
            "checkpoint": {"interval_steps": steps // SAVES, "interval_minutes": None, "keep_last": SAVES},
            "logging": {"interval_steps": 50, "tensorboard": False},
        }  # fmt: skip
        self.recipe = folder / "recipe.yaml"
        write_text(self.recipe, write_yaml(settings))

    def run(self, name: str, *settings: str, recipe: Path | None = None) -> float:
        """Train and return the last held-out loss."""
        run_dir = self.folder / name
        own = [] if recipe else [f"run_dir={run_dir}", *settings]
        if not self.is_complete(name):
            run_step(CTXLM, "pretrain", "--config", recipe or self.recipe, *(["--set", *own] if own else []))
        return self.losses(name)[-1]

    def is_complete(self, name: str) -> bool:
        status = self.folder / name / "status.json"
        return status.is_file() and json.loads(status.read_text(encoding="utf-8")).get("state") == "completed"

    def losses(self, name: str, key: str = LOSS) -> list[float]:
        return [float(line[key]) for line in read_lines(self.folder / name / METRICS_NAME) if key in line]

    def branch(self, trunk: str, step: int, name: str, *settings: str) -> float:
        """Branch off a run at a step, train, and return the last held-out loss."""
        if not (self.folder / name).exists():
            run_step(CTXLM, "fork", f"{self.folder / trunk}@{step}", self.folder / name, "--set", *settings)
        return self.run(name, recipe=self.folder / name / "config.yaml")

    def loss_of(self, weights: Path, *settings: str) -> float:
        """Return the held-out loss of weights: that at step 0 of a run that begins with them."""
        start = [f"initialize_from={weights}", "training.max_steps=1", "schedule.warmup_steps=0"]
        self.run(f"loss-{weights.name}", *start, *settings)
        return self.losses(f"loss-{weights.name}")[0]

    def mean(self, run: str) -> float:
        """Return the held-out loss of the mean of the last five checkpoints of a run."""
        output = self.folder / f"{run}-mean"
        if not output.exists():
            run_step(CTXLM, "average", self.folder / run, "--last", 5, "--output", output)
        return self.loss_of(output)


def decays(runs: Measured) -> Rows:
    """Train a trunk with a constant rate; compare its decays at 25, 50 and 100 % with cosines of these lengths."""
    decay = [f"schedule.decay_fraction={DECAY}", "schedule.decay_shape=one_minus_sqrt", "schedule.name=wsd"]
    stable = round(runs.steps * (1 - DECAY))
    runs.run("trunk", f"training.max_steps={stable}")
    rows: Rows = [("steps", "decay from the trunk", "cosine", "steps of the decay", "of the cosine")]
    for share in (0.25, 0.5, 1.0):
        steps = round(runs.steps * share)
        begin = round(steps * (1 - DECAY))
        found = runs.branch("trunk", begin, f"decay-{steps}", f"training.max_steps={steps}", *decay)
        cosine = runs.run(f"cosine-{steps}", f"training.max_steps={steps}", "schedule.name=cosine")
        rows.append((f"{steps:,}", f"{found:.4f}", f"{cosine:.4f}", f"{steps - begin:,}", f"{steps:,}"))
    return rows


def averages(runs: Measured) -> Rows:
    """Compare the last weights with the mean of five checkpoints and with training.ema, of the trunk and its decay."""
    decays(runs)
    rows: Rows = [("run", "last checkpoint", "mean of the last five", f"training.ema {EMA}")]
    for name in ("trunk", f"decay-{runs.steps}", f"cosine-{runs.steps}"):
        found = (runs.losses(name)[-1], runs.mean(name), runs.losses(name, EMA_LOSS)[-1])
        rows.append((name, *(f"{loss:.4f}" for loss in found)))
    return rows


def growth(runs: Measured) -> Rows:
    """Grow a trained model; compare its training with that of random weights of the larger shape."""
    half = f"training.max_steps={runs.steps // 2}"
    shape = [f"model.{name}={value}" for name, value in LARGE.items()]
    small, grown = runs.folder / "small", runs.folder / "grown"
    runs.run("small", half, "schedule.name=cosine")
    if not grown.exists():
        run_step(CTXLM, "convert", "grow", "--checkpoint", small, "--output", grown, "--set", *shape)
    rows: Rows = [("start of 4 layers of 192", "before", "after a quarter", "after half")]
    every = [*shape, f"evaluation.interval_steps={runs.steps // 4}", half, "schedule.name=cosine"]
    for name, settings in (("grown", [f"initialize_from={grown}"]), ("random", [])):
        runs.run(f"large-{name}", *every, *settings)
        losses = [f"{loss:.4f}" for loss in runs.losses(f"large-{name}")]
        rows.append((name, *(["-"] if len(losses) < 3 else []), *losses))
    rows.append(("(the small model)", "-", "-", f"{runs.losses('small')[-1]:.4f}"))
    return rows


TABLES: dict[str, Callable[[Measured], Rows]] = {"decays": decays, "averages": averages, "growth": growth}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("table", choices=TABLES, help="what is measured")
    add("--train", required=True, metavar="PREFIX", help="dataset of sentences to train on")
    add("--heldout", required=True, metavar="PREFIX", help="held-out dataset")
    add("--tokenizer", required=True, metavar="DIR", help="their tokenizer")
    add("--output-dir", type=Path, required=True, metavar="DIR", help="folder of the runs")
    add("--steps", type=at_least(100), default=2000, help="steps of the longest run, a multiple of 100 (2,000)")
    arguments = parser.parse_args()
    setup_logging()
    folder = arguments.output_dir.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    runs = Measured(folder, arguments.train, arguments.heldout, arguments.tokenizer, arguments.steps)
    print("\n".join(aligned(TABLES[arguments.table](runs))))


if __name__ == "__main__":
    run_command(main)
