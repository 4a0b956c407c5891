"""The engine's training step against the bare model, and against transformers' class and Trainer.

All sides have the same shapes, batches, dropout and number of predictions. Rows are full, so every token is a real one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctxlm_ds.console import counted, format_size
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.check import check_config
from ctxlm_ds.recipe.hardware import GPUS, TERA
from ctxlm_ds.recipe.schema import RunConfig
from tools.benchmark.ceiling import MatrixProducts, step_flops
from tools.benchmark.our_sides import BareSteps, EngineSteps
from tools.benchmark.tables import NOTHING, Table, spread
from tools.benchmark.transformers_sides import TrainerSteps, TransformersSteps, class_name
from tools.benchmark.turns import Facts, Side, SideProcess, Turn, alternate, started

OURS, BARE, CEILING = "ctxlm_ds", "bare model", "matrix product"
LEAST_STEPS = {"cpu": 1, "cuda": 5}
"""Of a turn."""
HEADER = (
    "tokens/s", "speed against it", "TFLOP/s", "of ceiling", "peak memory", "CPU s/step", "page faults/step",
    "first step", "launches/step", "waits/step",
)  # fmt: skip


@dataclass(frozen=True)
class StepBenchmark:
    """Settings of a measurement, in addition to the recipe."""

    deepspeed: str
    """DeepSpeed JSON: a path or a name."""
    against: Sequence[str] = ("bare", "autocast", "bf16", "trainer")
    dropouts: Sequence[float | None] = (0.1, 0.0)
    """None keeps the recipe's."""
    micro_batches: int = 2
    """Of a step."""
    rounds: int = 5
    threads: int = 1


def compare_steps(config: RunConfig, benchmark: StepBenchmark) -> Iterator[Table]:
    """Yield a table for each dropout.

    Raises:
        ConfigError: the recipe leaves something to the tokenizer, or there is nothing to compare its step with.
        ExportError: transformers has no class for the model.
    """
    refuse(config)
    class_name(config)
    precision, note = measured_precision(config.training.precision)
    notes = [note] if note else []
    if not hasattr(config.optimizer, "betas"):
        notes.append(f"The recipe updates by {config.optimizer.name}, transformers' sides by AdamW.")
    for dropout in benchmark.dropouts:
        case = measured_recipe(config, dropout, precision, benchmark.micro_batches)
        yield _measure(case, benchmark, dropout, notes)


def refuse(config: RunConfig) -> None:
    """Raise ConfigError if the step of a recipe cannot be measured on made-up rows."""
    if config.model.vocab_size is None:
        raise ConfigError("model.vocab_size is not set; add --set model.vocab_size=30522")
    if build_objective(config.objective).teacher_outputs:
        raise ConfigError(
            f"objective.name is {config.objective.name}: a step with a teacher has no counterpart; set "
            "objective.name to masked_lm"
        )
    if config.training.precision == "fp16":
        raise ConfigError("training.precision is fp16, which is not measured; set it to bf16 or fp32")


def measured_precision(precision: str) -> tuple[str, str]:
    """Return the precision to measure, and a note if it is not the one of the recipe."""
    import torch

    from ctxlm_ds.kernels.linear import bf16_is_emulated

    if precision == "bf16" and not torch.cuda.is_available() and bf16_is_emulated("cpu"):
        return "fp32", "This CPU has no bf16 units: measured in fp32."
    return precision, ""


def measured_recipe(config: RunConfig, dropout: float | None, precision: str, micro_batches: int) -> RunConfig:
    """Return the recipe with fresh weights, a step of `micro_batches`, and every dropout of the model at a value.

    With dropout None the model keeps its own.
    """
    names = [name for name in type(config.model).model_fields if name.endswith("dropout")]
    values = {} if dropout is None else dict.fromkeys(names, dropout)
    training: dict[str, Any] = {
        "precision": precision,
        "global_batch_size": config.training.micro_batch_size * micro_batches,
        "batch_ramp": None,
    }
    case = config.model_copy(
        update={
            "model": config.model.model_copy(update=values),
            "training": config.training.model_copy(update=training),
            "initialize_from": None,
            "initialize_moments": False,
            "initialize_layers": None,
        }
    )
    check_config(case, 1)
    return case


def peers_of(config: RunConfig, against: Sequence[str], threads: int) -> dict[str, Side]:
    """Return the sides to compare with; in fp32 `autocast` and `bf16` are the same plain loop."""
    sides: dict[str, Side] = {}
    half = config.training.precision == "bf16"
    if "bare" in against:
        sides[BARE] = BareSteps(config)
    if half and "autocast" in against:
        sides["transformers, autocast"] = TransformersSteps(config, threads, "autocast")
    if half and "bf16" in against:
        sides["transformers, bf16"] = TransformersSteps(config, threads, "bf16")
    if not half and {"autocast", "bf16"} & set(against):
        sides["transformers, fp32"] = TransformersSteps(config, threads, "fp32")
    if "trainer" in against:
        sides["transformers.Trainer"] = TrainerSteps(config, threads)
    return sides


