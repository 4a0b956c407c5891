"""Every family on fake CUDA tensors: chosen kernels, shapes and types of outputs, gradients of all parameters."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ctxlm_ds.apps.verify.fake_cuda import DEVICE, FakePass
from ctxlm_ds.apps.verify.parts import WRONG, Finding
from ctxlm_ds.kernels.dispatch import DTYPES, OPERATIONS
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.registry import FAMILIES
from tests.unit.apps.verify import fake_passes
from tests.unit.apps.verify.fake_passes import CAPABILITIES, OF_EVERY_ROW, ROWS, Case, Outcome

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[4]
FLASH = {"aten._flash_attention_forward.default", "torch_attn._varlen_attn.default"}
FLASH_BACKWARD = {"aten._flash_attention_backward.default", "torch_attn._varlen_attn_backward.default"}
OWN_ATTENTION = ("xlnet", "elmo")
"""Families without an operation of the table between queries and keys."""
WITH_BIAS_OR_RANKS = ("t5", "unilm")
CAUSAL = ("gpt1", "gpt2", "llama")
WITH_SCORES_OR_DECODER = ("tinybert", "bart", "mbart")
"""Families of which some layers read bounds; TinyBERT's student and teacher return scores of some layers."""


class Passes(NamedTuple):
    """The parts of fake_passes.main."""

    families: dict[Case, Outcome]
    rows: list[tuple[str, dict[str, str], FakePass]]
    refusals: list[str]
    of_a_later_device: Finding
    operators: tuple[list[str], list[str]]

    def done(self, case: Case) -> FakePass:
        """The pass of a case, or of an earlier device with the same kernels in the same type."""
        wanted = self.families[case]
        return next(
            outcome.done for other, outcome in self.families.items()
            if (other.family, other.shares_rows) == case[:2] and outcome.done is not None
            and (outcome.kernels, CAPABILITIES[other.capability]) == (wanted.kernels, CAPABILITIES[case.capability])
        )  # fmt: skip


@pytest.fixture(scope="module", params=["few", pytest.param("complete", marks=pytest.mark.soak)])
def passes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Passes:
    path = tmp_path_factory.mktemp("fake") / "passes"
    code = f"from {fake_passes.__name__} import main; main({str(path)!r}, {request.param!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Passes(*pickle.loads(path.read_bytes()))


def test_every_parameter_gets_a_gradient_on_the_device(passes: Passes) -> None:
    assert {case.family for case in passes.families} == set(FAMILIES.shipped_names())
    for case in passes.families:
        done, dtype = passes.done(case), DTYPES[CAPABILITIES[case.capability]]
        assert len(done.parameters) > 7 and set(done.parameters.values()) == {(dtype, DEVICE)}, case
        assert done.gradients == done.parameters, case


def attention_of(case: Case) -> set[str]:
    """Bounds of sequences from Ampere on, but where a causal row holds one; a mask elsewhere."""
    if case.family in OWN_ATTENTION:
        return {""}
    if case.family == "t5" and case.capability == (9, 0):
        return {"sdpa", "triton"}
    by_bounds = "sdpa" if case.capability < (8, 0) or case.family in WITH_BIAS_OR_RANKS else "varlen"
    if case.family in CAUSAL and not case.shares_rows:
        return {"sdpa"}
    return {by_bounds, "sdpa"} if case.family in WITH_SCORES_OR_DECODER else {by_bounds}


def test_attention_is_that_of_the_device(passes: Passes) -> None:
    for case in passes.families:
        done, expected = passes.done(case), attention_of(case)
        assert set(done.kernels.get("attention", "").split(" and ")) == expected, case
        assert bool(FLASH & done.forward.keys()) == ("varlen" in expected), case
        # Only TinyBERT's teacher, which has no backward pass, has layers by bounds.
        assert bool(FLASH_BACKWARD & done.backward.keys()) == ("varlen" in expected and case.family != "tinybert"), case


