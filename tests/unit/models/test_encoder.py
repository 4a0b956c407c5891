"""What the encoder computes: positions, sequences that never see each other, heads on the chosen positions."""

from __future__ import annotations

import pytest
import torch

from ctxlm_ds.kernels.dispatch import choose_kernels
from ctxlm_ds.models.build import build_model
from ctxlm_ds.models.heads import select_positions
from ctxlm_ds.recipe.schema import KernelsConfig
from tests.encoder_batches import TERMS, random_batch, tiny_model

SEQ_LENGTH = 20


def test_select_positions_is_gather() -> None:
    hidden = torch.randn(3, 5, 4, requires_grad=True)
    positions = torch.tensor([[0, 4, 4], [2, 0, 1], [3, 3, 3]])
    expected = hidden.gather(1, positions[:, :, None].expand(-1, -1, 4))
    actual = select_positions(hidden, positions)
    assert torch.equal(actual, expected)
    upstream = torch.randn_like(actual)
    (gradient,) = torch.autograd.grad(actual, hidden, upstream)
    (expected_gradient,) = torch.autograd.grad(expected, hidden, upstream)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize(("packing", "lengths"), [(True, [[8, 5], [3, 9]]), (False, [[8], [3]])])
@pytest.mark.parametrize("attention", ["sdpa", "reference"])
def test_a_sequence_is_blind_to_its_neighbours_and_to_padding(
    packing: bool, lengths: list[list[int]], attention: str
) -> None:
    config = tiny_model()
    kernels = choose_kernels(KernelsConfig.model_validate({"attention": attention}), "cpu", torch.float32, packing)
    model = build_model(config, TERMS, kernels, seed=0).eval()
    batch = random_batch(lengths, config, SEQ_LENGTH)
    before = model(batch.model_inputs())
    first_slots = batch.prediction_positions[:, 0]
    assert (first_slots < torch.tensor([8, 3])).all()
    batch.input_ids = torch.where(batch.sequence_ids == 1, batch.input_ids, (batch.input_ids + 7) % 61)
    after = model(batch.model_inputs())
    torch.testing.assert_close(after[0][:, 0], before[0][:, 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(after[1][:, 0], before[1][:, 0], rtol=0, atol=1e-6)
    if packing:
        assert (after[1][:, 1] - before[1][:, 1]).abs().max() > 1e-3


def test_padding_gets_no_gradient() -> None:
    config = tiny_model()
    kernels = choose_kernels(KernelsConfig(), "cpu", torch.float32, packing=False)
    model = build_model(config, TERMS, kernels, seed=0)
    batch = random_batch([[8], [3]], config, SEQ_LENGTH)
    inputs = batch.model_inputs()
    words = model.word_embeddings(inputs)[0].detach().requires_grad_()
    model.word_embeddings.forward = lambda tensors, decode=False: (
        (words, *tensors[1:]) if not decode else (model.word_embeddings.decode(tensors[0]), *tensors[1:])
    )
    torch.stack([output.sum() for output in model(inputs)]).sum().backward()
    assert words.grad is not None
    padding = batch.sequence_ids == 0
    assert (words.grad[padding] == 0).all() and (words.grad[~padding].abs().sum(-1) > 0).all()


def test_positions_begin_at_zero_for_bert_and_at_two_for_roberta() -> None:
    for family, offset in (("bert", 0), ("roberta", 2)):
        config = tiny_model(family=family)
        kernels = choose_kernels(KernelsConfig(), "cpu", torch.float32, packing=True)
        model = build_model(config, ("masked_lm",), kernels, seed=0)
        batch = random_batch([[9, 6]], config, SEQ_LENGTH, ("masked_lm",))
        model(batch.model_inputs())[0].square().sum().backward()
        table = model.embeddings.position_embeddings.weight
        assert table.shape[0] == config.max_position_embeddings + offset
        used = table.grad.abs().sum(dim=1).nonzero().flatten().tolist()
        assert used == list(range(offset, offset + 9))
