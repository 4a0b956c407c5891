"""A family that no package ships, as a user would write it: one width, one repeated layer, words in and words out."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from ctxlm_ds.families.base import Family
from ctxlm_ds.models.layers import LayerDescription, ModelBuild
from ctxlm_ds.models.parts.embeddings import WordTable
from ctxlm_ds.parallel.parameters import Normal, ParameterFacts, declare
from ctxlm_ds.recipe.sections import ModelSection, PositiveInt


class ToySection(ModelSection):
    """A word predicts the next by itself."""

    family: str = "toy"
    size: PositiveInt = 16
    """Numbers a word."""
    depth: PositiveInt = 4
    """Repeated layers."""

    @property
    def num_blocks(self) -> int:
        return self.depth


class ToyBlock(nn.Module):
    """Adds a product."""

    def __init__(self, width: int, init: Normal) -> None:
        super().__init__()
        self.product = nn.Linear(width, width, bias=False)
        declare(self.product, weight=ParameterFacts(init, decays=True))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + functional.gelu(self.product(hidden))


def toy_layers(model: ToySection, build: ModelBuild) -> list[LayerDescription]:
    """List the layers."""
    init = Normal(0.1)
    table = WordTable(model.vocab_size or 0, model.size, init, build)
    block = {"width": model.size, "init": init}
    blocks = [
        LayerDescription(f"toy.{number}", ToyBlock, ("hidden",), ("hidden",), block, block=True)
        for number in range(model.depth)
    ]
    return [table.look_up(), *blocks, table.decode("hidden", "logits")]


def tiny() -> dict[str, Any]:
    """Return the sections of a recipe small enough for tests."""
    return {
        "model": {"family": "toy"},
        "objective": {"name": "causal_lm"},
        "data": {"sample_format": "blocks", "seq_length": 32},
    }


TOY = Family(
    name="toy",
    title="A toy",
    section=ToySection,
    layers="tests.families.toy:toy_layers",
    outputs=frozenset({"logits"}),
    objective="causal_lm",
    sample_format="blocks",
    tokenizer="gpt2",
    tiny=tiny,
)
