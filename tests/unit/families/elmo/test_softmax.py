"""The sampled softmax beside TensorFlow's definitions restated in float64: the drawn words and the losses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.numba_random import stream_key
from ctxlm_ds.families.elmo.config import ELMO, ElmoSection
from ctxlm_ds.families.elmo.softmax import CANDIDATES, Candidates, SharedSoftmax, draw_candidates, log_expected_counts
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import ModelBuild
from ctxlm_ds.parallel.context import ParallelContext
from tests.streams import streams_at

ROWS, LENGTH, VOCABULARY, SAMPLED = 3, 7, 60, 16
STEP, MICRO_BATCH = 4, 2
WORDS = 50


def softmax(**changes: object) -> SharedSoftmax:
    """With the keys of a micro-batch."""
    settings = ELMO.tiny()["model"] | {"vocab_size": VOCABULARY, "num_sampled": SAMPLED, "dropout": 0.0} | changes
    parallel = ParallelContext(dropout=streams_at(3, STEP, MICRO_BATCH))
    build = ModelBuild((), KernelSet({}, "cpu", torch.float32), parallel)
    torch.manual_seed(1)
    module = SharedSoftmax(ElmoSection.model_validate(settings), build).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def batch(width: int = 32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(2)
    hidden, backward = (torch.randn(ROWS, LENGTH, width, dtype=torch.float64, requires_grad=True) for _ in range(2))
    labels, reversed_labels = (torch.randint(VOCABULARY, (ROWS, LENGTH)) // 3 for _ in range(2))
    labels[0, -2:] = IGNORE_LABEL
    return hidden, backward, labels, reversed_labels


def drawn_words(module: SharedSoftmax, direction: int) -> Candidates:
    return draw_candidates(module.parallel.dropout.word(CANDIDATES + direction), SAMPLED, VOCABULARY)


def sampled_softmax_loss(module: SharedSoftmax, hidden: Tensor, labels: Tensor, direction: int) -> np.ndarray:
    """nn_impl._compute_sampled_logits with remove_accidental_hits, then the cross entropy of the first logit."""
    words, tries = drawn_words(module, direction)
    table, bias = module.weight.detach().numpy(), module.bias.detach().numpy()
    expected = -np.expm1(tries * np.log1p(-probabilities(VOCABULARY)))
    logits = hidden.detach().numpy().reshape(-1, table.shape[1]) @ table.T + bias - np.log(expected)
    losses = []
    for row, label in zip(logits, labels.flatten().tolist(), strict=True):
        if label != IGNORE_LABEL:
            compared = np.array([row[label], *(row[word] for word in words if word != label)])
            losses.append(np.log(np.exp(compared).sum()) - compared[0])
    return np.array(losses)


def test_training_computes_tensorflows_sampled_loss() -> None:
    module, fields = softmax(), batch()
    found = module(*fields)
    for direction in range(2):
        losses = sampled_softmax_loss(module, fields[direction], fields[2 + direction], direction)
        assert found[2 * direction].item() == pytest.approx(losses.sum(), rel=1e-6)
        assert 0 <= found[2 * direction + 1] <= len(losses)
    drawn = [drawn_words(module, direction).words for direction in range(2)]
    assert not np.array_equal(*drawn)
    assert set(fields[2].flatten().tolist()) & set(drawn[0].tolist()), "no drawn word is a next word"


def test_gradients_are_those_of_the_loss() -> None:
    """Beside autograd's of the loss over all words, in which those that were not drawn are left out."""
    module, (hidden, backward, labels, reversed_labels) = softmax(), batch()
    of_loss = torch.autograd.grad(module(hidden, backward, labels, reversed_labels)[0], (hidden, *module.parameters()))
    words, tries = drawn_words(module, 0)
    expected = torch.from_numpy(-np.expm1(tries * np.log1p(-probabilities(VOCABULARY))))
    logits = F.linear(hidden, module.weight, module.bias).flatten(0, 1) - expected.log()
    counted = labels.flatten() != IGNORE_LABEL
    known = labels.flatten().where(counted, 0)
    compared = torch.zeros(len(known), VOCABULARY, dtype=torch.bool)
    compared[:, words] = True
    compared[torch.arange(len(known)), known] = True
    losses = F.cross_entropy(logits.masked_fill(~compared, -torch.inf), known, reduction="none")
    wanted = torch.autograd.grad(losses[counted].sum(), (hidden, *module.parameters()))
    for got, value in zip(of_loss, wanted, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"num_sampled": None}])
def test_evaluation_compares_with_all_words(changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """As does training without sampling; the rows are compared some at a time."""
    module, fields = softmax(**changes), batch()
    monkeypatch.setattr("ctxlm_ds.families.elmo.softmax.chunk_rows", lambda *_: 4)
    found = (module if changes else module.eval())(*fields)
    for direction in range(2):
        logits = F.linear(fields[direction], module.weight, module.bias).flatten(0, 1)
        labels = fields[2 + direction].flatten()
        wanted = F.cross_entropy(logits, labels, ignore_index=IGNORE_LABEL, reduction="sum")
        assert found[2 * direction].item() == pytest.approx(wanted.item(), rel=1e-6)
        assert found[2 * direction + 1] == (logits.argmax(dim=1) == labels).sum()


def probabilities(vocabulary: int) -> np.ndarray:
    """range_sampler.cc."""
    words = np.arange(vocabulary, dtype=np.float64)
    return np.log((words + 2) / (words + 1)) / math.log1p(vocabulary)


def test_words_differ_and_belong_to_the_key() -> None:
    first, again, other = (draw_candidates(stream_key(key), 8192, 793_471) for key in (1, 1, 2))
    assert np.array_equal(first.words, again.words) and first.tries == again.tries > 8192
    assert not np.array_equal(first.words, other.words)
    assert (np.diff(first.words) > 0).all() and first.words[0] >= 0 and first.words[-1] < 793_471


def test_a_word_is_drawn_as_often_as_expected() -> None:
    """One try has the log-uniform distribution; distinct words are about as frequent as so many tries suggest."""
    singles = np.array([draw_candidates(stream_key(key), 1, WORDS).words[0] for key in range(20_000)])
    shares = np.bincount(singles, minlength=WORDS) / len(singles)
    assert np.abs(shares - probabilities(WORDS)).max() < 0.01
    draws = [draw_candidates(stream_key(key), 10, WORDS) for key in range(5000)]
    drawn = np.bincount(np.concatenate([each.words for each in draws]), minlength=WORDS) / len(draws)
    expected = np.mean([1 - (1 - probabilities(WORDS)) ** each.tries for each in draws], axis=0)
    assert np.abs(drawn - expected).max() < 0.03


@pytest.mark.parametrize("tries", [4, 9, 100_000])
def test_expected_counts_are_those_of_tensorflow(tries: int) -> None:
    """Without repeated words the count is p times the number of words, else 1 - (1 - p)^tries."""
    p = probabilities(793_471)
    wanted = p * 4 if tries == 4 else -np.expm1(tries * np.log1p(-p))
    found = log_expected_counts(torch.arange(793_471), Candidates(np.arange(4), tries), 793_471)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.double().numpy(), np.log(wanted), rtol=1e-6, atol=1e-12)


def test_all_words_can_be_drawn() -> None:
    assert draw_candidates(stream_key(3), 5, 5).words.tolist() == [0, 1, 2, 3, 4]
