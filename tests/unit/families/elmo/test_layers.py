"""The list of layers: words or characters as inputs, two directions that do not meet, cells carried between windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ctxlm_ds.families.elmo.config import ELMO, ElmoSection
from ctxlm_ds.families.elmo.layers import HIDDEN, LOSSES, elmo_layers
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import LayerSequence, ModelBuild
from ctxlm_ds.parallel.context import DropoutStreams, ParallelContext
from ctxlm_ds.parallel.parameters import initialize_parameters

ROWS, LENGTH, VOCABULARY = 2, 6, 40
FIELDS = {"characters": ("character_ids", "reversed_character_ids"), "words": ("input_ids", "reversed_input_ids")}
every_input = pytest.mark.parametrize("inputs", FIELDS)


def model_of(**changes: Any) -> LayerSequence:
    own = {"vocab_size": VOCABULARY, "dropout": 0.0, "num_sampled": None}
    section = ElmoSection.model_validate(ELMO.tiny()["model"] | own | changes)
    parallel = ParallelContext(dropout=DropoutStreams(seed=1, enabled=section.drops))
    build = ModelBuild(LOSSES, KernelSet({}, "cpu", torch.float32), parallel)
    module = LayerSequence(elmo_layers(section, build), (*LOSSES, *HIDDEN), parallel.dropout)
    initialize_parameters(module, seed=1)
    return module


def fields_of(inputs: str, seed: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    shape = (ROWS, LENGTH) if inputs == "words" else (ROWS, LENGTH, 50)
    names = {name: torch.randint(1, VOCABULARY, shape) for name in FIELDS[inputs]}
    return names | {name: torch.randint(VOCABULARY, (ROWS, LENGTH)) for name in ("labels", "reversed_labels")}


def test_initial_values_are_the_originals() -> None:
    """bilm-tf, training.py: _build_word_char_embeddings with filters of relu."""
    module = model_of(inputs="characters", filters=[[1, 64], [3, 64]], num_highways=2)
    width = 128
    bounds = {"table.weight": 1.0, "filters.0.weight": 0.05, "filters.1.weight": 0.05}
    constants = {"filters.0.bias": 0.0, "filters.1.bias": 0.0, "projection.bias": 0.0}
    normal = ["projection.weight"]
    for number in range(2):
        normal += [f"highways.{number}.{part}.weight" for part in ("carry", "transform")]
        constants |= {f"highways.{number}.carry.bias": -2.0, f"highways.{number}.transform.bias": 0.0}
    found = {name: x.detach() for name, x in module.named_parameters()}

    def value(name: str) -> Tensor:
        (one,) = (x for whole, x in found.items() if whole.endswith(f".{name}"))
        return one

    for name, bound in bounds.items():
        assert 0.97 * bound < value(name).abs().max() <= bound, name
        assert float(value(name).std()) == pytest.approx(bound / 3**0.5, rel=0.1), name
    for name, constant in constants.items():
        assert (value(name) == constant).all(), name
    for name in normal:
        assert float(value(name).std()) == pytest.approx(width**-0.5, rel=0.05), name


@every_input
def test_directions_do_not_meet(inputs: str) -> None:
    module, fields, other = model_of(inputs=inputs), fields_of(inputs), fields_of(inputs, 2)
    assert module.inputs == tuple(sorted(fields))
    ours, reversed_input = module.run(fields), FIELDS[inputs][1]
    changed = module.run(fields | {reversed_input: other[reversed_input], "reversed_labels": other["reversed_labels"]})
    assert torch.equal(ours["forward_loss"], changed["forward_loss"])
    assert not torch.equal(ours["backward_loss"], changed["backward_loss"])


@every_input
def test_windows_continue_each_other(inputs: str) -> None:
    """Two windows one after the other are one of twice the length; an interrupted step leaves the cells unchanged."""
    module, fields = model_of(inputs=inputs), fields_of(inputs)
    complete, half = module.eval().run(fields), LENGTH // 2
    module.train().carried.begin(0)
    parts = [{name: value[:, first : first + half] for name, value in fields.items()} for first in (0, half)]
    first = module.run(parts[0])
    module.carried.end_step(keep=True)
    module.run(parts[0])
    module.carried.end_step(keep=False)
    second = module.run(parts[1])
    for name in HIDDEN:
        torch.testing.assert_close(torch.cat([first[name], second[name]], dim=1), complete[name])
    for name in LOSSES:
        torch.testing.assert_close(first[name] + second[name], complete[name])


def test_rows_whose_states_are_dropped_begin_with_zeros() -> None:
    """In training only: both directions and all layers of a row, other rows in each step."""
    rows, module = 16, model_of(inputs="words", state_dropout=0.5)
    parts = [fields_of("words", seed) for seed in range(rows // ROWS)]
    fields = {name: torch.cat([part[name] for part in parts]) for name in module.inputs}
    assert module.streams.enabled
    module.carried.begin(0)
    module.streams.begin(0, 0, torch.device("cpu"))
    from_zeros = module.run(fields)
    module.carried.end_step(keep=True)
    dropped = []
    for step in (1, 2):
        module.streams.begin(step, 0, torch.device("cpu"))
        found = module.run(fields)
        same = [(found[name] == from_zeros[name]).flatten(1).all(dim=1) for name in HIDDEN]
        assert torch.equal(*same) and 0 < same[0].sum() < rows
        dropped.append(same[0])
    assert not torch.equal(*dropped)
    module.eval().carried.begin_evaluation()
    for _ in range(2):
        evaluated = module.run(fields)
    assert not (evaluated["hidden"] == from_zeros["hidden"]).flatten(1).all(dim=1).any()
