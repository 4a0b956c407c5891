"""Rows of full sentences as a format, and blocks for causal language models: which token predicts which."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.index.build import IndexPlace, build_rows
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream.loader import TrainLoader
from ctxlm_ds.data.stream.preview import preview_rows
from ctxlm_ds.errors import DataError
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.schema import RunConfig
from tests.sample_data import (
    FakeTokenizer,
    build_sample_index,
    numbered_documents,
    random_documents,
    run_config,
    sample_of,
    samples_of_row,
    write_dataset,
)
from tests.unit.data.index.test_index import BERT, SEP, ids_of
from tests.unit.data.index.test_index import config_of as config_of_format

TOKENIZER = FakeTokenizer()
EOD = TOKENIZER.sep_id


def config_of(seq_length: int, reset: bool = True, slots: int = 4, **sections: dict[str, object]) -> RunConfig:
    data = {
        "sample_format": "blocks", "seq_length": seq_length, "reset_at_documents": reset,
        "max_sequences_per_row": slots,
    }  # fmt: skip
    model = {"family": "gpt2"}
    values: dict[str, dict[str, object]] = {"data": data, "objective": {"name": "causal_lm"}, "model": model}
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return run_config(**values)


def one_epoch(prefix: Path, config: RunConfig) -> list[Batch]:
    """Every row of an epoch once, in micro-batches of one row."""
    objective = build_objective(config.objective, TOKENIZER)
    rows = build_rows([prefix], TOKENIZER, config.row_settings)
    whole = {"global_batch_size": len(rows), "micro_batch_size": 1}
    one_step = config.model_copy(update={"training": config.training.model_copy(update=whole)})
    return next(iter(TrainLoader(rows, objective, one_step.data, one_step.training))).micro_batches


def predictions(batches: list[Batch]) -> list[tuple[int, int]]:
    """(input token, label) of every position with a label."""
    pairs = []
    for batch in batches:
        labels = batch.fields["causal_lm_labels"]
        assert labels.shape == batch.fields["input_ids"].shape
        assert ((labels != IGNORE_LABEL) == (batch.fields["sequence_ids"] > 0)).all()
        real = labels != IGNORE_LABEL
        pairs += list(zip(batch.fields["input_ids"][real].tolist(), labels[real].tolist(), strict=True))
    return pairs


def test_rows_of_documents_that_do_not_see_each_other(tmp_path: Path) -> None:
    """Tokens are numbered from 5 on, EOD is 3: documents 5 6 7 E | 8 9 E | 10 11 12 13 14 15 E."""
    prefix = write_dataset(tmp_path / "d", numbered_documents([[3], [2], [6]]), False, EOD)
    index = build_sample_index(prefix, TOKENIZER, config_of(8))
    rows = [samples_of_row(index, row) for row in range(len(index))]
    assert [[sample_of(index, number).input_ids.tolist() for number in row] for row in rows] == [
        [[5, 6, 7, EOD], [8, 9, EOD], [10, 11, 12, 13]],
        [[13, 14, 15, EOD]],
    ]
    by_first = {int(batch.fields["input_ids"][0, 0]): batch for batch in one_epoch(prefix, config_of(8))}
    batch = by_first[5]
    assert batch.fields["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10, 11, 12]]
    assert batch.fields["causal_lm_labels"].tolist() == [[6, 7, EOD, 9, EOD, 11, 12, 13]]
    assert batch.fields["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch.fields["sequence_ids"].tolist() == [[1, 1, 1, 2, 2, 3, 3, 3]]
    assert batch.fields["sequence_starts"].tolist() == [[0, 3, 5, 8, 8]]
    assert by_first[13].fields["input_ids"].tolist() == [[13, 14, 15, 0, 0, 0, 0, 0]]
    assert by_first[13].fields["causal_lm_labels"].tolist() == [[14, 15, EOD] + [IGNORE_LABEL] * 5]


def test_without_reset_rows_are_megatrons_blocks(tmp_path: Path) -> None:
    """The flat stream cut every seq_length tokens, each block with one token more as its last label."""
    documents = random_documents(20, sentences=3, tokens=8, seed=2)
    prefix = write_dataset(tmp_path / "d", documents, eod_id=EOD)
    stream = [token for document in documents for token in [*sum(document, []), EOD]]
    config = config_of(16, reset=False)
    index = build_sample_index(prefix, TOKENIZER, config)
    assert not index.is_packed
    blocks = [sample_of(index, number).input_ids.tolist() for number in range(len(index))]
    assert blocks == [stream[start : start + 17] for start in range(0, len(stream) - 1, 16)]
    batches = one_epoch(prefix, config)
    for batch in batches:
        assert batch.fields["sequence_starts"].shape == (1, 2) and batch.fields["sequence_ids"].max() == 1
    assert sorted(predictions(batches)) == sorted(zip(stream[:-1], stream[1:], strict=True))


@pytest.mark.parametrize("split", [True, False])
def test_an_epoch_predicts_every_token_of_every_document_but_its_first(tmp_path: Path, split: bool) -> None:
    documents = random_documents(40, sentences=3, tokens=8, seed=1)
    prefix = write_dataset(tmp_path / "d", documents, split, EOD)
    wanted = []
    for document in documents:
        tokens = [*sum(document, []), EOD]
        wanted += list(zip(tokens[:-1], tokens[1:], strict=True))
    assert sorted(predictions(one_epoch(prefix, config_of(16, slots=2)))) == sorted(wanted)


def test_the_two_kinds_of_blocks_have_indexes_of_their_own(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", numbered_documents([[9], [9]]), False, EOD)
    configs = [config_of(4, reset, slots) for reset, slots in ((True, 4), (True, 1), (False, 4), (False, 1))]
    built = [build_sample_index(prefix, TOKENIZER, config) for config in configs]
    assert len({index.directory for index in built}) == 3
    assert built[2].directory == built[3].directory
    assert IndexPlace.of(prefix, TOKENIZER, config_of(4).row_settings).directory == built[0].directory


def test_documents_without_an_end_are_refused_with_the_remedy(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", numbered_documents([[9], [9]]), False)
    with pytest.raises(DataError, match=r"do not end with the end-of-document token 3.* again with --append-eod"):
        build_sample_index(prefix, TOKENIZER, config_of(4))


def test_preview_shows_the_text_and_what_its_end_predicts(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", numbered_documents([[3], [2]]), False, EOD)
    config = config_of(8)
    objective = build_objective(config.objective, TOKENIZER)
    rows = build_rows([prefix], TOKENIZER, config.row_settings)
    (text,) = preview_rows(rows, objective, TOKENIZER, config.data, config.training, 3)
    assert text.plain.splitlines() == [
        "row 0: 5 of 8 positions, 5 predictions",
        "  sequence 1 of 2",
        "  ##w5 w6 ##w7 [→[SEP]]",
        "  sequence 2 of 2",
        "  w8 ##w9 [→[SEP]]",
    ]


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, _get_ltor_masks_and_position_ids
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split


class MegatronTokenizer:
    """What GPTDataset asks of a tokenizer."""

    eod = EOD
    pad = 0
    vocab_size = 1000
    unique_identifiers = {"class": "MegatronTokenizer"}


def megatron_dataset(prefix: Path, cache: Path, seq_length: int) -> Any:
    """Megatron's dataset of one pass over all documents."""
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=seq_length, blend=None, split="1,0,0", path_to_cache=str(cache),
        tokenizer=MegatronTokenizer(), reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False,
    )  # fmt: skip
    dataset = IndexedDataset(str(prefix))
    documents = np.arange(len(dataset.document_indices) - 1, dtype=np.int32)
    return GPTDataset(dataset, str(prefix), documents, None, Split.train, config)


