"""The rows `triton` of the kernels' tables; they load Triton when a layer asks for one.

`auto` takes them by the measured times in kernels/figures.json, to which `tools/benchmark device` adds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ctxlm_ds.kernels.bias_gelu import GATED, torch_bias_gelu
from ctxlm_ds.kernels.implementation import Implementation, Need
from ctxlm_ds.kernels.norm import AddNormSpec
from ctxlm_ds.registry import load_object

FIGURES = Path(__file__).parents[1] / "figures.json"
MIN_CAPABILITY, MIN_CAPABILITY_BF16 = (7, 5), (8, 0)
HEAD_SIZES = (64, 128)
WIDEST_NORM = 8192
"""Width of a norm above which a thread has more values than registers."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
def measured(path: Path = FIGURES) -> tuple[Figure, ...]:
    """Return the figures of a file; a figure without the fields of Figure is a TypeError."""
    return tuple(Figure(**figure) for figure in json.loads(path.read_text(encoding="utf-8")))


def wins(operation: str, row: str, need: Need, path: Path = FIGURES) -> bool:
    """Return whether the row was faster than torch's in each shape measured on a device like this one."""
    if need.device_type != "cuda" or not torch.cuda.is_available():
        return False
    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    wanted = operation, row, capability, str(need.dtype).removeprefix("torch.")
    times = [(found.microseconds, found.torch_microseconds) for found in measured(path) if found[:4] == wanted]
    return bool(times) and all(own < of_torch for own, of_torch in times)


def why_triton_cannot_run(need: Need) -> str | None:
    """Return the reason, or None if this project's Triton kernels run here."""
    if need.device_type != "cuda":
        return f"it needs a CUDA device, and this run is on {need.device_type}"
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"triton cannot be imported ({error}); pip install triton"
    if not torch.cuda.is_available():
        return "it needs a CUDA device, and torch finds none"
    if need.dtype not in DTYPES:
        return f"it computes in bf16, fp16 or fp32 only, and the precision is {need.dtype}"
    least = MIN_CAPABILITY_BF16 if need.dtype == torch.bfloat16 else MIN_CAPABILITY
    capability = torch.cuda.get_device_capability()
    if capability < least:
        return "it needs compute capability {}.{} or later, and this device has {}.{}".format(*least, *capability)
    return None


def why_add_norm_cannot_run(need: Need) -> str | None:
    """Return the reason, or None if the norm of an AddNormSpec is narrow enough as well."""
    if isinstance(need.spec, AddNormSpec) and need.spec.width > WIDEST_NORM:
        return f"a norm must be at most {WIDEST_NORM} wide, and this model has one of {need.spec.width}"
    return why_triton_cannot_run(need)


def why_attention_cannot_run(need: Need) -> str | None:
    """Return the reason, or None if the heads fit the tiles as well; the spec is an AttentionSpec."""
    problem = why_triton_cannot_run(need)
    if problem is not None:
        return problem
    if torch.cuda.get_device_capability() < MIN_CAPABILITY_BF16:
        return "Triton multiplies no matrices by the units of a device before compute capability 8.0"
    if need.spec.ranked:
        return "it hides keys by their place only, and this model's attention by their rank"
    if need.spec.head_size not in HEAD_SIZES:
        return f"heads must be {HEAD_SIZES[0]} or {HEAD_SIZES[1]} wide, and they are {need.spec.head_size}"
    return None


def _load(name: str) -> Any:
    """Return an object of this folder by `module:name`."""
    return load_object(f"ctxlm_ds.kernels.triton.{name}")


def _row(
    operation: str, make: Callable[[Need], Any], why_not: Callable[[Need], str | None] = why_triton_cannot_run
) -> Implementation:
    """Return a row that `auto` takes where a measured figure says that it is faster."""
    return Implementation("triton", make, why_not, lambda need: wins(operation, "triton", need))


ROWS = {
    "attention": Implementation(
        "triton",
        lambda need: _load("attention:TritonAttention")(need.spec),
        why_attention_cannot_run,
        # torch needs no mask without a bias, and other draws change a run's losses.
        lambda need: need.spec.bias and wins("attention", "triton", need),
    ),
    "dropout": _row("dropout", lambda need: _load("dropout:keyed_dropout")),
    "add_norm": _row("add_norm", lambda need: _load("norm:triton_add_norm"), why_add_norm_cannot_run),
    # A plain activation of torch's reads and writes each number once already.
    "bias_gelu": _row(
        "bias_gelu", lambda need: _load("activation:triton_gated") if need.spec == GATED else torch_bias_gelu
    ),
    "rotary": _row("rotary", lambda need: _load("rotary:triton_rotary")),
    "cross_entropy": _row("cross_entropy", lambda need: _load("cross_entropy:KERNEL")),
}
"""Operation -> its Triton row."""
