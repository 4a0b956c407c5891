"""Choosing and replacing the tokens to predict (masked LM): compiled loops over the samples of a micro-batch.

Sources: google-research/bert create_pretraining_data.py (Devlin 2018), fairseq data/mask_tokens_dataset.py (Liu 2019).

k of a sample's n tokens (special ones counted, as both originals do) are predicted: max(1, round(p·n)) or, rounding
`probabilistic`, max(1, floor(p·n + U)), and at most the sample's budget. Each becomes the mask token, itself, or a
random token (80/10/10). `special_tokens` chooses the original to follow: `never` neither masks special tokens nor draws
them as random ones, `bert` draws from the full vocabulary, `roberta` also masks special tokens. `distilbert` is `bert`
without predictions of special ids of the text ([UNK]), which the others predict like any token.

With `whole_word`, words are drawn in random order and taken while they fit: a word that would exceed k is skipped
(BERT). If no word fits, the first drawn is predicted in part, so that every sample has a prediction. Given spans, which
come with the tokens (data/dataset), are drawn in the same way: each is one unit, extended to complete words (the
phrases and entities of ERNIE, Sun 2019, sections 3.2.2 and 3.2.3; its code draws each unit by itself with probability
p, here units are drawn until k tokens are reached). spans.py chooses runs of tokens or words.

The words of a sample's stream (data/numba_random.py): word 0 rounds its count; word 1 + 2j draws the j-th candidate
(token or word) among those not yet drawn, by Fisher and Yates's shuffle; word 2 + 2i replaces the token at position i:
its upper half decides how, its lower half is the random token. So the result depends only on the sample and its key.
"""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.numba_random import below, compiled, stream, uniform, word_at
from ctxlm_ds.data.sample import Ids, Marks, Places, Samples, Shares
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.corruption.spans import (
    HALF_SCALE,
    LOW_HALF,
    Scratch,
    choose_ngrams,
    choose_skipgrams,
    choose_spans,
    geometric_shares,
    ngram_shares,
    skipgram_shares,
)
from ctxlm_ds.objectives.permutation_lm import PUNCTUATION

if TYPE_CHECKING:
    from ctxlm_ds.objectives.masked_lm import MaskingSection
    from ctxlm_ds.tokenizers.base import Tokenizer

HALF_WORD = np.uint64(32)
NEAREST, PROBABILISTIC, UP = range(3)
ROUNDINGS = {"nearest": NEAREST, "probabilistic": PROBABILISTIC, "up": UP}
SINGLE, SPANS, NGRAMS, SKIPGRAMS = range(4)
WORD_CHARACTERS = PUNCTUATION | frozenset(string.ascii_lowercase)
RUNS = {"none": SINGLE, "geometric": SPANS, "ngram": NGRAMS, "skipgram": SKIPGRAMS, "given": SINGLE}


class MaskingRules(NamedTuple):
    """The rules of a corruption."""

    mask_prob: float
    keep_prob: float
    random_prob: float
    rounding: int
    """A value of ROUNDINGS."""
    runs: int
    """A value of RUNS."""
    length_shares: Shares
    """Share of each length of a run, from 1."""
    replaces_runs: bool
    """Draw mask, random or kept once for all tokens of a run."""
    masks_specials: bool
    spares_special_ids: bool
    """Never predict a special id that the text has ([UNK])."""
    whole_word: bool
    given_spans: bool
    """Choose each given span like a word."""
    mask_id: int
    random_ids: Ids
    """Ids that a random replacement is drawn from; frequent tokens of a corpus are in it several times."""
    word_starts: Marks
    """[vocabulary] True if a token begins a word; empty without whole_word."""
    is_special: Marks
    """[vocabulary] True for special tokens."""
    weights: Shares
    """[vocabulary] weight of a token among the candidates of its sample; empty for equal weights."""


