"""What the ledger answers for each document equals what the loader's batches held, read token by token."""

from __future__ import annotations

import copy
import math
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxlm_ds.checkpoint.ledger import Ledger, Segment, document_reads, documents_of_text, open_segment
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.preprocess.config import PreprocessConfig
from ctxlm_ds.data.preprocess.encode import ChunkEncoder
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream.run_datasets import RunRows, build_run_rows
from ctxlm_ds.errors import DataError
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.training.loop.recovery import Recovery
from ctxlm_ds.training.loop.state import Anomaly, StepResult, TrainState
from tests.checkpoints import make_tokenizer
from tests.sample_data import FIRST_WORD_ID, FakeTokenizer, numbered_documents, run_config, train_loader, write_dataset

TOKENIZER: Any = FakeTokenizer(vocab_size=20_000)
STEPS = 24
SKIPPED, BACK, SAVED = 5, 13, 9
"""Steps whose batch is skipped, that goes back, and to which it goes back."""
Held = dict[tuple[int, int], list[tuple[int, int, bool]]]
"""By dataset and document: position in the stream, place of the token, and whether it is of the second segment."""
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "pairs of a blend": ({"sample_format": "segment_pair", "blend": "weighted", "weights": (1, 3)}, "masked_lm_nsp"),
    "packed rows": ({"sample_format": "doc_sentences", "packing": True, "epochs": (1, 2.5)}, "masked_lm"),
    "a drawn split": ({"sample_format": "doc_sentences", "split": "60,40", "split_seed": 3}, "masked_lm"),
    "blocks": ({"sample_format": "blocks"}, "causal_lm"),
    "lanes": ({"sample_format": "lanes"}, "causal_lm"),
    "halves and pairs": ({"sample_format": "text_and_pair"}, "masked_lm"),
}


def write_datasets(folder: Path, is_split: bool, eod_id: int | None) -> dict[str, list[tuple[int, int]]]:
    """Two datasets in which each token occurs once; return first token and number of tokens of their documents."""
    shapes = [np.random.default_rng(seed).integers(2, 9, (count, 5)).tolist() for seed, count in ((0, 60), (1, 55))]
    documents = numbered_documents([*shapes[0], *shapes[1]])
    parts = {"one": documents[: len(shapes[0])], "two": documents[len(shapes[0]) :]}
    for name, part in parts.items():
        write_dataset(folder / name, part, split_sentences=is_split, eod_id=eod_id)
    return {name: [(part[0][0], sum(map(len, part))) for part in own] for name, own in parts.items()}


def make(folder: Path, data: dict[str, Any], objective: str) -> tuple[RunConfig, RunRows, Any]:
    settings, folders = dict(data), [str(folder / name) for name in ("one", "two")]
    weights, epochs = settings.pop("weights", (None, None)), settings.pop("epochs", (None, None))
    train = [
        {"path": path, "weight": weight, "epochs": one}
        for path, weight, one in zip(folders, weights, epochs, strict=True)
    ]
    training = {"global_batch_size": 24, "batch_ramp": [8, 8, 60]} if data["sample_format"] != "lanes" else {}
    config = run_config(
        data={"seq_length": 48, "train": train, **settings}, training=training, objective={"name": objective},
        anomalies={"non_finite": "skip", "spike": "rollback"},
    )  # fmt: skip
    made = build_objective(config.objective, TOKENIZER)
    return config, build_run_rows(config.row_settings, TOKENIZER, made), made


def tokens_of(batch: Batch, row: int) -> Iterator[tuple[int, bool]]:
    """The tokens of a row before their corruption, and whether they are of the second segment."""
    fields = {name: tensor[row].numpy().copy() for name, tensor in batch.fields.items()}
    ids = fields["input_ids"]
    if "prediction_positions" in fields:
        labels = fields["masked_lm_labels"]
        ids[fields["prediction_positions"][labels != IGNORE_LABEL]] = labels[labels != IGNORE_LABEL]
    types = fields.get("token_type_ids", np.zeros_like(ids))
    yield from zip(ids.tolist(), types.astype(bool).tolist(), strict=True)
    if "causal_lm_labels" in fields:  # the last token of a sequence is only a label
        ends = np.flatnonzero(np.diff(fields["sequence_ids"], append=0))
        yield from ((token, False) for token in fields["causal_lm_labels"][ends].tolist())


