"""Which tensors are alive where in a list of layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ctxlm_ds.models.layers import Flow, LayerDescription, Tensors
from ctxlm_ds.models.parts.distillation import tap
from ctxlm_ds.parallel.parameters import ONES, ParameterFacts, declare


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
