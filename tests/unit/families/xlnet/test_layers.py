"""XLNet's memory and directions beside XLNetLMHeadModel, and what a prediction sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from ctxlm_ds.families.xlnet.config import XlnetSection
from ctxlm_ds.families.xlnet.export import EXPORT
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import LayerSequence, ModelBuild
from ctxlm_ds.models.program import build_program

ROWS, LENGTH, SLOTS, MEMORY, VOCAB = 4, 12, 3, 9, 40
OUTPUT = "permuted_logits"


def model_of(**settings: Any) -> LayerSequence:
    """A model without dropout whose weights are all random."""
    section = XlnetSection(
        vocab_size=VOCAB, hidden_size=16, num_layers=3, num_attention_heads=2, intermediate_size=24,
        hidden_dropout=0.0, attention_dropout=0.0, **settings,
    )  # fmt: skip
    model = build_program(section, ModelBuild((OUTPUT,), KernelSet({}, "cpu", torch.float32))).module(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model


def theirs_of(ours: LayerSequence, section: XlnetSection, **settings: Any) -> transformers.XLNetLMHeadModel:
    weights = dict(ours.named_parameters())
    config = transformers.XLNetConfig(
        vocab_size=VOCAB, d_model=16, n_layer=3, n_head=2, d_inner=24, dropout=0.0, ff_activation="gelu_new",
        pad_token_id=0, **settings,
    )  # fmt: skip
    theirs = transformers.XLNetLMHeadModel(config)
    rows = EXPORT.key_map(section, (OUTPUT,), 0).rows
    named = dict(theirs.named_parameters())
    with torch.no_grad():
        for row in rows:
            for name, value in zip(row.theirs, row.to_theirs(weights[row.ours]), strict=True):
                named[name].copy_(value)
    return theirs


def batches(count: int, directions: Tensor | None = None) -> Iterator[dict[str, Tensor]]:
    """Batches with a random order over two halves; the last slot of a row is empty."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        ids = torch.randint(1, VOCAB, (ROWS, LENGTH), generator=generator)
        order = torch.stack([torch.randperm(LENGTH, generator=generator) for _ in range(ROWS)])
        is_target = order < 5
        half = (torch.arange(LENGTH) >= LENGTH // 2).long() * (LENGTH + 1)
        slots = torch.stack([row.nonzero().flatten()[:SLOTS] for row in is_target])
        is_target = torch.zeros_like(is_target).scatter(1, slots, value=True)
        yield {
            "input_ids": ids, "sequence_ids": torch.ones_like(ids),
            "token_type_ids": (torch.arange(LENGTH) // 5).expand(ROWS, -1),
            "ranks": torch.where(is_target, order + 1, 0) + half,
            "target_positions": torch.cat([slots, torch.full((ROWS, 1), LENGTH)], dim=1),
            "directions": torch.zeros(ROWS, 1, dtype=torch.int64) if directions is None else directions,
        }  # fmt: skip


@pytest.mark.parametrize("both", [False, True], ids=["forward", "both directions"])
def test_states_of_earlier_rows_are_those_of_transformers(both: bool) -> None:
    """Three steps in training: logits and gradients with the memory of two; both directions as bi_data."""
    ours = model_of(mem_len=MEMORY)
    section = XlnetSection(
        vocab_size=VOCAB, hidden_size=16, num_layers=3, num_attention_heads=2, intermediate_size=24, mem_len=MEMORY
    )
    theirs = theirs_of(ours, section, mem_len=MEMORY, reuse_len=LENGTH // 2, use_mems_train=True, bi_data=both)
    mems = [torch.zeros(MEMORY, ROWS, 16) for _ in range(3)]
    backward = (torch.arange(ROWS)[:, None] >= ROWS // 2).long() * both
    ours.train(), theirs.train()
    for fields in batches(3, backward):
        ours.carried.begin(0)
        got = ours.run(fields)[OUTPUT]
        ours.carried.end_step(keep=True)
        result = theirs(**EXPORT.their_inputs(fields), mems=mems)
        mems = result.mems
        torch.testing.assert_close(got, result.logits, rtol=1e-4, atol=1e-5)
    got[:, :SLOTS].square().sum().backward()
    result.logits[:, :SLOTS].square().sum().backward()
    gradients, wanted = dict(ours.named_parameters()), dict(theirs.named_parameters())
    for row in EXPORT.key_map(section, (OUTPUT,), 0).rows:
        gradient = row.to_ours(lambda name: wanted[name].grad)
        scale = gradient.abs().max()
        assert (gradients[row.ours].grad - gradient).abs().max() < 1e-4 * scale, row.ours


@pytest.mark.parametrize("training", [True, False])
def test_the_memory_is_no_view_of_a_larger_tensor(training: bool) -> None:
    model = model_of(mem_len=MEMORY).train(training)
    if not training:
        model.carried.begin_evaluation()
    for fields in batches(3):
        model.carried.begin(0)
        model.run(fields)
        for name in model.carried.names:
            memory = (model.carried._written if training else model.carried._evaluated)[name, 0]  # type: ignore[index]
            assert memory.untyped_storage().nbytes() == memory.nbytes
        model.carried.end_step(keep=True)
    assert memory.shape[1] == MEMORY


def test_in_evaluation_a_first_row_sees_itself_only() -> None:
    with_memory, without = model_of(mem_len=MEMORY).eval(), model_of().eval()
    (fields,) = batches(1)
    assert torch.equal(with_memory.run(fields)[OUTPUT], without.run(fields)[OUTPUT])


def test_a_slot_without_a_prediction_changes_nothing() -> None:
    model = model_of()
    (fields,) = batches(1)
    fewer = fields | {"target_positions": fields["target_positions"][:, :SLOTS]}
    torch.testing.assert_close(model.run(fields)[OUTPUT][:, :SLOTS], model.run(fewer)[OUTPUT])


def test_predictions_see_only_what_is_before_them() -> None:
    """A change of a token reaches the predictions of higher ranks, and no other."""
    model = model_of()
    (fields,) = batches(1)
    before = model.run(fields)[OUTPUT]
    ranks, slots = fields["ranks"], fields["target_positions"][:, :SLOTS]
    for place in range(LENGTH):
        ids = fields["input_ids"].clone()
        ids[:, place] = ids[:, place] % (VOCAB - 1) + 1
        changed = (model.run(fields | {"input_ids": ids})[OUTPUT] - before).abs().amax(-1)[:, :SLOTS] > 1e-7
        assert torch.equal(changed, ranks.gather(1, slots) > ranks[:, place, None]), place
