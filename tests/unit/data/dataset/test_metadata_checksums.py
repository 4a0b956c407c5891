"""The manifest of checksums beside `sha256sum`, both ways, and a copy that is not what it was."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from ctxlm_ds.data.dataset.inspection import verify_dataset
from ctxlm_ds.data.dataset.metadata import file_digest, manifest_text, read_manifest, write_manifest
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.errors import DataError
from tests.sample_data import random_documents, write_dataset

NAMES = ["plain.bin", "two words.idx", "back\\slash.json", "line\nend.bin", "größe.idx", "return\r.bin"]


def _sha256sum(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sha256sum", *arguments], cwd=folder, capture_output=True, text=True)


def test_sha256sum_reads_ours(tmp_path: Path) -> None:
    for number, name in enumerate(NAMES):
        (tmp_path / name).write_bytes(bytes([number]) * 3_000_000)
    digests = {name: file_digest(tmp_path / name) for name in NAMES}
    assert digests == {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in NAMES}
    (tmp_path / "ours").write_bytes(manifest_text(digests).encode())
    assert _sha256sum(tmp_path, "--strict", "-c", "ours").returncode == 0
    assert _sha256sum(tmp_path, "--text", *NAMES).stdout == manifest_text(digests)
    (tmp_path / NAMES[1]).write_bytes(b"changed")
    assert _sha256sum(tmp_path, "-c", "ours").returncode == 1


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    (tmp_path / "a").mkdir()
    return write_dataset(tmp_path / "a" / "data", random_documents(20))


def test_a_finished_dataset_carries_its_manifest(prefix: Path) -> None:
    assert _sha256sum(prefix.parent, "--strict", "-c", "data.sha256").stdout == (
        "data.bin: OK\ndata.idx: OK\ndata.json: OK\n"
    )
    assert set(read_manifest(prefix) or {}) == {"bin", "idx", "json"}


def test_without_manifest_verify_says_so_and_writes_it_when_told(prefix: Path) -> None:
    path = Path(f"{prefix}.sha256")
    original = path.read_bytes()
    path.unlink()
    assert any(proof.startswith("manifest: none (data.sha256)") for proof in verify_dataset(IndexedDataset(prefix)))
    assert not path.exists()
    assert any("data.sha256 written" in proof for proof in verify_dataset(IndexedDataset(prefix), write=True))
    assert path.read_bytes() == original
    with pytest.raises(DataError, match="exists already"):
        write_manifest(prefix, {"bin": "0" * 64})
    assert path.read_bytes() == original


def test_a_dataset_of_megatron_gets_one_that_then_proves_it(prefix: Path) -> None:
    for extension in ("json", "sha256"):
        Path(f"{prefix}.{extension}").unlink()
    verify_dataset(IndexedDataset(prefix), write=True)
    assert _sha256sum(prefix.parent, "--strict", "-c", "data.sha256").stdout == "data.bin: OK\ndata.idx: OK\n"
    content = bytearray(Path(f"{prefix}.bin").read_bytes())
    content[40] ^= 4
    Path(f"{prefix}.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"data\.bin: sha256 .*data\.sha256 records"):
        verify_dataset(IndexedDataset(prefix))


def test_damage_is_not_recorded_as_the_truth(prefix: Path) -> None:
    Path(f"{prefix}.sha256").unlink()
    content = bytearray(Path(f"{prefix}.bin").read_bytes())
    content[40] ^= 4
    Path(f"{prefix}.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"data\.json records"):
        verify_dataset(IndexedDataset(prefix), write=True)
    assert not Path(f"{prefix}.sha256").exists()


@pytest.mark.parametrize("name", ["two words", "back\\slash", "größe"])
def test_we_read_what_sha256sum_writes(prefix: Path, name: str) -> None:
    for extension in ("bin", "idx", "json"):
        Path(f"{prefix}.{extension}").rename(prefix.parent / f"{name}.{extension}")
    expected = read_manifest(prefix)
    written = _sha256sum(prefix.parent, "--text", *(f"{name}.{extension}" for extension in ("bin", "idx", "json")))
    (prefix.parent / f"{name}.sha256").write_text(written.stdout)
    assert read_manifest(prefix.parent / name) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (content, "not the checksums of one dataset's .bin, .idx and .json as `sha256sum --text` writes them")
        for content in (
            b"",
            b"\x00" * 50,
            b"0" * 63 + b"  data.bin\n",
            b"0" * 64 + b"  data.bin\n",
            b"0" * 64 + b"  data.bin\n" + b"1" * 64 + b"  other.idx\n",
            b"0" * 64 + b"  data.bin\n" + b"1" * 64 + b"  data.idx\n" + b"1" * 64 + b"  data.txt\n",
            b"0" * 64 + b"  data.bin\n" + b"1" * 64 + b"  data.bin\n",
            b"0" * 64 + b"  data.bin\n" + b"1" * 64 + b"  data.idx\n" + b"1" * 64 + b"  data.idx\n",
            b"A" * 64 + b"  data.bin\n" + b"1" * 64 + b"  data.idx\n",
            b"0" * 64 + b" *data.bin\n" + b"1" * 64 + b"  data.idx\n",
            b"0" * 64 + b"  data.bin\n" + b"1" * 64 + b"  data.idx",
        )
    ]
    + [(b"\xff\xfe", "cannot be read as UTF-8"), (b"0" * (1 << 21), "more than 1,048,576 bytes")],
)
def test_damaged_manifest(prefix: Path, content: bytes, message: str) -> None:
    Path(f"{prefix}.sha256").write_bytes(content)
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix)


def test_a_renamed_dataset_keeps_its_proof(prefix: Path) -> None:
    for extension in ("bin", "idx", "json", "sha256"):
        Path(f"{prefix}.{extension}").rename(prefix.parent / f"renamed.{extension}")
    proofs = "\n".join(verify_dataset(IndexedDataset(prefix.parent / "renamed")))
    assert "sha256 of .bin, .idx, .json equal those in renamed.sha256" in proofs


def test_a_copy_without_its_json_is_incomplete(prefix: Path) -> None:
    Path(f"{prefix}.json").unlink()
    with pytest.raises(DataError, match=r"data\.json: no such file, but .*data\.sha256 lists it"):
        IndexedDataset(prefix)


def test_opening_sees_every_changed_byte_of_the_json_and_of_the_manifest(prefix: Path) -> None:
    for extension in ("json", "sha256"):
        path = Path(f"{prefix}.{extension}")
        content = path.read_bytes()
        flipped = [content[:i] + bytes([content[i] ^ 1 << i % 8]) + content[i + 1 :] for i in range(len(content))]
        upper = [content[:i] + content[i : i + 1].swapcase() + content[i + 1 :] for i in range(len(content))]
        for changed in [*flipped, *upper, *(content[:length] for length in range(len(content)))]:
            if changed != content:
                path.write_bytes(changed)
                with pytest.raises(DataError, match=r"data\.(json|sha256)"):
                    IndexedDataset(prefix)
        path.write_bytes(content)
    IndexedDataset(prefix)
