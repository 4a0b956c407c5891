"""Copies on a node's own disk: what is copied, what proves it, and what a run reads then."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.cluster import staging
from ctxlm_ds.cluster.staging import ROOT_NAME, copy_of, settings_of, stage_here
from ctxlm_ds.data.stream.run_datasets import build_run_rows
from ctxlm_ds.objectives.build import build_objective
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.sample_data import random_documents, write_dataset
from tests.text import make_documents


@pytest.fixture(autouse=True)
def little_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SPARE_BYTES", 0)


@pytest.fixture(scope="module")
def route(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, two datasets of one name in two folders, a held-out one, and a recipe; indexes built."""
    folder = tmp_path_factory.mktemp("route")
    tokenizer = train_tokenizer("wordpiece", make_documents(60, seed=1), 300, folder / "tokenizer")
    made_with = {"tokenizer_fingerprint": tokenizer.fingerprint}
    for seed, name in enumerate(("a/text", "b/text", "heldout")):
        (folder / name).parent.mkdir(exist_ok=True)
        write_dataset(
            folder / name, random_documents(20, seed=seed, vocab_size=tokenizer.vocab_size), metadata=made_with
        )
    recipe = {
        "tokenizer": {"path": str(folder / "tokenizer")},
        "data": {
            "train": [{"path": str(folder / "a/text"), "epochs": 2}, str(folder / "b/text")],
            "validation": [{"name": "held", "path": str(folder / "heldout")}], "seq_length": 32,
        },
    }  # fmt: skip
    (folder / "recipe.json").write_text(json.dumps(recipe))
    rows_of(config_of(folder), tokenizer)
    return folder


@pytest.fixture
def copied_route(route: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the route that a test may damage."""
    folder = tmp_path / "route"
    shutil.copytree(route, folder)
    recipe = (folder / "recipe.json").read_text().replace(str(route), str(folder))
    (folder / "recipe.json").write_text(recipe)
    yield folder


def config_of(folder: Path, *overrides: str) -> RunConfig:
    return load_config(folder / "recipe.json", overrides)


def rows_of(config: RunConfig, tokenizer: Tokenizer) -> dict[str, object]:
    """What a checkpoint keeps of the data: indexes by content."""
    rows = build_run_rows(config, tokenizer, build_objective(config.objective, tokenizer))
    return rows.describe(config, tokenizer)


def stage(folder: Path, into: Path, *overrides: str) -> tuple[list[str], list[str]]:
    """Settings and lines."""
    lines: list[str] = []
    return settings_of([stage_here(config_of(folder, *overrides), into)], into, lines.append), lines


def staged_files(into: Path) -> dict[str, int]:
    """Number of the file (a copy made anew has another) by path."""
    root = into / ROOT_NAME
    return {str(p.relative_to(root)): p.stat().st_ino for p in sorted(root.rglob("*")) if p.is_file()}


def damage(path: Path, place: int = 0) -> None:
    """Change a byte; the time stays."""
    status, content = path.stat(), bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_run_reads_the_copies_and_sees_the_same_data(route: Path, tmp_path: Path) -> None:
    settings, lines = stage(route, tmp_path)
    assert lines == []
    before, now = config_of(route), config_of(route, *settings)
    # Nothing of the run may need the originals now, and no index is built anew.
    files = set(staged_files(tmp_path))
    for source in (*now.data.train, *now.data.validation):
        assert source.path.startswith(str(tmp_path))
    assert str(now.tokenizer.path).startswith(str(tmp_path))
    tokenizer = load_tokenizer(str(now.tokenizer.path))
    old, new = rows_of(before, tokenizer), rows_of(now, tokenizer)
    for mine in (old, new):
        for source in mine["sources"]:  # type: ignore[attr-defined]
            source.pop("path")
    assert old == new
    assert set(staged_files(tmp_path)) == files
    assert [source.epochs for source in now.data.train] == [2, None]
    # Both are called `text`, so their paths are their names, which must not change with the copies.
    assert [source.name for source in now.data.train] == [source.path for source in before.data.train]


def test_what_is_there_and_verifies_is_not_copied_again(route: Path, tmp_path: Path) -> None:
    first, _ = stage(route, tmp_path)
    before = staged_files(tmp_path)
    assert stage(route, tmp_path) == (first, [])
    assert staged_files(tmp_path) == before
    damaged = next((tmp_path / ROOT_NAME).glob("heldout-*/heldout.bin"))
    damage(damaged, 5)
    assert stage(route, tmp_path) == (first, [])
    after = staged_files(tmp_path)
    assert damaged.read_bytes() == (route / "heldout.bin").read_bytes()
    changed = [name for name in before if before[name] != after[name]]
    assert changed and all(name.startswith("heldout-") for name in changed)


def test_a_changed_source_is_copied_again(copied_route: Path, tmp_path: Path) -> None:
    stage(copied_route, tmp_path)
    tokenizer = load_tokenizer(copied_route / "tokenizer")
    for path in copied_route.glob("heldout*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    documents = random_documents(9, seed=99, vocab_size=tokenizer.vocab_size)
    write_dataset(copied_route / "heldout", documents, metadata={"tokenizer_fingerprint": tokenizer.fingerprint})
    _, lines = stage(copied_route, tmp_path)
    copy = next((tmp_path / ROOT_NAME).glob("heldout-*/heldout.bin"))
    assert copy.read_bytes() == (copied_route / "heldout.bin").read_bytes()
    # Its index does not exist yet.
    assert len(lines) == 1
    assert "is not built yet" in lines[0]


def test_a_damaged_source_is_not_staged(copied_route: Path, tmp_path: Path) -> None:
    damage(copied_route / "b/text.bin")
    settings, lines = stage(copied_route, tmp_path)
    assert len(lines) == 1
    assert "sha256sum: text.bin: FAILED; the file is damaged" in lines[0]
    train = config_of(copied_route, *settings).data.train
    assert train[0].path.startswith(str(tmp_path / ROOT_NAME))
    assert train[1].path == str(copied_route / "b/text")


def test_an_interrupted_copy_is_not_taken_for_a_file(
    copied_route: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that fails half-way, as on a full disk, then one that works."""

    def fail(file: Path, copy: Path) -> None:
        copy.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(copy))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copy2", fail)
        settings, lines = stage(copied_route, tmp_path)
    assert (settings, len(lines)) == ([], 4) and "No space left on device" in lines[0]
    assert staged_files(tmp_path) == {}
    settings, lines = stage(copied_route, tmp_path)
    assert (len(settings), lines) == (3, [])
    assert not list((tmp_path / ROOT_NAME).rglob("*partial*"))


