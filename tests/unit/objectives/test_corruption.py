"""Masking by the published definitions, measured."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from ctxlm_ds.config.schema import ObjectiveConfig
from ctxlm_ds.data.randomness import KeyedStreams, SampleDraws
from ctxlm_ds.data.sample import Example, Sample
from ctxlm_ds.data.samples.template import SequenceTemplate
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.corruption import MaskedTokenCorruption
from tests.sample_data import FIRST_WORD_ID, FakeTokenizer

TEMPLATE = SequenceTemplate(cls_id=2, sep_id=3, pad_id=0, double_separator=False)
TOKENIZER = FakeTokenizer()


def samples_of(lengths: list[int] | NDArray[np.int64], seed: int = 0, vocab_size: int = 1000) -> list[Sample]:
    """Pairs of the given total lengths (at least 5), random words."""
    rng = np.random.default_rng(seed)
    made = []
    for length in lengths:
        text = rng.integers(FIRST_WORD_ID, vocab_size, size=length - 3)
        made.append(TEMPLATE.pair(text[: len(text) // 2], text[len(text) // 2 :], 0))
    return made


def corrupt(samples: list[Sample], budget: int = 1000, key: int = 0, **settings: object) -> list[Example]:
    config = ObjectiveConfig.model_validate(settings)
    draws = SampleDraws(KeyedStreams(1, "mask"), [(number, key, 0) for number in range(len(samples))])
    return MaskedTokenCorruption(config, TOKENIZER).corrupt_batch(samples, draws, np.full(len(samples), budget))


def outcomes(samples: list[Sample], examples: list[Example]) -> dict[str, int]:
    """How many predictions became the mask, stayed, were replaced."""
    counts = {"mask": 0, "kept": 0, "random": 0}
    for example in examples:
        seen = example.input_ids[example.prediction_positions]
        counts["mask"] += int((seen == TOKENIZER.mask_id).sum())
        counts["kept"] += int((seen == example.prediction_labels).sum())
        counts["random"] += int(((seen != TOKENIZER.mask_id) & (seen != example.prediction_labels)).sum())
    return counts


@pytest.mark.parametrize("settings", [{}, {"whole_word": True}, {"special_tokens": "roberta"}])
def test_labels_are_the_originals_and_nothing_else_changes(settings: dict[str, object]) -> None:
    samples = samples_of(np.random.default_rng(1).integers(5, 128, size=100))
    for sample, example in zip(samples, corrupt(samples, **settings), strict=True):
        positions = example.prediction_positions
        assert np.array_equal(example.prediction_labels, sample.input_ids[positions])
        assert (np.diff(positions) > 0).all()
        restored = example.input_ids.copy()
        restored[positions] = example.prediction_labels
        assert np.array_equal(restored, sample.input_ids)
        assert example.token_type_ids is sample.token_type_ids


def test_count_is_berts_and_at_least_one() -> None:
    lengths = list(range(5, 129))
    for length, example in zip(lengths, corrupt(samples_of(lengths)), strict=True):
        assert len(example.prediction_positions) == min(max(1, round(length * 0.15)), length - 3)


def test_count_never_exceeds_the_budget() -> None:
    for settings in ({}, {"whole_word": True}, {"count_rounding": "probabilistic"}):
        examples = corrupt(samples_of([128] * 50), budget=7, **settings)
        assert max(len(example.prediction_positions) for example in examples) == 7


def test_probabilistic_rounding_is_exact_on_average() -> None:
    samples = samples_of([50] * 4000)
    counts = np.array([len(e.prediction_positions) for e in corrupt(samples, count_rounding="probabilistic")])
    assert set(counts.tolist()) == {7, 8}
    assert abs(counts.mean() - 7.5) < 4 * 0.5 / math.sqrt(4000)
    shortest = corrupt(samples_of([5] * 500), count_rounding="probabilistic")
    assert all(len(example.prediction_positions) >= 1 for example in shortest)


def test_shares_of_mask_kept_and_random() -> None:
    samples = samples_of([128] * 3000)
    counts = outcomes(samples, corrupt(samples))
    total = sum(counts.values())
    assert total == 3000 * 19
    # A random token equals the original once in 995, which counts as kept.
    same = 0.1 / (1000 - FIRST_WORD_ID)
    for name, share in (("mask", 0.8), ("kept", 0.1 + same), ("random", 0.1 - same)):
        assert abs(counts[name] / total - share) < 4 * math.sqrt(share * (1 - share) / total), name


def test_other_shares_are_followed() -> None:
    samples = samples_of([128] * 500)
    assert outcomes(samples, corrupt(samples, keep_prob=0.0, random_prob=0.0))["mask"] == 500 * 19
    counts = outcomes(samples, corrupt(samples, keep_prob=0.5, random_prob=0.5))
    assert counts["mask"] == 0 and abs(counts["kept"] / (500 * 19) - 0.5) < 0.03
    assert sum(outcomes(samples, corrupt(samples, mask_prob=0.4)).values()) == 500 * 51


def test_positions_are_uniform_over_the_text() -> None:
    samples = samples_of([64] * 6000)
    counts = np.zeros(64)
    for example in corrupt(samples):
        counts[example.prediction_positions] += 1
    specials = samples[0].special_mask
    assert counts[specials].sum() == 0
    expected = counts.sum() / (~specials).sum()
    chi_square = ((counts[~specials] - expected) ** 2 / expected).sum()
    assert chi_square < 60 + 5 * math.sqrt(2 * 60)


def test_random_tokens_are_uniform_over_words_or_the_whole_vocabulary() -> None:
    samples = samples_of([512] * 500)
    for habit, lowest in (("never", FIRST_WORD_ID), ("roberta", FIRST_WORD_ID), ("bert", 0)):
        examples = corrupt(samples, keep_prob=0.0, random_prob=1.0, special_tokens=habit)
        drawn = np.concatenate([example.input_ids[example.prediction_positions] for example in examples])
        assert drawn.max() == TOKENIZER.vocab_size - 1
        counts = np.bincount(drawn, minlength=1000)
        assert counts[:lowest].sum() == 0 and (counts[lowest:] > 0).all()
        expected = counts.sum() / (1000 - lowest)
        degrees = 1000 - lowest - 1
        assert abs(((counts[lowest:] - expected) ** 2 / expected).sum() - degrees) < 5 * math.sqrt(2 * degrees)


def test_special_tokens_are_predicted_only_as_fairseq_does() -> None:
    samples = samples_of([20] * 2000)
    specials = samples[0].special_mask
    for habit in ("never", "bert", "roberta"):
        counts = np.zeros(20)
        for example in corrupt(samples, special_tokens=habit):
            counts[example.prediction_positions] += 1
        if habit == "roberta":
            assert np.abs(counts - 300).max() < 5 * math.sqrt(300)
        else:
            assert counts[specials].sum() == 0


def word_of(sample: Sample) -> NDArray[np.int64]:
    """Number of the word that each position belongs to: odd ids continue a word, specials stand alone."""
    starts = (sample.input_ids % 2 == 0) | sample.special_mask
    starts[1:] |= sample.special_mask[:-1]
    return np.cumsum(starts)


def test_whole_words_are_whole() -> None:
    samples = samples_of(np.random.default_rng(3).integers(40, 128, size=800), seed=3)
    predicted = 0
    for sample, example in zip(samples, corrupt(samples, whole_word=True), strict=True):
        words = word_of(sample)
        chosen = np.isin(words, words[example.prediction_positions])
        assert np.array_equal(np.flatnonzero(chosen), example.prediction_positions)
        assert not sample.special_mask[example.prediction_positions].any()
        assert 1 <= len(example.prediction_positions) <= round(len(words) * 0.15)
        predicted += len(example.prediction_positions)
    # Words that would exceed the budget are skipped and shorter ones fill it.
    assert predicted > 0.99 * sum(round(len(sample.input_ids) * 0.15) for sample in samples)


def test_whole_words_equal_the_originals_loop() -> None:
    """BERT's loop over shuffled candidates, driven by the same order of words."""
    samples = samples_of([60] * 50, seed=8)
    config = ObjectiveConfig(whole_word=True)
    draws = SampleDraws(KeyedStreams(1, "mask"), [(number, 0, 0) for number in range(50)])
    examples = MaskedTokenCorruption(config, TOKENIZER).corrupt_batch(samples, draws, np.full(50, 1000))
    ranks = draws.words(1 + 2 * 60)[:, 1::2]
    for row, (sample, example) in enumerate(zip(samples, examples, strict=True)):
        candidates: list[list[int]] = []
        for position in range(60):
            if sample.special_mask[position]:
                continue
            continues = sample.input_ids[position] % 2 == 1 and not sample.special_mask[position - 1]
            if continues and candidates:
                candidates[-1].append(position)
            else:
                candidates.append([position])
        candidates.sort(key=lambda word: ranks[row, word[0]])
        masked: list[int] = []
        for word in candidates:
            if len(masked) >= 9:
                break
            if len(masked) + len(word) > 9:
                continue
            masked.extend(word)
        assert sorted(masked) == example.prediction_positions.tolist()


