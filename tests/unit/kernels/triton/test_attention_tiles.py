"""The tiles of Triton's attention: which probabilities they drop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ctxlm_ds.kernels.attention import ReferenceAttention
from ctxlm_ds.kernels.attention_spec import AttentionCall, AttentionSpec, ProbabilityKeys, Sequences
from tests.unit.kernels.attention_oracle import layout
from tests.unit.kernels.triton.interpreter import in_interpreter

pytestmark = pytest.mark.long

SIZE = 64
KEY = torch.tensor(0x5DEECE66D1234567)


def dropped(kernel: type, p: float, key: Tensor, heads: slice, dtype: torch.dtype) -> Tensor:
    """Return the probabilities [b, s, n, t] of some of four heads: the values are unit vectors."""
    draw, length = torch.Generator().manual_seed(2), SIZE - 1
    query, keys = (torch.randn(2, length, 4, SIZE, generator=draw).to(dtype)[:, :, heads] for _ in range(2))
    values = torch.eye(length, SIZE, dtype=dtype)[None, :, None].expand_as(query)
    ids, starts = layout([[length], [length]], length)
    call = AttentionCall(Sequences(ids, starts), p, None, ProbabilityKeys(key, heads.start, 4))
    return kernel(AttentionSpec(SIZE, scale=0.1))(query, keys, values, call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@in_interpreter
def test_the_dropped_probabilities_are_those_of_the_plain_hash(dtype: torch.dtype) -> None:
    from ctxlm_ds.kernels.triton.attention import TritonAttention

    for p, key in ((0.1, KEY), (0.6, -KEY)):
        whole = [dropped(kernel, p, key, slice(0, 4), dtype) for kernel in (TritonAttention, ReferenceAttention)]
        assert torch.equal(*(x[..., : SIZE - 1] == 0 for x in whole))
        assert abs((whole[0] == 0).float().mean() - p) < 0.03
        assert torch.equal(dropped(TritonAttention, p, key, slice(2, 4), dtype), whole[0][:, :, 2:])
