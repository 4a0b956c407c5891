"""The sample index on disk: what it holds, what it refuses, and building it at the same time."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.index.build import IndexPlace, build_rows, excerpt
from ctxlm_ds.data.index.index import SampleIndex
from ctxlm_ds.data.index.record import SourcePart
from ctxlm_ds.data.index.storage import NpyAppender, open_array
from ctxlm_ds.data.sample import NO_LABEL
from ctxlm_ds.data.stream.plan_table import summary_lines
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.objectives.build import build_objective
from ctxlm_ds.recipe.schema import RunConfig
from tests.sample_data import (
    FakeTokenizer,
    build_sample_index,
    example_of,
    locate,
    numbered_documents,
    random_documents,
    run_config,
    sample_of,
    samples_of_row,
    write_dataset,
)

BERT = FakeTokenizer()
ROBERTA = FakeTokenizer(double_separator=True)
CLS, SEP = BERT.cls_id, BERT.sep_id


def config_of(sample_format: str, seq_length: int = 64, **data: object) -> RunConfig:
    return run_config(data={"sample_format": sample_format, "seq_length": seq_length} | data)


def ids_of(index: SampleIndex) -> list[list[int]]:
    return [sample_of(index, number).input_ids.tolist() for number in range(len(index.records))]


def forget_record(prefix: Path) -> None:
    """Leave a dataset as Megatron writes it."""
    for extension in (".json", ".sha256"):
        prefix.with_suffix(extension).unlink(missing_ok=True)


def test_pairs_are_framed_for_both_families(tmp_path: Path) -> None:
    documents = numbered_documents([[3, 4], [2, 5]])
    prefix = write_dataset(tmp_path / "d", documents)
    for tokenizer, middle in ((BERT, [SEP]), (ROBERTA, [SEP, SEP])):
        index = build_sample_index(prefix, tokenizer, config_of("segment_pair"))
        for number in range(len(index.records)):
            sample = sample_of(index, number)
            record = index.records[number]
            ids = sample.input_ids.tolist()
            a = list(range(5 + record["a_start"], 5 + record["a_end"]))
            b = list(range(5 + record["b_start"], 5 + record["b_end"]))
            assert ids == [CLS, *a, *middle, *b, SEP]
            assert len(ids) == record["num_tokens"]
            assert sample.token_type_ids.tolist() == [0] * (len(a) + 2) + [1] * (len(middle) - 1 + len(b) + 1)
            assert sample.special_mask.tolist() == [token in (CLS, SEP) for token in ids]
            assert sample.sequence_label in (0, 1)
        shutil.rmtree(index.directory)


def test_dense_full_sentences_have_separators_between_documents(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", numbered_documents([[3], [2, 2], [4]]))
    index = build_sample_index(prefix, ROBERTA, config_of("full_sentences", 12, separate_sentences=False))
    assert ids_of(index) == [[CLS, 5, 6, 7, SEP, 8, 9, 10, 11, SEP], [CLS, 12, 13, 14, 15, SEP]]
    sample = sample_of(index, 0)
    assert np.flatnonzero(sample.special_mask).tolist() == [0, 4, 9]
    assert sample.token_type_ids.sum() == 0 and sample.sequence_label == NO_LABEL


@pytest.mark.parametrize("sample_format", ["full_sentences", "doc_sentences"])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("eod_id", [SEP, 999])
def test_end_of_document_tokens_are_never_doubled(tmp_path: Path, sample_format: str, split: bool, eod_id: int) -> None:
    documents = random_documents(30, sentences=5, tokens=12, seed=1, vocab_size=900)
    config = config_of(sample_format, 32)
    plain = build_sample_index(write_dataset(tmp_path / "plain", documents, split), BERT, config)
    ended = build_sample_index(write_dataset(tmp_path / "ended", documents, split, eod_id=eod_id), BERT, config)
    assert ids_of(ended) == ids_of(plain)


def test_end_of_document_tokens_of_pairs(tmp_path: Path) -> None:
    documents = random_documents(30, seed=1)
    plain = build_sample_index(write_dataset(tmp_path / "plain", documents), BERT, config_of("segment_pair"))
    ended = build_sample_index(write_dataset(tmp_path / "e", documents, eod_id=SEP), BERT, config_of("segment_pair"))
    assert ids_of(ended) == ids_of(plain)


@pytest.mark.parametrize("eod_id", [SEP, None])
def test_a_dataset_without_our_record_is_read_by_what_it_holds(tmp_path: Path, eod_id: int | None) -> None:
    """As Megatron writes it: no JSON; its documents end with the separator or they do not."""
    documents = random_documents(100, sentences=5, seed=1)
    config = config_of("full_sentences", 32)
    recorded = build_sample_index(write_dataset(tmp_path / "recorded", documents), BERT, config)
    bare = write_dataset(tmp_path / "bare", documents, eod_id=eod_id)
    forget_record(bare)
    assert ids_of(build_sample_index(bare, BERT, config)) == ids_of(recorded)
    assert len(build_sample_index(bare, BERT, config_of("segment_pair")).records) > 100


def test_unsplit_documents_are_cut_at_block_borders(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", numbered_documents([[25], [10]]), split_sentences=False)
    index = build_sample_index(prefix, BERT, config_of("full_sentences", 12, separate_sentences=False))
    text = [[token for token in ids[1:-1]] for ids in ids_of(index)]
    assert [len(part) for part in text] == [10, 10, 10, 6]
    assert sum(text, []) == [*range(5, 30), SEP, *range(30, 40)]


@pytest.mark.parametrize("sample_format", ["segment_pair", "sentence_pair"])
def test_pairs_need_sentences_and_two_documents(tmp_path: Path, sample_format: str) -> None:
    documents = random_documents(5)
    unsplit = write_dataset(tmp_path / "unsplit", documents, split_sentences=False)
    with pytest.raises(DataError, match="--split-sentences"):
        build_sample_index(unsplit, BERT, config_of(sample_format))
    forget_record(unsplit)
    with pytest.raises(DataError, match="--split-sentences"):
        build_sample_index(unsplit, BERT, config_of(sample_format))
    with pytest.raises(DataError, match="there is only 1"):
        build_sample_index(write_dataset(tmp_path / "one", documents[:1]), BERT, config_of(sample_format))
    assert not list(tmp_path.glob("*.samples-*"))


def test_short_sequences_empty_data_and_foreign_tokenizers_are_refused(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(5))
    with pytest.raises(ConfigError, match=r"seq_length 4 leaves 1 tokens next to 3 special"):
        build_sample_index(prefix, BERT, config_of("segment_pair", 4))
    with pytest.raises(DataError, match="made with another tokenizer"):
        build_sample_index(prefix, FakeTokenizer(fingerprint="other"), config_of("segment_pair"))
    empty = write_dataset(tmp_path / "empty", [[], []])
    with pytest.raises(DataError, match="no text"):
        build_sample_index(empty, BERT, config_of("full_sentences"))


def test_empty_documents_and_sentences_vanish(tmp_path: Path) -> None:
    documents = random_documents(20, sentences=4, seed=3)
    with_holes = [[]] + [document[:1] + [[]] + document[1:] for document in documents] + [[]]
    for sample_format in ("segment_pair", "full_sentences"):
        config = config_of(sample_format)
        full = build_sample_index(write_dataset(tmp_path / f"f-{sample_format}", documents), BERT, config)
        holes = build_sample_index(write_dataset(tmp_path / f"h-{sample_format}", with_holes), BERT, config)
        assert ids_of(holes) == ids_of(full)


def test_key_covers_every_setting_and_nothing_else(tmp_path: Path) -> None:
    documents = random_documents(20)
    prefix = write_dataset(tmp_path / "d", documents)
    base = {"sample_format": "segment_pair"}
    changed = [
        run_config(data=base),
        run_config(data=base | {"seq_length": 32}),
        run_config(data=base | {"short_seq_prob": 0.2}),
        run_config(data=base | {"num_duplicates": 2}),
        run_config(data=base | {"packing": True}),
        run_config(data=base | {"packing": True, "max_sequences_per_row": 3}),
        run_config(data=base, training={"seed": 8}),
        run_config(data={"sample_format": "full_sentences"}),
    ]
    folders = {build_sample_index(prefix, BERT, config).directory for config in changed}
    assert len(folders) == len(changed)
    same = run_config(data=base | {"num_workers": 3}, training={"micro_batch_size": 1}, objective={"mask_prob": 0.3})
    assert build_sample_index(prefix, BERT, same).directory in folders
    write_dataset(tmp_path / "other", random_documents(20, seed=1))
    other = build_sample_index(tmp_path / "other", BERT, changed[0]).directory.name
    assert other.split("-")[-1] not in {folder.name.split("-")[-1] for folder in folders}


def test_held_out_index_does_not_depend_on_seed_or_passes(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(20))
    one = run_config(training={"seed": 1}, data={"num_duplicates": 3}, objective={"masking": "static"})
    other = run_config(training={"seed": 2})
    first = build_sample_index(prefix, BERT, one, held_out=True)
    assert first.directory == build_sample_index(prefix, BERT, other, held_out=True).directory
    assert not first.is_static


def test_sample_index_dir(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "data" / "d", random_documents(10))
    index = build_sample_index(prefix, BERT, run_config(data={"sample_index_dir": str(tmp_path / "elsewhere" / "x")}))
    assert index.directory.parent == tmp_path / "elsewhere" / "x"


def test_packed_rows(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(100, sentences=3, tokens=8))
    config = config_of("sentence_pair", 64, packing=True, max_sequences_per_row=4)
    index = build_sample_index(prefix, BERT, config)
    rows = [samples_of_row(index, row) for row in range(len(index))]
    assert sorted(sum(rows, [])) == list(range(len(index.records)))
    assert len(index) < 0.7 * len(index.records)
    for row in range(len(index)):
        samples = [sample_of(index, number) for number in rows[row]]
        assert len(samples) <= 4
        assert sum(len(sample.input_ids) for sample in samples) <= 64


@pytest.mark.parametrize("packing", [False, True])
def test_static_masking_stores_each_copy(tmp_path: Path, packing: bool) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(40, sentences=4))
    config = run_config(
        data={"num_duplicates": 3, "packing": packing}, objective={"masking": "static", "whole_word": True}
    )
    objective = build_objective(config.objective, BERT)
    with pytest.raises(ConfigError, match="needs the objective"):
        build_sample_index(prefix, BERT, config)
    index = build_sample_index(prefix, BERT, config, objective)
    single = build_sample_index(prefix, BERT, run_config(data={"packing": packing}))
    assert abs(len(index.records) / len(single.records) - 3) < 0.5
    masks = set()
    for row in range(len(index)):
        for number in samples_of_row(index, row):
            sample, example = sample_of(index, number), example_of(index, number)
            restored = example.input_ids.copy()
            restored[example.prediction_positions] = example.prediction_labels
            assert np.array_equal(restored, sample.input_ids)
            assert np.array_equal(example.token_type_ids, sample.token_type_ids)
            assert example.sequence_label == sample.sequence_label
            assert len(example.prediction_positions) >= 1
            masks.add((len(sample.input_ids), tuple(example.prediction_positions.tolist())))
    assert len(masks) > 0.5 * len(index.records)
    again = IndexPlace.of(prefix, BERT, config).open(BERT)
    assert np.array_equal(example_of(again, 5).input_ids, example_of(index, 5).input_ids)


def test_rows_of_several_datasets_are_one_space(tmp_path: Path) -> None:
    prefixes = [write_dataset(tmp_path / name, random_documents(10, seed=seed)) for seed, name in enumerate("abc")]
    config = config_of("full_sentences")
    rows = build_rows(prefixes, BERT, config)
    assert len(rows) == sum(len(index) for index in rows.indexes)
    located = [locate(rows, row) for row in range(len(rows))]
    expected = [(index, number) for index in rows.indexes for number in range(len(index))]
    assert located == expected
    assert len({index.random_key for index in rows.indexes}) == 3


def test_an_index_that_cannot_fit_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(200))
    dynamic = run_config(data={"num_duplicates": 900})
    static = run_config(data={"num_duplicates": 900}, objective={"masking": "static"})
    tokens = IndexedDataset(prefix).num_tokens * 900
    for config, least in ((dynamic, tokens * 37 // 64), (static, tokens * 37 // 64 + tokens * 2)):
        free = SimpleNamespace(free=least - 1000)
        monkeypatch.setattr("shutil.disk_usage", lambda folder, free=free: free)
        with pytest.raises(DataError, match=r"needs at least .* GB \(data.num_duplicates 900\), the disk has"):
            build_sample_index(prefix, BERT, config, build_objective(config.objective, BERT))
    assert not list(tmp_path.glob("*.samples-*"))
    with pytest.raises(ValidationError, match="less than or equal to 1000"):
        run_config(data={"num_duplicates": 10**9})


def test_every_pass_draws_other_pairs(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(60))
    for sample_format in ("segment_pair", "sentence_pair"):
        one = build_sample_index(prefix, BERT, config_of(sample_format))
        two = build_sample_index(prefix, BERT, config_of(sample_format, num_duplicates=2))
        passes = ids_of(two)[: len(one.records)], ids_of(two)[len(one.records) :]
        assert passes[0] == ids_of(one)
        shared = {tuple(ids) for ids in passes[0]} & {tuple(ids) for ids in passes[1]}
        assert len(shared) < 0.6 * len(one.records)


def test_static_masks_differ_between_samples_of_one_length(tmp_path: Path) -> None:
    documents = [[list(range(5, 35)), list(range(5, 36))] for _ in range(100)]
    prefix = write_dataset(tmp_path / "d", documents)
    config = run_config(data={"sample_format": "sentence_pair"}, objective={"masking": "static"})
    index = build_sample_index(prefix, BERT, config, build_objective(config.objective, BERT))
    examples = [example_of(index, number) for number in range(len(index.records))]
    for length in {len(example.input_ids) for example in examples}:
        masks = [tuple(e.prediction_positions.tolist()) for e in examples if len(e.input_ids) == length]
        assert len(set(masks)) == len(masks)


def test_opening_what_was_not_built_names_the_command(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(5))
    with pytest.raises(DataError, match="build_samples"):
        IndexPlace.of(prefix, BERT, config_of("full_sentences")).open(BERT)


def test_damage_is_named(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(5))
    config = config_of("full_sentences")
    directory = build_sample_index(prefix, BERT, config).directory
    samples = directory / "samples.npy"
    whole = samples.read_bytes()
    samples.write_bytes(whole[:-5])
    with pytest.raises(DataError, match=rf"samples\.npy: has {len(whole) - 5} bytes instead of {len(whole)}"):
        IndexPlace.of(prefix, BERT, config).open(BERT)
    samples.unlink()
    with pytest.raises(DataError, match="is missing"):
        IndexPlace.of(prefix, BERT, config).open(BERT)
    (directory / "meta.json").write_text("{")
    with pytest.raises(DataError, match=r"meta\.json"):
        IndexPlace.of(prefix, BERT, config).open(BERT)
    samples.write_bytes(b"not an array" * 10)
    with pytest.raises(DataError, match="not readable"):
        open_array(directory, "samples")


def test_checksums_are_those_of_sha256sum_and_a_changed_bit_is_noticed(tmp_path: Path) -> None:
    prefix, config = write_dataset(tmp_path / "d", random_documents(5)), config_of("full_sentences")
    index = build_sample_index(prefix, BERT, config)
    listed = "".join(f"{entry['sha256']}  {name}\n" for name, entry in index.meta["files"].items())
    subprocess.run(["sha256sum", "-c", "--strict", "-"], input=listed, text=True, check=True, cwd=index.directory)
    samples = index.directory / "samples.npy"
    content = bytearray(samples.read_bytes())
    content[-10] ^= 1
    samples.write_bytes(content)
    build_sample_index(prefix, BERT, config, verify=False)
    with pytest.raises(DataError, match=r"samples\.npy: sha256 .*meta\.json records .*delete the folder"):
        build_sample_index(prefix, BERT, config)


def test_a_renamed_index_is_refused(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(5))
    short, long = config_of("full_sentences", 32), config_of("full_sentences", 64)
    one, other = (build_sample_index(prefix, BERT, config).directory for config in (short, long))
    shutil.rmtree(one)
    other.rename(one)
    with pytest.raises(DataError, match=r"meta\.json: this is the index with the key .*renamed"):
        build_sample_index(prefix, BERT, short)
    meta = json.loads((one / "meta.json").read_text())
    (one / "meta.json").write_text(json.dumps(meta | {"files": {"samples.npy": 5}}))
    with pytest.raises(DataError, match="not the description of a sample index"):
        IndexPlace.of(prefix, BERT, short).open(BERT)


def test_a_summary_has_a_row_for_each_index_and_fits_a_terminal(tmp_path: Path) -> None:
    indexes = {
        f"source-{number} (held out)": build_sample_index(
            write_dataset(tmp_path / f"d{number}", random_documents(5, seed=number)), BERT, config_of("segment_pair")
        )
        for number in range(4)
    }
    lines = list(summary_lines(indexes))
    table, folders = lines[:6], lines[6:]
    assert max(map(len, table)) <= 100
    for name, index, row in zip(indexes, indexes.values(), table[1:5], strict=True):
        assert row.strip().startswith(name) and f" {len(index.records)} (1 pass) " in row
        middle = np.sort(index.records["num_tokens"])[(len(index.records) + 1) // 2 - 1]
        assert row.split()[-2] == str(middle)
        assert any(str(index.directory) in line for line in folders)


def test_an_excerpt_leaves_nothing_and_says_what_it_is_of(tmp_path: Path) -> None:
    prefix, config = write_dataset(tmp_path / "d", random_documents(320, sentences=2)), config_of("full_sentences")
    objective = build_objective(config.objective, BERT)
    before = sorted(tmp_path.iterdir())
    with excerpt(str(prefix), BERT, config, objective, 2) as (rows, told):
        assert rows.indexes[0].meta["dataset"]["documents"] == [0, 300]
        assert "only the first 300 of 320 documents" in told
        expected = build_sample_index(SourcePart(str(prefix), (0, 300)), BERT, config)
        assert rows.indexes[0].records.tobytes() == expected.records.tobytes()
        folder = rows.indexes[0].directory
    shutil.rmtree(expected.directory)
    assert not folder.parent.exists() and sorted(tmp_path.iterdir()) == before
    whole = build_sample_index(prefix, BERT, config)
    with excerpt(str(prefix), BERT, config, objective, 2) as (rows, told):
        assert rows.indexes[0].directory == whole.directory and "all 320 documents" in told


def build_in_child(prefix: Path, barrier: object, results: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    index = build_sample_index(prefix, BERT, config_of("segment_pair"))
    results.put((str(index.directory), index.records.tobytes()))  # type: ignore[attr-defined]


def test_processes_may_build_the_same_index_at_once(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(2000))
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    children = [context.Process(target=build_in_child, args=(prefix, barrier, results)) for _ in range(3)]
    for child in children:
        child.start()
    found = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join(timeout=60)
    assert len(set(found)) == 1
    assert [path.name for path in tmp_path.glob("d.samples-*")] == [Path(found[0][0]).name]


def test_growing_arrays_are_plain_npy_files(tmp_path: Path) -> None:
    path = tmp_path / "values.npy"
    with NpyAppender(path, np.int32) as file:
        for begin in range(0, 100_000, 1000):
            file.append(np.arange(begin, begin + 1000))
    assert np.array_equal(np.load(path), np.arange(100_000, dtype=np.int32))
    with NpyAppender(tmp_path / "empty.npy", np.int64):
        pass
    assert open_array(tmp_path, "empty").shape == (0,)


def test_meta_tells_what_was_built(tmp_path: Path) -> None:
    documents = random_documents(10, seed=4)
    index = build_sample_index(write_dataset(tmp_path / "d", documents), BERT, config_of("doc_sentences", 64))
    meta = json.loads((index.directory / "meta.json").read_text())
    assert meta["documents"] == 10 and meta["sentences"] == sum(map(len, documents))
    assert meta["tokens"] == sum(len(ids) for ids in ids_of(index))
    assert meta["samples"] == meta["rows"] == len(index.records) == len(index)