def test_one_long_word_is_predicted_in_part() -> None:
    ids = np.full(40, 7)  # odd: every token but the first continues the word
    for example in corrupt([TEMPLATE.single([ids])] * 20, whole_word=True):
        assert example.prediction_positions.tolist() == [1, 2, 3, 4, 5, 6]


def test_nothing_to_predict_in_a_sample_of_specials() -> None:
    empty = TEMPLATE.single([np.empty(0, dtype=np.int64)])
    for settings in ({}, {"whole_word": True}):
        bare, full = corrupt([empty, samples_of([30])[0]], **settings)
        assert len(bare.prediction_positions) == 0 and np.array_equal(bare.input_ids, empty.input_ids)
        assert len(full.prediction_positions) >= 1


@pytest.mark.parametrize("settings", [{}, {"whole_word": True}, {"count_rounding": "probabilistic"}])
def test_a_sample_is_corrupted_alike_in_any_batch(settings: dict[str, object]) -> None:
    lengths = np.random.default_rng(2).integers(5, 100, size=40)
    samples = samples_of(lengths)
    corruption = MaskedTokenCorruption(ObjectiveConfig.model_validate(settings), TOKENIZER)
    streams = KeyedStreams(1, "mask")
    together = corruption.corrupt_batch(
        samples, SampleDraws(streams, [(n, 0, 0) for n in range(40)]), np.full(40, 1000)
    )
    for number in (0, 7, 39):
        draws = SampleDraws(streams, [(number, 0, 0)])
        alone = corruption.corrupt_batch([samples[number]], draws, np.full(1, 1000))[0]
        assert np.array_equal(alone.input_ids, together[number].input_ids)
        assert np.array_equal(alone.prediction_positions, together[number].prediction_positions)


def test_keys_give_different_masks() -> None:
    samples = samples_of([128] * 20)
    one, other = corrupt(samples, key=0), corrupt(samples, key=1)
    same = [np.array_equal(a.prediction_positions, b.prediction_positions) for a, b in zip(one, other, strict=True)]
    assert not any(same)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"keep_prob 0\.6 and objective\.random_prob 0\.5"):
        MaskedTokenCorruption(ObjectiveConfig(keep_prob=0.6, random_prob=0.5), TOKENIZER)
    with pytest.raises(ConfigError, match="all special"):
        MaskedTokenCorruption(ObjectiveConfig(), FakeTokenizer(vocab_size=5))
