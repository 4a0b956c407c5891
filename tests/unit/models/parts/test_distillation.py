"""Layers of a teacher: they read the same fields, and no gradient flows through them."""

from __future__ import annotations

import torch

from ctxlm_ds.models.layers import Flow, LayerSequence
from ctxlm_ds.models.parts.distillation import tap, teacher_layers
from ctxlm_ds.parallel.parameters import collect_facts
from tests.unit.models.test_layers import layer


def test_a_teacher_reads_the_same_fields_and_sends_no_gradient() -> None:
    words = layer("words", "ids", "hidden", tie_key="t")
    student = [words, layer("0", "hidden ids", "hidden"), tap("hidden", "tapped")]
    layers = [*teacher_layers(student), *student]
    flow = Flow(layers, ["tapped", "teacher.tapped"])
    assert flow.inputs == ("ids",)
    assert flow.before(4) == Flow(layers, ["teacher.tapped", "tapped"]).before(4)
    assert flow.before(4).with_gradient == ("hidden",)
    assert flow.before(4).without_gradient == ("ids", "teacher.tapped")
    model = LayerSequence(layers, flow.outputs).train()
    assert {name: facts.trained for name, facts in collect_facts(model).items()} == {
        "teacher.words.weight": False, "teacher.0.weight": False, "words.weight": True, "0.weight": True,
    }  # fmt: skip
    tapped, taught = model((torch.ones(2),))
    assert tapped.requires_grad and not taught.requires_grad
    assert model.training and not model.teacher.words.training


def test_no_gradient_flows_through_what_is_written_without_one_in_one_process_either() -> None:
    layers = [layer("0", "ids", "a b", no_gradient=frozenset({"b"})), layer("1", "a b", "c")]
    model = LayerSequence(layers, ["c"])
    model((torch.ones(()),))[0].backward()
    assert model.get_submodule("0").weight.grad == 1
