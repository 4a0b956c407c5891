"""The data tools as a user types them: the route, clear errors, and interrupted runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.route import ROOT, Finished, tool, wait_for
from tests.text import write_corpus


def command_of(name: str, *arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "tools" / f"{name}.py"), *map(str, arguments)]


def run_tool(name: str, *arguments: object, code: int = 0) -> Finished:
    done = tool(f"{name}.py", *arguments, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def refused(message: str, name: str, *arguments: object) -> None:
    done = run_tool(name, *arguments, code=2)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    write_corpus(path, 150, seed=2)
    return path


@pytest.fixture(scope="module")
def tokenizer(corpus: Path) -> Path:
    folder = corpus.parent / "tokenizer"
    run_tool("train_tokenizer", "--input", corpus, "--type", "wordpiece", "--vocab-size", 600, "--output-dir", folder)
    return folder


@pytest.fixture(scope="module")
def long_corpus(corpus: Path) -> Path:
    """Text enough for several seconds, so that a run can be stopped in the middle."""
    path = corpus.parent / "long.jsonl"
    content = corpus.read_bytes()
    with open(path, "wb") as file:
        for _ in range(400):
            file.write(content)
    return path


def test_the_route(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    again = ("--input", corpus, "--split-sentences", "--tokenizer", tokenizer, "--output-prefix", tmp_path / "data")
    done = run_tool("preprocess_data", *again, "--json-keys", "text", "--append-eod", "--workers", 2)
    prefix = f"{tmp_path}/data_text_sentence"
    assert f"{prefix}: 150 documents (0 empty and 0 bad ones skipped)" in done.stdout
    assert {str(path) for path in tmp_path.iterdir()} == {f"{prefix}.{end}" for end in ("bin", "idx", "json", "sha256")}
    shown = run_tool("inspect_dataset", prefix, "--verify", "--show", 1).stdout
    assert "documents     150" in shown and shown.count("verified ") >= 4
    assert "[1]" in shown and "chapter 0 is about" in shown and "[SEP]" in shown
    assert f"{tokenizer} has the recorded fingerprint" in shown
    assert "complete already, nothing to do" in run_tool("preprocess_data", "--append-eod", *again).stdout
    refused("already", "preprocess_data", *again)


def test_mistakes_give_one_clear_line(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    output = ("--output-prefix", tmp_path / "data")
    refused("no such file", "preprocess_data", "--input", tmp_path / "none", "--tokenizer", tokenizer, *output)
    refused("no such tokenizer folder", "preprocess_data", "--input", corpus, "--tokenizer", "bert-base", *output)
    refused("has no key 'body'", "preprocess_data", "--input", corpus, "--json-keys", "body", "--tokenizer", tokenizer,
           "--workers", 2, *output)  # fmt: skip
    refused("already exists", "train_tokenizer", "--input", corpus, "--type", "bpe", "--output-dir", tokenizer)
    refused("no such file", "inspect_dataset", tmp_path / "data")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "cut.idx").write_bytes(b"MMIDIDX")
    (tmp_path / "cut.bin").write_bytes(b"")
    refused("not an indexed dataset", "inspect_dataset", tmp_path / "cut", "--verify")


def test_a_shard_names_the_join_and_one_is_singular(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text('{"text": "Ada."}\n')
    flags = ("--input", path, "--tokenizer", tokenizer, "--output-prefix", tmp_path / "data", "--workers", 1)
    for shard in ("0/2", "1/2"):
        done = run_tool("preprocess_data", *flags, "--shard", shard)
        if shard == "0/2":
            assert ": 1 document (0 empty and 0 bad ones skipped), 1 sequence, " in done.stdout
            assert re.search(r"^4 characters in 0:\d\d \(\d+/s\)$", done.stdout, re.MULTILINE)
    line = done.stdout.splitlines()[-1]
    whole = f"{tmp_path}/data_text_document"
    assert line.startswith("next, when all 2 shards are there: ctxlm merge --input ")
    command = line.split("ctxlm merge ")[1]
    assert command == f"--input {whole}_shard*-of-00002.idx --output-prefix {whole}"
    merged = run_tool("merge_datasets", "--input", *sorted(tmp_path.glob("*_shard*.idx")), "--output-prefix", whole)
    assert merged.stdout.startswith(f"{whole}: 2 parts, 1 document, 1 sequence, ") and "kB in " in merged.stdout


_PIECEMEAL = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from ctxlm_ds.data.preprocess import job
job.SAVE_INTERVAL_BYTES = 1 << 20
from ctxlm_ds.console import run_command
from ctxlm_ds.apps.text.preprocess_data import main
run_command(main)
"""


def contents(prefix: Path) -> dict[str, bytes]:
    """The files of a dataset by their endings, without its own name."""
    name = prefix.name.removesuffix("_document").encode()
    return {path.suffix: path.read_bytes().replace(name, b"NAME") for path in prefix.parent.glob(f"{prefix.name}.*")}


def test_an_interrupted_run_keeps_its_progress_and_goes_on(long_corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    source = ("--input", long_corpus, "--tokenizer", tokenizer, "--output-prefix")
    command = [sys.executable, "-c", _PIECEMEAL, ROOT, *source, tmp_path / "data", "--workers", 1]
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
    partial = tmp_path / "data_text_document.partial"
    wait_for((partial / "progress.json").exists, 60, "progress")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip().splitlines()[-1] == f"interrupted; {partial} is kept: rerun the command to resume"
    assert "resuming after" in run_tool("preprocess_data", *source, tmp_path / "data", "--workers", 2).stderr
    run_tool("preprocess_data", *source, tmp_path / "whole")
    assert contents(tmp_path / "data_text_document") == contents(tmp_path / "whole_text_document")


def test_a_worker_killed_by_the_system_is_reported(long_corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    arguments = ("--input", long_corpus, "--tokenizer", tokenizer, "--output-prefix", tmp_path / "data")
    command = command_of("preprocess_data", *arguments, "--split-sentences", "--workers", 2)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        parts = "*.partial/*.bin.part"
        wait_for(lambda: any(path.stat().st_size > 100_000 for path in tmp_path.glob(parts)), 60, "a part")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        workers = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(int(workers[0]), signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 2
    assert errors.strip().splitlines()[-1].startswith("error: a worker process died")
    assert list(tmp_path.iterdir()) == []


def test_memory_stays_flat(long_corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from ctxlm_ds.data.preprocess.job import *\n"
        "preprocess([sys.argv[1]], sys.argv[2], sys.argv[3], PreprocessConfig(split_sentences=True))\n"
        # Not getrusage's figure, which goes on from what the process that started this one held.
        "print(*(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    content = long_corpus.read_bytes()
    peaks = []
    for name, size in (("small", 4_000_000), ("large", 12_000_000)):
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(content[:size].rsplit(b"\n", 1)[0])
        command = [sys.executable, "-c", code, str(path), str(tokenizer), str(tmp_path / name)]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout))
    assert peaks[1] < peaks[0] * 1.15  # three times the text; peaks in kB