def test_no_room_leaves_the_data_in_its_place(route: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SPARE_BYTES", 1 << 62)
    settings, lines = stage(route, tmp_path)
    assert settings == []
    assert len(lines) == 4
    assert f"here: no room for {route / 'a/text'} in {tmp_path}: " in lines[0]
    assert staged_files(tmp_path) == {}
    (tmp_path / "file").write_text("")
    assert "Not a directory" in stage(route, tmp_path / "file")[1][0]


def answers(**failed: dict[str, str]) -> list[dict[str, Any]]:
    """Of nodes, each with what failed there."""
    plan = {"train": [{"path": "/d/a", "name": "a"}, {"path": "/d/b", "name": "b"}], "validation": [{"path": "/d/v"}]}
    return [
        {**plan, "tokenizer": "/d/tok", "has_index_dir": True, "notes": [], "node": node, "failed": why}
        for node, why in failed.items()
    ]


def test_what_one_node_lacks_is_read_from_the_shared_disk_by_all(tmp_path: Path) -> None:
    lines: list[str] = []
    settings = settings_of(answers(n1={}, n2={"/d/b": "No space left on device"}), tmp_path, lines.append)
    assert lines == ["staging: n2: No space left on device; /d/b is read from where the recipe says"]
    copy_of_a = str(copy_of("/d/a", tmp_path))
    assert settings[0] == "data.train=" + json.dumps([{"path": copy_of_a, "name": "a"}, {"path": "/d/b", "name": "b"}])
    assert [setting.partition("=")[0] for setting in settings] == ["data.train", "data.validation", "tokenizer.path"]


def test_an_index_folder_of_its_own_is_given_up_only_when_all_is_staged(tmp_path: Path) -> None:
    assert "data.sample_index_dir=null" in settings_of(answers(n1={}, n2={"/d/tok": "x"}), tmp_path, print)
    assert "data.sample_index_dir=null" not in settings_of(answers(n1={"/d/v": "x"}), tmp_path, print)


def test_links_are_copied_as_what_they_point_to(copied_route: Path, tmp_path: Path) -> None:
    (copied_route / "heldout.bin").rename(copied_route / "elsewhere")
    (copied_route / "heldout.bin").symlink_to(copied_route / "elsewhere")
    _, lines = stage(copied_route, tmp_path)
    assert lines == []
    copy = next((tmp_path / ROOT_NAME).glob("heldout-*/heldout.bin"))
    assert not copy.is_symlink()
