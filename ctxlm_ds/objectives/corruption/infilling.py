"""Noise of BART and mBART: compiled loops over the samples of a micro-batch.

Source: fairseq data/denoising_dataset.py (Lewis 2020, section 2.2; Liu 2020, arXiv:2001.08210, section 2.2). Sentences
are permuted, then spans of words replaced, then tokens inserted, then the text is rotated.

The budget of spans is ceil(mask_ratio · words) words. Lengths are drawn until they reach it, the last one is cut there,
and the spans begin at different random words. A span that reaches another one covers it, so that both become one mask;
fewer words than the budget are then replaced. Spans of no words become masks at random places.

The words of a sample's stream (data/numba_random.py): draw i of purpose k is word k + PURPOSES · i.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ctxlm_ds.data.numba_random import below, compiled, inlined, put, stream, uniform, word_at
from ctxlm_ds.data.sample import NO_LANGUAGE, Ids, Marks, Places, Samples, Shares, TargetExamples, starts_of
from ctxlm_ds.objectives.encoder_decoder import FRAME, longest_target

PURPOSES = 16
# numba compiles a function for each Python integer that it is given, but once for all of a type of numpy.
(
    SENTENCES, SENTENCE_ORDER, SPAN_LENGTHS, SPAN_STARTS, SPAN_KINDS, TOKENS, MASK_PLACES, MASK_TOKENS, PLACES,
    PLACE_TOKENS, ROTATION, SHIFT,
) = map(np.int64, range(12))  # fmt: skip
LONGEST_SPAN = 128
SMALLEST_SHARE = 1e-7


class InfillingRules(NamedTuple):
    """The rules of a corruption; fields without a text are settings of TextInfillingSection."""

    mask_ratio: float
    length_ends: Shares
    """Cumulative shares of the lengths of spans, from 0; empty for spans of one word."""
    replace_length: int
    random_ratio: float
    permute_ratio: float
    insert_ratio: float
    rotate_prob: float
    sentence_end: int
    """Id of the token that ends a sentence."""
    cls_id: int
    sep_id: int
    mask_id: int
    random_ids: Ids
    """Ids that random tokens are drawn from."""
    token_languages: Ids
    """Languages each of whose tokens is a word."""
    word_starts: Marks
    """[vocabulary] True if a token begins a word; empty if each token is a word."""


def poisson_ends(mean: float) -> Shares:
    """Return the cumulative shares of the lengths 0, 1, ... of spans: Poisson, without lengths of less than 1e-7."""
    shares = [np.exp(-mean)]
    while len(shares) < LONGEST_SPAN and (shares[-1] >= SMALLEST_SHARE or len(shares) <= mean):
        shares.append(shares[-1] * mean / len(shares))
    return np.asarray(np.cumsum(shares) / np.sum(shares), dtype=np.float64)


def corrupt(samples: Samples, key: np.uint64, limits: Places, rules: InfillingRules) -> TargetExamples:
    """Make an input and a target of each of c samples, whose tokens before and after the text are replaced by ours.

    `limits` [c] are the most tokens of each input; insertions beyond it are left out, as is the end of a text that is
    longer than longest_target with its frame (a sample that ends inside a sentence has no separator).
    """
    bounds = np.empty((len(limits), 2), dtype=np.int64)
    find_texts(samples, bounds)
    longest = np.array([longest_target(limit, rules.insert_ratio) for limit in limits.tolist()], dtype=np.int64)
    bounds[:, 1] = np.minimum(bounds[:, 1], bounds[:, 0] + longest - FRAME)
    has_language = samples.language_ids != NO_LANGUAGE
    target_starts = starts_of(bounds[:, 1] - bounds[:, 0] + FRAME)
    targets = np.empty(int(target_starts[-1]), dtype=np.int32)
    replaced = np.zeros(len(targets), dtype=np.bool_)
    inputs = np.empty(int(limits.sum()), dtype=np.int32)
    lengths = np.empty(len(limits), dtype=np.int64)
    for_targets = TargetExamples(inputs, lengths, targets, target_starts, replaced)
    size = write(samples, key, limits, rules, bounds, has_language, for_targets)
    return for_targets._replace(input_ids=inputs[:size].copy(), starts=starts_of(lengths))


@compiled
def find_texts(samples: Samples, bounds: Places) -> None:
    """Find the tokens [c, 2] of each sample between the first and the last that the sample format did not insert."""
    for number in range(len(bounds)):
        begin, end = samples.starts[number], samples.starts[number + 1]
        while begin < end and samples.special_mask[begin]:
            begin += 1
        while begin < end and samples.special_mask[end - 1]:
            end -= 1
        bounds[number, 0], bounds[number, 1] = begin, end


@compiled
def write(
    samples: Samples,
    key: np.uint64,
    limits: Places,
    rules: InfillingRules,
    bounds: Places,
    has_language: Marks,
    examples: TargetExamples,
) -> np.int64:
    """Write targets and inputs, the latter one after another with their lengths in `starts` [c]; return their sum."""
    filled = np.int64(0)
    for number in range(len(limits)):
        state = stream(key, samples.keys[number, 0], samples.keys[number, 1], samples.keys[number, 2])
        begin, end = bounds[number]
        first, last = examples.target_starts[number], examples.target_starts[number + 1]
        target, replaced = examples.target_ids[first:last], examples.replaced[first:last]
        is_start = np.empty(end - begin + 1, dtype=np.bool_)
        by_token = len(rules.word_starts) == 0 or (rules.token_languages == samples.language_ids[number]).any()
        find_words(samples, begin, end, by_token, rules, is_start[: end - begin])
        # With a language its token stands behind the text and the separator, which belongs to the text.
        head = 0 if has_language[number] else 1
        target[0] = rules.cls_id
        put(target[head:], samples.input_ids[begin:end])
        target[head + end - begin] = rules.sep_id
        target[-1] = samples.language_ids[number] if has_language[number] else rules.sep_id
        is_start[end - begin] = True
        size = len(target) - 1 - head
        text = corrupt_text(
            target[head:-1], is_start[:size], replaced[head:-1], limits[number] - 1 - head, state, rules
        )
        examples.input_ids[filled] = rules.cls_id
        put(examples.input_ids[filled + head :], text)
        examples.input_ids[filled + head + len(text)] = target[-1]
        examples.starts[number] = len(text) + 1 + head
        filled += examples.starts[number]
    return filled


@compiled
def find_words(
    samples: Samples, begin: np.int64, end: np.int64, by_token: bool, rules: InfillingRules, is_start: Marks
) -> None:
    """Find the tokens that begin a word; a separator is a word, as are all tokens with `by_token`."""
    after_special = True
    for position in range(begin, end):
        known = by_token or rules.word_starts[samples.input_ids[position]]
        is_start[position - begin] = after_special or samples.special_mask[position] or known
        after_special = samples.special_mask[position]


@compiled
def corrupt_text(
    text: Ids, is_start: Marks, replaced: Marks, limit: np.int64, state: np.uint64, rules: InfillingRules
) -> Ids:
    """Return the noised text of at most `limit` tokens, no fewer than the n of `text`.

    `is_start` [n] is True if a token begins a word; `replaced` [n] receives True at each token of a span.
    """
    order = np.arange(len(text))
    if rules.permute_ratio > 0.0:
        permute_sentences(text, rules.sentence_end, rules.permute_ratio, state, order)
    noised, size = np.empty(limit, dtype=np.int32), len(text)
    masks = np.int64(0)
    if rules.mask_ratio > 0.0 and size > 0:
        masks, size = infill(text, is_start, order, state, rules, replaced, noised)
    else:
        put(noised, text[order])
    size = insert(noised, size, masks, MASK_PLACES, state, rules)
    if rules.insert_ratio > 0.0:
        count = np.int64(np.ceil((size + 2) * rules.insert_ratio))
        size = insert(noised, size, count, PLACES, state, rules)
    noised = noised[:size]
    if rules.rotate_prob > 0.0 and uniform(draw(state, ROTATION, 0)) < rules.rotate_prob:
        shift = below(draw(state, SHIFT, 0), size + 1)
        noised = np.concatenate((noised[shift:], noised[:shift]))
    return noised


@inlined
def draw(state: np.uint64, purpose: int, number: int) -> np.uint64:
    return word_at(state, purpose + PURPOSES * number)


@compiled
def draw_places(among: int, count: int, purpose: int, state: np.uint64) -> Places:
    """Return `count` different numbers below `among`, in random order (Fisher and Yates)."""
    places = np.arange(among)
    for turn in range(count):
        other = turn + below(draw(state, purpose, turn), among - turn)
        places[turn], places[other] = places[other], places[turn]
    return places[:count]


@compiled
def permute_sentences(text: Ids, sentence_end: int, ratio: float, state: np.uint64, order: Places) -> None:
    """Write the place in the text of each token after a share of the sentences have changed places among each other.

    A sentence ends with the first of adjacent end tokens, and the text ends one. What the last end leaves over stays.
    """
    ends, count = np.empty(len(text), dtype=np.int64), 0
    was_end = False
    for place in range(len(text)):
        is_end = text[place] == sentence_end or place == len(text) - 1
        if is_end and not was_end:
            ends[count] = place + 1
            count += 1
        was_end = is_end
    moved = np.int64(np.ceil(count * ratio))
    chosen = draw_places(count, moved, SENTENCES, state)
    turns = draw_places(moved, moved, SENTENCE_ORDER, state)
    sentences = np.arange(count)
    for turn in range(moved):
        sentences[chosen[turn]] = chosen[turns[turn]]
    filled = 0
    for sentence in sentences:
        begin = ends[sentence - 1] if sentence > 0 else 0
        for place in range(begin, ends[sentence]):
            order[filled] = place
            filled += 1


@compiled
def infill(
    text: Ids, is_start: Marks, order: Places, state: np.uint64, rules: InfillingRules, replaced: Marks, noised: Ids
) -> tuple[np.int64, np.int64]:
    """Replace spans of words; return the spans without words, and the tokens written into `noised`."""
    words = np.int64(1)
    for place in range(1, len(order)):
        words += is_start[order[place]]
    budget = np.int64(np.ceil(np.float32(words) * np.float32(rules.mask_ratio)))
    empty, lengths = draw_lengths(budget, state, rules)
    owners, is_random = np.full(words, -1), np.zeros(words, dtype=np.bool_)
    starts = draw_places(words, len(lengths), SPAN_STARTS, state)
    for span in range(len(starts)):
        for word in range(starts[span], min(words, starts[span] + lengths[span])):
            # The span that begins first covers a word.
            owners[word] = starts[span] if owners[word] < 0 else min(owners[word], starts[span])
        is_random[starts[span]] = uniform(draw(state, SPAN_KINDS, span)) < rules.random_ratio
    word, size = -1, 0
    for place in range(len(order)):
        begins = place == 0 or is_start[order[place]]
        word += begins
        owner = owners[word]
        if owner < 0:
            noised[size] = text[order[place]]
            size += 1
            continue
        replaced[order[place]] = True
        if rules.replace_length == -1 or (rules.replace_length == 1 and begins and owner == word):
            noised[size] = random_token(draw(state, TOKENS, place), rules) if is_random[owner] else rules.mask_id
            size += 1
    return empty, np.int64(size)


@compiled
def draw_lengths(budget: np.int64, state: np.uint64, rules: InfillingRules) -> tuple[np.int64, Places]:
    """Draw lengths of spans until their sum is the budget, the last one cut; return the zeros, and the others."""
    lengths = np.ones(budget, dtype=np.int64)
    if len(rules.length_ends) == 0:
        return np.int64(0), lengths
    empty, count, total = np.int64(0), 0, np.int64(0)
    while total < budget:
        share = uniform(draw(state, SPAN_LENGTHS, empty + count))
        length = 0
        while length < len(rules.length_ends) - 1 and share >= rules.length_ends[length]:
            length += 1
        if length == 0:
            empty += 1
            continue
        lengths[count] = length
        total += length
        count += 1
    if count > 0:
        lengths[count - 1] -= total - budget
    return empty, lengths[:count]


@compiled
def insert(
    tokens: Ids, size: np.int64, count: np.int64, purpose: int, state: np.uint64, rules: InfillingRules
) -> np.int64:
    """Insert masks, and ceil(random_ratio · count) random tokens among them, at random places; return the new size."""
    count = min(count, len(tokens) - size)
    places = draw_places(size + count, count, purpose, state)
    random = np.int64(np.ceil(count * rules.random_ratio))
    inserted = np.full(size + count, -1, dtype=np.int32)
    for number in range(count):
        word = draw(state, purpose + 1, number)
        inserted[places[number]] = random_token(word, rules) if number < random else rules.mask_id
    left = size
    for place in range(size + count - 1, -1, -1):
        if inserted[place] < 0:
            left -= 1
            tokens[place] = tokens[left]
        else:
            tokens[place] = inserted[place]
    return np.int64(size + count)


@inlined
def random_token(word: np.uint64, rules: InfillingRules) -> np.int32:
    return rules.random_ids[below(word, len(rules.random_ids))]
