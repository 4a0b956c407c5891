"""Masking by the published definitions, with the same draws."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from ctxlm_ds.data.numba_random import stream_key
from ctxlm_ds.data.sample import Example
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.objectives.corruption.tokens import text_ids, word_starts
from ctxlm_ds.recipe.sections import ObjectiveSection
from tests.ragged import Sample, each, pair_sample, samples_from, single_sample
from tests.sample_data import FIRST_WORD_ID, FakeTokenizer
from tests.sections import objective_section

TOKENIZER = FakeTokenizer()
KEY = stream_key(1, "mask")


def samples_of(lengths: list[int] | NDArray[np.int64], seed: int = 0, vocab_size: int = 1000) -> list[Sample]:
    """Pairs of the given total lengths (at least 5), random words."""
    rng = np.random.default_rng(seed)
    made = []
    for length in lengths:
        text = rng.integers(FIRST_WORD_ID, vocab_size, size=length - 3)
        made.append(pair_sample(text[: len(text) // 2], text[len(text) // 2 :]))
    return made


def corrupt(samples: list[Sample], budget: int = 1000, **settings: object) -> list[Example]:
    objective = build_objective(objective_section(**settings), TOKENIZER)
    return each(objective.corrupt_batch(samples_from(samples), KEY, np.full(len(samples), budget)))


class Words:
    """The words of a sample's stream as corruption/tokens.py documents them, in Python's whole numbers."""

    GAMMA, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1

    def __init__(self, key: int, integers: tuple[int, int, int]) -> None:
        self.state = self.mix(key + integers[0] * self.GAMMA + self.GAMMA)
        for number, integer in enumerate(integers[1:], start=1):
            self.state = self.mix(self.state ^ ((integer * self.GAMMA + number) & self.MASK))

    def mix(self, word: int) -> int:
        word &= self.MASK
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & self.MASK
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & self.MASK
        return word ^ (word >> 31)

    def __getitem__(self, number: int) -> int:
        return self.mix(self.state + (number + 1) * self.GAMMA)


def berts_corruption(
    sample: Sample, words: Words, budget: int, config: ObjectiveSection
) -> tuple[list[int], list[int]]:
    """create_masked_lm_predictions of google-research/bert, its shuffle and draws taken from `words`.

    Returns:
        The positions predicted, ascending, and the corrupted tokens.
    """
    ids, special, length = sample.input_ids.tolist(), sample.special_mask.tolist(), len(sample.input_ids)
    expected = length * config.mask_prob
    whole = round(expected) if config.count_rounding == "nearest" else int(expected + (words[0] >> 11) * 2.0**-53)
    wanted = min(max(1, whole), budget)
    candidates: list[list[int]] = []
    for position in range(length):
        if special[position] and config.special_tokens != "roberta":
            continue
        continues = ids[position] % 2 == 1 and not special[position] and position and not special[position - 1]
        if config.whole_word and continues:
            candidates[-1].append(position)
        else:
            candidates.append([position])
    for turn in range(len(candidates)):
        drawn = turn + ((words[1 + 2 * turn] >> 32) * (len(candidates) - turn) >> 32)
        candidates[turn], candidates[drawn] = candidates[drawn], candidates[turn]
    predicted: list[int] = []
    for candidate in candidates:
        if len(predicted) < wanted and len(predicted) + len(candidate) <= wanted:
            predicted.extend(candidate)
    predicted = sorted(predicted or candidates[0][:wanted])
    drawable = [token for token in range(1000) if config.special_tokens == "bert" or token >= FIRST_WORD_ID]
    for position in predicted:
        word = words[2 + 2 * position]
        action = (word >> 32) * 2.0**-32
        if action < 1.0 - config.random_prob - config.keep_prob:
            ids[position] = TOKENIZER.mask_id
        elif action >= 1.0 - config.random_prob:
            ids[position] = drawable[(word & 0xFFFFFFFF) * len(drawable) >> 32]
    return predicted, ids


@pytest.mark.parametrize("whole_word", [False, True])
@pytest.mark.parametrize("special_tokens", ["never", "bert", "roberta"])
@pytest.mark.parametrize("count_rounding", ["nearest", "probabilistic"])
@pytest.mark.parametrize("budget", [1000, 5])
def test_every_sample_is_the_originals_loop_over_documented_words(
    whole_word: bool, special_tokens: str, count_rounding: str, budget: int
) -> None:
    settings = {"whole_word": whole_word, "special_tokens": special_tokens, "count_rounding": count_rounding}
    config = objective_section(**settings | {"mask_prob": 0.2, "keep_prob": 0.2, "random_prob": 0.3})
    samples = samples_of(np.random.default_rng(8).integers(5, 90, size=60), seed=8)
    keys = [(number * 10**12, 3, (1 << 64) - 1 - number) for number in range(60)]
    laid = samples_from(samples, keys)
    examples = each(build_objective(config, TOKENIZER).corrupt_batch(laid, KEY, np.full(60, budget)))
    for sample, key, example in zip(samples, keys, examples, strict=True):
        positions, ids = berts_corruption(sample, Words(int(KEY), key), budget, config)
        assert example.prediction_positions.tolist() == positions
        assert example.input_ids.tolist() == ids
        assert np.array_equal(example.prediction_labels, sample.input_ids[positions])
        assert np.array_equal(example.token_type_ids, sample.token_type_ids)


def test_one_long_word_is_predicted_in_part() -> None:
    ids = np.full(40, 7)  # odd: every token but the first continues the word
    for example in corrupt([single_sample(ids)] * 20, whole_word=True):
        assert example.prediction_positions.tolist() == [1, 2, 3, 4, 5, 6]


def test_an_unknown_word_of_the_text_is_predicted_as_in_the_original() -> None:
    """DistilBERT's token_probs is 0 at special ids; BERT and fairseq draw an [UNK] of the text like any token."""
    ids = np.where(np.arange(40) % 2, TOKENIZER.unk_id, 2 * np.arange(40) + FIRST_WORD_ID + 1)
    samples = [single_sample(ids)] * 50
    shares = {}
    for special_tokens in ("never", "bert", "roberta", "distilbert"):
        for whole_word in (False, True):
            examples = corrupt(samples, special_tokens=special_tokens, whole_word=whole_word, mask_prob=0.3)
            labels = np.concatenate([example.prediction_labels for example in examples])
            shares[special_tokens, whole_word] = float((labels == TOKENIZER.unk_id).mean())
            assert len(labels) == 50 * round(0.3 * 42)
    assert {name: share for (name, _), share in shares.items() if share < 0.3} == {"distilbert": 0.0}
    unknown = single_sample(np.full(8, TOKENIZER.unk_id))
    assert len(corrupt([unknown], special_tokens="distilbert")[0].prediction_labels) == 0


