"""Dropout's keys as a layer finds them in a step."""

from __future__ import annotations

import torch

from ctxlm_ds.parallel.context import DropoutStreams


def streams_at(
    seed: int, step: int = 0, micro_batch: int = 0, tensor_rank: int = 0, tensor_size: int = 1
) -> DropoutStreams:
    """Those of the only layer of a model."""
    streams = DropoutStreams(seed, tensor_rank, tensor_size, enabled=True)
    streams.num_layers = 1
    streams.begin(step, micro_batch, torch.device("cpu"))
    streams.use(streams.layer(0))
    return streams
