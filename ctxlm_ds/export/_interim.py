"""To be deleted when the tracks are merged: today's model code behind the interfaces that the export is written for.

After the merge: describe_model and WholeModel come from models/build.py, plain_model is
`build_model(section, ModelBuild(tuple(outputs), choose_kernels(KernelsConfig(), "cpu", torch.float32))).eval()` under
`torch.device(device)`, POSITION_OFFSET is families/roberta/layers.POSITION_OFFSET, section_of and recipe_model are the
identity, own_settings(section, …) is section.model_dump(), fields_of(batch) is batch.fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ctxlm_ds.kernels.dispatch import choose_kernels
from ctxlm_ds.models.build import build_layer_list
from ctxlm_ds.models.layer_list import LayerSequence
from ctxlm_ds.recipe.schema import KernelsConfig, ModelConfig
from ctxlm_ds.recipe.section import Section
from ctxlm_ds.recipe.sections import ModelSection
from ctxlm_ds.registry import FAMILIES

POSITION_OFFSET = 2
TERMS = {"predicted_logits": "masked_lm", "sentence_logits": "next_sentence", "logits": "causal_lm"}
GROWS = {
    "word_embeddings.weight": "vocabulary",
    "mlm_bias.bias": "vocabulary",
    "embeddings.position_embeddings.weight": "position table",
}
OPTIONAL = ("heads.pooler.", "heads.nsp_classifier.")


@dataclass(frozen=True)
class ParameterFacts:
    grows: str | None
    optional: bool


@dataclass(frozen=True)
class WholeModel:
    shapes: dict[str, tuple[int, ...]]
    facts: dict[str, ParameterFacts]

    @property
    def num_parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())


class PlainModel(LayerSequence):
    def __init__(self, model: ModelConfig, outputs: Sequence[str]) -> None:
        terms = tuple(TERMS[name] for name in outputs)
        kernels = choose_kernels(KernelsConfig(), "cpu", torch.float32, False, causal=model.is_decoder)
        super().__init__(build_layer_list(model, terms, kernels, False))
        self.outputs = tuple(outputs)
        self.inputs = (
            "input_ids", "token_type_ids", "position_ids", "sequence_ids", "sequence_starts", "prediction_positions",
            "cls_positions",
        )  # fmt: skip

    def run(self, fields: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        outputs = self(tuple(fields[name] for name in self.inputs))
        return dict(zip(self.outputs, outputs, strict=True))


def section_of(model: Any) -> ModelSection:
    section = FAMILIES.get(model.family).section
    if isinstance(model, section):
        return model
    return section.model_validate({key: getattr(model, key) for key in section.model_fields})


def recipe_model(model: Any) -> Any:
    if isinstance(model, ModelConfig):
        return model
    pre = {"pre_layer_norm": True} if model.family == "gpt2" else {}
    return ModelConfig.model_validate(pre | model.model_dump())


def plain_model(model: Any, outputs: Sequence[str], device: str) -> PlainModel:
    with torch.device(device):
        return PlainModel(recipe_model(model), outputs).eval()


def describe_model(model: Any, outputs: Sequence[str]) -> WholeModel:
    named = dict(plain_model(model, outputs, "meta").named_parameters())
    facts = {name: ParameterFacts(GROWS.get(name), name.startswith(OPTIONAL)) for name in named}
    return WholeModel({name: tuple(parameter.shape) for name, parameter in named.items()}, facts)


def fields_of(batch: Any) -> dict[str, torch.Tensor]:
    """Batch.fields after the merge."""
    names = [name for name in batch.__slots__ if name != "labels"]
    labels = {f"{term}_labels": value for term, value in batch.labels.items()}
    return {name: getattr(batch, name) for name in names} | labels


def own_settings(section: Section, registered: type[Section]) -> dict[str, Any]:
    return {key: value for key, value in section.model_dump().items() if key in registered.model_fields}
