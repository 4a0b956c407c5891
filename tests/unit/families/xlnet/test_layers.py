"""XLNet's memory and directions beside XLNetLMHeadModel, and attention beside its definition in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from ctxlm_ds.families.xlnet.config import XlnetSection
from ctxlm_ds.families.xlnet.export import EXPORT
from ctxlm_ds.families.xlnet.layers import _shifted
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import LayerSequence
from ctxlm_ds.models.program import build_program
from ctxlm_ds.models.spec import ModelBuild

ROWS, LENGTH, SLOTS, MEMORY, VOCAB = 4, 12, 3, 9, 40
OUTPUT = "permuted_logits"


def model_of(dtype: torch.dtype = torch.float32, **settings: Any) -> LayerSequence:
    """A model without dropout whose weights are all random."""
    section = XlnetSection(
        vocab_size=VOCAB, hidden_size=16, num_layers=3, num_attention_heads=2, intermediate_size=24,
        hidden_dropout=0.0, attention_dropout=0.0, **settings,
    )  # fmt: skip
    model = build_program(section, ModelBuild((OUTPUT,), KernelSet({}, "cpu", dtype))).module(0).to(dtype)
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


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 4), (2, 2), (5, 5), (4, 9)])
def test_shifted_products_are_those_of_the_distances(rows: int, keys: int) -> None:
    products = torch.randn(2, 3, rows, keys + rows - 1)
    got = _shifted(products, keys)
    for row in range(rows):
        begin = rows - 1 - row
        assert torch.equal(got[:, :, row], products[:, :, row, begin : begin + keys])


def test_scores_are_those_of_the_definition_in_float64() -> None:
    """One layer's attention beside equation 5 of Dai 2019 and section 2.6 of Yang 2019, term by term."""
    model = model_of(torch.float64).eval()
    layer = dict(model.named_modules())["layer.0"].attention
    (fields,) = batches(1)
    names = ("ranks", "token_type_ids", "sequence_ids", "directions", "target_positions")
    reads = tuple(fields[name] for name in names)
    distances, hidden_keys, others = dict(model.named_modules())["places"](*reads)
    tokens = torch.randn(ROWS, LENGTH + SLOTS + 1, 16, dtype=torch.float64)
    got = layer(tokens, None, distances, hidden_keys, others, fields["target_positions"])
    query, key, value = (
        (tokens @ weight.T).view(ROWS, -1, 2, 8) for weight in (layer.query.weight, *layer.key_value.weight.chunk(2))
    )
    far, segments = (distances @ layer.distance.weight.T).view(ROWS, -1, 2, 8), layer.segments.view(2, 2, 8)
    places = torch.cat([torch.arange(LENGTH).expand(ROWS, -1), fields["target_positions"]], dim=1)
    context = torch.zeros(ROWS, LENGTH + SLOTS + 1, 2, 8, dtype=torch.float64)
    for row in range(ROWS):
        for number, place in enumerate(places[row].tolist()):
            if place == LENGTH:
                continue
            for head in range(2):
                vector = query[row, number, head]
                scores = torch.full((LENGTH,), -torch.inf, dtype=torch.float64)
                for other in range(LENGTH):
                    if hidden_keys[row, number, other]:
                        continue
                    segment = segments[int(others[row, number, other]), head]
                    scores[other] = (vector + layer.content_bias[head]) @ key[row, other, head]
                    scores[other] += (vector + layer.distance_bias[head]) @ far[row, LENGTH - 1 - place + other, head]
                    scores[other] += (vector + layer.segment_bias[head]) @ segment
                if scores.isinf().all():
                    scores[:] = 0.0
                context[row, number, head] = torch.softmax(scores / 8**0.5, 0) @ value[row, :LENGTH, head]
    torch.testing.assert_close(got, context.flatten(2) @ layer.output.weight.T)
