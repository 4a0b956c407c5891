"""Which decoders compare their scores with labels, and what their layers read and write then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import Flow, LayerDescription, LayerSequence, ModelBuild
from ctxlm_ds.models.program import Program, build_program, loss_of
from ctxlm_ds.objectives.base import GIVEN_SUMS, build_objective
from ctxlm_ds.parallel import cross_entropy
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.training.engine.losses import TermLosses
from tests.sections import model_section, objective_section

SIZE = {"vocab_size": 61, "hidden_size": 16, "num_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
        "max_position_embeddings": 16}  # fmt: skip
T5_SIZE = {"family": "t5", "vocab_size": 61, "hidden_size": 16, "num_layers": 1, "num_decoder_layers": 1,
           "num_attention_heads": 2, "head_size": 8, "intermediate_size": 32, "relative_buckets": 8,
           "relative_reach": 12, "hidden_dropout": 0.0, "attention_dropout": 0.0}  # fmt: skip


def program_of(family: str, objective: Any, asked: str) -> Program:
    kernels = KernelSet({"cross_entropy": asked}, "cpu", torch.float32)
    return build_program(model_section(family=family, **SIZE), ModelBuild(objective.outputs, kernels), objective)


def layers_of(family: str, objective: Any, asked: str) -> list[LayerDescription]:
    return program_of(family, objective, asked).layers


def flow(layers: list[LayerDescription]) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    return [(layer.name, layer.reads, layer.writes) for layer in layers]


@pytest.mark.parametrize(
    ("family", "name", "logits", "reads"),
    [
        ("gpt2", "causal_lm", "logits", ("hidden", "causal_lm_labels")),
        ("llama", "causal_lm", "logits", ("hidden", "causal_lm_labels")),
        ("bert", "masked_lm_nsp", "predicted_logits",
         ("predicted_hidden", "masked_lm_labels", "predicted_logits.bias")),
    ],
)  # fmt: skip
def test_the_decoder_reads_labels_and_writes_its_loss(
    family: str, name: str, logits: str, reads: tuple[str, ...]
) -> None:
    objective = build_objective(objective_section(name=name))
    program = program_of(family, objective, "chunked")
    layers, outputs = program.layers, program.outputs
    decoder = next(layer for layer in layers if layer.writes == loss_of(logits))
    assert decoder.reads == reads
    assert not any(logits in layer.writes for layer in layers)
    (changed, *others), term = program.terms, objective.terms[0]
    assert (changed.outputs, changed.reduce) == (loss_of(logits), GIVEN_SUMS) and others == list(objective.terms[1:])
    assert (changed.name, changed.labels, changed.weight) == (term.name, term.labels, term.weight)
    assert outputs == (*loss_of(logits), *objective.tensors[1:])
    assert objective.terms[0].labels[0] in Flow(layers, outputs).inputs
    plain = layers_of(family, objective, "full")
    assert flow(plain) == flow(layers_of(family, objective, "auto")), "a CPU takes all logits"
    names = [name for name, _ in LayerSequence(layers, outputs).named_parameters()]
    assert names == [name for name, _ in LayerSequence(plain, objective.tensors).named_parameters()]


@pytest.mark.parametrize(("family", "name"), [("distilbert", "distillation"), ("electra", "replaced_tokens")])
def test_logits_that_something_else_reads_are_kept(family: str, name: str) -> None:
    objective = build_objective(objective_section(name=name))
    assert flow(layers_of(family, objective, "auto")) == flow(layers_of(family, objective, "full"))
    with pytest.raises(ConfigError, match=r"kernels.cross_entropy: `chunked` never holds .*logits, but another layer"):
        layers_of(family, objective, "chunked")


def t5_batch(rows: int = 6, source: int = 9, target: int = 50) -> dict[str, torch.Tensor]:
    """Random texts and targets; a sixth of the labels is padding."""
    generator = torch.Generator().manual_seed(3)
    fields = {"decoder_labels": torch.randint(61, (rows, target), generator=generator)}
    fields["decoder_labels"][-1] = IGNORE_LABEL
    for stack, length in (("", source), ("decoder_", target)):
        fields |= {
            f"{stack}input_ids": torch.randint(61, (rows, length), generator=generator),
            f"{stack}position_ids": torch.arange(length).expand(rows, -1),
            f"{stack}sequence_ids": torch.ones(rows, length, dtype=torch.long),
            f"{stack}sequence_starts": torch.tensor([[0, length]] * rows),
        }
    return fields


@pytest.mark.parametrize(("tied", "z_loss"), [(True, 0.0), (False, 0.0), (True, 0.05)])
def test_losses_and_gradients_of_t5_are_those_of_all_logits(
    tied: bool, z_loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one tile of rows, three for the batch; the untied head has its own gradient."""
    monkeypatch.setattr(cross_entropy, "CPU_CHUNK", cross_entropy.TILE * 61)
    objective, fields = build_objective(objective_section(name="span_corruption", z_loss=z_loss)), t5_batch()
    model, found = model_section(**T5_SIZE, gated=not tied, tied_head=tied), []
    for asked in ("full", "chunked"):
        kernels = KernelSet({"cross_entropy": asked}, "cpu", torch.float32)
        program = build_program(model, ModelBuild(objective.outputs, kernels), objective)
        assert (program.outputs == objective.tensors) == (asked == "full")
        module = program.module(1)
        losses = TermLosses(program.terms, program.outputs, ParallelContext())
        loss, sums = losses(module.run(fields), fields, torch.tensor([1 / 250, z_loss / 250]))
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
        found.append((float(loss.detach()), {name: float(value) for name, value in sums.items()}, gradients))
    (full, its_sums, its_gradients), (chunked, sums, gradients) = found
    assert chunked == pytest.approx(full, rel=1e-6) and sums == pytest.approx(its_sums, rel=1e-6)
    total = sums["span_corruption/loss_sum"] + z_loss * sums.get("span_corruption_z/loss_sum", 0.0)
    assert chunked == pytest.approx(total / 250, rel=1e-6) and len(sums) == (6 if z_loss else 3)
    assert sums["span_corruption/correct"] > 0 and ("lm_head.weight" in gradients) == (not tied)
    for name, wanted in its_gradients.items():
        assert wanted.abs().max() > 0, name
        assert (gradients[name] - wanted).abs().max() <= 1e-5 * wanted.abs().max(), name
