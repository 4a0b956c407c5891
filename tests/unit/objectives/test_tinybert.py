"""TinyBERT's objective: its terms and gradients against transformers' BertModel, its layer map, counts and inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctxlm_ds.data.sample import Batch
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.families.bert.export import TINYBERT_EXPORT as EXPORT
from ctxlm_ds.families.bert.export import BertExport
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import LayerSequence, ModelBuild
from ctxlm_ds.models.program import build_program
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.recipe.check import check_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.training.engine.losses import TermLosses
from tests.encoder_batches import random_rows
from tests.ragged import Rows, collate

LENGTH, WIDE = 16, 48
STUDENT = {
    "family": "tinybert", "vocab_size": 50, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": LENGTH, "fit_size": WIDE, "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}  # fmt: skip
TEACHER = {key: value for key, value in STUDENT.items() if key != "fit_size"} | {
    "family": "bert", "hidden_size": WIDE, "num_layers": 4,
}  # fmt: skip
PADDED, PACKED, FULL = [[16], [9], [4]], [[5, 8], [16], [3, 2, 7]], [[16], [16]]


def recipe(student: dict[str, Any] | None = None, teacher: dict[str, Any] | None = None, **objective: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": STUDENT | (student or {}), "teacher": {"model": TEACHER | (teacher or {})},
            "objective": {"name": "tinybert", **objective}, "data": {"sample_format": "segment_pair", "seq_length": 16},
        }
    )  # fmt: skip


def built(config: RunConfig, packed: bool = False) -> LayerSequence:
    """Student and teacher with random values, biases and norms too."""
    objective = build_objective(config.objective)

    def kernels(precision: str) -> KernelSet:
        return KernelSet({}, "cpu", torch.float32)

    build = ModelBuild((*objective.outputs, *objective.taps), kernels("fp32"), shares_rows=packed)
    model = build_program(config.model, build, objective, config.teacher, kernels).module()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.train()


def batch_of(config: RunConfig, lengths: Sequence[Sequence[int]]) -> Batch:
    most = max(map(len, lengths))
    return collate(random_rows(lengths, 50, seed=3), build_objective(config.objective), Rows(LENGTH, most))


def losses_of(config: RunConfig, model: LayerSequence, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """The loss as a step has it, and the mean of each term."""
    objective = build_objective(config.objective)
    counts = [term.count({name: x.numpy() for name, x in batch.fields.items()}) for term in objective.terms]
    factors = torch.tensor([term.weight / count for term, count in zip(objective.terms, counts, strict=True)])
    losses = TermLosses(objective.terms, objective.tensors, ParallelContext())
    total, sums = losses(model.run(batch.fields), batch.fields, factors)
    assert [float(sums[f"{term.name}/count"]) for term in objective.terms] == counts
    return total, {
        term.name: float(sums[f"{term.name}/loss_sum"]) / count
        for term, count in zip(objective.terms, counts, strict=True)
    }


class Theirs:
    """transformers' BertModel with our weights, in fp64; scores come from the queries and keys of its layers."""

    def __init__(self, model: LayerSequence, section: Any, prefix: str) -> None:
        from transformers import BertConfig, BertModel

        settings = {theirs: getattr(section, ours) for ours, theirs in BertExport.settings.items()}
        self.module = BertModel(BertConfig(**settings), add_pooling_layer=False).double().train()
        ours = {name.removeprefix(prefix): value for name, value in model.named_parameters() if name.startswith(prefix)}
        self.rows = EXPORT.key_map(section, ("hidden_states.-1",), 0).rows
        values = {
            theirs: value.detach()
            for row in self.rows
            for theirs, value in zip(row.theirs, row.to_theirs(ours[row.ours]), strict=True)
        }
        missing, unexpected = self.module.load_state_dict(values, strict=False)
        assert not unexpected and not [name for name in missing if "position_ids" not in name]
        self.products: list[Tensor] = []
        for layer in self.module.encoder.layer:
            for part in (layer.attention.self.query, layer.attention.self.key):
                part.register_forward_hook(lambda module, inputs, output: self.products.append(output))

    def run(self, fields: dict[str, Tensor], heads: int) -> tuple[list[Tensor], list[Tensor]]:
        """Hidden states from the embeddings on, and scores [b, n, s, s] before the mask."""
        self.products.clear()
        result = self.module(
            fields["input_ids"], attention_mask=(fields["sequence_ids"] > 0).long(),
            token_type_ids=fields["token_type_ids"], output_hidden_states=True,
        )  # fmt: skip
        split = [x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in self.products]
        scores = [q @ k.mT / q.shape[-1] ** 0.5 for q, k in zip(split[::2], split[1::2], strict=True)]
        return list(result.hidden_states), scores


