"""Silences known noise of the libraries, each message by its exact text; everything else stays visible."""

from __future__ import annotations

import builtins
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# DeepSpeed calls the old names.
KNOWN_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    (r"`torch\.distributed\.all_gather_into_tensor` is deprecated", FutureWarning),
    (r"`torch\.distributed\.reduce_scatter_tensor` is deprecated", FutureWarning),
    # DeepSpeed's pipeline broadcasts activations in groups of two and returns their gradients itself.
    (r"c10d::broadcast_: an autograd kernel was not registered", UserWarning),
)
KNOWN_LOG_LINES = (
    "Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it.",
    # Of Muon, LAMB and other optimizers that tests/dist runs under every ZeRO stage.
    "**** You are using ZeRO with an untested optimizer",
)
KNOWN_PRINTS = (
    # PipelineModule's table and PipelineParallelGrid's topology.
    "SEED_LAYERS=",
    "Using topology:",
)


def quiet_libraries() -> None:
    """Silence known noise of torch, DeepSpeed and tokenizers; call it before they are imported.

    Settings in the environment stay.
    """
    # c10d complains about a peer's host name without reverse lookup.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Loader workers fork after a tokenizer was used.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for message, category in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    deepspeed = logging.getLogger("DeepSpeed")
    deepspeed.setLevel(logging.WARNING)
    deepspeed.addFilter(lambda record: not record.getMessage().startswith(KNOWN_LOG_LINES))


@contextmanager
def without_known_prints() -> Iterator[None]:
    """Drop what DeepSpeed prints (rather than logs) on every rank while it starts, by its known beginning."""
    shown = builtins.print

    def print_unknown(*values: Any, **settings: Any) -> None:
        if not str(next(iter(values), "")).startswith(KNOWN_PRINTS):
            shown(*values, **settings)

    builtins.print = print_unknown
    try:
        yield
    finally:
        builtins.print = shown
