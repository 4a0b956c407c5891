"""Random numbers by key on the device, for dropout and drawn words: each is a hash of a key and of its element's place.

An eager layer, a compiled one, a recomputed one and a CUDA graph therefore drop the same elements. The hash is
splitmix64 (Steele 2014) over words of four 16-bit lanes: a lane below p · 2^16 drops its element. The largest sum of
logit and keyed Gumbel noise draws a word from a softmax (Maddison 2014, section 2).
Shape letters: k slots, v words of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ctxlm_ds.kernels.implementation import Implementation, compile_later, compiled_row

GAMMA = 0x9E3779B97F4A7C15
GAMMA_INVERSE = pow(GAMMA, -1, 1 << 64)
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
LANES_PER_WORD = 4
LANE_VALUES = 1 << 16
MOST_WORDS = 1 << 31
"""Ids of words are below this."""
CPU_PIECE, PIECE = 1 << 14, 1 << 22
"""Logits that get their noise together: few on a CPU, whose cache they should fit, and not all on other devices."""
LOOP_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


class DropoutKernel(Protocol):
    """Zero elements of x by key and place; the arguments of keyed_dropout."""

    def __call__(self, x: Tensor, p: float, key: Tensor, first: int = 0) -> Tensor: ...


SamplingKernel = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Finds the words that noisy logits draw; the arguments and results are those of largest_with_noise."""


def keyed_dropout(x: Tensor, p: float, key: Tensor, first: int = 0) -> Tensor:
    """Zero elements of x with probability p and scale the others so that the mean stays.

    Args:
        x: any shape, floating.
        p: probability, rounded to a multiple of 2^-16.
        key: 0-d int64 on x's device; two keys must be hashes themselves (parallel/context.py), not neighbours.
        first: place of x's first element in the complete tensor, if x is a share of one.
    """
    return _drop(x, p, _lanes(x.numel(), key, first).view(x.shape))