def train(config: RunConfig, rows: RunRows, objective: Any, folder: Path) -> tuple[TrainState, list[Segment], Any, Any]:
    """Read STEPS steps with the loader and the recovery of a run, with saves; return all applied batches."""
    loader, saves = train_loader(rows.train, objective, config), {}
    state, applied = TrainState(), []
    segments = open_segment([], config, rows.describe(config.data.train, TOKENIZER), 0)

    def go_back() -> TrainState:
        saved, kept, read = saves[SAVED]
        applied[:], segments[:] = kept, read
        return copy.deepcopy(saved)

    recovery = Recovery(config.anomalies, folder, None, go_back, loader.restart)
    steps, went_back = iter(loader), False
    while state.step < STEPS:
        step = next(steps)
        kind = (
            "non_finite" if state.step + 1 == SKIPPED else "spike" if state.step + 1 == BACK and not went_back else None
        )
        anomaly = None if kind is None else Anomaly(kind, "made up")
        result = StepResult(1.0, {}, {}, math.nan, step.num_tokens, kind is not None, 1.0, anomaly)
        if recovery.must_go_back(state, step, result):
            state, following = recovery.go_back(state, step, result)
            steps, went_back = iter(following), True
            continue
        if kind is None:
            applied.append((state.step + 1, state.rows_consumed, step))
        state.step, state.rows_consumed = state.step + 1, state.rows_consumed + step.rows_consumed
        if state.step % 3 == 0:
            segments[:] = [segments[-1].up_to(state)]
            saves[state.step] = copy.deepcopy(state), list(applied), list(segments)
    loader.close()
    return state, segments, applied, loader


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_document_was_read_when_the_batches_held_it(tmp_path: Path, layout: str) -> None:
    data, name = LAYOUTS[layout]
    in_blocks = data["sample_format"] in ("blocks", "lanes", "text_and_pair")
    places = write_datasets(tmp_path, data["sample_format"] != "blocks", 3 if in_blocks else None)
    config, rows, objective = make(tmp_path, data, name)
    state, (segment,), applied, _ = train(config, rows, objective, tmp_path)
    (segment,) = Ledger.model_validate_json(Ledger(segments=[segment]).model_dump_json()).segments
    assert [len(ranges) for ranges in (segment.skipped, segment.rolled_back)] == [1, 1]
    held: dict[tuple[str, int], Counter[tuple[int, int]]] = {}
    starts = {name: np.array([first for first, _ in found]) for name, found in places.items()}
    at_step, second = {}, {}
    for number, first, step in applied:
        for row in range(step.rows_consumed):
            batch = step.micro_batches[row // config.training.micro_batch_size]
            at_step[first + row] = number
            for token, is_second in tokens_of(batch, row % config.training.micro_batch_size):
                if token < FIRST_WORD_ID or token == IGNORE_LABEL:
                    continue
                dataset = "one" if token < starts["two"][0] else "two"
                document = int(np.searchsorted(starts[dataset], token, side="right")) - 1
                held.setdefault((dataset, document), Counter())[
                    first + row, token - int(starts[dataset][document])
                ] += 1
                second.setdefault((dataset, document, first + row), set()).add(is_second)
    epochs = seconds = 0
    for dataset, documents in places.items():
        opened = IndexedDataset(tmp_path / dataset)
        for document in range(len(documents)):
            reads = list(document_reads([segment], opened, [document], TOKENIZER))
            found = Counter((read.position, place) for read in reads for place in read.places.tolist())
            assert found == held.get((dataset, document), Counter()), (dataset, document)
            for read in reads:
                assert read.step == at_step[read.position]
                epochs, seconds = max(epochs, read.epoch), seconds + read.second
                if name == "masked_lm_nsp":
                    assert read.second == (second[dataset, document, read.position] == {True})
    assert epochs >= 1 and (seconds > 0) == (name == "masked_lm_nsp" or layout == "halves and pairs")
    planned = segment.stream.at(np.array(sorted(at_step)))
    for source, index, number in zip(segment.sources, rows.train.indexes, range(2), strict=True):
        count = int((rows.train.sources(planned.rows)[0] == number).sum())
        assert source["read"]["rows"] == count and source["read"]["epochs"] == count / len(index)


def test_what_does_not_fit_is_one_error(tmp_path: Path) -> None:
    write_datasets(tmp_path, True, None)
    config, rows, _ = make(tmp_path, *LAYOUTS["packed rows"])
    (segment,) = open_segment([], config, rows.describe(config.data.train, TOKENIZER), 0)
    segment = segment.up_to(TrainState(step=3, rows_consumed=24))

    def reads(prefix: Path, document: int = 0) -> list[Any]:
        return list(document_reads([segment], IndexedDataset(prefix), [document], TOKENIZER))

    assert sum(bool(reads(tmp_path / "one", document)) for document in range(60)) > 5
    with pytest.raises(DataError, match="one: has documents 0 to 59, not 60"):
        reads(tmp_path / "one", 60)
    write_dataset(tmp_path / "other", numbered_documents([[3, 4]]))
    with pytest.raises(DataError, match="other: its fingerprint .* is that of no source of the ledger: .*one"):
        reads(tmp_path / "other")
    other = segment.model_copy(update={"sources": [{**one, "index": "0" * 64} for one in segment.sources]})
    with pytest.raises(DataError, match="one: gives samples .* now, the weights read 000000000000"):
        list(document_reads([other], IndexedDataset(tmp_path / "one"), [0], TOKENIZER))
    bare = segment.model_copy(
        update={"sources": [{k: one[k] for k in one if k != "fingerprint"} for one in segment.sources]}
    )
    read_by = [
        [
            read.position
            for number in range(60)
            for read in document_reads([each], IndexedDataset(tmp_path / "one"), [number], TOKENIZER)
        ]
        for each in (segment, bare)
    ]
    assert read_by[0] == read_by[1] != []
    with pytest.raises(DataError, match="is that of no source of the ledger: .*one .unknown"):
        list(document_reads([bare], IndexedDataset(tmp_path / "other"), [0], TOKENIZER))
    for path in tmp_path.glob("one.samples-*"):
        shutil.rmtree(path)
    with pytest.raises(DataError, match="build the samples again .ctxlm samples."):
        reads(tmp_path / "one")


def test_a_text_is_found_among_documents_as_they_were_encoded(tmp_path: Path) -> None:
    folder = make_tokenizer("gpt2", tmp_path / "tok")
    texts = [
        "the river walked. a mountain was slowly reading.",
        "books",
        "the river walked. a mountain was slowly reading.",
    ]
    for is_split in (False, True):
        settings = {"split_sentences": is_split, "append_eod": True, "leading_space": is_split}
        encoder = ChunkEncoder(folder, PreprocessConfig(**settings))
        made = [encoder.encode([text]) for text in texts]
        documents = [np.split(one.tokens, np.cumsum(one.lengths)[:-1]) for one in made]
        facts = settings | {"sentence_prefix": " " if is_split else ""}
        prefix = write_dataset(
            tmp_path / f"data{is_split}", [[list(map(int, s)) for s in d] for d in documents], metadata=facts
        )
        dataset = IndexedDataset(prefix)
        assert documents_of_text(dataset, texts[0] + "\n", folder) == [0, 2]
        assert documents_of_text(dataset, "the river", folder) == []
