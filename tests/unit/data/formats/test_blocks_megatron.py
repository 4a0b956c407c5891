"""Blocks against megatron-core: GPTDataset's own blocks, and its masks and positions that restart at documents."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.sample_data import numbered_documents, random_documents, write_dataset
from tests.unit.data.formats.test_blocks import EOD, config_of, one_epoch

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
