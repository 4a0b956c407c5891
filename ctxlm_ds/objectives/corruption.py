"""Choosing and replacing the tokens to predict (masked LM): Sample -> Example, a batch at once, in numpy.

In: samples, the random words of each (SampleDraws), and how many predictions each may have. Out: examples. Not here:
the loss, torch, which stream a sample is keyed by (data/loader). Sources: google-research/bert
create_pretraining_data.py (Devlin 2018), fairseq data/mask_tokens_dataset.py (Liu 2019).

Of a sample of n tokens, specials counted as both originals do, k are predicted: max(1, round(p·n)) or, rounding
`probabilistic`, max(1, floor(p·n + U)); never more than the sample's budget. Each becomes the mask token, itself, or a
random token (80/10/10). `special_tokens` says which originals' habit is followed: `never` neither masks specials nor
draws them as random tokens, `bert` draws from the whole vocabulary, `roberta` also masks the specials.

Whole words are drawn in random order and taken while they fit: a word that would exceed k is skipped (BERT). Where not
one word fits, the first drawn is predicted in part, so that every sample has a prediction.

The words of a sample: word 0 rounds its count; words 1 + 2j and 2 + 2j belong to position j (its rank; its
replacement). So the result depends on the sample alone, whatever batch it is corrupted in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.config.schema import ObjectiveConfig
from ctxlm_ds.data.randomness import SampleDraws, uniforms
from ctxlm_ds.data.sample import Example, Sample
from ctxlm_ds.errors import ConfigError

if TYPE_CHECKING:
    from ctxlm_ds.tokenizers.base import Tokenizer

POSITION_BITS = np.uint64(16)
POSITION_MASK = np.uint64((1 << 16) - 1)
NOT_A_CANDIDATE = np.uint64((1 << 64) - 1)
HALF_WORD = np.uint64(32)
LOW_HALF = np.uint64((1 << 32) - 1)


class MaskedTokenCorruption:
    """The corruption of BERT and RoBERTa for one tokenizer.

    Raises:
        ConfigError: keep_prob and random_prob exceed 1, or the tokenizer has only special tokens to draw from.
    """

    def __init__(self, config: ObjectiveConfig, tokenizer: Tokenizer) -> None:
        if config.keep_prob + config.random_prob > 1.0:
            raise ConfigError(
                f"objective.keep_prob {config.keep_prob} and objective.random_prob {config.random_prob} add up to more "
                "than 1; lower one of them (BERT: 0.1 and 0.1)"
            )
        self._config = config
        self._mask_id = tokenizer.mask_id
        self._random_ids = _random_ids(config, tokenizer)
        self._word_starts = tokenizer.word_start_mask() if config.whole_word else None

    def corrupt_batch(self, samples: Sequence[Sample], draws: SampleDraws, budgets: NDArray[np.int64]) -> list[Example]:
        """Corrupt samples.

        Args:
            samples: b sequences of any lengths up to 65,536.
            draws: their random words, in the same order.
            budgets: [b] most predictions of each.
        """
        lengths = np.array([len(sample.input_ids) for sample in samples], dtype=np.int64)
        ids, special = _pad(samples, int(lengths.max()))
        words = draws.words(1 + 2 * ids.shape[1])
        blocked = _beyond(lengths, ids.shape[1]) if self._config.special_tokens == "roberta" else special
        ranks = _ranks(words[:, 1::2], blocked)
        counts = np.minimum(self._counts(lengths, words[:, 0]), budgets)
        if self._word_starts is None:
            positions, counts = _choose_tokens(ranks, np.minimum(counts, (~blocked).sum(axis=1)))
        else:
            positions, counts = _choose_words(ranks, counts, self._starts(ids, special))
        labels = np.take_along_axis(ids, positions, axis=1)
        corrupted = self._replace(ids, positions, counts, np.take_along_axis(words[:, 2::2], positions, axis=1))
        return [
            Example(
                input_ids=corrupted[row, : lengths[row]],
                token_type_ids=sample.token_type_ids,
                prediction_positions=positions[row, : counts[row]],
                prediction_labels=labels[row, : counts[row]],
                is_random_next=sample.is_random_next,
            )
            for row, sample in enumerate(samples)
        ]

    def _counts(self, lengths: NDArray[np.int64], words: NDArray[np.uint64]) -> NDArray[np.int64]:
        expected = lengths * self._config.mask_prob
        if self._config.count_rounding == "nearest":
            counts = np.rint(expected)
        else:
            counts = np.floor(expected + uniforms(words))
        return np.maximum(1, counts.astype(np.int64))

    def _starts(self, ids: NDArray[np.int64], special: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """[b, s] True where a word begins: by the vocabulary, at a special token (or padding) and right after one."""
        assert self._word_starts is not None
        starts = self._word_starts[ids] | special
        starts[:, 0] = True
        starts[:, 1:] |= special[:, :-1]
        return starts

    def _replace(
        self, ids: NDArray[np.int64], positions: NDArray[np.int64], counts: NDArray[np.int64], words: NDArray[np.uint64]
    ) -> NDArray[np.int64]:
        """[b, s] `ids` with the first `counts` of `positions` replaced by mask, itself or a random token."""
        config = self._config
        action = (words >> HALF_WORD).astype(np.float64) * 2.0**-32
        drawn = ((words & LOW_HALF) * np.uint64(len(self._random_ids))) >> HALF_WORD
        original = np.take_along_axis(ids, positions, axis=1)
        replaced = np.where(action < 1.0 - config.random_prob, original, self._random_ids[drawn])
        replaced[action < 1.0 - config.random_prob - config.keep_prob] = self._mask_id
        rows, slots = np.nonzero(np.arange(positions.shape[1]) < counts[:, None])
        corrupted = ids.copy()
        corrupted[rows, positions[rows, slots]] = replaced[rows, slots]
        return corrupted


def _random_ids(config: ObjectiveConfig, tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Ids that a random replacement is drawn from, uniformly."""
    ids = np.arange(tokenizer.vocab_size, dtype=np.int64)
    if config.special_tokens != "bert":
        ids = np.setdiff1d(ids, np.array(sorted(tokenizer.special_ids), dtype=np.int64))
    if len(ids) == 0:
        raise ConfigError(f"the tokenizer's {tokenizer.vocab_size} tokens are all special; train it on more text")
    return ids


