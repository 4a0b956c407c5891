"""What MASS's decoder reads and writes, and at which positions."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.sample import NO_LABEL
from ctxlm_ds.data.stream.collate import collate_arrays, split_fields
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.masked_seq2seq import MaskedSeq2Seq
from ctxlm_ds.recipe.check import check_config
from ctxlm_ds.recipe.schema import RunConfig
from tests.ragged import Sample, samples_from
from tests.sample_data import FakeTokenizer, run_config

LENGTH = 32


def config_of(**objective: object) -> RunConfig:
    return run_config(
        model={"family": "bart"}, objective={"name": "masked_seq2seq"} | objective,
        data={"sample_format": "doc_sentences", "seq_length": LENGTH, "packing": True},
    )  # fmt: skip


def filled(
    lengths: list[int], row_starts: list[int], **settings: object
) -> tuple[list[Sample], dict[str, NDArray[np.int32]]]:
    """Samples of these lengths, and the fields of the rows that hold them."""
    config, rng = config_of(**settings), np.random.default_rng(0)
    objective = MaskedSeq2Seq(config.objective, FakeTokenizer())  # type: ignore[arg-type]
    rows = [rng.integers(5, 1000, size=length).astype(np.int32) for length in lengths]
    samples = [Sample(row, np.zeros_like(row), np.zeros(len(row), dtype=np.bool_), NO_LABEL) for row in rows]
    examples = objective.corrupt_batch(samples_from(samples), np.uint64(5), np.array(lengths))
    fields = objective.fields(config.data)
    return samples, split_fields(collate_arrays(objective, fields, examples, np.array(row_starts)), fields)


def test_the_decoder_reads_the_token_before_each_that_it_writes() -> None:
    samples, arrays = filled([20, 11, 32, 1], [0, 2, 3, 4])
    for row, members in enumerate(([0, 1], [2], [3])):
        labels, inputs = arrays["decoder_labels"][row], arrays["decoder_input_ids"][row]
        places, sequences = arrays["decoder_position_ids"][row], arrays["decoder_sequence_ids"][row]
        written = labels != IGNORE_LABEL
        assert written.sum() == sum((len(samples[number].input_ids) - 1) // 2 for number in members)
        for number, label, read, place in zip(
            sequences[written], labels[written], inputs[written], places[written], strict=True
        ):
            text = samples[members[number - 1]].input_ids
            assert (text[place], text[place - 1]) == (label, read)
        for number in range(1, len(members) + 1):
            assert (np.diff(places[written & (sequences == number)]) == 1).all()


def test_the_encoder_lacks_what_the_decoder_writes() -> None:
    samples, arrays = filled([31], [0, 1], keep_prob=0.0, random_prob=0.0)
    places = arrays["decoder_position_ids"][0][arrays["decoder_labels"][0] != IGNORE_LABEL]
    ids = arrays["input_ids"][0, :31]
    assert (ids[places] == FakeTokenizer.mask_id).all() and len(places) == 15
    others = np.setdiff1d(np.arange(31), places)
    assert np.array_equal(ids[others], samples[0].input_ids[others])


def test_impossible_shares_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"objective\.random_prob: 0\.6 and objective\.keep_prob 0\.5 add up"):
        check_config(config_of(keep_prob=0.5, random_prob=0.6), None)
    check_config(config_of(block_size=8), None)
    check_config(config_of(block_size=4, mask_ratio=0.25), None)
    with pytest.raises(ConfigError, match=r"objective\.block_size: 3 x objective\.mask_ratio 0\.25 is below"):
        check_config(config_of(block_size=3, mask_ratio=0.25), None)


def test_generation_has_no_start_token() -> None:
    """The decoder reads the text before a span."""
    assert MaskedSeq2Seq(config_of().objective, FakeTokenizer()).generation_settings == {}  # type: ignore[arg-type]
