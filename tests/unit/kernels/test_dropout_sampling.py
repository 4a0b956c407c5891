"""The kernels of drawn words agree, and their noise has the Gumbel distribution."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ctxlm_ds.kernels import dropout
from ctxlm_ds.kernels.dropout import compiled_sampling, in_pieces, keyed_gumbel, largest_with_noise
from ctxlm_ds.kernels.implementation import why_compiled_cannot_run

KEY = torch.tensor(0x1234_5678_9ABC_DEF)
EULER = 0.5772156649015329
SLOTS, WORDS, FIRST_WORD = 60, 1000, 3000


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(SLOTS, WORDS, generator=generator)
    logits[:, -5:] = float("-inf")
    positions = torch.randint(0, 512, (SLOTS,), generator=generator)
    keys = torch.randint(-(1 << 62), 1 << 62, (SLOTS,), generator=generator)
    return logits.to(dtype), positions, keys, FIRST_WORD


def test_the_noise_of_a_word_depends_on_key_position_and_word_only() -> None:
    logits, positions, keys, first = inputs()
    for slot in range(0, SLOTS, 7):
        places = [positions[slot] * (1 << 31) + first + word for word in range(WORDS)]
        noisy = logits[slot] + torch.stack([keyed_gumbel(place, keys[slot]) for place in places])
        one = slice(slot, slot + 1)
        largest, word = largest_with_noise(logits[one], positions[one], keys[one], first)
        torch.testing.assert_close(largest[0], noisy.max(), rtol=1e-6, atol=1e-6)
        assert int(word) == int(noisy.argmax())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_of_any_size_give_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = largest_with_noise(*inputs(dtype))
    for numbers in (1, 7 * WORDS + 1, 1 << 30):
        monkeypatch.setattr(dropout, "CPU_PIECE", numbers)
        assert all(torch.equal(got, want) for got, want in zip(in_pieces(*inputs(dtype)), wanted, strict=True))


@pytest.mark.skipif(why_compiled_cannot_run("cpu") is not None, reason="needs a C++ compiler")
def test_the_compiled_kernel_draws_the_same_words() -> None:
    largest, word = compiled_sampling(*inputs())
    wanted, words = largest_with_noise(*inputs())
    assert torch.equal(word, words)
    torch.testing.assert_close(largest, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_draws_the_words_of_the_cpu() -> None:
    *tensors, first = inputs()
    words = largest_with_noise(*tensors, first)[1]
    for kernel in (in_pieces, compiled_sampling):
        assert torch.equal(kernel(*(tensor.cuda() for tensor in tensors), first)[1].cpu(), words)


def test_noise_has_the_moments_of_the_gumbel_distribution() -> None:
    count = 1_000_000
    noise = keyed_gumbel(torch.arange(count), KEY).double()
    variance = math.pi**2 / 6
    assert noise.isfinite().all()
    assert abs(noise.mean() - EULER) < 4 * math.sqrt(variance / count)
    # The fourth central moment is 5.4 times the squared variance.
    assert abs(noise.var() - variance) < 4 * variance * math.sqrt(4.4 / count)
    beyond = float((noise > 10.0).double().mean())
    wanted = -math.expm1(-math.exp(-10.0))
    assert abs(beyond - wanted) < 4 * math.sqrt(wanted / count)
    # The largest numbers, which decide a maximum, have few equals.
    assert len(noise.topk(1000).values.unique()) > 995
