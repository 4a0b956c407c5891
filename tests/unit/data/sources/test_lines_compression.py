"""Compressed files: several members, padding, and the damaged rest of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.data.sources.parsing import parse_chunk
from ctxlm_ds.data.sources.reading import find_sources, read_chunks
from ctxlm_ds.data.sources.types import BadRecord
from ctxlm_ds.errors import DataError
from tests.text import make_documents, write_corpus
from tests.unit.data.sources.documents import texts_of
from tests.unit.data.sources.test_reading import FORMATS


@pytest.mark.parametrize("format", ["jsonl.gz", "jsonl.xz", "jsonl.bz2", "jsonl.zst"])
def test_joined_compressed_files_are_read_to_the_end(tmp_path: Path, format: str) -> None:
    path = tmp_path / FORMATS[format]
    documents = write_corpus(path, 20, format=format)
    path.write_bytes(path.read_bytes() * 2)
    assert texts_of(path) == documents * 2


@pytest.mark.parametrize("format", ["jsonl.gz", "jsonl.xz"])
def test_zeros_behind_compressed_members_are_padding(tmp_path: Path, format: str) -> None:
    path = tmp_path / FORMATS[format]
    documents = write_corpus(path, 20, format=format)
    path.write_bytes(path.read_bytes() + bytes(400) + path.read_bytes() + bytes(70_000))
    assert texts_of(path) == documents * 2


@pytest.mark.parametrize("format", ["jsonl.gz", "jsonl.xz", "jsonl.bz2", "jsonl.zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "garbage", "garbage behind", "empty"])
def test_the_damaged_rest_of_a_compressed_file_is_one_bad_record(tmp_path: Path, format: str, damage: str) -> None:
    path = tmp_path / FORMATS[format]
    documents = write_corpus(path, 50, format=format)
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(
        {
            "cut": content * 2 + content[:half],
            "flipped": content * 2 + content[:half] + bytes([content[half] ^ 255]) + content[half + 1 :],
            "garbage": b"{not compressed at all}" * 20,
            "garbage behind": content * 2 + b"{not compressed at all}",
            "empty": b"",
        }[damage]
    )
    write_corpus(tmp_path / "next.jsonl", 3, seed=9)
    found = find_sources([str(path), str(tmp_path / "next.jsonl")])
    items = [item for chunk in read_chunks(found) for item in parse_chunk(chunk, ["text"])]
    bad = [item for item in items if isinstance(item, BadRecord)]
    good = [item["text"] for item in items if isinstance(item, dict)]
    read = good[:-3]
    assert good[-3:] == make_documents(3, 9)
    reason = f"damaged or not {format[6:]} data; the rest of the file is lost"
    assert bad[-1].reason == reason and bad[-1].detail and {item.path for item in bad} == {str(path)}
    if damage == "flipped":  # what a member holds is only proved at its end
        assert read[:100] == documents * 2
        return
    assert read == [] if damage in ("garbage", "empty") else read == (documents * 3)[: len(read)] and len(read) >= 100
    assert [(item.position, item.unit) for item in bad] == [(len(read) + 1, "line")]
    with pytest.raises(DataError, match=rf"{path.name}, line {len(read) + 1}: damaged"):
        texts_of(path)
