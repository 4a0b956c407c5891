"""tools/inspect_dataset.py and tools/merge_datasets.py as a user types them, on preprocessed text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.preprocess.job import PreprocessConfig, preprocess
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.integration.test_preprocess_data import command_of, run_tool
from tests.sample_data import random_documents, write_dataset
from tests.text import write_corpus


def test_text_comes_back_with_the_right_tokenizer_only(tmp_path: Path) -> None:
    documents = write_corpus(tmp_path / "text.jsonl", 150, seed=1)
    for name, kind in (("tok", "wordpiece"), ("other", "bpe")):
        train_tokenizer(kind, documents, 600, tmp_path / name)
    config = PreprocessConfig(split_sentences=True, append_eod=True)
    preprocess([str(tmp_path / "text.jsonl")], tmp_path / "tok", tmp_path / "whole", config)
    for extension in ("bin", "idx"):  # as a dataset of Megatron, which records no tokenizer
        (tmp_path / f"bare.{extension}").write_bytes((tmp_path / f"whole_text_sentence.{extension}").read_bytes())
    right = run_tool("inspect_dataset", tmp_path / "bare", "--verify", "--tokenizer", tmp_path / "tok").stdout
    assert "sampled sequences decode to text that gives the same ids again" in right
    wrong = run_tool("inspect_dataset", tmp_path / "bare", "--verify", "--tokenizer", tmp_path / "other", code=2)
    assert "name the tokenizer that made the dataset with --tokenizer" in wrong.stderr
    written = run_tool("inspect_dataset", tmp_path / "bare", "--write-manifest").stdout
    assert "bare.sha256 written" in written
    checked = subprocess.run(["sha256sum", "--strict", "-c", "bare.sha256"], cwd=tmp_path, capture_output=True)
    assert checked.returncode == 0


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
    command = command_of("merge_datasets", "--input", *parts, "--output-prefix", tmp_path / "joined")
    done = subprocess.run(["prlimit", "--nofile=48", *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert IndexedDataset(tmp_path / "joined").num_documents == 60
    done = subprocess.run(["prlimit", "--nofile=30", *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "error: 30 open files are allowed" in done.stderr
