"""Inputs and targets of BART and mBART beside fairseq's rules (data/denoising_dataset.py) as slow loops over words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import count, product

import numpy as np
import pytest

from ctxlm_ds.data.numba_random import stream, stream_key, word_at
from ctxlm_ds.data.sample import NO_LABEL, NO_LANGUAGE, Samples, TargetExamples
from ctxlm_ds.objectives.corruption import infilling
from ctxlm_ds.objectives.corruption.infilling import InfillingRules, corrupt, poisson_ends
from tests import ragged
from tests.each import each
from tests.ragged import Sample, one_sample, samples_from, single_sample


class StreamDraws:
    """The draws of a sample's stream, by purpose."""

    def __init__(self, state: np.uint64, tokens: Sequence[int]) -> None:
        self._state, self._tokens = state, tokens

    def uniform(self, purpose: int) -> Iterator[float]:
        return ((self._word(purpose, number) >> 11) / 2**53 for number in count())

    def below(self, purpose: int, bound: int, number: int = 0) -> int:
        return self._word(purpose, number) // 2**32 * bound // 2**32

    def token(self, purpose: int, number: int) -> int:
        """A random token."""
        return self._tokens[self.below(purpose, len(self._tokens), number)]

    def different(self, purpose: int, among: int, number: int) -> list[int]:
        """`randperm(among)[:number]`."""
        left, chosen = list(range(among)), []
        for turn in range(number):
            place = turn + self.below(purpose, among - turn, turn)
            left[turn], left[place] = left[place], left[turn]
            chosen.append(left[turn])
        return chosen

    def _word(self, purpose: int, number: int) -> int:
        return int(np.uint64(word_at(self._state, purpose + infilling.PURPOSES * number)))


def sentences_of(text: Sequence[int], end: int) -> list[list[int]]:
    """The places of each sentence; those that are left over are a further list."""
    is_end = [token == end for token in text[:-1]] + [True]
    cuts = [place + 1 for place in range(len(text)) if is_end[place] and not (place and is_end[place - 1])]
    bounds = [0, *cuts, len(text)]
    return [list(range(first, after)) for first, after in zip(bounds, bounds[1:], strict=False)]


def permuted(text: Sequence[int], rules: InfillingRules, draws: StreamDraws) -> list[int]:
    """The places of the text after sentences have changed theirs."""
    *sentences, rest = sentences_of(text, rules.sentence_end)
    moved = math.ceil(len(sentences) * rules.permute_ratio)
    homes = draws.different(infilling.SENTENCES, len(sentences), moved)
    order = dict(
        zip(homes, (homes[turn] for turn in draws.different(infilling.SENTENCE_ORDER, moved, moved)), strict=True)
    )
    found = [place for number in range(len(sentences)) for place in sentences[order.get(number, number)]]
    return found + rest


def span_lengths(budget: int, rules: InfillingRules, draws: StreamDraws) -> list[int]:
    """Lengths until their sum is the budget."""
    if not len(rules.length_ends):
        return [1] * budget
    lengths: list[int] = []
    for share in draws.uniform(infilling.SPAN_LENGTHS):
        if sum(lengths) >= budget:
            break
        lengths.append(int((np.asarray(rules.length_ends[:-1]) <= share).sum()))
    return [*lengths[:-1], budget - sum(lengths[:-1])]


def infilled(places: list[int], text: Sequence[int], begins: set[int], rules: InfillingRules, draws: StreamDraws
             ) -> tuple[list[int], int, set[int]]:  # fmt: skip
    """The text with its spans replaced, the spans of no word, and the places of replaced tokens."""
    words: list[list[tuple[int, int]]] = []
    for turn, place in enumerate(places):
        if place in begins or not words:
            words.append([])
        words[-1].append((turn, place))
    lengths = span_lengths(math.ceil(np.float32(len(words)) * np.float32(rules.mask_ratio)), rules, draws)
    kept = [length for length in lengths if length]
    spans = dict(zip(draws.different(infilling.SPAN_STARTS, len(words), len(kept)), kept, strict=True))
    kinds = dict(
        zip(spans, (share < rules.random_ratio for share in draws.uniform(infilling.SPAN_KINDS)), strict=False)
    )
    written, replaced = [], set()
    for number, word in enumerate(words):
        covering = [first for first, length in spans.items() if first <= number < first + length]
        if not covering:
            written += [text[place] for _, place in word]
            continue
        replaced |= {place for _, place in word}
        owner = min(covering)
        masks = word if rules.replace_length == -1 else word[: rules.replace_length] if owner == number else []
        written += [draws.token(infilling.TOKENS, turn) if kinds[owner] else rules.mask_id for turn, _ in masks]
    return written, len(lengths) - len(kept), replaced