def masking_rules(section: MaskingSection, tokenizer: Tokenizer) -> MaskingRules:
    """Return the rules of a section for a tokenizer with tokens below vocab_size; ConfigError if all are special."""
    draws_all = section.special_tokens in ("bert", "distilbert")
    ids = np.arange(tokenizer.vocab_size, dtype=np.int32) if draws_all else text_ids(tokenizer)
    if section.random_tokens == "corpus":
        ids = ids[:0]  # corpus_tokens.py has them once the corpus is known
    is_special = np.zeros(tokenizer.vocab_size, dtype=np.bool_)
    is_special[sorted(tokenizer.special_ids)] = True
    return MaskingRules(
        mask_prob=section.mask_prob,
        keep_prob=section.keep_prob,
        random_prob=section.random_prob,
        rounding=ROUNDINGS[section.count_rounding],
        runs=RUNS[section.spans],
        length_shares=length_shares(section),
        replaces_runs=section.replace_spans,
        masks_specials=section.special_tokens == "roberta",
        spares_special_ids=section.special_tokens == "distilbert",
        whole_word=section.whole_word,
        given_spans=section.needs_spans,
        mask_id=tokenizer.mask_id,
        random_ids=ids,
        word_starts=word_starts(section, tokenizer) if section.whole_word else np.empty(0, dtype=np.bool_),
        is_special=is_special,
        weights=np.empty(0),
    )


def text_ids(tokenizer: Tokenizer) -> Ids:
    """Return the ids of a tokenizer that are not special, ascending. Raises ConfigError if there are none."""
    ids = np.arange(tokenizer.vocab_size, dtype=np.int32)
    ids = np.setdiff1d(ids, np.array(sorted(tokenizer.special_ids), dtype=np.int32))
    if len(ids) == 0:
        raise ConfigError(f"the tokenizer's {tokenizer.vocab_size} tokens are all special; train it on more text")
    return ids


def word_starts(section: MaskingSection, tokenizer: Tokenizer) -> Marks:
    """Return [vocabulary] True for tokens that begin a word (albert: create_pretraining_data.py, is_start_piece)."""
    starts = tokenizer.word_start_mask()
    if section.word_starts == "albert" and tokenizer.marks_blanks:
        for token_id in np.flatnonzero(~starts).tolist():
            token = tokenizer.id_to_token(token_id)
            inside = token not in PUNCTUATION and all(char.lower() in WORD_CHARACTERS for char in token)
            starts[token_id] = token.startswith("<") or not inside
    return starts


def length_shares(section: MaskingSection) -> Shares:
    """Return the share of each length of a run of tokens or words, from 1; empty without runs."""
    if section.spans == "geometric":
        return geometric_shares(section.span_prob, section.max_span_length)
    if section.spans == "skipgram":
        return skipgram_shares(section.span_prob, section.max_span_length)
    return ngram_shares(section.max_span_length) if section.spans == "ngram" else np.empty(0)


@compiled
def mask_samples(
    samples: Samples, key: np.uint64, budgets: Places, rules: MaskingRules, ids: Ids
) -> tuple[Ids, Ids, Places]:
    """Choose and replace the predictions of every sample, at most budgets [c] of each.

    `key` is that of the random streams, of which samples.keys selects each sample's; `ids` [t] receives the tokens.

    Returns:
        prediction_positions [q], prediction_labels [q], prediction_starts [c + 1] as in sample.Examples.
    """
    count, longest, most = len(budgets), 0, 0
    for number in range(count):
        length = samples.starts[number + 1] - samples.starts[number]
        longest = max(longest, length)
        most += min(length, budgets[number])
    scratch = Scratch(
        np.empty(longest, dtype=np.int64),
        np.empty(longest, dtype=np.int64),
        np.empty(longest, dtype=np.int64),
        np.zeros(longest, dtype=np.bool_),
    )
    positions, labels = np.empty(most, dtype=np.int32), np.empty(most, dtype=np.int32)
    starts = np.zeros(count + 1, dtype=np.int64)
    for number in range(count):
        begin, end = samples.starts[number], samples.starts[number + 1]
        original, special, replaced = samples.input_ids[begin:end], samples.special_mask[begin:end], ids[begin:end]
        if rules.spares_special_ids:
            special = special | rules.is_special[original]
        state = stream(key, samples.keys[number, 0], samples.keys[number, 1], samples.keys[number, 2])
        wanted = min(wanted_predictions(special, word_at(state, 0), rules), budgets[number])
        if rules.whole_word or rules.given_spans:
            continues = samples.continues_span[begin:end] if rules.given_spans else samples.continues_span[:0]
            candidates = find_units(original, special, continues, rules, scratch)
        else:
            candidates = find_tokens(special, rules, scratch)
        choose_by_rules(original, candidates, wanted, state, rules, scratch)
        place = starts[number]
        starts[number + 1] = place + replace_chosen(
            original, replaced, state, rules, scratch, positions[place:], labels[place:]
        )
    return positions[: starts[count]], labels[: starts[count]], starts


