"""Measured times of kernels, by which `auto` takes a row; `tools/benchmark device` adds to kernels/figures.json."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from ctxlm_ds.kernels.implementation import Need

PATH = Path(__file__).with_name("figures.json")


class Figure(NamedTuple):
    """The time of one row for one shape on one card, forward and backward together, and the time of torch's row."""

    operation: str
    """Setting of a recipe's `kernels` section."""
    row: str
    capability: str
    """Such as `9.0`."""
    dtype: str
    """Such as `bfloat16`."""
    shape: tuple[int, ...]
    microseconds: float
    torch_microseconds: float
    torch: str
    triton: str
    """Versions."""
    card: str


@cache
def measured(path: Path = PATH) -> tuple[Figure, ...]:
    """Return the figures of a file; a figure without the fields of Figure is a TypeError."""
    return tuple(Figure(**figure) for figure in json.loads(path.read_text(encoding="utf-8")))


def wins(operation: str, row: str, need: Need, path: Path = PATH) -> bool:
    """Return whether the row was faster than torch's in each shape measured on a device like this one."""
    if need.device_type != "cuda" or not torch.cuda.is_available():
        return False
    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    wanted = operation, row, capability, str(need.dtype).removeprefix("torch.")
    times = [(found.microseconds, found.torch_microseconds) for found in measured(path) if found[:4] == wanted]
    return bool(times) and all(own < of_torch for own, of_torch in times)
