"""A recipe that a CPU runs in seconds: layers of the run's widths and heads, but few layers, few words and one row."""

from __future__ import annotations

from ctxlm_ds.recipe.schema import KernelsConfig, RunConfig
from ctxlm_ds.recipe.sections import ModelSection

MOST_WORDS, MOST_POSITIONS = 10_000, 32
FEWEST_BLOCKS = 2
SLOTS = "max_predictions", "num_predictions"
"""Settings of objectives that are at most the positions of a row."""


def smaller(config: RunConfig) -> RunConfig:
    """Return the recipe with at least one block on each pipeline stage and one row in a micro-batch.

    Its widths, heads, types and layout are those of the run, its kernels those of a CPU; it writes no continuations.
    """
    blocks = max(FEWEST_BLOCKS, config.parallel.pipeline_parallel_size)
    words = MOST_WORDS if config.model.vocab_size is None else min(MOST_WORDS, config.model.vocab_size)
    config = config.model_copy(update={"model": _with_fewer_layers(config.model, blocks, words)})
    if config.teacher.model is not None:
        teacher = _with_fewer_layers(config.teacher.model, blocks, words)
        config = config.with_values("teacher", model=teacher)
    slots = {name: min(MOST_POSITIONS, value) for name, value in config.objective if name in SLOTS and value}
    config = config.with_values("objective", **slots)
    config = config.with_values("data", seq_length=min(MOST_POSITIONS, config.data.seq_length))
    config = config.with_values("parallel", pipeline_layers=None)
    config = config.with_values("evaluation", continuations=0, prompts=[])
    config = config.model_copy(update={"kernels": KernelsConfig()})
    return config.with_values("training", micro_batch_size=1, batch_ramp=None, compile=False)


def _with_fewer_layers(model: ModelSection, blocks: int, words: int) -> ModelSection:
    depths = {name: min(blocks, value) for name, value in model if "num_" in name and name.endswith("_layers")}
    return model.model_copy(update={**depths, "vocab_size": words})
