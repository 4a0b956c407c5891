"""What cannot be built is refused: impossible shapes and outputs, tensors that nothing gives, missing code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.models.layers import LayerDescription, ModelBuild
from ctxlm_ds.models.program import build_program
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.choices import DATA
from ctxlm_ds.registry import FAMILIES
from tests.encoder_batches import tiny_model
from tests.families.toy import TOY, ToyBlock, ToySection, toy_layers
from tests.sections import objective_section
from tests.unit.models.test_layers_sequence import build_of


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (tiny_model(vocab_size=None), r"model\.vocab_size is not set"),
        (tiny_model(vocab_size=10, hidden_size=30, num_attention_heads=4), "4 does not divide model.hidden_size 30"),
    ],
)
def test_impossible_shapes(config: TransformerSection, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_program(config, build_of())


def test_an_output_that_the_family_cannot_compute() -> None:
    with pytest.raises(ConfigError, match="model.family bert cannot compute logits"):
        build_program(tiny_model(), build_of(("logits",)))


def misreading_layers(model: ToySection, build: ModelBuild) -> list[LayerDescription]:
    """A block reads the logits before they are there, and another a field that there is not."""
    first, *others = toy_layers(model, build)
    wrong = [("toy.early", "logits"), ("toy.wrong", "input_idz")]
    return [first, *(LayerDescription(name, ToyBlock, (read,), ("hidden",)) for name, read in wrong), *others]


@pytest.mark.parametrize(
    ("layers", "changes", "message"),
    [
        ("misreading_layers", {},
         r"model\.family toy with objective\.name causal_lm: layer toy\.early reads logits, layer toy\.wrong reads "
         r"input_idz, but no .* no field of the batch \(input_ids, .*\) and no output \(logits\); correct"),
        ("gone", {}, r"the layers of model\.family toy \(.*test_program:gone\) cannot be imported: .*has no attribute"),
        ("toy_layers", {"labels": ("labelz",), "outputs": ("hidden",)}, "_lm reads hidden, .*_lm reads labelz"),
        ("toy_layers", {"reduce": "no_such:sums"},
         r"the reduction of loss term causal_lm \(no_such:sums\) cannot be imported: No module"),
    ],
    ids=["reads", "layers", "labels", "reduce"],
)  # fmt: skip
def test_what_nothing_gives_and_code_that_is_not_there(
    layers: str, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FAMILIES, "_added", {"toy": replace(TOY, layers=f"{__name__}:{layers}")})
    monkeypatch.setattr(FAMILIES, "_loaded", {})
    objective = build_objective(objective_section(name="causal_lm"))
    fields = [field.name for field in objective.fields(DATA.make("blocks", seq_length=8))]
    objective.terms = (replace(objective.terms[0], **changes),)
    with pytest.raises(ConfigError, match=message):
        build_program(ToySection(vocab_size=9), build_of(("logits",)), objective, fields=fields)
