"""Choosing and replacing the tokens to predict (masked LM): compiled loops over the samples of a micro-batch.

Sources: google-research/bert create_pretraining_data.py (Devlin 2018), fairseq data/mask_tokens_dataset.py (Liu 2019).

k of a sample's n tokens (special ones counted, as both originals do) are predicted: max(1, round(p·n)) or, rounding
`probabilistic`, max(1, floor(p·n + U)), and at most the sample's budget. Each becomes the mask token, itself, or a
random token (80/10/10). `special_tokens` chooses the original to follow: `never` neither masks special tokens nor draws
them as random ones, `bert` draws from the full vocabulary, `roberta` also masks special tokens.

With `whole_word`, words are drawn in random order and taken while they fit: a word that would exceed k is skipped
(BERT). If no word fits, the first drawn is predicted in part, so that every sample has a prediction.

The words of a sample's stream (data/numba_random.py): word 0 rounds its count; word 1 + 2j draws the j-th candidate
(token or word) among those not yet drawn, by Fisher and Yates's shuffle; word 2 + 2i replaces the token at position i:
its upper half decides how, its lower half is the random token. So the result depends only on the sample and its key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.numba_random import below, compiled, stream, uniform, word_at
from ctxlm_ds.data.sample import Samples
from ctxlm_ds.errors import ConfigError

if TYPE_CHECKING:
    from ctxlm_ds.objectives.masked_lm import MaskedLMSection
    from ctxlm_ds.tokenizers.base import Tokenizer

HALF_WORD = np.uint64(32)
LOW_HALF = np.uint64((1 << 32) - 1)
HALF_SCALE = 2.0**-32


class MaskingRules(NamedTuple):
    """The rules of a corruption."""

    mask_prob: float
    keep_prob: float
    random_prob: float
    rounds_to_nearest: bool
    """False: by a random number (probabilistic)."""
    masks_specials: bool
    whole_word: bool
    mask_id: int
    random_ids: NDArray[np.int32]
    """Ids that a random replacement is drawn from."""
    word_starts: NDArray[np.bool_]
    """[vocabulary] True if a token begins a word; empty without whole_word."""


def masking_rules(section: MaskedLMSection, tokenizer: Tokenizer) -> MaskingRules:
    """Return the rules of a section for a tokenizer; every token must be below its vocab_size.

    Raises:
        ConfigError: keep_prob and random_prob add up to more than 1, or the tokenizer has only special tokens.
    """
    if section.keep_prob + section.random_prob > 1.0:
        raise ConfigError(
            f"objective.keep_prob {section.keep_prob} and objective.random_prob {section.random_prob} add up to more "
            "than 1; lower one of them (BERT: 0.1 and 0.1)"
        )
    ids = np.arange(tokenizer.vocab_size, dtype=np.int32)
    if section.special_tokens != "bert":
        ids = np.setdiff1d(ids, np.array(sorted(tokenizer.special_ids), dtype=np.int32))
    if len(ids) == 0:
        raise ConfigError(f"the tokenizer's {tokenizer.vocab_size} tokens are all special; train it on more text")
    return MaskingRules(
        mask_prob=section.mask_prob,
        keep_prob=section.keep_prob,
        random_prob=section.random_prob,
        rounds_to_nearest=section.count_rounding == "nearest",
        masks_specials=section.special_tokens == "roberta",
        whole_word=section.whole_word,
        mask_id=tokenizer.mask_id,
        random_ids=ids,
        word_starts=tokenizer.word_start_mask() if section.whole_word else np.empty(0, dtype=np.bool_),
    )


class Scratch(NamedTuple):
    """Work space of one sample; `begins` and `ends` are its candidates for prediction."""

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    chosen: NDArray[np.bool_]


@compiled
def mask_samples(
    samples: Samples, key: np.uint64, budgets: NDArray[np.int64], rules: MaskingRules, ids: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """Choose and replace the predictions of every sample.

    Args:
        samples: sample.Samples.
        key: key of the random streams; samples.keys selects each sample's.
        budgets: [c] most predictions of each.
        rules: MaskingRules.
        ids: [t] receives the corrupted tokens.

    Returns:
        prediction_positions [q], prediction_labels [q], prediction_starts [c + 1] as in sample.Examples.
    """
    count, longest, most = len(budgets), 0, 0
    for number in range(count):
        length = samples.starts[number + 1] - samples.starts[number]
        longest = max(longest, length)
        most += min(length, budgets[number])
    scratch = Scratch(
        np.empty(longest, dtype=np.int64), np.empty(longest, dtype=np.int64), np.zeros(longest, dtype=np.bool_)
    )
    positions, labels = np.empty(most, dtype=np.int32), np.empty(most, dtype=np.int32)
    starts = np.zeros(count + 1, dtype=np.int64)
    for number in range(count):
        begin, end = samples.starts[number], samples.starts[number + 1]
        original, special, replaced = samples.input_ids[begin:end], samples.special_mask[begin:end], ids[begin:end]
        state = stream(key, samples.keys[number, 0], samples.keys[number, 1], samples.keys[number, 2])
        wanted = min(wanted_predictions(end - begin, word_at(state, 0), rules), budgets[number])
        if rules.whole_word:
            candidates = find_words(original, special, rules, scratch)
        else:
            candidates = find_tokens(special, rules, scratch)
        choose(candidates, wanted, state, scratch)
        place = starts[number]
        for position in range(len(original)):
            replaced[position] = original[position]
            if scratch.chosen[position]:
                scratch.chosen[position] = False
                replaced[position] = replacement(original[position], word_at(state, 2 + 2 * position), rules)
                positions[place], labels[place] = position, original[position]
                place += 1
        starts[number + 1] = place
    return positions[: starts[count]], labels[: starts[count]], starts


@compiled
def wanted_predictions(length: int, word: np.uint64, rules: MaskingRules) -> int:
    """Return how many predictions a sample should have: at least one."""
    expected = length * rules.mask_prob
    if rules.rounds_to_nearest:
        return max(1, int(np.rint(expected)))
    return max(1, int(np.floor(expected + uniform(word))))


@compiled
def find_tokens(special: NDArray[np.bool_], rules: MaskingRules, scratch: Scratch) -> int:
    """Find every token that may be predicted, each as one candidate; return how many there are."""
    count = 0
    for position in range(len(special)):
        scratch.begins[count], scratch.ends[count] = position, position + 1
        count += rules.masks_specials or not special[position]
    return count


@compiled
def find_words(ids: NDArray[np.int32], special: NDArray[np.bool_], rules: MaskingRules, scratch: Scratch) -> int:
    """Find every word that may be predicted, a special token being one word; return how many there are."""
    count, begin = 0, 0
    for position in range(1, len(ids) + 1):
        is_last = position == len(ids)
        if is_last or rules.word_starts[ids[position]] or special[position] or special[position - 1]:
            scratch.begins[count], scratch.ends[count] = begin, position
            count += rules.masks_specials or not special[begin]
            begin = position
    return count


@compiled
def choose(candidates: int, wanted: int, state: np.uint64, scratch: Scratch) -> None:
    """Mark candidates in random order while they fit into `wanted` tokens; if none fits, part of the first."""
    room = wanted
    for turn in range(candidates):
        drawn = turn + below(word_at(state, 1 + 2 * turn), candidates - turn)
        begin, end = scratch.begins[drawn], scratch.ends[drawn]
        scratch.begins[drawn], scratch.ends[drawn] = scratch.begins[turn], scratch.ends[turn]
        scratch.begins[turn], scratch.ends[turn] = begin, end
        if end - begin <= room:
            scratch.chosen[begin:end] = True
            room -= end - begin
            if room == 0:
                break
    if room == wanted and candidates > 0:
        scratch.chosen[scratch.begins[0] : scratch.begins[0] + wanted] = True


@compiled
def replacement(token: np.int32, word: np.uint64, rules: MaskingRules) -> np.int32:
    """Draw the mask, the token itself, or a random token."""
    action = np.float64(word >> HALF_WORD) * HALF_SCALE
    if action < 1.0 - rules.random_prob - rules.keep_prob:
        return np.int32(rules.mask_id)
    if action < 1.0 - rules.random_prob:
        return np.int32(token)
    return rules.random_ids[((word & LOW_HALF) * np.uint64(len(rules.random_ids))) >> HALF_WORD]