@dataclass
class PieceTokenizer(FakeTokenizer):
    """Pieces of sentencepiece."""

    pieces: tuple[str, ...] = ()
    marks_blanks: bool = True

    def word_start_mask(self) -> NDArray[np.bool_]:
        return np.array([piece.startswith("▁") for piece in self.pieces])

    def id_to_token(self, token_id: int) -> str:
        return self.pieces[token_id]


@pytest.mark.parametrize("marks_blanks", [True, False])
def test_alberts_words_of_sentencepiece_begin_at_more_than_blanks(marks_blanks: bool) -> None:
    """_is_start_piece_sp of google-research/albert; with WordPiece its words are BERT's."""
    marked, begin = ("▁the", "▁", "▁,"), (",", "(", "'", "'s", "5", "1st", "=", "a=b", "<b", "é", "né", "猫", "€", "…")
    inside = ("ing", "ING", "s,", "co-op", "--", "e.g.")
    pieces = (*marked, *begin, *inside)
    tokenizer = PieceTokenizer(len(pieces), special_ids=frozenset(), pieces=pieces, marks_blanks=marks_blanks)
    for setting, wanted in (("blank", marked), ("albert", (*marked, *begin) if marks_blanks else marked)):
        starts = word_starts(objective_section(whole_word=True, word_starts=setting), tokenizer)
        assert tuple(np.array(pieces)[starts]) == wanted


def test_nothing_to_predict_in_a_sample_of_specials() -> None:
    empty = single_sample(np.empty(0, dtype=np.int64))
    for settings in ({}, {"whole_word": True}):
        bare, full = corrupt([empty, samples_of([30])[0]], **settings)
        assert len(bare.prediction_positions) == 0 and np.array_equal(bare.input_ids, empty.input_ids)
        assert len(full.prediction_positions) >= 1


@pytest.mark.parametrize("name", ["masked_lm", "masked_seq2seq", "text_infilling"])
def test_objectives_refuse_a_tokenizer_of_special_tokens(name: str) -> None:
    section = objective_section(name=name, **{"sentence_end": None} if name == "text_infilling" else {})
    with pytest.raises(ConfigError, match="the tokenizer's 5 tokens are all special; train it on more text"):
        build_objective(section, FakeTokenizer(vocab_size=5))


def test_text_is_what_is_not_special() -> None:
    tokenizer = FakeTokenizer(vocab_size=9, special_ids=frozenset({0, 1, 2, 3, 4, 7}))
    ids = text_ids(tokenizer)  # type: ignore[arg-type]
    assert ids.tolist() == [5, 6, 8] and ids.dtype == np.int32