def plain_terms(
    student: tuple[list[Tensor], list[Tensor]], teacher: tuple[list[Tensor], list[Tensor]], layer_map: Sequence[int],
    fit: Any, inside: Tensor,
) -> dict[str, Tensor]:  # fmt: skip
    """general_distill.py, with means over what is not padding; scores up to -100 are 0."""
    (ours, our_scores), (theirs, their_scores) = student, teacher
    pairs = inside[:, None, :, None] & inside[:, None, None, :]

    def scores(x: Tensor) -> Tensor:
        return torch.where(x <= -1e2, 0.0, x)[pairs.expand_as(x)]

    return {
        "embedding_mse": F.mse_loss(fit(ours[0])[inside], theirs[0][inside]),
        "hidden_mse": sum(F.mse_loss(fit(ours[m])[inside], theirs[n][inside]) for m, n in enumerate(layer_map, 1)),
        "attention_mse": sum(
            F.mse_loss(scores(our_scores[m]), scores(their_scores[n - 1])) for m, n in enumerate(layer_map)
        ),
    }


@pytest.mark.parametrize("lengths", [PADDED, FULL], ids=["padded", "full"])
@pytest.mark.parametrize("layer_map", [None, [1, 4]], ids=str)
def test_terms_and_gradients_are_those_of_transformers(lengths: list[list[int]], layer_map: list[int] | None) -> None:
    weights = {"embedding_weight": 0.5, "hidden_weight": 2.0, "attention_weight": 3.0}
    config = recipe(layer_map=layer_map, **weights)
    model, batch = built(config), batch_of(config, lengths)
    total, means = losses_of(config, model, batch)
    total.backward()

    student, teacher = Theirs(model, config.model, ""), Theirs(model, config.teacher.model, "teacher.")
    fit = nn.Linear(32, WIDE).double()
    fit.load_state_dict({name: getattr(model.fit_dense, name).detach() for name in ("weight", "bias")})
    with torch.no_grad():
        known = teacher.run(batch.fields, 4)
    ours = student.run(batch.fields, 4)
    wanted = plain_terms(ours, known, layer_map or [2, 4], fit, batch.fields["sequence_ids"] > 0)
    assert means == pytest.approx({name: value.item() for name, value in wanted.items()}, rel=1e-5)
    theirs = sum(weights[name.replace("mse", "weight")] * value for name, value in wanted.items())
    assert total.item() == pytest.approx(theirs.item(), rel=1e-5)
    theirs.backward()

    gradients = {name: value.grad for name, value in model.named_parameters() if not name.startswith("teacher.")}
    parameters = dict(student.module.named_parameters())
    expected = {row.ours: row.to_ours(lambda name: parameters[name].grad) for row in student.rows}
    expected |= {f"fit_dense.{name}": getattr(fit, name).grad for name in ("weight", "bias")}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max(), name