@compiled
def choose_by_rules(
    original: Ids, candidates: int, wanted: int, state: np.uint64, rules: MaskingRules, scratch: Scratch
) -> None:
    """Mark the predictions of a sample in scratch.chosen."""
    if rules.runs == SPANS:
        choose_spans(candidates, wanted, state, rules.length_shares, scratch)
    elif rules.runs == NGRAMS:
        choose_ngrams(candidates, wanted, state, rules.length_shares, scratch)
    elif rules.runs == SKIPGRAMS:
        choose_skipgrams(candidates, wanted, state, rules.length_shares, scratch)
    elif len(rules.weights):
        choose_weighted(original, candidates, wanted, state, rules.weights, scratch)
    else:
        choose(candidates, wanted, state, scratch)


@compiled
def replace_chosen(
    original: Ids, replaced: Ids, state: np.uint64, rules: MaskingRules, scratch: Scratch, positions: Ids, labels: Ids
) -> int:
    """Write the corrupted tokens of a sample, and positions and labels of its predictions; return their number."""
    count, in_run, action = 0, False, np.uint64(0)
    for position in range(len(original)):
        replaced[position] = original[position]
        if scratch.chosen[position]:
            scratch.chosen[position] = False
            word = word_at(state, 2 + 2 * position)
            if not (rules.replaces_runs and in_run):
                action = word
            replaced[position] = replacement(original[position], action, word, rules)
            positions[count], labels[count] = position, original[position]
            count += 1
            in_run = True
        else:
            in_run = False
    return count


@compiled
def wanted_predictions(special: Marks, word: np.uint64, rules: MaskingRules) -> int:
    """Return how many predictions a sample should have: at least one."""
    expected = len(special) * rules.mask_prob
    if rules.rounding == NEAREST:
        return max(1, int(np.rint(expected)))
    if rules.rounding == UP:
        return max(1, int(np.ceil((len(special) - special.sum()) * rules.mask_prob)))
    return max(1, int(np.floor(expected + uniform(word))))


@compiled
def find_tokens(special: Marks, rules: MaskingRules, scratch: Scratch) -> int:
    """Find every token that may be predicted, each as one candidate; return how many there are."""
    count = 0
    for position in range(len(special)):
        scratch.begins[count], scratch.ends[count] = position, position + 1
        count += rules.masks_specials or not special[position]
    return count


@compiled
def find_units(ids: Ids, special: Marks, continues: NDArray[np.uint8], rules: MaskingRules, scratch: Scratch) -> int:
    """Find every word, or given span of complete words, that may be predicted; return how many there are.

    A special token is one unit. Without `whole_word` each token outside of a span is one.
    """
    count, begin = 0, 0
    for position in range(1, len(ids) + 1):
        is_begin = position == len(ids) or special[position] or special[position - 1]
        if not is_begin and not (len(continues) and continues[position]):
            is_begin = not rules.whole_word or rules.word_starts[ids[position]]
        if is_begin:
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
def choose_weighted(
    original: Ids, candidates: int, wanted: int, state: np.uint64, weights: Shares, scratch: Scratch
) -> None:
    """Mark tokens drawn one after another, each time with probabilities proportional to their weights.

    The order of exponential variates with these rates is such a draw (Efraimidis & Spirakis 2006). Word 1 + 2j of the
    stream is for candidate j. Source: distiller.py of DistilBERT's code (multinomial without replacement).
    """
    times = np.empty(candidates, dtype=np.float64)
    for number in range(candidates):
        rate = weights[original[scratch.begins[number]]]
        times[number] = -np.log(1.0 - uniform(word_at(state, 1 + 2 * number))) / rate
    for number in np.argsort(times)[:wanted]:
        scratch.chosen[scratch.begins[number]] = True


@compiled
def replacement(token: np.int32, action: np.uint64, word: np.uint64, rules: MaskingRules) -> np.int32:
    """Return the mask, the token itself, or a random token, as the upper half of `action` decides."""
    share = np.float64(action >> HALF_WORD) * HALF_SCALE
    if share < 1.0 - rules.random_prob - rules.keep_prob:
        return np.int32(rules.mask_id)
    if share < 1.0 - rules.random_prob:
        return np.int32(token)
    return rules.random_ids[((word & LOW_HALF) * np.uint64(len(rules.random_ids))) >> HALF_WORD]
