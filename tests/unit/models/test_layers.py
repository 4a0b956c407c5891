"""Which tensors are alive where in a list of layers, and what running one layer does to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ctxlm_ds.models.carried import CarriedStates
from ctxlm_ds.models.layers import Flow, LayerDescription, LayerSequence, Tensors, run_layer
from ctxlm_ds.models.parts.distillation import tap, teacher_layers
from ctxlm_ds.parallel.parameters import ONES, ParameterFacts, collect_facts, declare
from ctxlm_ds.parallel.random import DropoutStreams
from ctxlm_ds.training.pipeline import _pack, _unpack


class Sum(nn.Module):
    """Adds up what it reads, times a weight; as many outputs as are asked for."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.count = count
        self.weight = nn.Parameter(torch.ones(()))
        declare(self, weight=ParameterFacts(ONES, decays=False))

    def forward(self, *inputs: Tensor | None) -> Tensor | Tensors:
        total = self.weight * sum(x for x in inputs if x is not None)
        return tuple(total + index for index in range(self.count)) if self.count > 1 else total


def layer(name: str, reads: str, writes: str, **more: Any) -> LayerDescription:
    outputs = tuple(writes.split())
    return LayerDescription(name, Sum, tuple(reads.split()), outputs, {"count": len(outputs)}, **more)


def test_a_tensor_lives_from_its_writer_to_its_last_reader() -> None:
    layers = [layer("0", "ids", "a b"), layer("1", "a mask", "c"), layer("2", "c b", "d"), layer("3", "d", "e")]
    flow = Flow(layers, ["e"])
    assert flow.inputs == ("ids", "mask")
    assert [flow.before(index).names for index in range(5)] == [
        ("ids", "mask"), ("a", "b", "mask"), ("b", "c"), ("d",), ("e",),
    ]  # fmt: skip


def test_the_order_does_not_depend_on_that_of_reading() -> None:
    layers = [layer("0", "x", "b a"), layer("1", "a b z y", "c")]
    turned = [layer("0", "x", "b a"), layer("1", "z b y a", "c")]
    assert Flow(layers, ["c"]).before(1) == Flow(turned, ["c"]).before(1)
    assert Flow(layers, ["c"]).before(1).names == ("a", "b", "y", "z")


def test_a_tensor_that_is_written_anew_is_another_one() -> None:
    flow = Flow([layer("0", "ids", "hidden"), layer("1", "hidden", "hidden"), layer("2", "ids", "hidden")], ["hidden"])
    assert [flow.before(index).names for index in (1, 2, 3)] == [("hidden", "ids"), ("ids",), ("hidden",)]


def test_an_output_written_early_stays_alive() -> None:
    flow = Flow([layer("0", "ids", "a"), tap("a", "kept"), layer("1", "a", "a")], ["a", "kept"])
    assert flow.before(2).names == ("a", "kept")
    assert flow.outputs == ("a", "kept")


def test_an_output_that_no_layer_writes() -> None:
    with pytest.raises(ValueError, match="no layer writes sentence, word; the layers write a, b"):
        Flow([layer("0", "ids", "a b")], ["sentence", "a", "word"])
    with pytest.raises(ValueError, match="no layer writes state"):
        Flow([layer("0", "ids state", "a state", carries=frozenset({"state"}))], ["state"])


def test_what_is_carried_crosses_no_cut() -> None:
    flow = Flow([layer("0", "ids state", "a state", carries=frozenset({"state"})), layer("1", "a", "b")], ["b"])
    assert flow.inputs == ("ids",)
    assert flow.before(1).names == ("a",)


def test_gradient_floats_come_first_and_fields_have_none() -> None:
    layers = [
        layer("0", "ids weights", "z a m", no_gradient=frozenset({"m"})),
        layer("1", "z a m weights", "m b"),
        layer("2", "m b a weights", "c"),
    ]
    flow = Flow(layers, ["c"])
    assert flow.before(1).with_gradient == ("a", "z")
    assert flow.before(1).without_gradient == ("m", "weights")
    # Written anew, by a layer that does not say so again.
    assert flow.before(2).with_gradient == ("a", "b", "m")


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


def test_carried_tensors_are_those_of_the_last_kept_step() -> None:
    description = layer("0", "x state", "y state", carries=frozenset({"state"}))
    module, carried = description.build(), CarriedStates(["state"])

    def step(number: int, keep: bool = True) -> float:
        carried.begin(number)
        tensors = {"x": torch.ones(())}
        run_layer(description, module, tensors, 0, DropoutStreams(), carried)
        carried.end_step(keep)
        return tensors["y"].item()

    # y = x + state, state = y + 1
    assert [step(0), step(0), step(1), step(0, keep=False), step(0)] == [1, 3, 1, 5, 5]
    named = carried.named()
    assert {name: float(value) for name, value in named.items()} == {"state.0": 6, "state.1": 2}
    assert not any(value.requires_grad for value in named.values())
    module.eval()
    assert step(0) == 1
    assert carried.named().keys() == named.keys() and float(carried.named()["state.0"]) == 6
    module.train()
    carried.load({"state.3": torch.ones(())})
    assert [step(0), step(3)] == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_crosses_a_cut_arrives_bit_for_bit(dtype: torch.dtype) -> None:
    names = ("exact", "half", "flag", "long", "short")
    flow = Flow([layer("0", "ids", "a " + " ".join(names), no_gradient=frozenset(names)),
                 layer("1", "a " + " ".join(names), "b")], ["b"])  # fmt: skip
    tensors = {
        "a": torch.randn(2, 3).t(), "exact": torch.randn(3, 2).t(), "half": torch.randn(4).to(dtype),
        "flag": torch.tensor([True, False]), "long": torch.tensor([1 << 40]),
        "short": torch.tensor([-7], dtype=torch.int16),
    }  # fmt: skip
    tensors["exact"][0, 0] = float("nan")
    packed = _pack(tensors, flow.before(1))
    assert all(x.is_contiguous() for x in packed)
    assert [x.is_floating_point() for x in packed] == [True] + [False] * 5
    arrived = _unpack(packed, flow.before(1), dtype)
    for name, tensor in tensors.items():
        assert torch.equal(arrived[name].nan_to_num(), tensor.nan_to_num()), name
        assert arrived[name].dtype == (torch.int64 if name in ("long", "short") else tensor.dtype)