def test_a_finetuned_teachers_predictions_are_learnt_as_in_task_distill() -> None:
    """transformers' BertForSequenceClassification on both sides; rows of several sequences have as many predictions."""
    from transformers import BertConfig, BertForSequenceClassification

    weights = {"embedding_weight": 0.0, "hidden_weight": 0.0, "attention_weight": 0.0, "prediction_weight": 2.0}
    task = {"num_classes": 3}
    config = recipe(task, TEACHER | task | {"family": "tinybert"}, temperature=1.5, **weights)
    model, batch = built(config), batch_of(config, PADDED)
    total, means = losses_of(config, model, batch)
    total.backward()
    their_models, rows = [], {}
    for section, prefix in ((config.model, ""), (config.teacher.model, "teacher.")):
        settings = {theirs: getattr(section, ours) for ours, theirs in BertExport.settings.items()}
        module = BertForSequenceClassification(BertConfig(**settings, num_labels=3)).double().train()
        rows[prefix] = EXPORT.key_map(section, ("class_logits",), 0).rows
        ours = dict(model.named_parameters())
        values = {
            name: value.detach()
            for row in rows[prefix]
            for name, value in zip(row.theirs, row.to_theirs(ours[prefix + row.ours]), strict=True)
        }
        missing, unexpected = module.load_state_dict(values, strict=False)
        assert not unexpected and not [name for name in missing if "position_ids" not in name]
        their_models.append(module)
    inputs = {
        "input_ids": batch.fields["input_ids"], "token_type_ids": batch.fields["token_type_ids"],
        "attention_mask": (batch.fields["sequence_ids"] > 0).long(),
    }  # fmt: skip
    student, teacher = (module(**inputs).logits / 1.5 for module in their_models)
    wanted = (-teacher.detach().softmax(-1) * student.log_softmax(-1)).mean()
    assert means == pytest.approx({"class_targets": wanted.item()}, rel=1e-5)
    (2.0 * wanted).backward()
    parameters = dict(their_models[0].named_parameters())
    for row in rows[""]:
        expected = row.to_ours(lambda name: parameters[name].grad)
        got = model.get_parameter(row.ours).grad
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max(), row.ours

    packed, alone = batch_of(config, PACKED), batch_of(config, [[length] for row in PACKED for length in row])
    shared = losses_of(config, built(config, packed=True), packed)
    assert shared[1] == pytest.approx(losses_of(config, model, alone)[1], rel=1e-5)


def test_packed_sequences_are_compared_as_if_each_had_a_row() -> None:
    config = recipe()
    model = built(config, packed=True)
    packed = losses_of(config, model, batch_of(config, PACKED))
    alone = losses_of(config, model, batch_of(config, [[length] for row in PACKED for length in row]))
    assert packed[1] == pytest.approx(alone[1], rel=1e-5)


@pytest.mark.parametrize(
    ("weights", "terms", "has_projection"),
    [
        ({"embedding_weight": 0.0}, ["hidden_mse", "attention_mse"], True),
        ({"hidden_weight": 0.0, "attention_weight": 0.0}, ["embedding_mse"], True),
        ({"hidden_weight": 0.0, "embedding_weight": 0.0}, ["attention_mse"], False),
    ],
)
def test_a_term_without_weight_is_not_computed(
    weights: dict[str, float], terms: list[str], has_projection: bool
) -> None:
    config = recipe(**weights)
    model = built(config)
    assert list(losses_of(config, model, batch_of(config, PADDED))[1]) == terms
    assert hasattr(model, "fit_dense") == has_projection


def test_no_layer_of_the_teacher_runs_that_no_student_layer_learns_from() -> None:
    names = [name for name, _ in built(recipe(layer_map=[1, 3])).named_parameters()]
    assert any(name.startswith("teacher.encoder.2.") for name in names)
    assert not [name for name in names if name.startswith(("teacher.encoder.3.", "teacher.heads.", "heads."))]


@pytest.mark.parametrize(
    ("student", "teacher", "objective", "message"),
    [
        ({"num_layers": 3}, {}, {}, r"objective\.layer_map: null, but 3 layers do not divide the teacher's 4"),
        ({}, {}, {"layer_map": [4]}, r"objective\.layer_map: \[4\] names 1 layers, the student has 2"),
        ({}, {}, {"layer_map": [2, 5]}, r"objective\.layer_map: \[2, 5\]: the teacher has only 4 layers"),
        ({"num_attention_heads": 2}, {}, {}, r"model\.num_attention_heads: 2 heads .* the teacher's 4; .*weight to 0"),
        ({}, {"hidden_size": 64}, {}, r"model\.fit_size: 48 is not the width of the teacher's .* set it to 64"),
        (
            {}, {}, {"embedding_weight": 0.0, "hidden_weight": 0.0, "attention_weight": 0.0},
            r"objective\.prediction_weight: all weights are 0",
        ),
        ({}, {}, {"mask_prob": 1.0}, r"objective\.mask_prob: 1: expected"),
        ({}, {}, {"prediction_weight": 1.0}, r"teacher\.model\.family: bert does not compute class_logits"),
        (
            {}, {"family": "tinybert", "num_classes": 3}, {"prediction_weight": 1.0},
            r"model\.num_classes: 2, but the teacher has 3; both need the same",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(
    student: dict[str, Any], teacher: dict[str, Any], objective: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(recipe(student, teacher, **objective), None)
    check_config(recipe({"num_attention_heads": 2}, attention_weight=0.0), None)