def test_without_reset_rows_are_gptdatasets(tmp_path: Path) -> None:
    """A single document, for Megatron shuffles documents before it cuts; it leaves out the last, shorter block."""
    prefix = write_dataset(tmp_path / "d", numbered_documents([[205]]), False, EOD)
    theirs = megatron_dataset(prefix, tmp_path / "cache", 16)
    wanted = {(tuple(item["tokens"].tolist()), tuple(item["labels"].tolist())) for item in theirs}
    assert len(wanted) == len(theirs) == 12
    ours = {
        (tuple(batch.fields["input_ids"][0].tolist()), tuple(batch.fields["causal_lm_labels"][0].tolist()))
        for batch in one_epoch(prefix, config_of(16, reset=False))
    }
    assert wanted < ours and len(ours - wanted) == 1


def test_with_reset_every_prediction_sees_what_megatrons_sees(tmp_path: Path) -> None:
    """One row of many documents: each label with its input, position and everything visible there."""
    documents = random_documents(12, sentences=2, tokens=5, seed=4)
    prefix = write_dataset(tmp_path / "d", documents, eod_id=EOD)
    stream = torch.tensor([token for document in documents for token in [*sum(document, []), EOD]])
    hidden, loss_mask, positions = _get_ltor_masks_and_position_ids(stream[:-1], EOD, True, True, True, True)
    theirs: Counter[Any] = Counter()
    for place in loss_mask.nonzero().flatten().tolist():
        seen = tuple(stream[:-1][~hidden[0, place]].tolist())
        theirs[seen, int(positions[place]), int(stream[place + 1])] += 1

    (batch,) = one_epoch(prefix, config_of(len(stream), slots=len(documents)))
    ours: Counter[Any] = Counter()
    ids, sequences, labels = (batch.fields[name][0] for name in ("input_ids", "sequence_ids", "causal_lm_labels"))
    for place in (sequences > 0).nonzero().flatten().tolist():
        seen = tuple(ids[: place + 1][sequences[: place + 1] == sequences[place]].tolist())
        ours[seen, int(batch.fields["position_ids"][0, place]), int(labels[place])] += 1
    assert ours == theirs and len(ours) > 50


