"""ctxlm ledger: its tables of segments and of reads, and what it refuses; tests/integration/test_ledger.py runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctxlm_ds.apps.report.ledger import answer_lines, main
from ctxlm_ds.checkpoint.folders import find_verified
from ctxlm_ds.checkpoint.manifest import MANIFEST_NAME, hash_files, list_files, write_manifest
from tests.checkpoints import make_tokenizer, write_random_run
from tests.integration.route import call_here


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_random_run(tmp_path / "run", "gpt2", make_tokenizer("gpt2", tmp_path / "tok"))


def test_a_run_without_a_ledger_is_computed_and_said_so(run: Path) -> None:
    done = call_here(main, "ctxlm ledger", run)
    assert done.returncode == 0 and "-test (from state.json)" in done.stdout and "0 to 799" in done.stdout
    (segment,) = json.loads(call_here(main, "ctxlm ledger", run, "--json").stdout)
    assert segment["from"] == 0 and segment["to"] == 800 and segment["computed"]


def test_what_is_wrong_is_one_error(run: Path, tmp_path: Path) -> None:
    def refused(*words: object) -> str:
        done = call_here(main, "ctxlm ledger", *words)
        assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("error:") == 1
        return done.stderr

    assert "no such folder" in refused(tmp_path / "none")
    for wrong in ("data", "data:", ":3", "data:-1", "data:x"):
        assert "give a dataset and the number of a document" in refused(run, "--document", wrong)
    assert f"{tmp_path / 'gone'}.idx: no such file" in refused(run, "--document", f"{tmp_path / 'gone'}:0")
    assert f"error: {tmp_path / 'text'}: missing" in refused(run, "--text", tmp_path / "text")
    folder, manifest = find_verified(run)
    (folder / "state.json").write_bytes(b"x" * (folder / "state.json").stat().st_size)
    assert "state.json: sha256" in refused(run)
    (folder / "state.json").unlink()
    (folder / MANIFEST_NAME).unlink()
    write_manifest(folder, manifest.step, hash_files(folder, list_files(folder)))
    assert "has no ledger: the weights were imported" in refused(run)


def test_reads_are_shown_by_segment_epoch_and_part() -> None:
    def read(position: int, places: list[int], epoch: int = 0, second: bool = False, step: int | None = 1) -> dict:
        return {"segment": 0, "epoch": epoch, "position": position, "step": step, "places": places, "second": second}

    reads = [read(9, [0, 1]), read(4, [1, 2]), read(7, [3], second=True, step=None), read(30, [0, 1, 2, 3], epoch=1)]
    answer = {"dataset": "data/wiki", "documents": [5], "tokens": 4, "reads": reads}
    title, head, *rows = answer_lines(answer)
    assert title == "1 document of data/wiki (5), 4 tokens: 4 of its tokens were read, 2.25 times the document in all"
    assert head.split()[:3] == ["segment", "epoch", "as"]
    assert [row.split("  ") for row in (" ".join(row.split()) for row in rows)] == [
        ["0 0 text 2 3 of 4 9, 4 1"], ["0 0 second segment 1 1 of 4 7 -"], ["0 1 text 1 4 of 4 30 1"],
    ]  # fmt: skip
    assert answer_lines(answer | {"reads": []}) == ["1 document of data/wiki (5), 4 tokens: not read"]