def inserted(text: list[int], number: int, purpose: int, rules: InfillingRules, draws: StreamDraws) -> list[int]:
    places = draws.different(purpose, len(text) + number, number)
    random = math.ceil(number * rules.random_ratio)
    new = {p: draws.token(purpose + 1, turn) if turn < random else rules.mask_id for turn, p in enumerate(places)}
    left = iter(text)
    return [new[place] if place in new else next(left) for place in range(len(text) + number)]


def by_rule(text: list[int], begins: set[int], rules: InfillingRules, draws: StreamDraws) -> tuple[list[int], set[int]]:
    """The input without its frame, and the places of tokens that it lacks."""
    places, replaced = list(range(len(text))), set[int]()
    if rules.permute_ratio:
        places = permuted(text, rules, draws)
    result = [text[place] for place in places]
    if rules.mask_ratio:
        result, masks, replaced = infilled(places, text, begins, rules, draws)
        result = inserted(result, masks, infilling.MASK_PLACES, rules, draws)
    if rules.insert_ratio:
        result = inserted(result, math.ceil((len(result) + 2) * rules.insert_ratio), infilling.PLACES, rules, draws)
    if rules.rotate_prob and next(draws.uniform(infilling.ROTATION)) < rules.rotate_prob:
        shift = draws.below(infilling.SHIFT, len(result) + 1)
        result = result[shift:] + result[:shift]
    return result, replaced


KEY = stream_key(3, "mask")
CLS, SEP, MASK, STOP, LANGUAGE, FIRST_ID, VOCABULARY = 2, 3, 4, 10, 5, 8, 1000
MEAN = 3.0


def rules_of(**changed: object) -> InfillingRules:
    """The published rules; words begin at even ids."""
    return InfillingRules(
        mask_ratio=0.3, length_ends=poisson_ends(MEAN), replace_length=1, random_ratio=0.1, permute_ratio=1.0,
        insert_ratio=0.0, rotate_prob=0.0, sentence_end=STOP, cls_id=CLS, sep_id=SEP, mask_id=MASK,
        random_ids=np.arange(FIRST_ID, VOCABULARY, dtype=np.int32),
        token_languages=np.empty(0, dtype=np.int32), word_starts=np.arange(VOCABULARY) % 2 == 0,
    )._replace(**changed)  # fmt: skip


