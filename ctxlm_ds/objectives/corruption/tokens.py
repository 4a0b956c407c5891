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
WORD_CHARACTERS = PUNCTUATION | frozenset(string.ascii_lowercase)


class MaskingRules(NamedTuple):
    """The rules of a corruption."""

    mask_prob: float
    keep_prob: float
    random_prob: float
    rounding: int
    """A value of ROUNDINGS."""
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


class Choice(NamedTuple):
    """How candidates are chosen: one after another, or in the way that has a value; only that one is compiled."""

    spans: Shares | None = None
    """Share of each length of a run, from 1, as of n-grams and skip-grams."""
    ngrams: Shares | None = None
    skipgrams: Shares | None = None
    weights: Shares | None = None
    """[vocabulary] weight of a token among the candidates of its sample."""


def choice_of(section: MaskingSection) -> Choice:
    """Return how a section chooses; weights come from a corpus (corpus_tokens.py)."""
    longest = section.max_span_length
    if section.spans == "geometric":
        return Choice(spans=geometric_shares(section.span_prob, longest))
    if section.spans == "skipgram":
        return Choice(skipgrams=skipgram_shares(section.span_prob, longest))
    return Choice(ngrams=ngram_shares(longest)) if section.spans == "ngram" else Choice()


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
        replaces_runs=section.replace_spans,
        masks_specials=section.special_tokens == "roberta",
        spares_special_ids=section.special_tokens == "distilbert",
        whole_word=section.whole_word,
        given_spans=section.needs_spans,
        mask_id=tokenizer.mask_id,
        random_ids=ids,
        word_starts=word_starts(section, tokenizer) if section.whole_word else np.empty(0, dtype=np.bool_),
        is_special=is_special,
    )


def text_ids(tokenizer: Tokenizer) -> Ids:
    """Return the ids of a tokenizer that are not special, ascending. Raises ConfigError if there are none."""
    ids = np.setdiff1d(np.arange(tokenizer.vocab_size, dtype=np.int32), sorted(tokenizer.special_ids))
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


@compiled
def mask_samples(
    samples: Samples, key: np.uint64, budgets: Places, rules: MaskingRules, choice: Choice, ids: Ids
) -> tuple[Ids, Ids, Places]:
    """Choose and replace the predictions of every sample, at most budgets [c] of each.

    `key` is that of the random streams, of which samples.keys selects each sample's; `ids` [t] receives the tokens.

    Returns:
        prediction_positions [q], prediction_labels [q], prediction_starts [c + 1] as in sample.Examples.
    """
    longest, most = 0, 0
    for number in range(len(budgets)):
        length = samples.starts[number + 1] - samples.starts[number]
        longest = max(longest, length)
        most += min(length, budgets[number])
    places, chosen = np.empty((3, longest), dtype=np.int64), np.zeros(longest, dtype=np.bool_)
    positions, labels = np.empty(most, dtype=np.int32), np.empty(most, dtype=np.int32)
    starts = np.zeros(len(budgets) + 1, dtype=np.int64)
    for number in range(len(budgets)):
        begin, end, place = samples.starts[number], samples.starts[number + 1], starts[number]
        scratch = Scratch(samples.input_ids[begin:end], places[0], places[1], places[2], chosen)
        state = stream(key, samples.keys[number, 0], samples.keys[number, 1], samples.keys[number, 2])
        candidates, wanted = find_candidates(samples, number, word_at(state, 0), rules, scratch)
        wanted = min(wanted, budgets[number])
        choose(candidates, wanted, state, scratch, choice.spans, choice.ngrams, choice.skipgrams, choice.weights)
        count = replace_chosen(ids[begin:end], state, rules, scratch, positions[place:], labels[place:])
        starts[number + 1] = place + count
    return positions[: starts[-1]], labels[: starts[-1]], starts


@compiled
def find_candidates(
    samples: Samples, number: int, word: np.uint64, rules: MaskingRules, scratch: Scratch
) -> tuple[int, int]:
    """Write the candidates of a sample; return how many there are, and how many tokens should be predicted."""
    begin, end = samples.starts[number], samples.starts[number + 1]
    special = samples.special_mask[begin:end]
    if rules.spares_special_ids:
        special = special | rules.is_special[scratch.tokens]
    wanted = wanted_predictions(special, word, rules)
    continues = samples.continues_span[begin:end] if rules.given_spans else samples.continues_span[:0]
    return find_units(special, continues, rules, scratch), wanted


@compiled
def choose(
    candidates: int, wanted: int, state: np.uint64, scratch: Scratch, spans: Shares | None, ngrams: Shares | None,
    skipgrams: Shares | None, weights: Shares | None,
) -> None:  # fmt: skip
    """Mark the predictions of a sample in scratch.chosen, in the way that has a value; numba leaves the others out."""
    if spans is not None:
        choose_spans(candidates, wanted, state, spans, scratch)
    elif ngrams is not None:
        choose_ngrams(candidates, wanted, state, ngrams, scratch)
    elif skipgrams is not None:
        choose_skipgrams(candidates, wanted, state, skipgrams, scratch)
    elif weights is not None:
        choose_weighted(candidates, wanted, state, weights, scratch)
    else:
        choose_units(candidates, wanted, state, scratch)


@compiled
def replace_chosen(
    replaced: Ids, state: np.uint64, rules: MaskingRules, scratch: Scratch, positions: Ids, labels: Ids
) -> int:
    """Write the corrupted tokens of a sample, and positions and labels of its predictions; return their number."""
    count, in_run, action = 0, False, np.uint64(0)
    for position, token in enumerate(scratch.tokens):
        replaced[position] = token
        if scratch.chosen[position]:
            scratch.chosen[position] = False
            word = word_at(state, 2 + 2 * position)
            if not (rules.replaces_runs and in_run):
                action = word
            replaced[position] = replacement(token, action, word, rules)
            positions[count], labels[count] = position, token
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
def find_units(special: Marks, continues: NDArray[np.uint8], rules: MaskingRules, scratch: Scratch) -> int:
    """Find every word, or given span of complete words, that may be predicted; return how many there are.

    A special token is one unit. Without `whole_word` each token outside of a span is one.
    """
    count, begin = 0, 0
    for position in range(1, len(special) + 1):
        is_begin = position == len(special) or special[position] or special[position - 1]
        if not is_begin and not (len(continues) and continues[position]):
            is_begin = not rules.whole_word or rules.word_starts[scratch.tokens[position]]
        if is_begin:
            scratch.begins[count], scratch.ends[count] = begin, position
            count += rules.masks_specials or not special[begin]
            begin = position
    return count


@compiled
def choose_units(candidates: int, wanted: int, state: np.uint64, scratch: Scratch) -> None:
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
def choose_weighted(candidates: int, wanted: int, state: np.uint64, weights: Shares, scratch: Scratch) -> None:
    """Mark tokens drawn one after another, each time with probabilities proportional to their weights.

    The order of exponential variates with these rates is such a draw (Efraimidis & Spirakis 2006). Word 1 + 2j of the
    stream is for candidate j. Source: distiller.py of DistilBERT's code (multinomial without replacement).
    """
    times = np.empty(candidates, dtype=np.float64)
    for number in range(candidates):
        rate = weights[scratch.tokens[scratch.begins[number]]]
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
