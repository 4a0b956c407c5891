"""Where a run's pipeline is cut: by hand, by parameters, by number of layers, or by measured time."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from ctxlm_ds.models.layer_list import LayerDescription
from ctxlm_ds.models.stages import block_costs, bounds_of_counts, parameter_costs, stage_bounds
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.training.stage_timing import measured_costs

logger = logging.getLogger("ctxlm_ds")


def plan_stages(
    config: RunConfig,
    descriptions: Sequence[LayerDescription],
    shapes: Mapping[str, Sequence[int]],
    topology: Topology,
) -> list[int]:
    """First layer of each stage, and the number of layers at the end; the same on every rank.

    Raises:
        ConfigError: the layers do not fill the stages.
    """
    layout = config.parallel
    if layout.pipeline_layers is not None:
        bounds = bounds_of_counts(descriptions, layout.pipeline_layers)
    else:
        if layout.pipeline_partition == "parameters":
            costs = parameter_costs(descriptions, shapes)
        elif layout.pipeline_partition == "time":
            costs = measured_costs(config, descriptions, topology)
        else:
            costs = block_costs(descriptions)
        bounds = stage_bounds(descriptions, costs, layout.pipeline_parallel_size)
    counts = [
        sum(description.block for description in descriptions[start:stop])
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    logger.info("pipeline: %s transformer layers on stages 0 to %d", ", ".join(map(str, counts)), len(counts) - 1)
    return bounds