def shapes_of(name: str, config: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """What docs/parts.md says of an output: shape and type."""
    columns = {f.name: f.columns for f in build_objective(config.objective).fields(config.data)}
    words = -(-(config.model.vocab_size or FAMILIES.get(config.model.family).vocab_size) // 128) * 128
    sequences, dtype = config.data.sequences_per_row, DTYPES[config.training.precision]
    slots, length, width = columns.get("prediction_positions", 0), config.data.seq_length, config.model.width
    known: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "sentence_logits": ((ROWS, sequences, 2), dtype),
        "generator_logits": ((ROWS, slots, words), dtype),
        "replaced_logits": ((ROWS, length), dtype),
        "replaced_labels": ((ROWS, length), torch.int64),
        "predicted_logits": ((ROWS, slots, words), dtype),
        "hidden_states.-1": ((ROWS, length, width), dtype),
    }
    # A sum of losses or squares, a number of right predictions; TinyBERT's errors are those of rows.
    scalar: tuple[tuple[int, ...], torch.dtype] = (ROWS,) if name.endswith("_error") else (), torch.float32
    return known.get(name.removeprefix("teacher."), scalar)


def test_outputs_have_shapes_and_types_of_the_run(passes: Passes) -> None:
    for case, outcome in passes.families.items():
        done = passes.done(case)
        assert done.outputs, case
        for name, (shape, place) in done.outputs.items():
            expected, dtype = shapes_of(name, outcome.config)
            assert (shape, place) == (expected, (dtype, DEVICE)), (case, name)


def test_a_kernel_that_the_gpu_cannot_run_is_wrong(passes: Passes) -> None:
    found = passes.of_a_later_device
    assert (found.part, found.state) == ("model", WRONG) and "compute capability 8.0" in found.text


def test_every_row_that_a_recipe_can_name_runs(passes: Passes) -> None:
    """Also those that `auto` does not take: all give the outputs and gradients of the first."""
    assert {family for family, _, _ in passes.rows} == set(OF_EVERY_ROW)
    asked = {(operation, name) for _, names, _ in passes.rows for operation, name in names.items()}
    own = {(operation, row.name) for operation, table in OPERATIONS.items() for row in table if row.name == "triton"}
    assert {operation for operation, _ in asked} >= OPERATIONS.keys() - {"sampling"}
    assert asked >= own | {("attention", "varlen"), ("attention", "reference")} and len(own) > 1
    for family, names, done in passes.rows:
        first = next(other for name, _, other in passes.rows if name == family)
        assert done.kernels == {operation: names[operation] for operation in done.kernels}
        assert done.parameters == done.gradients == first.gradients
        assert all(done.outputs[name] == first.outputs[name] for name in done.outputs.keys() & first.outputs.keys())
        ran = {name.split(".")[1] for name in done.forward if name.startswith("ctxlm.")}
        # BERT's dropout is part of add_norm; the other families drop nothing.
        drops = family == "bert" and names["dropout"] == "triton" and names["add_norm"] != "triton"
        for operation, operator, runs in (
            ("add_norm", "add_norm", True), ("cross_entropy", "cross_entropy_gradient_", True),
            ("dropout", "keyed_dropout", drops), ("rotary", "rotate_", True),
            ("bias_gelu", "gated_activation", family != "bert"),
        ):  # fmt: skip
            assert (operator in ran) == (runs and names.get(operation) == "triton"), (family, names)


def test_an_operator_without_a_fake_form_is_named(passes: Passes) -> None:
    without, of_values = passes.refusals
    assert without.startswith("toy.product.default has no fake form; register one")
    assert of_values.startswith("the shape of aten.index.Tensor's result depends on values")


def test_every_operator_of_this_package_has_a_fake_form(passes: Passes) -> None:
    known, without = passes.operators
    assert {"ctxlm_ds::attention", "ctxlm::keyed_dropout"} <= set(known)
    assert without == []
