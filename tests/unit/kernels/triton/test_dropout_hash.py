"""The hash of a kernel against numpy's unsigned numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from ctxlm_ds.kernels.triton.dropout import hash_words
from ctxlm_ds.parallel.context import _hashes
from tests.unit.kernels.triton.interpreter import in_interpreter

pytestmark = pytest.mark.long


@triton.jit
def kernel(out, key, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, hash_words(at.to(tl.uint64), tl.load(key).to(tl.uint64)).to(tl.int64, bitcast=True))


@in_interpreter
def test_words_are_those_of_splitmix64() -> None:
    out, key = torch.empty(64, dtype=torch.int64), torch.tensor(-5)
    kernel[(1,)](out, key, 64)
    assert np.array_equal(out.numpy().view(np.uint64), _hashes(2**64 - 5, 1, 64))
