"""The fields of permutation language modelling, its settings, and which tokens begin a word."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.sample import NO_LABEL
from ctxlm_ds.data.stream.collate import collate_arrays, split_fields
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.permutation_lm import PermutationLM, PermutationLMSection, word_beginnings
from ctxlm_ds.recipe.check import check_config
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.ragged import Sample, samples_from
from tests.sample_data import run_config
from tests.unit.data.formats.test_text_and_pair import config_of

LENGTH = 24
TEXT = ["The cat sat, then (it) slept. <b> isn't far-off.", "A cat is far away."] * 20


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer("xlnet", TEXT, 60, tmp_path_factory.mktemp("tokenizer") / "xlnet")


def test_words_begin_at_spaces_punctuation_and_angle_brackets(tokenizer: Tokenizer) -> None:
    begins = word_beginnings(tokenizer)
    for token_id in range(tokenizer.vocab_size):
        token = tokenizer.id_to_token(token_id)
        wanted = token.startswith(("▁", "<")) or token in set('!"#$%&"()*+,-./:;?@[\\]^_`{|}~')
        assert begins[token_id] == wanted, token


def test_fields_hold_ranks_slots_types_and_directions(tokenizer: Tokenizer) -> None:
    objective = PermutationLM(PermutationLMSection(), tokenizer)
    data = config_of(LENGTH, both_directions=True).data
    fields = objective.fields(data)
    rng, samples = np.random.default_rng(0), []
    for direction in (0, 1):
        ids = rng.integers(9, tokenizer.vocab_size, size=LENGTH).astype(np.int32)
        ids[[17, 22, 23]] = tokenizer.sep_id, tokenizer.sep_id, tokenizer.cls_id
        types = (np.arange(LENGTH) > 17).astype(np.int32)
        samples.append(Sample(ids, types, np.isin(np.arange(LENGTH), [17, 22, 23]), direction))
    flat = samples_from(samples)
    examples = objective.corrupt_batch(flat, np.uint64(5), objective.budgets(flat.lengths, data))
    arrays = split_fields(collate_arrays(objective, fields, examples, np.array([0, 1, 2])), fields)
    for row, sample in enumerate(samples):
        labels, slots = arrays["permutation_lm_labels"][row], arrays["target_positions"][row]
        used = labels != IGNORE_LABEL
        assert 1 <= used.sum() <= LENGTH // 6 == len(labels) and (slots[~used] == LENGTH).all()
        assert np.array_equal(sample.input_ids[slots[used]], labels[used])
        assert np.array_equal(arrays["input_ids"][row], sample.input_ids)
        assert arrays["token_type_ids"][row].tolist() == [0] * 18 + [1] * 5 + [2]
        assert arrays["directions"][row].tolist() == [row]
        ranks = arrays["ranks"][row]
        ordered = np.flatnonzero((ranks != ranks[: LENGTH // 2].min()) & (ranks != ranks[LENGTH // 2 :].min()))
        special = np.flatnonzero(sample.special_mask)
        assert set(ordered) == {*slots[used], *special} or len(special) + used.sum() == 0
        assert ranks[: LENGTH // 2].max() < ranks[LENGTH // 2 :].min()


def test_shorter_rows_have_their_share_of_predictions_and_padding_is_seen_by_none(tokenizer: Tokenizer) -> None:
    objective = PermutationLM(PermutationLMSection(num_predictions=8), tokenizer)
    data = run_config(
        data={"sample_format": "full_sentences", "seq_length": LENGTH}, objective={"name": "permutation_lm"},
        model={"family": "xlnet"},
    ).data  # fmt: skip
    assert objective.budgets(np.array([LENGTH, 12, 3, 1]), data).tolist() == [8, 4, 1, 1]
    ids = np.arange(9, 21, dtype=np.int32)
    flat = samples_from([Sample(ids, np.zeros_like(ids), np.zeros(12, dtype=np.bool_), NO_LABEL)])
    examples = objective.corrupt_batch(flat, np.uint64(5), np.array([4]))
    fields = objective.fields(data)
    arrays = split_fields(collate_arrays(objective, fields, examples, np.array([0, 1])), fields)
    ranks = arrays["ranks"][0]
    assert ranks[12:].min() > ranks[:12].max() and (arrays["permutation_lm_labels"] != IGNORE_LABEL).sum() == 4


def test_the_published_number_of_predictions_follows_from_the_context() -> None:
    assert PermutationLMSection().slots(config_of(512).data) == 85
    assert PermutationLMSection().stack_lengths(config_of(512).data) == (597,)


@pytest.mark.parametrize(("settings", "message"), [
    ({"predicted_tokens": 7}, r"objective\.predicted_tokens: 7 is more than objective\.context_tokens 6"),
    ({"num_predictions": 33}, r"objective\.num_predictions: 33 is more than a row has positions"),
    ({"perm_size": 17}, r"objective\.perm_size: 17 is longer than half a row"),
])  # fmt: skip
def test_impossible_settings_are_refused(settings: dict[str, int], message: str) -> None:
    config = config_of(32)
    section = PermutationLMSection(**settings)
    with pytest.raises(ConfigError, match=message):
        check_config(config.model_copy(update={"objective": section}), None)


def test_both_streams_are_divided_among_ranks() -> None:
    parallel = {"tensor_parallel_size": 2, "sequence_parallel": True}
    config = config_of(32)
    training = config.training.model_copy(update={"micro_batch_size": 1})
    update = {"parallel": config.parallel.model_copy(update=parallel), "training": training}
    with pytest.raises(ConfigError, match=r"micro_batch_size 1 x positions and predictions of a row 37 = 37"):
        check_config(config.model_copy(update=update), None)


def test_predicted_tokens_are_shown_in_brackets(tokenizer: Tokenizer, tmp_path: Path) -> None:
    objective = PermutationLM(PermutationLMSection(), tokenizer)
    ids = np.array(tokenizer.encode_batch(["The cat is far away."])[0], dtype=np.int32)
    flat = samples_from([Sample(ids, np.zeros_like(ids), np.zeros(len(ids), dtype=np.bool_), NO_LABEL)])
    example = objective.corrupt_batch(flat, np.uint64(5), np.array([2])).example(0)
    assert objective.render(example, tokenizer).plain.count("[") == 2
