"""tools/inspect_dataset.py as a user types it, on preprocessed text: what it verifies and what it finds."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ctxlm_ds.data.dataset.inspection import round_trip
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.tokenizers.load import load_tokenizer

TOOLS = Path(__file__).parents[2] / "tools"


def run_tool(tool: str, *arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / f"{tool}.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize("tool", ["merge_datasets", "inspect_dataset"])
def test_help_within_a_second(tool: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "usage:" in run_tool(tool, "--help").stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 1.0


def test_verify_shows_the_text_and_finds_a_changed_byte(shards: Path) -> None:
    prefix = shards / "whole_text_sentence"
    shown = run_tool("inspect_dataset", prefix, "--verify").stdout
    for proof in ("structure: ", "checksums: sha256 of .bin, .idx, .json equal", f"tokenizer: {shards}/tok has the",
                  "ids: ", "text: "):  # fmt: skip
        assert f"verified      {proof}" in shown
    original = (shards / "whole_text_sentence.bin").read_bytes()
    try:
        (shards / "whole_text_sentence.bin").write_bytes(original[:99] + bytes([original[99] ^ 1]) + original[100:])
        failed = run_tool("inspect_dataset", prefix, "--verify", code=2)
        assert failed.stderr.startswith("error: ") and "whole_text_sentence.bin: sha256" in failed.stderr
    finally:
        (shards / "whole_text_sentence.bin").write_bytes(original)


def test_text_comes_back_with_the_right_tokenizer_only(shards: Path, tmp_path: Path) -> None:
    dataset = IndexedDataset(shards / "whole_text_sentence")
    result = round_trip(dataset, load_tokenizer(shards / "tok"))
    assert result.sequences > 30
    assert result.same + result.with_unknown >= 0.95 * result.sequences
    for extension in ("bin", "idx"):  # as a dataset of Megatron, which records no tokenizer
        (tmp_path / f"bare.{extension}").write_bytes((shards / f"whole_text_sentence.{extension}").read_bytes())
    right = run_tool("inspect_dataset", tmp_path / "bare", "--verify", "--tokenizer", shards / "tok").stdout
    assert "sampled sequences decode to text that gives the same ids again" in right
    wrong = run_tool("inspect_dataset", tmp_path / "bare", "--verify", "--tokenizer", shards / "other", code=2)
    assert "name the tokenizer that made the dataset with --tokenizer" in wrong.stderr
    written = run_tool("inspect_dataset", tmp_path / "bare", "--write-manifest").stdout
    assert "bare.sha256 written" in written
    checked = subprocess.run(["sha256sum", "--strict", "-c", "bare.sha256"], cwd=tmp_path, capture_output=True)
    assert checked.returncode == 0