def keyed_row_dropout(x: Tensor, p: float, key: Tensor, rows: Tensor) -> Tensor:
    """Drop elements of x [..., t] by the numbers `rows` [...] of its rows; each row begins at a word of four lanes."""
    words = -(-x.shape[-1] // LANES_PER_WORD)
    places = rows[..., None] * words + torch.arange(words, device=rows.device)
    return _drop(x, p, _hash(places, key).view(torch.int16)[..., : x.shape[-1]])


def threshold_and_factor(p: float) -> tuple[int, float]:
    """Return the number of a lane's values that drop an element, and the factor of elements that are kept."""
    threshold = round(p * LANE_VALUES)
    return threshold, LANE_VALUES / (LANE_VALUES - threshold)


def _drop(x: Tensor, p: float, lanes: Tensor) -> Tensor:
    threshold, factor = threshold_and_factor(p)
    return torch.where(lanes >= threshold - LANE_VALUES // 2, x * factor, 0.0)


def keyed_gumbel(places: Tensor, key: Tensor) -> Tensor:
    """Draw an fp32 number from the standard Gumbel distribution for each of `places`, with a key or broadcast keys.

    It is minus the logarithm of an exponential draw, -log(1 - u), whose uniform u has 40 bits. The largest draws, which
    decide a maximum over many words, therefore have all bits of fp32.
    """
    uniform = (_shift_right(_hash(places, key), 24).float() + 0.5) * 2.0**-40
    return -(-torch.log1p(-uniform)).log()


def _lanes(count: int, key: Tensor, first: int) -> Tensor:
    """Hash places first to first + count - 1 to int16 numbers, all values equally likely."""
    if key.device.type == "meta":
        return torch.empty(count, dtype=torch.int16, device="meta")
    begin, end = first // LANES_PER_WORD, -(-(first + count) // LANES_PER_WORD)
    lanes = _hash(torch.arange(begin, end, device=key.device), key).view(torch.int16)
    skipped = first - begin * LANES_PER_WORD
    return lanes[skipped : skipped + count]


def _hash(places: Tensor, key: Tensor) -> Tensor:
    """Hash places to int64 numbers, all values equally likely.

    The key joins before the product with GAMMA. A compiled kernel would otherwise multiply the index of its loop by
    GAMMA, which overflows after one step: C++ leaves that undefined, and the loop then writes past its end.
    """
    z = (places + 1 + key * _signed(GAMMA_INVERSE)) * _signed(GAMMA)
    z = (z ^ _shift_right(z, 30)) * _signed(MIX_1)
    z = (z ^ _shift_right(z, 27)) * _signed(MIX_2)
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift as unsigned numbers: int64 >> copies the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """Return the int64 with the bits of a 64-bit unsigned number."""
    return value - (1 << 64) if value >> 63 else value


@compile_later
def _shifted(x: Tensor, p: float, key: Tensor, first: int) -> Tensor:
    """Drop the elements that keyed_dropout drops.

    Each element shifts its lane out of its word: the compiler makes no single kernel across `view(torch.int16)`.
    """
    threshold, factor = threshold_and_factor(p)
    places = torch.arange(first, first + x.numel(), device=x.device)
    bits = _hash(places // LANES_PER_WORD, key) >> places % LANES_PER_WORD * 16
    # A lane counts as a signed number: its highest bit is turned.
    lanes = (bits & (LANE_VALUES - 1)) ^ (LANE_VALUES // 2)
    return torch.where(lanes >= threshold, x.flatten() * factor, 0.0).view(x.shape)


def compiled_dropout(x: Tensor, p: float, key: Tensor, first: int = 0) -> Tensor:
    """Drop the same elements as keyed_dropout, in one kernel of torch.compile for each pass."""
    # Words before `first` go into the key: torch.compile makes one kernel for each number that it is given.
    words, lane = divmod(first, LANES_PER_WORD)
    return _Rehashed.apply(_shifted, x, p, key + _signed(words * GAMMA % (1 << 64)) if words else key, lane)


class _Rehashed(torch.autograd.Function):
    """Apply a kernel to values and to gradients; the backward pass hashes again instead of keeping a mask."""

    @staticmethod
    def forward(ctx: Any, kernel: DropoutKernel, x: Tensor, p: float, key: Tensor, first: int) -> Tensor:
        ctx.kernel, ctx.p, ctx.first = kernel, p, first
        ctx.save_for_backward(key)
        return kernel(x, p, key, first)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None, None]:
        return None, ctx.kernel(gradient, ctx.p, *ctx.saved_tensors, ctx.first), None, None, None


def loop_dropout(x: Tensor, p: float, key: Tensor, first: int = 0) -> Tensor:
    """Drop the same elements as keyed_dropout, in one compiled loop on the CPU."""
    if torch.compiler.is_compiling() or x.dtype not in LOOP_DTYPES:
        return keyed_dropout(x, p, key, first)
    return _Rehashed.apply(_loop, x, p, key, first)


def _loop(x: Tensor, p: float, key: Tensor, first: int) -> Tensor:
    if x.device.type == "meta":
        return torch.empty_like(x)
    from ctxlm_ds.kernels.cpu_loops import array_of, dropout_loop, in_threads

    x = x.contiguous()
    out = torch.empty_like(x)
    threshold, factor = threshold_and_factor(p)
    source, target = array_of(x.view(-1)), array_of(out.view(-1))
    kept, unsigned = (np.float64 if x.dtype == torch.float64 else np.float32)(factor), np.uint64(int(key) % (1 << 64))

    def work(begin: int, end: int) -> None:
        dropout_loop(source, target, kept, threshold - LANE_VALUES // 2, unsigned, first, begin, end)

    in_threads(x.numel(), x.numel(), work)
    return out


def largest_with_noise(logits: Tensor, positions: Tensor, keys: Tensor, first_word: int) -> tuple[Tensor, Tensor]:
    """Add noise to logits [k, v]; return the largest sum of each slot, fp32 [k], and the first word that has it [k].

    `positions` [k] are those of the slots in their rows, `keys` [k] int64 those rows' keys. Words are returned from 0;
    the rank's first one is `first_word` of the complete vocabulary.
    """
    words = torch.arange(logits.shape[-1], device=logits.device) + first_word
    noise = keyed_gumbel(positions[:, None] * MOST_WORDS + words, keys[:, None])
    largest, word = (logits + noise).max(dim=-1)
    return largest, word


def in_pieces(logits: Tensor, positions: Tensor, keys: Tensor, first_word: int) -> tuple[Tensor, Tensor]:
    """Compute largest_with_noise for some slots at a time, which bounds the memory of the noise."""
    slots = max(1, (CPU_PIECE if logits.device.type == "cpu" else PIECE) // logits.shape[-1])
    pieces = zip(*(values.split(slots) for values in (logits, positions, keys)), strict=True)
    found = [largest_with_noise(some, places, rows, first_word) for some, places, rows in pieces]
    largest, word = (torch.cat(parts) for parts in zip(*found, strict=True))
    return largest, word


compiled_sampling: SamplingKernel = compile_later(largest_with_noise)
"""It stores no noise."""


IMPLEMENTATIONS = (
    # One read and one write of x instead of about twenty passes over the hash: memory is an accelerator's bottleneck.
    compiled_row(lambda need: compiled_dropout, suits=lambda need: need.device_type != "cpu"),
    Implementation(
        "loop",
        lambda need: loop_dropout,
        lambda need: None if need.device_type == "cpu" else f"it needs a CPU, and this run is on {need.device_type}",
    ),
    Implementation("torch", lambda need: keyed_dropout),
)
SAMPLING = (
    # The noise has about 30 operations a word, each a pass over an accelerator's memory without fusion.
    compiled_row(lambda need: compiled_sampling, suits=lambda need: need.device_type != "cpu"),
    Implementation("torch", lambda need: in_pieces),
)
