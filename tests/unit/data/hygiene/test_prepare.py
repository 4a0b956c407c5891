"""Whole corpora prepared: parts and their checksums, limits, and that nothing half-done is taken for done."""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from ctxlm_ds import atomic
from ctxlm_ds.data.hygiene.cleaning import PACKAGES
from ctxlm_ds.data.hygiene.corpora import CorpusRecipe
from ctxlm_ds.data.hygiene.prepare import PrepareOptions, prepare_corpus
from ctxlm_ds.data.hygiene.report import cleaning_record
from ctxlm_ds.data.sources.corpus import Corpus
from ctxlm_ds.data.sources.reading import find_sources
from ctxlm_ds.errors import DataError
from tests.text import make_documents
from tests.unit.data.hygiene.conftest import lines_of, recipe_of, source_of, write_lines


def test_the_same_bytes_with_any_number_of_workers(corpus: tuple[CorpusRecipe, list[str]], tmp_path: Path) -> None:
    recipe = corpus[0]
    for workers in (1, 2):
        prepare_corpus(recipe, tmp_path / f"out{workers}", PrepareOptions(workers=workers, part_bytes=20_000))
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / f"out{n}").iterdir()} for n in (1, 2))
    assert one == two
    assert len([name for name in one if name.startswith("one-")]) > 1


