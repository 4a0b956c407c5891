"""Copies on a node's own disk: what is copied, what proves it, and what a run reads then."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ctxlm_ds.apps.cluster import staging
from ctxlm_ds.apps.cluster.job_context import JobContext
from ctxlm_ds.apps.cluster.staging import ROOT_NAME, copy_of, run_staging, stage_here
from ctxlm_ds.data.stream.run_datasets import build_run_rows
from ctxlm_ds.errors import ClusterError
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
    rows = build_run_rows(config.row_settings, tokenizer, build_objective(config.objective, tokenizer))
    return rows.describe(config.data.train, tokenizer)


def stage(folder: Path, into: Path, *overrides: str) -> list[str]:
    """The settings."""
    settings: list[str] = stage_here(config_of(folder, *overrides), into)["settings"]
    return settings


def staged_files(into: Path) -> dict[str, int]:
    """Time at which the file was made or last changed, by path; its number may be used again."""
    root = into / ROOT_NAME
    return {str(p.relative_to(root)): p.stat().st_ctime_ns for p in sorted(root.rglob("*")) if p.is_file()}


def damage(path: Path, place: int = 0) -> None:
    """Change a byte; the time stays."""
    status, content = path.stat(), bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_run_reads_the_copies_and_sees_the_same_data(route: Path, tmp_path: Path) -> None:
    settings = stage(route, tmp_path)
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
    first = stage(route, tmp_path)
    before = staged_files(tmp_path)
    assert stage(route, tmp_path) == first
    assert staged_files(tmp_path) == before
    damaged = next((tmp_path / ROOT_NAME).glob("heldout-*/heldout.bin"))
    damage(damaged, 5)
    assert stage(route, tmp_path) == first
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
    answer = stage_here(config_of(copied_route), tmp_path)
    copy = next((tmp_path / ROOT_NAME).glob("heldout-*/heldout.bin"))
    assert copy.read_bytes() == (copied_route / "heldout.bin").read_bytes()
    # Its index does not exist yet.
    assert [Path(folder).is_relative_to(copied_route) for folder in answer["missing"]] == [True]


def test_a_damaged_source_is_not_staged(copied_route: Path, tmp_path: Path) -> None:
    damage(copied_route / "b/text.bin")
    with pytest.raises(ClusterError, match="text.bin: sha256sum: text.bin: FAILED; if the file is damaged"):
        stage(copied_route, tmp_path)


def test_an_interrupted_copy_is_not_taken_for_a_file(
    copied_route: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that fails half-way, as on a full disk, then one that works."""
    fail = 'for last; do :; done; head -c 9 "$1" >"$last/$(basename "$1")"; echo "No space left on device" >&2; exit 1'
    with monkeypatch.context() as patched:
        for name in ("RSYNC", "CP"):
            patched.setattr(staging, name, ("sh", "-c", fail, "copy"))
        with pytest.raises(ClusterError, match="this node: .*/a/text.bin: sh: No space left on device"):
            stage(copied_route, tmp_path)
    assert any(staged_files(tmp_path))
    stage(copied_route, tmp_path)
    copy = copy_of(str(copied_route / "a/text"), tmp_path).with_suffix(".bin")
    assert copy.read_bytes() == (copied_route / "a/text.bin").read_bytes()


def test_no_room_stages_nothing(route: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SPARE_BYTES", 1 << 62)
    with pytest.raises(ClusterError, match=f"this node: no room for {route / 'a/text.bin'} in {tmp_path}"):
        stage(route, tmp_path)
    assert staged_files(tmp_path) == {}
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        stage(route, tmp_path / "file")


def run_job(
    answers: list[dict[str, Any]], output: list[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[str]]:
    """Settings and log lines of a job on two nodes with these answers."""
    lines: list[str] = []
    monkeypatch.setattr(staging, "run_on_nodes", lambda *_: (answers, output))
    monkeypatch.setattr(staging, "log", lines.append)
    context = cast(JobContext, SimpleNamespace(words=(), settings=None))
    return run_staging(context, ["n1", "n2"], {"CTXLM_STAGE_DIR": "/disk"}, lambda: False), lines


def test_what_one_node_lacks_is_read_from_the_shared_disk_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"settings": ["tokenizer.path=null"], "copied_bytes": 1000, "missing": []}
    settings, lines = run_job([answer, answer], [], monkeypatch)
    assert settings == ["tokenizer.path=null"]
    assert lines[0].startswith("staging: /disk/ctxlm-staged of 2 nodes; 1.0 kB copied")
    settings, lines = run_job([answer], ["1: error: n2: no room"], monkeypatch)
    assert (settings, lines) == ([], ["staging: n2: no room; everything is read from where the recipe says"])


def test_an_index_folder_of_its_own_is_given_up(route: Path, tmp_path: Path) -> None:
    assert "data.sample_index_dir=null" in stage(route, tmp_path, f"data.sample_index_dir={tmp_path / 'indexes'}")


def test_links_are_copied_as_what_they_point_to(copied_route: Path, tmp_path: Path) -> None:
    (copied_route / "heldout.bin").rename(copied_route / "elsewhere")
    (copied_route / "heldout.bin").symlink_to(copied_route / "elsewhere")
    stage(copied_route, tmp_path)
    copy = next((tmp_path / ROOT_NAME).glob("heldout-*/heldout.bin"))
    assert not copy.is_symlink()


def test_a_teacher_is_copied(copied_route: Path, tmp_path: Path) -> None:
    teacher = copied_route / "teacher"
    teacher.mkdir()
    (teacher / "config.json").write_text("{}")
    (teacher / "model.safetensors").write_bytes(b"weights")
    words = ["objective.name=distillation", "model.family=distilbert", f"teacher.path={teacher}"]
    now = config_of(copied_route, *words, *stage(copied_route, tmp_path, *words)).teacher
    copy = Path(str(now.path))
    assert copy == copy_of(str(teacher), tmp_path) and copy.is_relative_to(tmp_path / ROOT_NAME)
    assert (copy / "model.safetensors").read_bytes() == b"weights"