def _pad(samples: Sequence[Sample], length: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """[b, s] ids (0 beyond the end) and [b, s] True at special tokens and beyond the end."""
    ids = np.zeros((len(samples), length), dtype=np.int64)
    special = np.ones((len(samples), length), dtype=np.bool_)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.input_ids)] = sample.input_ids
        special[row, : len(sample.input_ids)] = sample.special_mask
    return ids, special


def _beyond(lengths: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
    """[b, s] True beyond the end of each sample."""
    return np.arange(length) >= lengths[:, None]


def _ranks(words: NDArray[np.uint64], blocked: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """[b, s] 48 random bits above the position: sorting them shuffles the positions; blocked ones come last."""
    ranks = (words & ~POSITION_MASK) | np.arange(words.shape[1], dtype=np.uint64)
    ranks[blocked] = NOT_A_CANDIDATE
    return ranks


def _choose_tokens(
    ranks: NDArray[np.uint64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The counts[i] lowest ranks of row i: [b, p] positions, ascending, 0 beyond the count; and the counts."""
    slots = max(1, int(counts.max()))
    lowest = np.partition(ranks, slots - 1, axis=1)[:, :slots] if slots < ranks.shape[1] else ranks.copy()
    lowest.sort(axis=1)
    chosen = (lowest & POSITION_MASK).astype(np.int64)
    return _ascending(chosen, counts), counts


def _choose_words(
    ranks: NDArray[np.uint64], counts: NDArray[np.int64], starts: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Whole words by their first token's rank while they fit: [b, p] positions and how many of each row."""
    chosen = np.zeros((len(ranks), max(1, int(counts.max()))), dtype=np.int64)
    taken = np.zeros(len(ranks), dtype=np.int64)
    for row in range(len(ranks)):
        positions = _words_of_row(ranks[row], int(counts[row]), np.flatnonzero(starts[row]))
        taken[row] = len(positions)
        chosen[row, : len(positions)] = positions
    return _ascending(chosen, taken), taken


def _words_of_row(ranks: NDArray[np.uint64], budget: int, starts: NDArray[np.int64]) -> list[int]:
    """Positions of the words taken, at most `budget` of them."""
    ends = np.append(starts[1:], len(ranks))
    word_ranks = ranks[starts]
    order = np.argsort(word_ranks)[: int((word_ranks != NOT_A_CANDIDATE).sum())].tolist()
    first, end = starts.tolist(), ends.tolist()
    positions: list[int] = []
    for word in order:
        room = budget - len(positions)
        if room == 0:
            break
        if end[word] - first[word] <= room:
            positions.extend(range(first[word], end[word]))
    if not positions and order:
        begin = first[order[0]]
        positions = list(range(begin, begin + budget))
    return positions


def _ascending(positions: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sort the first counts[i] entries of each row; the rest becomes 0."""
    empty = np.arange(positions.shape[1]) >= counts[:, None]
    ordered = np.where(empty, np.iinfo(np.int64).max, positions)
    ordered.sort(axis=1)
    ordered[empty] = 0
    return ordered