def test_parts_are_listed_with_their_checksums(corpus: tuple[CorpusRecipe, list[str]], tmp_path: Path) -> None:
    recipe, stay = corpus
    report = prepare_corpus(recipe, tmp_path / "out", PrepareOptions(part_bytes=15_000))
    files = [file for source in report["sources"] for file in source["files"]]
    assert len(files) > 3
    for file in files:
        content = (tmp_path / "out" / file["name"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file["bytes"], file["sha256"])
        assert len(lines_of(tmp_path / "out", file["name"])) == file["documents"]
    assert list(Corpus([str(tmp_path / "out/*.jsonl.zst")])) == stay


def test_a_finished_corpus_is_recognised(corpus: tuple[CorpusRecipe, list[str]], tmp_path: Path) -> None:
    recipe, out = corpus[0], tmp_path / "out"
    first = prepare_corpus(recipe, out, PrepareOptions())
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    again = prepare_corpus(recipe, out, PrepareOptions(workers=2, max_bad_records=7))
    assert again == first
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    other = recipe.model_copy(update={"filters": recipe.filters.model_copy(update={"min_words": 13})})
    with pytest.raises(DataError, match="exists and is not this corpus.*--overwrite"):
        prepare_corpus(other, out, PrepareOptions())
    prepare_corpus(other, out, PrepareOptions(overwrite=True))
    with open(recipe.sources[1].input[0], "a") as file:
        file.write(json.dumps({"text": "One more document of more than twelve words, which stands at the very end."}))
    with pytest.raises(DataError, match="is not this corpus"):
        prepare_corpus(other, out, PrepareOptions())
    shutil.copytree(out, tmp_path / "cut")
    next((tmp_path / "cut").glob("one-*")).write_bytes(b"")
    (tmp_path / "two.jsonl").write_text("".join((tmp_path / "two.jsonl").read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(DataError, match="missing or changed since it was made"):
        prepare_corpus(other, tmp_path / "cut", PrepareOptions())


def test_another_folder_is_left_alone(tmp_path: Path) -> None:
    recipe = recipe_of(source_of("part", write_lines(tmp_path / "in.jsonl", make_documents(3))))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("precious")
    with pytest.raises(DataError, match="exists and is not this corpus"):
        prepare_corpus(recipe, tmp_path / "out", PrepareOptions())
    assert (tmp_path / "out/thesis.txt").read_text() == "precious"


def test_rows_are_joined_and_other_keys_kept(tmp_path: Path) -> None:
    rows = [{"title": f"t{number}", "body": f"sentence {number}."} for number in range(7)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = source_of("part", str(tmp_path / "in.jsonl"), join_rows=3, json_keys=["body", "title"])
    prepare_corpus(recipe_of(source), tmp_path / "out", PrepareOptions())
    lines = lines_of(tmp_path / "out")
    assert [line["text"].count("\n") for line in lines] == [2, 2, 0]
    assert lines[1] == {"text": "sentence 3.\nsentence 4.\nsentence 5.", "title": "t3\nt4\nt5"}


def test_unreadable_records_are_counted_sampled_and_limited(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "fine"}\n{"text": \n\xff\xfe{}\n{"text": "fine too"}\n')
    recipe = recipe_of(source_of("part", str(path)))
    with pytest.raises(DataError, match="in.jsonl, line 2.*--max-bad-records"):
        prepare_corpus(recipe, tmp_path / "out", PrepareOptions())
    assert list(tmp_path.iterdir()) == [path]
    report = prepare_corpus(recipe, tmp_path / "out", PrepareOptions(max_bad_records=2))
    assert sum(report["sources"][0]["unreadable"].values()) == 2
    assert report["sources"][0]["records"] == 4
    assert len((tmp_path / "out/errors.jsonl").read_text().splitlines()) == 2


def test_a_limit_reads_a_beginning(tmp_path: Path) -> None:
    texts = [f"document {number} " + "filler words " * 200 for number in range(2000)]
    recipe = recipe_of(source_of("part", write_lines(tmp_path / "in.jsonl", texts)))
    report = prepare_corpus(recipe, tmp_path / "out", PrepareOptions(limit_bytes=1_500_000))
    assert 500 < report["sources"][0]["records"] < 1200
    assert lines_of(tmp_path / "out")[0]["text"] == texts[0]


def test_a_limit_reads_a_beginning_of_a_table(tmp_path: Path) -> None:
    texts = [f"document {number} " + "filler words " * 200 for number in range(2000)]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "in.parquet")
    recipe = recipe_of(source_of("part", str(tmp_path / "in.parquet")))
    report = prepare_corpus(recipe, tmp_path / "out", PrepareOptions(limit_bytes=1_500_000))
    assert 500 < report["sources"][0]["records"] < 1200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ('{"body": "x"}\n', "has no key 'text' .its keys: body; held-out files hold their texts under 'text'"),
    ],
)
def test_a_held_out_file_is_refused_by_its_own_flag(tmp_path: Path, content: str | None, message: str) -> None:
    held_out = tmp_path / "held.jsonl"
    if content:
        held_out.write_text(content)
    recipe = recipe_of(source_of("part", write_lines(tmp_path / "in.jsonl", ["text"])), decontaminate=[str(held_out)])
    with pytest.raises(DataError, match=f"^--decontaminate: .*held.jsonl.*{message}") as caught:
        prepare_corpus(recipe, tmp_path / "out", PrepareOptions())
    assert "--input" not in str(caught.value) and "--json-keys" not in str(caught.value)


def test_no_tool_reads_a_folder_that_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed before its last rename leaves a folder that globs pass over and that is refused by name."""
    written: list[str] = []

    def killed(folder: Path) -> None:
        written.extend(path.name for path in folder.iterdir())
        with pytest.raises(DataError, match="no file matches"):
            find_sources([str(tmp_path / "out*/*")])
        with pytest.raises(DataError, match="never finished"):
            find_sources([str(folder / "part-00000.jsonl.zst")])

    monkeypatch.setattr(atomic, "fsync_tree", killed)
    recipe = recipe_of(source_of("part", write_lines(tmp_path / "in.jsonl", make_documents(30))))
    prepare_corpus(recipe, tmp_path / "out", PrepareOptions(part_bytes=4000))
    assert {"corpus.json", "dropped.jsonl", "blend.yaml", "part-00001.jsonl.zst"} < set(written)
    assert find_sources([str(tmp_path / "out*/*.zst")])


@pytest.mark.parametrize(
    ("name", "filters"), [("rensa", {"near_duplicates": True}), ("py3langid", {"languages": ["en"]})]
)
def test_a_missing_library_is_named_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, filters: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    recipe = recipe_of(source_of("part", write_lines(tmp_path / "in.jsonl", ["text"])), **filters)
    with pytest.raises(DataError, match=f"needs the package {name}.*pip install {name}"):
        prepare_corpus(recipe, tmp_path / "out", PrepareOptions())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("rule", "name"), PACKAGES.items())
def test_a_missing_library_of_a_cleaning_rule_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    recipe = recipe_of(source_of("part", write_lines(tmp_path / "in.jsonl", ["text"]), clean=[rule]))
    with pytest.raises(DataError, match=f"the cleaning rule {rule} needs the package {name}.*pip install {name}"):
        prepare_corpus(recipe, tmp_path / "out", PrepareOptions())
    assert not (tmp_path / "out").exists()


def test_what_was_done_travels_with_the_files(corpus: tuple[CorpusRecipe, list[str]], tmp_path: Path) -> None:
    recipe = corpus[0]
    report = prepare_corpus(recipe, tmp_path / "out", PrepareOptions(part_bytes=15_000))
    record = cleaning_record(find_sources([str(tmp_path / "out/*.zst"), str(tmp_path / "one.jsonl")]))
    assert record == [{"corpus": "test", **stage} for stage in report["stages"]]
    assert cleaning_record(find_sources([str(tmp_path / "one.jsonl"), "hf://some/where"])) == []
    for content in ("{", "[]", '{"text": "x"}\n{"text": "y"}\n'):  # another program's file of that name
        (tmp_path / "out/corpus.json").write_text(content)
        assert cleaning_record(find_sources([str(tmp_path / "out/one-00000.jsonl.zst")])) == []


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    rng_texts = [hashlib.sha512(str(number).encode()).hexdigest() for number in range(6000)]
    path = write_lines(tmp_path / "in.jsonl", rng_texts)
    recipe = recipe_of(source_of("part", path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        with pytest.raises(DataError, match="nothing was kept, free some space"):
            prepare_corpus(recipe, tmp_path / "out", PrepareOptions())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [entry.name for entry in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_killed_run_leaves_nothing_that_is_taken_for_a_corpus(tmp_path: Path) -> None:
    texts = [f"{number} " + hashlib.sha512(str(number).encode()).hexdigest() * 50 for number in range(9000)]
    path = write_lines(tmp_path / "in.jsonl", texts)
    command = [sys.executable, "tools/prepare_corpus.py", "--input", path, "--output-dir", str(tmp_path / "out")]
    process = subprocess.Popen([*command, "--part-size", "1", "--workers", "1"], stderr=subprocess.DEVNULL)
    try:
        while not list(tmp_path.glob("out.partial-*/part-00001*")) and process.poll() is None:
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.glob("out.partial-*/part-*"))
    assert not list(tmp_path.glob("**/corpus.json"))


@pytest.mark.soak
def test_killed_at_any_moment_it_is_whole_or_absent(tmp_path: Path) -> None:
    texts = [f"{number} " + hashlib.sha512(str(number).encode()).hexdigest() * 50 for number in range(3000)]
    path = write_lines(tmp_path / "in.jsonl", texts)
    command = [sys.executable, "tools/prepare_corpus.py", "--input", path, "--part-size", "1", "--near-duplicates"]
    finished = 0
    for attempt in range(12):
        out = tmp_path / f"out{attempt}"
        process = subprocess.Popen([*command, "--output-dir", str(out), "--workers", "2"], stderr=subprocess.DEVNULL)
        while not list(tmp_path.glob(f"out{attempt}.partial-*")) and process.poll() is None:
            time.sleep(0.01)
        time.sleep(attempt * 0.1)
        process.kill()
        process.wait()
        if out.exists():
            finished += 1
            report = json.loads((out / "corpus.json").read_text())
            assert [line["text"] for line in lines_of(out)] == texts
            for file in report["sources"][0]["files"]:
                assert hashlib.sha256((out / file["name"]).read_bytes()).hexdigest() == file["sha256"]
    assert finished < 12
