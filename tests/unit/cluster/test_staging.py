"""Copies on a node's own disk: what is copied, what proves it, and what a run reads then."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ctxlm_ds.cluster.staging import choose_items, proved_items, settings_of, stage_here
from ctxlm_ds.cluster.staging_copy import (
    ABANDONED_AFTER_S,
    ROOT_NAME,
    SPARE_BYTES,
    StagedFile,
    StageItem,
    StagePlan,
    copy_items,
    folder_name,
    room,
)
from ctxlm_ds.cluster.staging_plan import plan_staging
from ctxlm_ds.data.stream.run_datasets import build_run_rows
from ctxlm_ds.objectives.build import build_objective
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.sample_data import random_documents, write_dataset
from tests.text import make_documents


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
    words = ["--config", str(folder / "recipe.json"), *(["--set", *overrides] if overrides else [])]
    return stage_here(words, into, lines.append), lines


def staged_files(into: Path) -> dict[str, int]:
    """Time of change by path."""
    root = into / ROOT_NAME
    return {str(p.relative_to(root)): p.stat().st_mtime_ns for p in sorted(root.rglob("*")) if p.is_file()}


def without_stamps(files: dict[str, int]) -> dict[str, int]:
    return {name: time_ns for name, time_ns in files.items() if not name.endswith("staged.json")}


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
    before = without_stamps(staged_files(tmp_path))
    damaged = next((tmp_path / ROOT_NAME).glob("heldout-*/heldout.bin"))
    content = bytearray(damaged.read_bytes())
    content[5] ^= 1
    damaged.write_bytes(bytes(content))
    second, lines = stage(route, tmp_path)
    after = without_stamps(staged_files(tmp_path))
    assert (first, lines) == (second, [])
    assert [name for name in before if before[name] != after[name]] == [str(damaged.relative_to(tmp_path / ROOT_NAME))]
    assert damaged.read_bytes() == (route / "heldout.bin").read_bytes()


def test_a_changed_source_is_copied_again(copied_route: Path, tmp_path: Path) -> None:
    stage(copied_route, tmp_path)
    tokenizer = load_tokenizer(copied_route / "tokenizer")
    for path in copied_route.glob("heldout*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    documents = random_documents(9, seed=99, vocab_size=tokenizer.vocab_size)
    write_dataset(
        copied_route / "heldout", documents, metadata={"tokenizer_fingerprint": tokenizer.fingerprint}
    )
    _, lines = stage(copied_route, tmp_path)
    copy = next((tmp_path / ROOT_NAME).glob("heldout-*/heldout.bin"))
    assert copy.read_bytes() == (copied_route / "heldout.bin").read_bytes()
    # Its index does not exist yet.
    assert len(lines) == 1
    assert "is not built yet" in lines[0]


def test_a_damaged_source_is_not_staged(copied_route: Path, tmp_path: Path) -> None:
    damaged = copied_route / "b/text.bin"
    content = bytearray(damaged.read_bytes())
    content[0] ^= 1
    damaged.write_bytes(bytes(content))
    settings, lines = stage(copied_route, tmp_path)
    assert len(lines) == 1
    assert f"{damaged}: sha256" in lines[0]
    train = config_of(copied_route, *settings).data.train
    assert train[0].path.startswith(str(tmp_path / ROOT_NAME))
    assert train[1].path == str(copied_route / "b/text")


def test_leftovers_of_killed_copies_go_when_they_are_old(route: Path, tmp_path: Path) -> None:
    folder = tmp_path / ROOT_NAME / folder_name(str(route / "heldout"))
    folder.mkdir(parents=True)
    old, young = (folder / f"heldout.bin.partial-host-1-{name}" for name in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"part")
    then_s = time.time() - 2 * ABANDONED_AFTER_S
    os.utime(old, (then_s, then_s))
    stage(route, tmp_path)
    assert not old.exists()
    assert young.exists()


def test_what_has_no_room_on_one_node_is_read_from_the_shared_disk_by_all(route: Path, tmp_path: Path) -> None:
    plan = plan_staging(config_of(route))
    plenty = {"free_bytes": 10_000, "needed_bytes": [1000] * 4, "error": None}
    # n2 holds the first already and has room for everything else but the second.
    tight = {"free_bytes": 100, "needed_bytes": [0, 1000, 60, 40], "error": None}
    lines: list[str] = []
    chosen = choose_items(plan.items, {"n1": plenty, "n2": tight}, tmp_path, lines.append)
    assert chosen == [plan.items[0], plan.items[2], plan.items[3]]
    assert len(lines) == 1
    assert all("of n2" in line and "no room for" in line for line in lines)
    refused = {**tight, "error": "/local: Read-only file system"}
    assert choose_items(plan.items, {"n1": plenty, "n2": refused}, tmp_path, lines.append) == []
    assert lines[-1].startswith("staging: n2: /local: Read-only file system")


def test_a_node_that_fails_leaves_the_item_where_it_is(route: Path, tmp_path: Path) -> None:
    plan = plan_staging(config_of(route))
    items = plan.items[:2]
    good = [{"source": item.source, "copied_bytes": 1, "kept_bytes": 0, "error": None} for item in items]
    bad = [good[0], {"source": items[1].source, "error": "No space left on device"}]
    lines: list[str] = []
    assert proved_items(items, {"n1": good, "n2": bad}, lines.append) == [items[0]]
    assert "staging: n2: No space left on device" in lines[0]
    settings = settings_of(plan, [items[0]], tmp_path)
    assert len(settings) == 1
    assert str(route / "b/text") in settings[0]


def test_an_index_folder_of_its_own_is_given_up_only_when_all_is_staged(route: Path, tmp_path: Path) -> None:
    plan = replace(plan_staging(config_of(route)), has_index_dir=True)
    assert "data.sample_index_dir=null" in settings_of(plan, plan.items, tmp_path)
    assert "data.sample_index_dir=null" not in settings_of(plan, plan.items[:-2], tmp_path)


def test_a_plan_travels_as_json(route: Path) -> None:
    plan = plan_staging(config_of(route))
    assert StagePlan.from_json(plan.to_json()) == plan
    names = {Path(file.target).name for file in plan.items[0].files}
    assert names >= {"text.bin", "text.idx", "text.json", "text.sha256", "meta.json", "samples.npy"}
    assert all(file.sha256 for file in plan.items[0].files if file.target.endswith((".bin", ".idx", ".npy")))


def test_room_is_what_the_disk_has_left(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    found = room([], tmp_path)
    assert found["error"] is None
    assert abs(found["free_bytes"] - (disk.f_bavail * disk.f_frsize - SPARE_BYTES)) < 1 << 30
    (tmp_path / "file").write_text("")
    assert "Not a directory" in room([], tmp_path / "file")["error"]


def test_a_missing_source_is_told(tmp_path: Path) -> None:
    gone = StagedFile(str(tmp_path / "gone.bin"), "gone-1/gone.bin", 10, 0, None)
    answers = copy_items([StageItem("dataset", "gone", "gone-1/gone", [gone], [])], tmp_path)
    assert answers == [{"source": "gone", "error": f"{gone.source}: No such file or directory"}]
