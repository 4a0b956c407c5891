"""Our decoders against transformers' GPT2LMHeadModel and OpenAIGPTLMHeadModel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.sample import Batch, Example
from ctxlm_ds.export.key_maps import KeyMap
from ctxlm_ds.models.layers import LayerSequence
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.cross_entropy import vocabulary_sums
from ctxlm_ds.recipe.schema import KernelsConfig
from ctxlm_ds.recipe.sections import ModelSection
from tests.encoder_batches import PAD_ID, tiny_model
from tests.parity.mapping import copy_weights, hf_model, key_map_of, our_model, randomize
from tests.ragged import Rows, collate, text_examples
from tests.sections import objective_section

SEQ_LENGTH = 20
LENGTHS = [[20], [13], [4], [9]]
OUTPUTS = ("logits",)
GPT2 = {"family": "gpt2", "layer_norm_eps": 1e-5, "intermediate_size": 128}
GPT1 = {"family": "gpt1", "layer_norm_eps": 1e-5, "intermediate_size": 128}
MODELS = {
    "gpt2": tiny_model(hidden_activation="gelu_tanh", **GPT2),
    "gpt2 erf": tiny_model(hidden_activation="gelu", **GPT2),
    "gpt2 relu, narrow": tiny_model(hidden_activation="relu", **GPT2 | {"intermediate_size": 48}),
    "gpt1": tiny_model(hidden_activation="gelu_tanh", **GPT1),
    "gpt1 relu": tiny_model(hidden_activation="relu", **GPT1),
}


def pair(config: ModelSection) -> tuple[LayerSequence, nn.Module, KeyMap]:
    """Our model and theirs with the same weights, in evaluation mode."""
    theirs = hf_model(config, OUTPUTS).eval()
    randomize(theirs)
    ours = our_model(config, OUTPUTS).eval()
    key_map = key_map_of(config, OUTPUTS)
    copy_weights(theirs, ours, key_map)
    return ours, theirs, key_map


def examples(lengths: list[list[int]], seed: int = 0) -> list[list[Example]]:
    """Rows of random texts with so many inputs each."""
    rng = np.random.default_rng(seed)
    return [text_examples([rng.integers(2, 61, length + 1) for length in row]) for row in lengths]


def batch_of(rows: list[list[Example]], seq_length: int = SEQ_LENGTH) -> Batch:
    objective = build_objective(objective_section(name="causal_lm"))
    objective.pad_id = PAD_ID
    return collate(rows, objective, Rows(seq_length, max(map(len, rows))))


def their_output(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits [b, s, v], and the loss with the labels shifted back to where transformers expects them."""
    labels = batch.fields["input_ids"].masked_fill(batch.fields["sequence_ids"] == 0, IGNORE_LABEL)
    last = (batch.fields["sequence_ids"] > 0).sum(dim=1, keepdim=True)
    padded = torch.cat([labels, torch.full_like(last, IGNORE_LABEL)], dim=1)
    padded.scatter_(1, last, batch.fields["causal_lm_labels"].gather(1, last - 1))
    inputs = torch.cat([batch.fields["input_ids"], torch.full_like(last, PAD_ID)], dim=1)
    mask = torch.cat([batch.fields["sequence_ids"] > 0, torch.zeros_like(last, dtype=torch.bool)], dim=1)
    output = model(input_ids=inputs, attention_mask=mask.long(), labels=padded)
    return output.logits[:, :-1], output.loss


def our_loss(logits: Tensor, batch: Batch) -> Tensor:
    labels = batch.fields["causal_lm_labels"]
    sums = vocabulary_sums([logits], [labels], ParallelContext())
    return sums.loss / sums.count


@pytest.mark.parametrize("name", ["gpt2 erf", "gpt2 relu, narrow", "gpt1 relu"])
def test_logits_loss_and_all_gradients(name: str) -> None:
    config = MODELS[name]
    ours, theirs, key_map = pair(config)
    batch = batch_of(examples(LENGTHS))
    (logits,) = ours.run(batch.fields).values()
    their_logits, their_loss = their_output(theirs, batch)
    real = batch.fields["sequence_ids"] > 0
    torch.testing.assert_close(logits[real], their_logits[real], rtol=1e-5, atol=1e-5)
    loss = our_loss(logits, batch)
    torch.testing.assert_close(loss, their_loss, rtol=1e-5, atol=0)
    loss.backward()
    their_loss.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for parameter_name, parameter in ours.named_parameters():
        row = next(row for row in key_map.rows if row.ours == parameter_name)
        expected = row.to_ours(gradients.pop)
        assert expected.abs().max() > 0, parameter_name
        assert torch.allclose(parameter.grad, expected, rtol=1e-5, atol=1e-5), parameter_name
    assert gradients == {}


@pytest.mark.parametrize("attention", ["sdpa", "reference"])
@pytest.mark.parametrize("name", ["gpt2", "gpt1"])
def test_documents_of_a_row_give_transformers_logits_of_each_alone(name: str, attention: str) -> None:
    """Attention and positions restart: what stands before a document in its row changes nothing."""
    config = MODELS[name]
    _, theirs, key_map = pair(config)
    ours = our_model(config, OUTPUTS, packing=True, asked=KernelsConfig.model_validate({"attention": attention})).eval()
    copy_weights(theirs, ours, key_map)
    rows = examples([[7, 5, 8], [6, 3], [1, 19]], seed=3)
    batch = batch_of(rows)
    (logits,) = ours.run(batch.fields).values()
    for row, sequences in enumerate(rows):
        for number, example in enumerate(sequences, start=1):
            alone = theirs(input_ids=torch.from_numpy(example.input_ids)[None]).logits[0]
            own = logits[row][batch.fields["sequence_ids"][row] == number]
            torch.testing.assert_close(own, alone, rtol=1e-5, atol=1e-5)
