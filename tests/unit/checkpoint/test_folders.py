"""Which checkpoint a run continues from, what is cleaned up, and what rotation may remove."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxlm_ds.checkpoint.folders import (
    find_newest_intact,
    list_checkpoints,
    remove_folder,
    remove_leftovers,
    step_name,
    to_rotate,
)
from ctxlm_ds.checkpoint.manifest import hash_files, list_files, write_manifest
from ctxlm_ds.errors import CheckpointError


def _checkpoint(directory: Path, step: int) -> Path:
    folder = directory / step_name(step)
    folder.mkdir(parents=True)
    (folder / "weights-00000.safetensors").write_bytes(step.to_bytes(4, "big") * 1000)
    write_manifest(folder, step, hash_files(folder, list_files(folder)))
    (directory / "latest").write_text(folder.name)
    return folder


def _damage(folder: Path) -> None:
    path = folder / "weights-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def test_none_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    assert find_newest_intact(tmp_path / "checkpoints")[0] is None
    (tmp_path / "step-00000001.partial").mkdir()
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-00000002").write_text("a file")
    assert find_newest_intact(tmp_path)[0] is None


def test_the_newest_intact_one(tmp_path: Path) -> None:
    for step in (1, 2, 100_000_000):
        newest = _checkpoint(tmp_path, step)
    assert newest.name == "step-100000000"
    assert find_newest_intact(tmp_path)[0] == newest


@pytest.mark.parametrize("latest", ["step-00000001", "step-00000099", "", None])
def test_latest_is_only_a_hint(tmp_path: Path, latest: str | None) -> None:
    _checkpoint(tmp_path, 1)
    newest = _checkpoint(tmp_path, 2)
    (tmp_path / "latest").unlink()
    if latest is not None:
        (tmp_path / "latest").write_text(latest)
    assert find_newest_intact(tmp_path)[0] == newest


def test_damaged_ones_are_named_and_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good, bad, cut = (_checkpoint(tmp_path, step) for step in (10, 20, 30))
    _damage(bad)
    (cut / "weights-00000.safetensors").unlink()
    with caplog.at_level(logging.WARNING, "ctxlm_ds"):
        assert find_newest_intact(tmp_path) == (good, (cut, bad))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert "step-00000030" in warnings[0] and "weights-00000.safetensors: missing" in warnings[0]
    assert "step-00000020" in warnings[1] and "weights-00000.safetensors: sha256" in warnings[1]


def test_a_manifest_of_another_step_is_damage(tmp_path: Path) -> None:
    good, other = _checkpoint(tmp_path, 1), _checkpoint(tmp_path, 2)
    other.rename(tmp_path / step_name(3))
    assert find_newest_intact(tmp_path)[0] == good


def test_all_damaged_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    for step in (1, 2):
        _damage(_checkpoint(tmp_path, step))
    with pytest.raises(CheckpointError, match="step-00000002(.|\n)*step-00000001(.|\n)*must not start over(.|\n)*move"):
        find_newest_intact(tmp_path)


def test_leftovers(tmp_path: Path) -> None:
    kept = _checkpoint(tmp_path, 1)
    for name in ("step-00000002.partial", "step-00000003.removing"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights-00000.safetensors").write_bytes(b"1")
    (tmp_path / "latest.partial-123").write_text("step-0")
    (tmp_path / "notes.txt").write_text("mine")
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "notes.txt", kept.name]
    remove_leftovers(tmp_path / "absent")


def test_remove_over_an_earlier_half_removal(tmp_path: Path) -> None:
    doomed = _checkpoint(tmp_path, 4)
    (tmp_path / "step-00000004.removing" / "old").mkdir(parents=True)
    remove_folder(doomed)
    assert list_checkpoints(tmp_path) == {}
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


@pytest.mark.parametrize(
    ("steps", "newest", "keep_last", "keep_every", "damaged", "expected"),
    [
        ([1, 2, 3], 3, 3, None, set(), []),
        ([1, 2, 3, 4], 4, 3, None, set(), [1]),
        ([1, 2, 3, 4], 4, 1, None, set(), [1, 2, 3]),
        ([10, 15, 20, 25, 30], 30, 2, 10, set(), [15]),
        # A damaged one takes no intact one's place, and goes when it is older than all that stay.
        ([10, 20, 30], 30, 2, None, {20}, []),
        ([10, 20, 30, 40], 40, 2, None, {20}, [10, 20]),
        # A later one, damaged, from which the run fell back, does not push out the one just saved.
        ([10, 20, 30], 20, 1, None, {30}, [10]),
        ([10, 20, 30], 20, 1, None, set(), [10]),
    ],
)
def test_rotation(
    steps: list[int], newest: int, keep_last: int, keep_every: int | None, damaged: set[int], expected: list[int]
) -> None:
    assert to_rotate(steps, newest, keep_last, keep_every, damaged) == expected


@given(
    steps=st.lists(st.integers(1, 60), min_size=1, unique=True),
    keep_last=st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 20),
    data=st.data(),
)
def test_rotation_never_removes_what_is_to_stay(
    steps: list[int], keep_last: int, keep_every: int | None, data: st.DataObject
) -> None:
    newest = data.draw(st.sampled_from(steps))
    damaged = data.draw(st.sets(st.sampled_from(steps))) - {newest}
    gone = to_rotate(steps, newest, keep_last, keep_every, damaged)
    intact = sorted(set(steps) - damaged - set(range(newest + 1, 100)))
    assert newest not in gone
    assert not set(gone) & set(intact[-keep_last:])
    assert len([step for step in intact if step not in gone]) >= min(keep_last, len(intact))
    assert all(step < newest for step in gone)
    if keep_every:
        assert not [step for step in gone if step % keep_every == 0 and step not in damaged]


def test_links_are_removed_as_links(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "thesis.tex").write_text("years of work")
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    for name in ("step-00000001.partial", "step-00000002.removing", "step-00000003"):
        (directory / name).symlink_to(tmp_path / "elsewhere")
    (directory / "step-00000004.partial").symlink_to(tmp_path / "nowhere")
    remove_leftovers(directory)
    assert [path.name for path in directory.iterdir()] == ["step-00000003"]
    remove_folder(directory / "step-00000003")
    assert not list(directory.iterdir()) and (tmp_path / "elsewhere" / "thesis.tex").exists()
