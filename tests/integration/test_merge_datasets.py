"""tools/merge_datasets.py as a user types it, on shards of preprocessed text: the whole, in bounded memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ctxlm_ds.data.dataset.reader import IndexedDataset
from tests.integration.conftest import SHARDS
from tests.integration.test_inspect_dataset import TOOLS, run_tool
from tests.sample_data import random_documents, write_dataset


def test_shards_joined_are_the_whole(shards: Path) -> None:
    parts = sorted(shards.glob("c_text_sentence_shard*.idx"))
    assert len(parts) == SHARDS
    done = run_tool("merge_datasets", "--input", *parts, "--output-prefix", shards / "joined")
    whole, joined = IndexedDataset(shards / "whole_text_sentence"), IndexedDataset(shards / "joined")
    assert done.stdout.startswith(f"{shards}/joined: 3 parts, 150 documents, {len(whole):,} sequences")
    assert done.stdout.endswith(f"next: ctxlm inspect {shards}/joined --verify\n")
    for extension in ("bin", "idx"):
        joined_bytes = (shards / f"joined.{extension}").read_bytes()
        assert joined_bytes == (shards / f"whole_text_sentence.{extension}").read_bytes()
    assert joined.metadata is not None and whole.metadata is not None
    for key in ("documents", "characters", "empty_documents", "sha256", "tokenizer_fingerprint", "inputs"):
        assert joined.metadata[key] == whole.metadata[key]
    again = run_tool("merge_datasets", "--input", *parts, "--output-prefix", shards / "joined")
    assert "complete already, nothing to do" in again.stdout
    missing = run_tool("merge_datasets", "--input", *parts[:2], "--output-prefix", shards / "two", code=2)
    assert "2 of its 3 shards are named, missing 00002" in missing.stderr
    assert not list(shards.glob("two*"))


def test_memory_of_a_join_does_not_grow_with_the_tokens(tmp_path: Path) -> None:
    code = (
        "import sys; from ctxlm_ds.data.dataset.merge import merge_datasets\n"
        "merge_datasets(sys.argv[2:], sys.argv[1])\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    peaks = []
    for name, tokens in (("small", 100_000), ("large", 5_000_000)):
        count = tokens // 50_000
        parts = [
            str(write_dataset(tmp_path / f"{name}{number}", [[[7 + number] * 50_000]] * count)) for number in range(2)
        ]
        command = [sys.executable, "-c", code, str(tmp_path / name), *parts]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout))
    assert peaks[1] < peaks[0] * 1.15  # 40 MB of tokens; peaks in kB


def test_a_join_of_many_parts_keeps_few_files_open(tmp_path: Path) -> None:
    parts = [write_dataset(tmp_path / f"p{number:03d}", random_documents(1, seed=number)) for number in range(60)]
    command = [sys.executable, str(TOOLS / "merge_datasets.py"), "--input", *map(str, parts)]
    done = subprocess.run(
        ["prlimit", "--nofile=48", *command, "--output-prefix", str(tmp_path / "joined")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert IndexedDataset(tmp_path / "joined").num_documents == 60
