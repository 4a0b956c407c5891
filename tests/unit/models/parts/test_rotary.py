"""Rotary positions against transformers, in every precision, for rows of several sequences and compiled."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import LlamaConfig, ModernBertConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.modernbert.modeling_modernbert import ModernBertRotaryEmbedding, apply_rotary_pos_emb

from ctxlm_ds.kernels.implementation import why_compiled_cannot_run
from ctxlm_ds.kernels.rotary import torch_rotary
from ctxlm_ds.models.parts.rotary import LinearScaling, Llama3Scaling, Rotary, Scaling

ROWS, LENGTH, HEADS, SIZE, POSITIONS = 2, 40, 3, 8, 9000
KINDS = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}
"""transformers' kinds of layers and their published bases."""


def heads(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Queries and keys [b, s, 2, n, d]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, LENGTH, 2, HEADS, SIZE, generator=generator).to(dtype)


def positions() -> torch.Tensor:
    """Of two sequences and padding, and of the end of a long row."""
    packed = torch.cat([torch.arange(25), torch.arange(10), torch.zeros(5, dtype=torch.int64)])
    return torch.stack([packed, torch.arange(8000, 8000 + LENGTH)])


def rotate(rotary: Rotary, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Rotate queries and keys [b, s, 2, n, d]."""
    query, key, _ = torch_rotary(x.flatten(2, 3), (HEADS, HEADS, 0), rotary.angles(position_ids))
    return torch.stack([query, key], dim=2)


def of_tokens(rotary: Rotary) -> torch.Tensor:
    """Return the angles [b, s, d]."""
    table, rows = rotary.angles(positions())
    return table[rows]


def theirs(kind: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Rotated queries and keys [b, s, n, d]."""
    config = ModernBertConfig(hidden_size=HEADS * SIZE, num_attention_heads=HEADS)
    query, key = heads(dtype).permute(2, 0, 3, 1, 4)
    cos, sin = ModernBertRotaryEmbedding(config)(query, positions(), kind)
    return [x.transpose(1, 2) for x in apply_rotary_pos_emb(query, key, cos, sin)]


@pytest.mark.parametrize("kind", KINDS)
def test_rotates_as_transformers(kind: str) -> None:
    rotated = rotate(Rotary(SIZE, KINDS[kind], POSITIONS), heads(), positions())
    for got, wanted in zip(rotated.unbind(2), theirs(kind), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


SCALINGS: dict[str, tuple[Scaling | None, dict[str, object]]] = {
    "none": (None, {"rope_type": "default"}),
    "linear": (LinearScaling(4.0), {"rope_type": "linear", "factor": 4.0}),
    "Llama 3.1": (
        Llama3Scaling(8.0, 1.0, 4.0, 1024),
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    ),
}  # fmt: skip
"""Ours, and rope_parameters of transformers."""


@pytest.mark.parametrize("name", SCALINGS)
def test_a_scaling_turns_as_that_of_transformers(name: str) -> None:
    scaling, parameters = SCALINGS[name]
    size, base = 64, 500_000.0
    config = LlamaConfig(
        hidden_size=4 * size, num_attention_heads=4, max_position_embeddings=POSITIONS,
        rope_parameters={"rope_theta": base, **parameters},
    )  # fmt: skip
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions())
    wanted = torch.cat([cos[..., : size // 2], sin[..., : size // 2]], dim=-1)
    found = of_tokens(Rotary(size, base, POSITIONS, scaling))
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3)  # of position 8,000: float32 turns are 5e-4 apart
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-5)
    plain = of_tokens(Rotary(size, base, POSITIONS))
    assert torch.equal(found, plain) == (scaling is None)


def test_angles_are_float32_in_half_precision() -> None:
    """A bf16 cosine of position 8,000 would be that of a position some hundred off."""
    rotary = Rotary(SIZE, 10_000.0, POSITIONS)
    rotated = rotate(rotary, heads(torch.bfloat16), positions())
    assert rotated.dtype == torch.bfloat16
    exact = rotate(rotary, heads(torch.bfloat16).float(), positions())
    assert torch.equal(rotated, exact.to(torch.bfloat16))


def test_layers_share_the_table_of_a_base() -> None:
    one, other = Rotary(SIZE, 10_000.0, 50), Rotary(SIZE, 10_000.0, 50)
    assert one == other and one != Rotary(SIZE, 160_000.0, 50)
    table = one.angles(positions()).table
    assert table is other.angles(positions()).table and not table.requires_grad


@pytest.mark.skipif(why_compiled_cannot_run("cpu") is not None, reason="needs a C++ compiler")
def test_compiled_rotation_has_the_same_values_and_gradients() -> None:
    rotary, x = Rotary(SIZE, 160_000.0, POSITIONS), heads().requires_grad_()
    compiled = torch.compile(partial(rotate, rotary), dynamic=False)
    upstream = torch.linspace(-1, 1, x.numel()).view_as(x)
    for function in (partial(rotate, rotary), compiled):
        found = function(x, positions())
        (gradient,) = torch.autograd.grad(found, x, upstream)
        torch.testing.assert_close(found, rotate(rotary, x, positions()), rtol=0, atol=1e-5)
        # The transpose of a rotation is the rotation back.
        torch.testing.assert_close(rotate(rotary, gradient, positions()), upstream, rtol=0, atol=1e-5)
