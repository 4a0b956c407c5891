"""data.split: which documents are trained on, which are held out, and that no document is both."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.index.build import build_rows
from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.index.record import SourcePart
from ctxlm_ds.data.stream.run_datasets import held_out_parts, refuse_copies, refuse_overlap, train_parts
from ctxlm_ds.errors import DataError
from ctxlm_ds.recipe.schema import RunConfig
from tests.sample_data import FakeTokenizer, random_documents, run_config, write_dataset

TOKENIZER: Any = FakeTokenizer()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "one", random_documents(40, sentences=5, seed=1), eod_id=3)
    write_dataset(tmp_path / "two", random_documents(25, sentences=5, seed=2), eod_id=3)
    return tmp_path


def recipe(folder: Path, split: str | None = "80,12,8", **data: Any) -> RunConfig:
    train = [str(folder / "one"), str(folder / "two")]
    objective = {"name": "causal_lm" if data.get("sample_format") == "blocks" else "masked_lm"}
    return run_config(data={"train": train, "split": split, **data}, objective=objective)


def held_out_rows(config: RunConfig) -> dict[str, RowSource]:
    return {
        name: build_rows([part], TOKENIZER, config.row_settings, held_out=True)
        for name, part in held_out_parts(config.data).items()
    }


def documents_of(rows: RowSource) -> dict[str, set[int]]:
    """Documents whose tokens stand in the samples of each dataset."""
    found: dict[str, set[int]] = {}
    for index in rows.indexes:
        dataset = IndexedDataset(index.meta["dataset"]["prefix"])
        ends = np.cumsum(dataset.document_tokens(0, dataset.num_documents))
        touched = found.setdefault(Path(dataset.prefix).name, set())
        for first, last in (("a_start", "a_end"), ("b_start", "b_end")):
            filled = index.records[index.records[first] < index.records[last]]
            low = np.searchsorted(ends, filled[first], side="right")
            high = np.searchsorted(ends, filled[last] - 1, side="right")
            for begin, end in zip(low.tolist(), high.tolist(), strict=True):
                touched.update(range(begin, end + 1))
    return found


@pytest.mark.parametrize(
    "sample_format", ["segment_pair", "sentence_pair", "full_sentences", "doc_sentences", "blocks"]
)
def test_no_document_is_in_two_parts(folder: Path, sample_format: str) -> None:
    validation = [
        {"name": f"{name} {part}", "path": str(folder / name), "part": part}
        for name in ("one", "two")
        for part in ("valid", "test")
    ]
    config = recipe(folder, sample_format=sample_format, validation=validation)
    train = build_rows(train_parts(config.data), TOKENIZER, config.row_settings)
    held_out = held_out_rows(config)
    refuse_overlap(train, held_out, config.data)
    parts = [documents_of(train), *map(documents_of, held_out.values())]
    for name, total in (("one", 40), ("two", 25)):
        of_dataset = [found[name] for found in parts if name in found]
        assert sum(map(len, of_dataset)) == len(set.union(*of_dataset)) == total
    assert documents_of(train) == {"one": set(range(32)), "two": set(range(20))}


def test_with_a_split_alone_each_valid_part_is_held_out(folder: Path) -> None:
    config = recipe(folder)
    assert train_parts(config.data) == [
        SourcePart(str(folder / "one"), (0, 32)), SourcePart(str(folder / "two"), (0, 20)),
    ]  # fmt: skip
    assert held_out_parts(config.data) == {
        "one": SourcePart(str(folder / "one"), (32, 37)), "two": SourcePart(str(folder / "two"), (20, 23)),
    }  # fmt: skip
    assert held_out_parts(recipe(folder, "1,0,0").data) == {}


def test_a_split_with_a_seed_draws_documents_and_cuts_by_tokens(tmp_path: Path) -> None:
    # The last documents hold a quarter of the tokens, of another kind than the rest.
    documents = random_documents(1200, sentences=5, seed=1) + random_documents(2, sentences=800, seed=2)
    write_dataset(tmp_path / "one", documents, eod_id=3)
    whole = IndexedDataset(tmp_path / "one")
    data = recipe(tmp_path, "97,3,0", train=[str(tmp_path / "one")], split_seed=7).data
    (train,), (held_out,) = train_parts(data), held_out_parts(data).values()
    assert train.documents is not None and held_out.documents == (train.documents[1], whole.num_documents)
    assert held_out.prefix == train.prefix and train.documents[0] == 0
    copy = IndexedDataset(train.prefix)

    def texts(dataset: IndexedDataset, *span: int) -> list[list[list[int]]]:
        return [[sequence.tolist() for sequence in dataset.document(number)] for number in range(*span)]

    ours, theirs = texts(copy, 0, copy.num_documents), texts(whole, 0, whole.num_documents)
    assert ours != theirs and sorted(ours) == sorted(theirs)
    assert copy.metadata is not None and whole.metadata is not None
    assert copy.metadata["tokenizer_fingerprint"] == whole.metadata["tokenizer_fingerprint"]
    share = int(copy.document_tokens(*held_out.documents).sum()) / whole.num_tokens
    assert abs(share - 0.03) < 0.002
    places = [theirs.index(document) for document in texts(copy, *held_out.documents)]
    assert abs(np.mean(places) - 600) < 4 * 1200 / np.sqrt(12 * len(places)), "a sample of all places"
    assert train_parts(data) == [train]
    other = train_parts(data.model_copy(update={"split_seed": 8}))
    assert other[0].prefix != train.prefix
    assert train_parts(data.model_copy(update={"split_seed": None}))[0] == SourcePart(str(tmp_path / "one"), (0, 1166))


def test_the_original_of_a_drawn_order_is_the_same_documents(folder: Path) -> None:
    for end in ("bin", "idx", "json"):
        shutil.copy(folder / f"one.{end}", folder / f"copy.{end}")
    config = recipe(folder, "1", split_seed=0, validation=[{"name": "copy", "path": str(folder / "copy")}])
    train = build_rows(train_parts(config.data), TOKENIZER, config.row_settings)
    with pytest.raises(DataError, match="copy has documents of the training source .*one"):
        refuse_overlap(train, held_out_rows(config), config.data)


def test_too_few_drawn_documents_are_refused_with_the_remedy(folder: Path) -> None:
    told = r"one: data.split 80,12,8 holds out \d+ of 40 documents for valid, fewer than 20; .*--document lines:50"
    with pytest.raises(DataError, match=told):
        held_out_parts(recipe(folder, split_seed=0).data)
    assert len(train_parts(recipe(folder, split_seed=0).data)) == 2
    assert held_out_parts(recipe(folder, "1", split_seed=0).data) == {}


def test_without_a_split_every_document_is_trained_on(folder: Path) -> None:
    config = recipe(folder, None, validation=[{"name": "v", "path": "else"}])
    assert train_parts(config.data) == [SourcePart(str(folder / "one")), SourcePart(str(folder / "two"))]
    assert held_out_parts(config.data) == {"v": SourcePart("else")}
    assert held_out_parts(recipe(folder, None).data) == {}


def test_a_part_without_documents_is_told(folder: Path) -> None:
    with pytest.raises(DataError, match="split 1,99 gives its train part none of its 40 documents"):
        train_parts(recipe(folder, "1,99").data)
    named = recipe(folder, "99,0,1", validation=[{"name": "v", "path": str(folder / "one"), "part": "valid"}])
    with pytest.raises(DataError, match="gives its valid part none"):
        held_out_parts(named.data)


def test_a_copy_under_another_name_is_still_the_same_documents(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for end in ("bin", "idx", "json"):
        shutil.copy(folder / f"one.{end}", folder / f"copy.{end}")
    copy = {"name": "copy", "path": str(folder / "copy")}
    for split, part, refused in (("9,1", "all", True), ("9,1", "valid", False), ("9,1", "train", False)):
        config = recipe(folder, split, validation=[copy | {"part": part}])
        train = build_rows(train_parts(config.data), TOKENIZER, config.row_settings)
        if refused:
            with pytest.raises(DataError, match="copy has documents of the training source .*one"):
                refuse_overlap(train, held_out_rows(config), config.data)
        else:
            refuse_overlap(train, held_out_rows(config), config.data)
    assert not caplog.records
    config = recipe(folder, None, validation=[copy])
    refuse_overlap(
        build_rows(train_parts(config.data), TOKENIZER, config.row_settings), held_out_rows(config), config.data
    )
    assert "warning: held-out source copy" in caplog.text and "data.split keeps them apart" in caplog.text


@pytest.mark.parametrize("has_json", [True, False])
def test_a_training_source_named_twice_under_two_paths_is_refused(folder: Path, has_json: bool) -> None:
    for end in ("bin", "idx", "json"):
        shutil.copy(folder / f"one.{end}", folder / f"copy.{end}")
    if not has_json:
        for name in ("one.json", "one.sha256", "copy.json"):
            (folder / name).unlink()
    config = recipe(folder, train=[str(folder / "one"), str(folder / "copy")])
    with pytest.raises(DataError, match=r"data\.train: .*copy is a copy of .*one: .*`epochs: 2`"):
        refuse_copies(build_rows(train_parts(config.data), TOKENIZER, config.row_settings), config.data)
    if not has_json:
        content = bytearray((folder / "copy.bin").read_bytes())
        content[0] ^= 1
        (folder / "copy.bin").write_bytes(content)
        refuse_copies(build_rows(train_parts(config.data), TOKENIZER, config.row_settings), config.data)
