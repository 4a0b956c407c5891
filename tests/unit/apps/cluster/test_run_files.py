"""The files of a run directory that its status is read from: only the end of a long one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctxlm_ds.apps.cluster.run_files import TAIL_BYTES, read_last_step
from tests.unit.apps.cluster.status_runs import line


def test_only_the_end_of_metrics_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    text = (json.dumps(line(7)) + "\n").encode() * 1000
    with open(path, "wb") as handle:
        for _ in range(-(-128 * TAIL_BYTES // len(text))):
            handle.write(text)
        handle.write((json.dumps(line(8)) + "\n" + json.dumps({"step": 8, "eval/x/loss": 1.0}) + "\n").encode())
    before = read_bytes()
    assert read_last_step(tmp_path) == line(8)
    assert read_bytes() - before < 1 << 20


def read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_lines_longer_than_a_piece_and_a_bound_without_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(json.dumps({**line(step), "pad": "x" * 100_000}) for step in (1, 2, 3)))
    assert (read_last_step(tmp_path) or {})["step"] == 3
    path.write_bytes(b"\0" * (TAIL_BYTES + 10))
    with pytest.raises(ValueError):
        read_last_step(tmp_path)
    path.write_text(json.dumps({"step": 0, "eval/x/loss": 1.0}) + "\n")
    assert read_last_step(tmp_path) is None
    path.write_bytes(b"")
    assert read_last_step(tmp_path) is None
