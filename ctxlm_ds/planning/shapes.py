"""A model as its list of layers with the shapes of their parameters, without building it and without torch.

In: a recipe. Out: layers in the order of models/encoder.py and models/decoder.py, with the names that those give.
Not here: how a shape is split over ranks (parallel/placement.py), where stages are cut (models/stages.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ctxlm_ds.data.stream.collate import CAUSAL_LM, MASKED_LM, NEXT_SENTENCE
from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.recipe.schema import RunConfig

Shape = tuple[int, ...]
PUBLISHED_VOCAB_SIZES = {"bert": 30_522, "roberta": 50_265, "gpt2": 50_257, "gpt1": 40_478}
WORD_EMBEDDINGS = "word_embeddings"


@dataclass(frozen=True, slots=True)
class PlannedLayer:
    """One layer of the list; the tied table stands at both of its places."""

    name: str
    shapes: tuple[tuple[str, Shape], ...]
    """Full name and full shape of each parameter."""
    block: bool = False
    """Whether it is a transformer layer, at which stages may be cut."""

    @property
    def num_elements(self) -> int:
        """Elements of its parameters."""
        return sum(prod(shape) for _, shape in self.shapes)


def objective_terms(config: RunConfig) -> tuple[str, ...]:
    """Loss terms of the recipe's objective."""
    if config.objective.name == "causal_lm":
        return (CAUSAL_LM,)
    return (MASKED_LM, NEXT_SENTENCE) if config.objective.name == "masked_lm_nsp" else (MASKED_LM,)


def with_vocabulary(model: TransformerSection) -> TransformerSection:
    """The model with the published vocabulary of its family where the recipe leaves the size to the tokenizer."""
    if model.vocab_size is not None:
        return model
    return model.model_copy(update={"vocab_size": PUBLISHED_VOCAB_SIZES[model.family]})


def layer_list(config: RunConfig) -> list[PlannedLayer]:
    """The layers in order; `model.vocab_size` unset counts as published."""
    model = with_vocabulary(config.model)
    return _decoder(model) if model.is_decoder else _encoder(model, "next_sentence" in objective_terms(config))


def _encoder(model: TransformerSection, next_sentence: bool) -> list[PlannedLayer]:
    h = model.hidden_size
    num_positions = model.max_position_embeddings + model.position_offset
    inputs = [_weight("embeddings.position_embeddings", num_positions, h)]
    if model.family == "bert":
        inputs.append(_weight("embeddings.token_type_embeddings", model.type_vocab_size, h))
    inputs += _norm("embeddings.layer_norm", h)
    heads = [*_linear("heads.mlm_transform", h, h), *_norm("heads.mlm_layer_norm", h)]
    if next_sentence:
        heads += [*_linear("heads.pooler", h, h), *_linear("heads.nsp_classifier", h, 2)]
    return [
        _table(model),
        PlannedLayer("embeddings", tuple(inputs)),
        *_blocks(model, "encoder"),
        PlannedLayer("heads", tuple(heads)),
        _table(model),
        PlannedLayer("mlm_bias", (("mlm_bias.bias", (_vocab_size(model),)),)),
    ]


def _decoder(model: TransformerSection) -> list[PlannedLayer]:
    positions = _weight("embeddings.position_embeddings", model.max_position_embeddings, model.hidden_size)
    return [
        _table(model),
        PlannedLayer("embeddings", (positions,)),
        *_blocks(model, "decoder"),
        PlannedLayer("output", ()),
        _table(model),
    ]


def _blocks(model: TransformerSection, prefix: str) -> list[PlannedLayer]:
    final = [PlannedLayer("final_layer_norm", tuple(_norm("final_layer_norm", model.hidden_size)))]
    blocks = [_block(model, f"{prefix}.{index}") for index in range(model.num_layers)]
    return [*blocks, *final] if model.pre_layer_norm else blocks


def _block(model: TransformerSection, name: str) -> PlannedLayer:
    h, f = model.hidden_size, model.intermediate_size
    shapes = [
        *_linear(f"{name}.attention.qkv", h, 3 * h),
        *_linear(f"{name}.attention.output", h, h),
        *_norm(f"{name}.attention_layer_norm", h),
        *_linear(f"{name}.mlp.up", h, f),
        *_linear(f"{name}.mlp.down", f, h),
        *_norm(f"{name}.mlp_layer_norm", h),
    ]
    return PlannedLayer(name, tuple(shapes), block=True)


def _table(model: TransformerSection) -> PlannedLayer:
    return PlannedLayer(WORD_EMBEDDINGS, (_weight(WORD_EMBEDDINGS, _vocab_size(model), model.hidden_size),))


def _vocab_size(model: TransformerSection) -> int:
    size = with_vocabulary(model).vocab_size
    assert size is not None
    return size


def _weight(name: str, rows: int, columns: int) -> tuple[str, Shape]:
    return f"{name}.weight", (rows, columns)


def _linear(name: str, inputs: int, outputs: int) -> list[tuple[str, Shape]]:
    return [(f"{name}.weight", (outputs, inputs)), (f"{name}.bias", (outputs,))]


def _norm(name: str, width: int) -> list[tuple[str, Shape]]:
    return [(f"{name}.weight", (width,)), (f"{name}.bias", (width,))]
