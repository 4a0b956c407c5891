"""What is measured of a model on `meta`, against the built model and against what the papers say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.kernels.dispatch import DTYPES, KernelSet
from ctxlm_ds.models.layers import ModelBuild
from ctxlm_ds.models.program import build_program
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.parallel.context import DropoutStreams, ParallelContext
from ctxlm_ds.parallel.mappings import own_share
from ctxlm_ds.recipe.load import load_config, shipped_recipes
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.registry import FAMILIES, load_object
from ctxlm_ds.training import measure as measure_module
from ctxlm_ds.training.measure import describe, measure, with_vocabulary

VOCAB, ROWS = 500, 4


def config_of(family: str = "bert", **changes: Any) -> RunConfig:
    """Change settings of the model, or whole sections."""
    sections: dict[str, Any] = FAMILIES.get(family).tiny()
    fields = FAMILIES.get(family).section.model_fields
    plain = {"attention_dropout": 0.0} if "attention_dropout" in fields else {}
    for name in ("data", "kernels", "training"):
        sections[name] = sections.get(name, {}) | changes.pop(name, {})
    sections["model"] = sections["model"] | {"vocab_size": VOCAB} | plain | changes
    sections["training"] = {"precision": "fp32", "global_batch_size": ROWS} | sections["training"]
    return RunConfig.model_validate(sections)


class RealRun:
    """A model with its loss on the CPU, and the storages that autograd saves of it."""

    def __init__(self, config: RunConfig, parallel: ParallelContext | None = None, rows: int = ROWS) -> None:
        self.objective = build_objective(config.objective)
        self.parallel = parallel or ParallelContext(dropout=DropoutStreams(enabled=True))
        dtype = DTYPES[config.training.precision]
        build = ModelBuild(
            self.objective.outputs,
            KernelSet(dict(config.kernels), "cpu", dtype),
            self.parallel,
            recompute=config.training.activation_checkpointing,
            shares_rows=config.data.shares_rows,
        )
        program = build_program(config.model, build, self.objective)
        self.terms, self.model = program.terms, program.module(0).to(dtype).train()
        fields = self.objective.fields(config.data)
        self.fields = {
            field.name: own_share(torch.zeros(rows, field.columns, dtype=torch.int64), field.shared, self.parallel)
            for field in fields
        }
        self.parameters = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        self.kept: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in self.parameters:
            self.kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def loss(self) -> Tensor:
        outputs = self.model.run(self.fields)
        everything = self.fields | outputs
        return torch.stack(
            [
                load_object(term.reduce)(
                    [outputs[name] for name in term.outputs], [everything[name] for name in term.labels],
                    self.parallel,
                ).loss
                for term in self.terms
            ]
        ).sum()  # fmt: skip

    def kept_bytes(self) -> int:
        with saved_tensors_hooks(self.pack, lambda tensor: tensor):
            loss = self.loss()
        assert loss.requires_grad
        return sum(tensor.untyped_storage().nbytes() for tensor in self.kept.values())


@pytest.mark.parametrize(("tensor", "split", "context"), [(1, False, 1), (2, False, 1), (2, True, 1), (2, True, 2)])
def test_everything_lies_on_a_line_of_rows(
    tensor: int, split: bool, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(num_attention_heads=4)
    expected = measure(config, tensor, split, context=context)
    monkeypatch.setattr(measure_module, "_measured", {})
    monkeypatch.setattr(measure_module, "MEASURED_ROWS", 24)
    direct = measure(config, tensor, split, context=context)
    rows = 24 * tensor * context
    for one, other in zip((*expected.recomputed, expected.loss), (*direct.recomputed, direct.loss), strict=True):
        assert one.at(rows)._replace(kept=0) == other.at(rows)._replace(kept=0)
        assert one.at(rows).kept == pytest.approx(other.at(rows).kept, rel=1e-3)


WIDE: dict[str, Any] = {
    "training": {"precision": "bf16"}, "hidden_size": 512, "intermediate_size": 2048, "attention_dropout": 0.1,
    "data": {"seq_length": 64},
}  # fmt: skip


def first_block(config: RunConfig) -> int:
    return next(index for index, layer in enumerate(describe(config).layers) if layer.block)


def test_tensor_and_sequence_parallelism_divide_what_they_split() -> None:
    """Korthikanti 2022, table 2, in 16 bits with f = 4h, dropout and fused attention: 34 T·h whole, of which the
    products' 24 are divided by tensor parallelism, all by sequence parallelism.
    """
    config = config_of(**WIDE)
    block = first_block(config)

    def units(tensor: int, split: bool = False) -> float:
        return measure(config, tensor, split).layers[block].at(4).kept / (4 * 64 * 512)

    assert units(1) == pytest.approx(34, rel=0.01)
    assert units(4) == pytest.approx(10 + 24 / 4, rel=0.01)
    assert units(4, split=True) == pytest.approx(34 / 4, rel=0.01)


@pytest.mark.parametrize(("name", "linear"), [("llama-1b", True), ("modernbert-base", True), ("unilm-base", False)])
def test_a_gpu_keeps_no_masks_of_packed_rows_and_windows(name: str, linear: bool) -> None:
    """Ranks need a mask; twice the positions then keep more than twice the bytes."""
    config = load_config(name, ["data.seq_length=512", "model.max_position_embeddings=1024"])
    longer = config.with_values("data", seq_length=1024)

    def kept(config: RunConfig) -> int:
        layers = zip(describe(config).layers, measure(config).layers, strict=True)
        return max(work.at(1).kept for layer, work in layers if layer.block)

    short, long = kept(config), kept(longer)
    assert (long <= 2.01 * short) is linear


def test_context_parallelism_divides_all_but_what_is_exchanged() -> None:
    """Of 34 T·h (above) a rank has half, and once more the context, which its kernel and its output matrix keep."""
    config = config_of(**WIDE)
    block = first_block(config)
    one, two = (measure(config, context=size).layers[block].at(4) for size in (1, 2))
    hidden = 4 * 64 * 512 * 2
    assert two.kept == pytest.approx(one.kept / 2 + hidden / 2, rel=0.01)
    assert one.flops == 2 * two.flops and one.scores == 2 * two.scores
    assert two.context_all_to_all == 2 * 4 * hidden // 2 and two.context_collectives == 4
    assert two.collectives == two.all_gather == 0 and one.context_collectives == 0


def test_slots_are_padded_to_a_multiple_of_the_ranks_that_share_them() -> None:
    """One sequence of a row for two ranks: they add up the vectors of two slots, as for two rows."""
    config = config_of(data={"seq_length": 64})

    def scattered(rows: int) -> int:
        measured = measure(config, context=2, rows=rows)
        return sum(layer.at(rows).context_reduce_scatter for layer in measured.layers)

    slots = {field.name: field.columns for field in build_objective(config.objective).fields(config.data)}
    predictions, sequences = slots["masked_lm_labels"], slots["next_sentence_labels"]
    assert sequences % 2 == 1
    for rows in (1, 2, 3):
        padded = sum(-(-rows * each // 2) * 2 for each in (predictions, sequences))
        assert scattered(rows) == padded * config.model.width * 4


@pytest.mark.parametrize(("operation", "family"), [("dropout", "bert"), ("rotary", "llama"), ("bias_gelu", "llama")])
def test_a_row_for_a_device_is_measured_without_the_device(operation: str, family: str) -> None:
    works = [measure(config_of(family, kernels={operation: row})).layers for row in ("triton", "auto")]
    named, automatic = ([work.at(ROWS) for work in layers] for layers in works)
    assert named == automatic


def test_what_a_block_sends() -> None:
    """Shoeybi 2019: two all-reduces forward and two backward, or as many gathers and scatters with a gather more."""
    config = config_of()
    block = first_block(config)
    hidden = ROWS * config.data.seq_length * 32 * 4
    whole, split = (measure(config, 2, parallel) for parallel in (False, True))
    assert whole.layers[block].at(ROWS).all_reduce == 4 * hidden
    assert whole.recomputed[block].at(ROWS).all_reduce == 6 * hidden
    assert whole.layers[block].at(ROWS).collectives == 4
    assert split.layers[block].at(ROWS).all_gather == 6 * hidden
    assert split.layers[block].at(ROWS).reduce_scatter == 4 * hidden


def test_a_vocabulary_left_open_is_the_published_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in shipped_recipes():
        assert (with_vocabulary(load_config(name).model).vocab_size or 0) > 1000
    model = load_config("bert-base").model
    unpublished = replace(FAMILIES.get("bert"), vocab_size=None)
    monkeypatch.setattr(FAMILIES, "get", lambda name: unpublished)
    with pytest.raises(ConfigError, match="vocab_size is not set"):
        with_vocabulary(model.model_copy(update={"vocab_size": None}))


@pytest.mark.parametrize("split", [False, True])
def test_ranks_that_do_not_divide_the_heads_are_refused(split: bool) -> None:
    """9 heads, 3 of keys and values."""
    with pytest.raises(ConfigError, match=r"parallel\.tensor_parallel_size: 2 .*num_key_value_heads 3"):
        measure(load_config("llama-125m"), 2, split)
