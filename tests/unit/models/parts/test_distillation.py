"""Layers of a teacher: they read the same fields, and no gradient flows through them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.models.layers import Flow, LayerDescription, LayerSequence, dropout_numbers
from ctxlm_ds.models.parts.distillation import needed_layers, tap, teacher_layers, together, with_taps
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


def blocks(count: int) -> list[LayerDescription]:
    """Embeddings, repeated layers, a norm and a head."""
    repeated = [replace(layer(str(number), "hidden", "hidden"), block=True) for number in range(count)]
    return [layer("words", "ids", "hidden"), *repeated, layer("norm", "hidden", "hidden"), layer("head", "hidden", "a")]


def test_taps_are_the_states_between_repeated_layers() -> None:
    names = ("hidden_states.0", "hidden_states.2", "hidden_states.-1", "attention_scores.-2")
    listed = with_taps(blocks(3), names)
    assert [description.name for description in listed] == [
        "words", "tap_hidden_states.0", "0", "1", "tap_hidden_states.2", "2", "norm", "tap_hidden_states.-1", "head",
    ]  # fmt: skip
    assert [d.name for d in listed if d.call_kwargs == {"with_scores": True}] == ["1"]
    assert with_taps(blocks(3), ()) == blocks(3)


@pytest.mark.parametrize("name", ["hidden_states.4", "hidden_states.-5", "attention_scores.3"])
def test_a_tap_beyond_the_layers_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the objective needs {name} of a model that has 0 to"):
        with_taps(blocks(3), [name])


def test_layers_that_nothing_needs_are_left_out() -> None:
    tapped = with_taps(blocks(3), ["hidden_states.2"])
    assert [d.name for d in needed_layers(tapped, ["hidden_states.2"])] == ["words", "0", "1", "tap_hidden_states.2"]
    assert needed_layers(blocks(3), ["a"]) == blocks(3)


@pytest.mark.parametrize(("student", "teacher"), [(2, 5), (4, 3), (1, 4)])
def test_a_teacher_is_spread_over_the_students_blocks_or_comes_last(student: int, teacher: int) -> None:
    ours, theirs = blocks(student), teacher_layers(blocks(teacher))
    for last in (False, True):
        joined = together(ours, theirs, last)
        assert [d for d in joined if not d.frozen] == ours
        assert [d.name for d in joined if d.frozen] == [d.name for d in theirs]
        assert sum(d.block for d in joined) == student and joined[-1].name == ("teacher.head" if last else "head")
    starts = [index for index, d in enumerate(together(ours, theirs, False)) if d.block]
    shares = [sum(d.frozen for d in together(ours, theirs, False)[start:stop])
              for start, stop in zip(starts, [*starts[1:], None], strict=True)]  # fmt: skip
    assert sum(shares) == len(theirs) and max(shares) - min(shares) <= 1


def test_dropout_does_not_count_a_teachers_layers() -> None:
    ours, theirs = blocks(2), teacher_layers(blocks(3))
    numbers = dict(zip([d.name for d in ours], dropout_numbers(ours), strict=True))
    for last in (False, True):
        joined = together(ours, theirs, last)
        found = zip(joined, dropout_numbers(joined), strict=True)
        assert {d.name: number for d, number in found if not d.frozen} == numbers