def dropout_text(dropout: float | None) -> str:
    """Return a probability, or that it is the recipe's, for the title of a table."""
    return "of the recipe" if dropout is None else f"{dropout:g}"


def place(threads: int) -> str:
    """Return the device, for the title of a table."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else counted(threads, "CPU thread")


def _measure(config: RunConfig, benchmark: StepBenchmark, dropout: float | None, notes: Sequence[str]) -> Table:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sides: dict[str, Side] = {OURS: EngineSteps(config, benchmark.deepspeed)}
    sides |= peers_of(config, benchmark.against, benchmark.threads)
    sides[CEILING] = MatrixProducts(config.training.precision, benchmark.threads)
    with started(sides) as processes:
        alternate(processes, benchmark.rounds, LEAST_STEPS[device])
        facts = {name: process.facts() for name, process in processes.items()}
    figures = StepFigures(config, device, processes, facts)
    training = config.training
    title = (
        f"{config.name}, {benchmark.micro_batches} x {training.micro_batch_size} rows of {config.data.seq_length}, "
        f"{training.precision}, dropout {dropout_text(dropout)}, {place(benchmark.threads)}"
    )
    return Table(title, ("", *HEADER), figures.rows(), (*figures.notes(), *notes))


def peak_note(flops_per_s: float, precision: str, card: str) -> list[str]:
    """Return the share of a card's dense peak that a step reaches, as a line; none for unknown cards."""
    gpu = next((gpu for gpu in GPUS if gpu.name.partition("-")[0] in card), None)
    if gpu is None:
        return []
    peak = gpu.flops_per_s(precision)
    return [f"MFU of the engine's step: {flops_per_s / peak:.1%} of {peak / TERA:,.0f} TFLOP/s ({gpu.name})."]


def model_flops_per_row(config: RunConfig) -> float:
    """Return the operations of one row, forward and backward; a causal model's positions see no later ones."""
    from ctxlm_ds.training.measure import useful_flops_per_row

    return useful_flops_per_row(config)


class StepFigures:
    """The figures of a table."""

    def __init__(
        self, config: RunConfig, device: str, sides: Mapping[str, SideProcess], facts: Mapping[str, Facts]
    ) -> None:
        self._sides, self._facts = sides, facts
        self._precision, self._card = config.training.precision, place(1)
        rows = config.training.global_batch_size
        self._tokens = rows * config.data.seq_length
        self._flops = rows * model_flops_per_row(config)
        self._ceiling_flops = step_flops(device)

    def rows(self) -> list[list[str]]:
        """Return the rows, that of the ceiling last."""
        return [self._row(name) for name in self._sides if name != CEILING] + [self._ceiling_row()]

    def notes(self) -> list[str]:
        """Return the cost of the engine over the bare model, and the share of a GPU's peak."""
        speed = statistics.median(self._flops / turn.seconds for turn in self._sides[OURS].turns)
        peak = peak_note(speed, self._precision, self._card)
        if BARE not in self._sides:
            return peak
        ratios = self._ratios(OURS, BARE)
        ours, bare = (statistics.median(turn.cpu_seconds for turn in self._sides[name].turns) for name in (OURS, BARE))
        time = spread(ratios, "{:.3f}")
        return [f"Time of the engine's step over the bare model's: {time}; CPU seconds {ours / bare:.3f}.", *peak]

    def _ratios(self, name: str, other: str) -> list[float]:
        """Return the time of one side over that of another in each round."""
        turns = zip(self._sides[name].turns, self._sides[other].turns, strict=True)
        return [a.seconds / b.seconds for a, b in turns]

    def _row(self, name: str) -> list[str]:
        side = self._sides[name]
        speed = [self._flops / turn.seconds / 1e12 for turn in side.turns]
        ceiling = [self._ceiling_flops / turn.seconds / 1e12 for turn in self._sides[CEILING].turns]
        shares = [100 * own / limit for own, limit in zip(speed, ceiling, strict=True)]
        return [
            name,
            spread([self._tokens / turn.seconds for turn in side.turns], "{:,.0f}"),
            NOTHING if name == OURS else spread(self._ratios(name, OURS), "{:.2f}"),
            f"{statistics.median(speed):.3g}",
            f"{statistics.median(shares):.1f} %",
            *self._costs(name, side.turns),
        ]

    def _costs(self, name: str, turns: Sequence[Turn]) -> list[str]:
        calls = self._facts[name].calls
        return [
            format_size(self._facts[name].peak_bytes),
            f"{statistics.median(turn.cpu_seconds for turn in turns):.2f}",
            f"{statistics.median(turn.page_faults for turn in turns):,.0f}",
            f"{self._sides[name].first_step_s:.1f} s",
            *([NOTHING] * 2 if calls is None else [f"{count:,}" for count in calls]),
        ]

    def _ceiling_row(self) -> list[str]:
        speed = [self._ceiling_flops / turn.seconds / 1e12 for turn in self._sides[CEILING].turns]
        row = [CEILING, NOTHING, NOTHING, spread(speed, "{:.3g}"), "100 %"]
        return row + [NOTHING] * (len(HEADER) + 1 - len(row))