def chunks_of(size: int) -> RunConfig:
    return run_config(
        data={"sample_format": "chunks", "seq_length": size}, objective={"name": "masked_lm"},
        model={"family": "roberta"},
    )  # fmt: skip


@pytest.mark.parametrize("split_sentences", [False, True])
@pytest.mark.parametrize("at_once", [1, 3, 1 << 16])
def test_documents_follow_each_other_without_a_separator(
    tmp_path: Path, split_sentences: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxlm_ds.data.index.record.RECORDS_AT_ONCE", at_once)
    documents = numbered_documents([[3, 4], [20], [1], [9, 9, 2]])
    prefix = write_dataset(tmp_path / "data", documents, split_sentences)
    index = build_sample_index(prefix, TOKENIZER, chunks_of(10))
    samples = [sample_of(index, number) for number in range(len(index))]
    assert [len(sample.input_ids) for sample in samples] == [10, 10, 10, 10, 8]
    assert [token for sample in samples for token in sample.input_ids.tolist()] == list(range(5, 53))
    assert not any(sample.special_mask.any() for sample in samples)
    assert index.meta["documents"] == 4


@pytest.mark.parametrize("sample_format", ["full_sentences", "doc_sentences"])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("eod_id", [SEP, 999])
def test_end_of_document_tokens_are_never_doubled(tmp_path: Path, sample_format: str, split: bool, eod_id: int) -> None:
    documents = random_documents(30, sentences=5, tokens=12, seed=1, vocab_size=900)
    config = config_of_format(sample_format, 32)
    plain = build_sample_index(write_dataset(tmp_path / "plain", documents, split), BERT, config)
    ended = build_sample_index(write_dataset(tmp_path / "ended", documents, split, eod_id=eod_id), BERT, config)
    assert ids_of(ended) == ids_of(plain)


def test_unsplit_documents_are_cut_at_block_borders(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", numbered_documents([[25], [10]]), split_sentences=False)
    index = build_sample_index(prefix, BERT, config_of_format("full_sentences", 12, separate_sentences=False))
    text = [[token for token in ids[1:-1]] for ids in ids_of(index)]
    assert [len(part) for part in text] == [10, 10, 10, 6]
    assert sum(text, []) == [*range(5, 30), SEP, *range(30, 40)]
