"""Training through the DeepSpeed engine on several ranks against transformers' own models and torch's AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ctxlm_ds.recipe.schema import OptimizerConfig, RunConfig
from tests.dist.runner import run_ranks
from tests.dist.training import build_engine, global_batch, step_for_rank, tiny_config
from tests.parity.mapping import hf_inputs, hf_labels, hf_model, key_map_of, randomize

pytestmark = pytest.mark.dist
STEPS = 50
OUTPUTS = {"bert": ("predicted_logits", "sentence_logits"), "roberta": ("predicted_logits",)}
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, eps=1e-6, weight_decay=0.1, gradient_clipping=0.0)


def train_ours(
    rank: int, world_size: int, config: RunConfig, stage: int, weights: dict[str, torch.Tensor]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of 50 steps, and the first step's gradients of this rank's fragments by (name, start)."""
    engine = build_engine(config, {"zero_optimization": {"stage": stage}})
    engine.load_weights(weights.items())
    losses, gradients = [], {}
    for step in range(STEPS):
        batches = step_for_rank(step % 5, config.training.micro_batch_size, rank, world_size)
        losses.append(engine.train_step(batches, step, OPTIMIZER.learning_rate).loss)
        if step == 0:
            # After one update AdamW's first moment is (1 - beta1) times the gradient, wherever ZeRO keeps it.
            for fragment in engine.fragments():
                moment = fragment.moment(engine.optimizer_state(fragment.owner), "exp_avg")
                gradients[f"{fragment.name}@{fragment.start}"] = moment.clone() / (1 - OPTIMIZER.betas[0])
    return losses, gradients


def train_theirs(
    rank: int, world_size: int, model: nn.Module, config: RunConfig
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same steps with transformers' model on whole batches; first gradients by its own names."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    plain = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": OPTIMIZER.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=OPTIMIZER.learning_rate, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps,
    )  # fmt: skip
    losses, gradients = [], {}
    for step in range(STEPS):
        batch = global_batch(step % 5)
        if config.model.family == "roberta":
            del batch.fields["next_sentence_labels"]
        positions = {"position_ids": batch.fields["position_ids"] + 2} if config.model.family == "roberta" else {}
        loss = model(**hf_inputs(batch, config.model), **hf_labels(batch, config.model), **positions).loss
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_fifty_steps_and_the_first_gradients(family: str) -> None:
    config = tiny_config(family, optimizer=OPTIMIZER)
    torch.manual_seed(0)
    theirs = hf_model(config.model, OUTPUTS[family]).train()
    randomize(theirs)
    if family == "roberta":
        # Their one token type is part of the positions in ours; a parameter of its own would be stepped twice.
        theirs.roberta.embeddings.token_type_embeddings.weight.requires_grad_(False).zero_()
    key_map = key_map_of(config.model, OUTPUTS[family])
    values = {name: value.clone() for name, value in theirs.state_dict().items()}
    weights = {row.ours: row.to_ours(values.__getitem__) for row in key_map.rows}
    # In a process of its own: a parent that has computed with threads must not fork.
    wanted, their_gradients = run_ranks(train_theirs, 1, theirs, config, timeout_s=100)[0]
    assert wanted[-1] < 0.8 * wanted[0]

    for world_size, stage in ((1, 0), (2, 2), (2, 3)):
        results: list[Any] = run_ranks(train_ours, world_size, config, stage, weights, timeout_s=200)
        assert results[0][0] == pytest.approx(wanted, rel=1e-4)
        pieces = {key: value for _, gradients in results for key, value in gradients.items()}
        for row in key_map.rows:
            expected = torch.cat([their_gradients[name] for name in row.theirs if name in their_gradients])
            for key, piece in pieces.items():
                name, start = key.rsplit("@", 1)
                if name == row.ours:
                    wanted_piece = expected.flatten()[int(start) : int(start) + len(piece)]
                    torch.testing.assert_close(piece, wanted_piece, rtol=1e-5, atol=1e-5, msg=key)
