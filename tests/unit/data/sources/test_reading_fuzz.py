"""Damaged corpus files by the thousand: documents, bad records or a DataError, in bounded memory and time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.data.sources import source_mutations

REPOSITORY = Path(__file__).parents[4]

LONG_LINES = """
import resource, sys
from pathlib import Path
from ctxlm_ds.data.sources.parsing import parse_chunk
from ctxlm_ds.data.sources.reading import find_sources, read_chunks
from ctxlm_ds.data.sources.types import BadRecord
virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (virtual + 1_200_000_000,) * 2)
items = [item for chunk in read_chunks(find_sources(sys.argv[1:])) for item in parse_chunk(chunk, ["text"])]
print([str(item)[len(sys.argv[1]):] if isinstance(item, BadRecord) else len(item["text"]) for item in items])
"""


def _run(*arguments: str | Path | int) -> str:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "ARROW_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, env=environment, cwd=REPOSITORY
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stderr[-3000:]}"
    return done.stdout


def _fuzz(folder: Path, seed: int, num_cases: int) -> None:
    report = json.loads(_run(source_mutations.__file__, folder, seed, num_cases))
    outcomes = report["outcomes"]
    assert sum(outcomes.values()) == num_cases
    assert min(outcomes["documents"], outcomes["bad records"]) > num_cases / 10, outcomes
    assert report["peak_bytes"] < 400_000_000


def test_mutated_files(tmp_path: Path) -> None:
    _fuzz(tmp_path, seed=1, num_cases=2500)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 18))
def test_mutated_files_at_length(tmp_path: Path, seed: int) -> None:
    _fuzz(tmp_path, seed, num_cases=5000)


@pytest.mark.soak
def test_a_line_of_100_mb_is_read_and_one_of_600_mb_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "first"}\n{"text": "' + b"a" * 100_000_000 + b'"}\n{"text": "')
        for _ in range(600):
            file.write(b"b" * 1_000_000)
        file.write(b'"}\n{"text": "last"}\n')
    printed = _run("-c", LONG_LINES, path)
    assert printed == "[5, 100000000, ', line 3: longer than 256,000,000 bytes', 4]\n"