def texts(number: int, length: int, seed: int = 0) -> list[Sample]:
    """Texts with a full stop about every eighth token."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(FIRST_ID, VOCABULARY, size=(number, length))
    ids[rng.random(ids.shape) < 0.12] = STOP
    return [single_sample(row) for row in ids]


def noised(samples: Samples, rules: InfillingRules, limit: int = 600) -> TargetExamples:
    return corrupt(samples, KEY, np.full(len(samples.keys), limit), rules)


SINGLE: dict[str, object] = {"length_ends": np.empty(0), "permute_ratio": 0.0}
TABLE_1: dict[str, dict[str, object]] = {
    "token masking": SINGLE | {"mask_ratio": 0.15, "word_starts": np.empty(0, dtype=np.bool_)},
    "token deletion": SINGLE | {"replace_length": 0, "word_starts": np.empty(0, dtype=np.bool_)},
    "text infilling": {"permute_ratio": 0.0},
    "document rotation": {"mask_ratio": 0.0, "permute_ratio": 0.0, "rotate_prob": 0.5},
    "sentence permutation": {"mask_ratio": 0.0},
    "text infilling and sentence permutation": {},
}
"""The corruptions of table 1 of the paper."""
OTHERS: dict[str, dict[str, object]] = {
    "mBART": {"mask_ratio": 0.35, "length_ends": poisson_ends(3.5), "sentence_end": SEP},
    "a mask each token": {"replace_length": -1, "random_ratio": 0.5},
    "deleted spans": {"replace_length": 0, "permute_ratio": 0.5},
    "masked words": {"length_ends": np.empty(0), "mask_ratio": 1.0},
    "many short spans": {"length_ends": poisson_ends(0.3), "random_ratio": 0.3},
    "everything": {"insert_ratio": 0.2, "rotate_prob": 1.0, "permute_ratio": 0.3, "mask_ratio": 0.6},
}  # fmt: skip


@each("name, length", product([*TABLE_1, *OTHERS], [1, 60]))
def test_the_published_rules_give_the_same(name: str, length: int) -> None:
    rules = rules_of(**(TABLE_1 | OTHERS)[name])
    samples = samples_from(texts(25, length))
    examples = noised(samples, rules)
    for number in range(25):
        text = one_sample(samples, number).input_ids[1:-1].tolist()
        begins = {0, *(place for place in range(length) if not len(rules.word_starts) or text[place] % 2 == 0)}
        draws = StreamDraws(np.uint64(stream(KEY, *samples.keys[number])), rules.random_ids.tolist())
        found, replaced = by_rule(text, begins, rules, draws)
        assert examples.example(number).input_ids.tolist() == [CLS, *found, SEP]
        assert examples.example(number).target_ids.tolist() == [CLS, *text, SEP]
        first, after = examples.target_starts[number : number + 2]
        assert np.flatnonzero(examples.replaced[first:after]).tolist() == [place + 1 for place in sorted(replaced)]


def test_a_language_stands_behind_the_text() -> None:
    """`s1 </s> s2 </s> en_XX`; separators are words and move with their sentences."""
    ids = np.array([CLS, 20, 21, SEP, 30, 31, 32, SEP, 40, SEP, SEP], dtype=np.int32)
    special = np.isin(ids, (CLS, SEP))
    samples = samples_from([Sample(ids, np.zeros_like(ids), special, NO_LABEL)] * 50)
    samples = samples._replace(language_ids=np.full(50, LANGUAGE, dtype=np.int32))
    orders = set()
    for example in ragged.each(noised(samples, rules_of(mask_ratio=0.0, sentence_end=SEP), 11)):
        assert example.target_ids.tolist() == [20, 21, SEP, 30, 31, 32, SEP, 40, SEP, LANGUAGE]
        assert example.input_ids[-2:].tolist() == [SEP, LANGUAGE]
        ends = np.flatnonzero(example.input_ids == SEP)
        orders.add(tuple(tuple(part.tolist()) for part in np.split(example.input_ids[:-1], ends[:-1] + 1)))
    assert len(orders) == 6
    assert set(map(frozenset, orders)) == {frozenset({(20, 21, SEP), (30, 31, 32, SEP), (40, SEP)})}


def test_spans_of_a_language_without_blanks_are_of_tokens() -> None:
    """fairseq's --no-whole-word-mask-langs; sentencepiece makes a sentence of such a language one word."""
    other = LANGUAGE + 1
    sentence = single_sample(np.full(40, 2 * FIRST_ID + 1))  # its tokens continue a word
    samples = samples_from([sentence] * 400)._replace(language_ids=np.repeat([other, LANGUAGE], 200).astype(np.int32))
    found = noised(samples, rules_of(token_languages=np.array([LANGUAGE], dtype=np.int32)))
    words, tokens = noised(samples, rules_of()), noised(samples, rules_of(word_starts=np.empty(0, dtype=np.bool_)))
    for number, (example, wanted) in enumerate(zip(ragged.each(found), ragged.each(words), strict=True)):
        wanted = tokens.example(number) if number >= 200 else wanted
        assert example.input_ids.tolist() == wanted.input_ids.tolist()
    lost = found.replaced.reshape(400, -1).sum(axis=1)
    assert set(lost[:200].tolist()) == {1, 40} and lost[200:].max() <= math.ceil(0.3 * 41)


def test_an_input_keeps_to_its_limit() -> None:
    rules = rules_of(length_ends=poisson_ends(0.05), mask_ratio=1.0, insert_ratio=1.0)
    samples = samples_from(texts(50, 20))
    for limit in (22, 44, 60):
        examples = noised(samples, rules, limit)
        assert np.diff(examples.starts).max() == limit
        assert np.diff(examples.target_starts).max() == min(22, limit // 2)
    assert np.diff(noised(samples, rules).starts).max() > 60


@pytest.mark.parametrize("language", [NO_LANGUAGE, LANGUAGE])
def test_a_text_without_separator_is_cut_for_its_frame(language: int) -> None:
    ids = np.arange(20, 30, dtype=np.int32)
    ids[0] = CLS
    samples = samples_from([Sample(ids, np.zeros_like(ids), ids == CLS, NO_LABEL)])
    samples = samples._replace(language_ids=np.array([language], dtype=np.int32))
    (example,) = ragged.each(noised(samples, rules_of(), len(ids)))
    text = list(range(21, 29))
    assert example.target_ids.tolist() == ([CLS, *text, SEP] if language == NO_LANGUAGE else [*text, SEP, LANGUAGE])


def test_a_sample_without_text_is_its_frame() -> None:
    ids = np.array([CLS, SEP], dtype=np.int32)
    (example,) = ragged.each(noised(samples_from([Sample(ids, np.zeros_like(ids), ids > 0, NO_LABEL)]), rules_of()))
    assert example.target_ids.tolist() == [CLS, SEP]
    assert example.input_ids[[0, -1]].tolist() == [CLS, SEP]


def test_lengths_of_spans_are_poisson() -> None:
    shares = np.diff(poisson_ends(MEAN), prepend=0.0)
    expected = [math.exp(-MEAN) * MEAN**length / math.factorial(length) for length in range(len(shares))]
    assert np.abs(shares - expected).max() < 1e-7 and expected[-1] < 1e-7 <= expected[-2]
    assert (np.diff(poisson_ends(16.0), prepend=0.0) * np.arange(len(poisson_ends(16.0)))).sum() == pytest.approx(16.0)
