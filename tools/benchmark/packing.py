"""Real tokens per second of the engine on short documents: packed rows against padded ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ctxlm_ds.console import format_size
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.masked_lm import Masking
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.registry import OBJECTIVES
from tools.benchmark.our_sides import EngineSteps
from tools.benchmark.steps import (
    LEAST_STEPS,
    StepBenchmark,
    dropout_text,
    measured_precision,
    measured_recipe,
    place,
    refuse,
)
from tools.benchmark.tables import NOTHING, Table, spread
from tools.benchmark.turns import Facts, SideProcess, alternate, started

if TYPE_CHECKING:
    from ctxlm_ds.data.stream.loader import Step
    from tools.benchmark.documents import Lengths

PACKED_LENGTH, SHORT_LENGTH = 512, 128
SEQUENCES_OF_A_ROW = 16
PACKED = f"packed into {PACKED_LENGTH}"
WAYS = (PACKED, f"padded to {PACKED_LENGTH}", f"padded to {SHORT_LENGTH}", "padded to the longest of a micro-batch")
HEADER = ("real tokens/s", "speed of packed rows against it", "real tokens", "peak memory")


@dataclass(frozen=True)
class DocumentSteps(EngineSteps):
    """The engine on documents that are put into rows in one of the WAYS."""

    way: str
    dataset: str | None
    """Prefix of a dataset whose lengths the documents have; None draws them."""

    def steps(self) -> list[Step]:
        from ctxlm_ds.objectives.base import build_objective
        from tools.benchmark.documents import document_steps

        objective = build_objective(self.config.objective)
        return document_steps(self.config, objective, self.lengths(), longest_of_batch=self.way == WAYS[3])

    def lengths(self) -> Lengths:
        """Return the lengths of all documents of its steps, and more for rows to choose from."""
        from tools.benchmark.documents import NUM_STEPS, dataset_lengths, drawn_lengths

        training = self.config.training
        count = 4 * NUM_STEPS * training.global_batch_size * self.config.data.sequences_per_row
        if self.dataset is None:
            return drawn_lengths(count, training.seed)
        return dataset_lengths(self.dataset, count, training.seed)

    def fill(self) -> tuple[float, float]:
        """Return the mean of the real tokens of a step, and their share of its positions."""
        steps = self.steps()
        positions = sum(batch.fields["input_ids"].numel() for step in steps for batch in step.micro_batches)
        tokens = sum(step.num_tokens for step in steps)
        return tokens / len(steps), tokens / positions


def compare_packing(config: RunConfig, benchmark: StepBenchmark, dataset: str | None = None) -> Iterator[Table]:
    """Yield a table for each dropout.

    Every micro-batch has the positions of training.micro_batch_size rows of 512, and less if it ends with its longest
    document.

    Raises:
        ConfigError: the recipe's rows cannot be packed, or it masks no tokens.
    """
    refuse(config)
    if "packing" not in type(config.data).model_fields or not issubclass(
        OBJECTIVES.get(config.objective.name), Masking
    ):
        raise ConfigError(
            f"objective.name {config.objective.name} with data.sample_format {config.data.sample_format}: packing is "
            "measured on masked language models whose rows have data.packing, such as bert-base"
        )
    precision, note = measured_precision(config.training.precision)
    for dropout in benchmark.dropouts:
        case = measured_recipe(config, dropout, precision, benchmark.micro_batches)
        sides = {way: DocumentSteps(recipe_for(case, way), benchmark.deepspeed, way, dataset) for way in WAYS}
        yield _measure(case, sides, benchmark, dropout_text(dropout), [note] if note else [])


def recipe_for(config: RunConfig, way: str) -> RunConfig:
    """Return the recipe with rows of one of the WAYS and as many positions in a micro-batch as in packed rows."""
    length = PACKED_LENGTH if way in WAYS[:2] else SHORT_LENGTH
    more = PACKED_LENGTH // length
    model: dict[str, Any] = {}
    if config.model.longest_sequence is not None and config.model.longest_sequence < PACKED_LENGTH:
        model = {"max_position_embeddings": PACKED_LENGTH}
    data = {"seq_length": length, "packing": way == PACKED, "max_sequences_per_row": SEQUENCES_OF_A_ROW}
    training = {
        "micro_batch_size": more * config.training.micro_batch_size,
        "global_batch_size": more * config.training.global_batch_size,
    }
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=model),
            "data": config.data.model_copy(update=data),
            "objective": config.objective.model_copy(update={"max_predictions": None}),
            "training": config.training.model_copy(update=training),
        }
    )


def _measure(
    config: RunConfig, sides: Mapping[str, DocumentSteps], benchmark: StepBenchmark, kept: str, notes: list[str]
) -> Table:
    import torch

    with started(sides) as processes:
        alternate(processes, benchmark.rounds, LEAST_STEPS["cuda" if torch.cuda.is_available() else "cpu"])
        facts = {way: process.facts() for way, process in processes.items()}
    dataset = next(iter(sides.values())).dataset
    lengths = sides[PACKED].lengths()
    source = f"lengths of {dataset}" if dataset else "drawn lengths"
    title = (
        f"{config.name}, documents of {lengths.mean():.0f} tokens ({source}), {config.training.precision}, "
        f"dropout {kept}, {place(benchmark.threads)}"
    )
    fills = {way: side.fill() for way, side in sides.items()}
    return Table(title, ("", *HEADER), packing_rows(processes, facts, fills), notes)


def packing_rows(
    sides: Mapping[str, SideProcess], facts: Mapping[str, Facts], fills: Mapping[str, tuple[float, float]]
) -> list[list[str]]:
    """Return the rows of the table; `fills` has the real tokens of a step and their share for each way."""
    speeds = {way: [fills[way][0] / turn.seconds for turn in side.turns] for way, side in sides.items()}
    rows = []
    for way, own in speeds.items():
        ratios = [packed / other for packed, other in zip(speeds[PACKED], own, strict=True)]
        rows.append(
            [
                way,
                spread(own, "{:,.0f}"),
                NOTHING if way == PACKED else spread(ratios, "{:.2f}"),
                f"{100 * fills[way][1]:.0f} %",
                format_size(facts[way].peak_bytes),
            ]
        )
    return rows
