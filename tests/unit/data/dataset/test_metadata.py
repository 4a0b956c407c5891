"""The JSON of a dataset: damaged, of another dataset, with fields of another type."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from ctxlm_ds.data.dataset.inspection import verify_dataset
from ctxlm_ds.data.dataset.metadata import dataset_manifest, file_digest, read_manifest, write_manifest
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.errors import DataError
from tests.sample_data import random_documents, write_dataset
from tests.unit.data.dataset.test_reader import documents_of, edit, expect_refusal, write_documents


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_documents(tmp_path / "data", documents_of(1, 1000), vocab_size=1000)
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ('{"format": ' + "9" * 5000 + "}", "cannot be read as JSON"),
        ("[]", "expected an object"),
        ('{"format": "other"}', "does not describe"),
    ],
)
def test_damaged_json(prefix: Path, content: str, message: str) -> None:
    Path(f"{prefix}.json").write_text(content)
    expect_refusal(prefix, r"data\.json: sha256 .* --write-manifest")
    Path(f"{prefix}.sha256").unlink()
    expect_refusal(prefix, message)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokens", 5, "says tokens"),
        ("documents", 1, "says documents"),
        ("sequences", 0, "says sequences"),
        ("dtype", "int32", "says dtype"),
        ("version", 2, "version 2"),
        ("vocab_size", "many", "vocab_size is 'many' .*valid integer"),
        ("vocab_size", -3, "vocab_size is '-3' .*greater than or equal to 0"),
        ("split_sentences", 1, "split_sentences is '1' .*valid boolean"),
        ("tokenizer_path", ["tok"], "tokenizer_path is .*valid string"),
        ("inputs", [1], r"inputs is '\[1\]' .*valid string"),
        ("sha256", {"bin": None}, "sha256 is .*valid string"),
        ("eod_id", 1000, "eod_id 1000 is outside the vocabulary of 1000"),
        ("parts", ["a"], "parts is .*valid dictionary"),
        ("shard", [3, 3], r"shard is \[3, 3\]"),
    ],
)
def test_json_of_another_dataset_or_with_fields_of_another_type(
    prefix: Path, key: str, value: object, message: str
) -> None:
    Path(f"{prefix}.sha256").unlink()
    path = Path(f"{prefix}.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    expect_refusal(prefix, message)


NAMES = ["plain.bin", "two words.bin", "back\\slash.bin", "line\nend.bin", "größe.bin", "return\r.bin"]


def _sha256sum(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sha256sum", *arguments], cwd=folder, capture_output=True, text=True)


def test_sha256sum_reads_ours(tmp_path: Path) -> None:
    for number, name in enumerate(NAMES):
        (tmp_path / name).write_bytes(bytes([number]) * 3_000_000)
    digests = {name: file_digest(tmp_path / name) for name in NAMES}
    assert digests == {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in NAMES}
    manifest = "".join(dataset_manifest(name.removesuffix(".bin"), {"bin": digests[name]}) for name in NAMES)
    (tmp_path / "ours").write_bytes(manifest.encode())
    assert _sha256sum(tmp_path, "--strict", "-c", "ours").returncode == 0
    assert _sha256sum(tmp_path, "--text", *NAMES).stdout == manifest
    (tmp_path / NAMES[1]).write_bytes(b"changed")
    assert _sha256sum(tmp_path, "-c", "ours").returncode == 1


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    (tmp_path / "a").mkdir()
    return write_dataset(tmp_path / "a" / "data", random_documents(20))


def test_a_finished_dataset_carries_its_manifest(sealed: Path) -> None:
    assert _sha256sum(sealed.parent, "--strict", "-c", "data.sha256").stdout == (
        "data.bin: OK\ndata.idx: OK\ndata.json: OK\n"
    )
    assert set(read_manifest(sealed) or {}) == {"bin", "idx", "json"}


def test_without_manifest_verify_says_so_and_writes_it_when_told(sealed: Path) -> None:
    path = Path(f"{sealed}.sha256")
    original = path.read_bytes()
    path.unlink()
    assert any(proof.startswith("manifest: none (data.sha256)") for proof in verify_dataset(IndexedDataset(sealed)))
    assert not path.exists()
    assert any("data.sha256 written" in proof for proof in verify_dataset(IndexedDataset(sealed), write=True))
    assert path.read_bytes() == original
    with pytest.raises(DataError, match="exists already"):
        write_manifest(sealed, {"bin": "0" * 64})
    assert path.read_bytes() == original


def test_a_dataset_of_megatron_gets_one_that_then_proves_it(sealed: Path) -> None:
    for extension in ("json", "sha256"):
        Path(f"{sealed}.{extension}").unlink()
    verify_dataset(IndexedDataset(sealed), write=True)
    assert _sha256sum(sealed.parent, "--strict", "-c", "data.sha256").stdout == "data.bin: OK\ndata.idx: OK\n"
    edit(Path(f"{sealed}.bin"), lambda data: data[:40] + bytes([data[40] ^ 4]) + data[41:])
    with pytest.raises(DataError, match=r"data\.bin: sha256 .*data\.sha256 records"):
        verify_dataset(IndexedDataset(sealed))


def test_damage_is_not_recorded_as_the_truth(sealed: Path) -> None:
    Path(f"{sealed}.sha256").unlink()
    edit(Path(f"{sealed}.bin"), lambda data: data[:40] + bytes([data[40] ^ 4]) + data[41:])
    with pytest.raises(DataError, match=r"data\.json records"):
        verify_dataset(IndexedDataset(sealed), write=True)
    assert not Path(f"{sealed}.sha256").exists()


@pytest.mark.parametrize("name", ["two words", "back\\slash", "größe"])
def test_we_read_what_sha256sum_writes(sealed: Path, name: str) -> None:
    for extension in ("bin", "idx", "json"):
        Path(f"{sealed}.{extension}").rename(sealed.parent / f"{name}.{extension}")
    expected = read_manifest(sealed)
    written = _sha256sum(sealed.parent, "--text", *(f"{name}.{extension}" for extension in ("bin", "idx", "json")))
    (sealed.parent / f"{name}.sha256").write_text(written.stdout)
    assert read_manifest(sealed.parent / name) == expected


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
def test_damaged_manifest(sealed: Path, content: bytes, message: str) -> None:
    Path(f"{sealed}.sha256").write_bytes(content)
    with pytest.raises(DataError, match=message):
        IndexedDataset(sealed)


def test_a_renamed_dataset_keeps_its_proof(sealed: Path) -> None:
    for extension in ("bin", "idx", "json", "sha256"):
        Path(f"{sealed}.{extension}").rename(sealed.parent / f"renamed.{extension}")
    proofs = "\n".join(verify_dataset(IndexedDataset(sealed.parent / "renamed")))
    assert "sha256 of .bin, .idx, .json equal those in renamed.sha256" in proofs


def test_a_copy_without_its_json_is_incomplete(sealed: Path) -> None:
    Path(f"{sealed}.json").unlink()
    with pytest.raises(DataError, match=r"data\.json: no such file, but .*data\.sha256 lists it"):
        IndexedDataset(sealed)


def test_opening_sees_every_changed_byte_of_the_json_and_of_the_manifest(sealed: Path) -> None:
    for extension in ("json", "sha256"):
        path = Path(f"{sealed}.{extension}")
        content = path.read_bytes()
        flipped = [content[:i] + bytes([content[i] ^ 1 << i % 8]) + content[i + 1 :] for i in range(len(content))]
        upper = [content[:i] + content[i : i + 1].swapcase() + content[i + 1 :] for i in range(len(content))]
        for changed in [*flipped, *upper, *(content[:length] for length in range(len(content)))]:
            if changed != content:
                path.write_bytes(changed)
                with pytest.raises(DataError, match=r"data\.(json|sha256)"):
                    IndexedDataset(sealed)
        path.write_bytes(content)
    IndexedDataset(sealed)
