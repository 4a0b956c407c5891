"""The workers: their number changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.text import write_corpus
from tests.unit.data.preprocess.test_job import run


@pytest.mark.parametrize("split", [pytest.param(False, marks=pytest.mark.soak), True])
def test_the_number_of_workers_changes_nothing(
    tmp_path: Path, tokenizers: dict[str, Path], split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxlm_ds.data.sources.reading.CHUNK_BYTES", 5000)
    write_corpus(tmp_path / "corpus.jsonl", 300, seed=8)
    contents = []
    for workers in (1, 3):
        dataset = run(
            tmp_path / "corpus.jsonl", tokenizers["bpe"], split_sentences=split, workers=workers, overwrite=True
        )
        contents.append([Path(f"{dataset.prefix}.{extension}").read_bytes() for extension in ("bin", "idx", "json")])
    assert contents[0] == contents[1]
