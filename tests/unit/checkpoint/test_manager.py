"""One process saving: whole or not at all, at every point where it can be killed or the disk can fail."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from ctxlm_ds.checkpoint.chunk_index import ChunkWriter, WrittenFiles, merge_index
from ctxlm_ds.checkpoint.folders import step_name
from ctxlm_ds.checkpoint.manager import CheckpointManager
from ctxlm_ds.checkpoint.manifest import verify
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.errors import CheckpointError, RunLockedError
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.process.run_lock import RunLock
from ctxlm_ds.recipe.schema import CheckpointConfig
from tests.real_disks import memory_disk
from tests.savers import save_now

NUM_ELEMENTS = 70_000
SIZE_BYTES = 2 * 4 * NUM_ELEMENTS + 1000


def make_manager(run_dir: Path, keep_last: int = 3, lock: RunLock | None = None) -> CheckpointManager:
    return CheckpointManager(run_dir, CheckpointConfig(keep_last=keep_last), Topology(), lock)


def save(manager: CheckpointManager, step: int, needed_bytes: int = SIZE_BYTES, beside: bool = False) -> Path:
    """`beside`: in threads of their own, as beside training."""

    def write(folder: Path) -> WrittenFiles:
        writer = ChunkWriter(folder, 0)
        for kind in ("weight", "exp_avg"):
            writer.add("p", kind, (NUM_ELEMENTS,), 0, torch.full((NUM_ELEMENTS,), float(step)))
        return writer.write()

    def finish(folder: Path, pieces: list[dict]) -> None:
        merge_index(folder, pieces, {"step": step})
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocab.txt").write_text("a\n")

    return save_now(manager, step, write, finish, needed_bytes, beside)


def value_of(folder: Path) -> float:
    reader = CheckpointReader(folder)
    values = reader.read("p")
    assert torch.equal(values, reader.read("p", "exp_avg")) and values.unique().numel() == 1
    return values[0].item()


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_save_find_and_rotate(tmp_path: Path) -> None:
    manager = make_manager(tmp_path, keep_last=2)
    assert manager.find_resumable() is None
    for step in (5, 10, 15):
        folder = save(manager, step)
        assert verify(folder).step == step
        assert sorted(verify(folder).files) == [
            "index.json", "moments-00000.safetensors", "tokenizer/vocab.txt", "weights-00000.safetensors",
        ]  # fmt: skip
        assert (tmp_path / "checkpoints" / "latest").read_text() == folder.name + "\n"
        assert manager.find_resumable() == folder
    assert names(tmp_path) == ["latest", "step-00000010", "step-00000015"]
    assert value_of(folder) == 15


def test_saving_a_step_again_changes_nothing_unless_it_is_damaged(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    folder = save(manager, 5)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert save(manager, 5) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    (folder / "weights-00000.safetensors").write_bytes(b"")
    save(manager, 5)
    assert verify(folder) and value_of(folder) == 5
    assert names(tmp_path) == ["latest", "step-00000005"]


def test_a_damaged_newest_does_not_push_out_what_the_run_fell_back_to(tmp_path: Path) -> None:
    manager = make_manager(tmp_path, keep_last=2)
    folders = [save(manager, step) for step in (10, 20)]
    (folders[1] / "index.json").write_text("{}")
    again = make_manager(tmp_path, keep_last=1)
    assert again.find_resumable() == folders[0]
    saved = save(again, 15)
    assert saved.exists()
    assert again.find_resumable() == saved
    save(again, 20)
    assert names(tmp_path) == ["latest", "step-00000020"]
    assert make_manager(tmp_path).find_resumable() == folders[1]


@pytest.mark.parametrize("beside", [False, True])
def test_multiples_stay_also_beside_training(tmp_path: Path, beside: bool) -> None:
    manager = CheckpointManager(tmp_path, CheckpointConfig(keep_last=2, keep_every_steps=20), Topology())
    for step in range(5, 55, 5):
        save(manager, step, beside=beside)
    assert names(tmp_path) == ["latest", *(step_name(step) for step in (20, 40, 45, 50))]


def test_a_rollback_takes_the_later_ones_away(tmp_path: Path) -> None:
    """Neither does a restart go on with the course that was left, nor is its checkpoint taken for the new course's."""
    manager = make_manager(tmp_path, keep_last=3)
    for step in (5, 10, 15):
        save(manager, step)
    manager.remove_after(5)
    assert names(tmp_path) == ["latest", "step-00000005"]
    assert manager.last_good() == manager.find_resumable() == tmp_path / "checkpoints" / step_name(5)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000005\n"
    for step in (10, 15, 20):
        save(manager, step)
    assert names(tmp_path) == ["latest", *(step_name(step) for step in (10, 15, 20))]


def test_too_little_room_is_told_beforehand(tmp_path: Path) -> None:
    manager = make_manager(tmp_path)
    save(manager, 1)
    free_bytes = shutil.disk_usage(tmp_path).free
    expected = r"needs .* GB and .* free .*: 5\d\.\d+ GB are missing.*keep_last \(now 3\)"
    with pytest.raises(CheckpointError, match=expected):
        save(manager, 2, needed_bytes=free_bytes + 55 * 10**9)
    assert names(tmp_path) == ["latest", "step-00000001"]


def test_leftovers_go_only_under_the_lock(tmp_path: Path) -> None:
    partial = tmp_path / "checkpoints" / "step-00000007.partial"
    partial.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="only removed under the run directory's lock"):
        make_manager(tmp_path).clean_leftovers()
    lock = RunLock(tmp_path)
    with pytest.raises(RunLockedError):
        make_manager(tmp_path, lock=lock).clean_leftovers()
    assert partial.exists()
    with lock.acquire():
        make_manager(tmp_path, lock=lock).clean_leftovers()
    assert not partial.exists()


def test_a_lost_lock_writes_nothing(tmp_path: Path) -> None:
    lock = RunLock(tmp_path).acquire()
    manager = make_manager(tmp_path, lock=lock)
    save(manager, 1)
    lock.release()
    with pytest.raises(RunLockedError):
        save(manager, 2)
    assert names(tmp_path) == ["latest", "step-00000001"]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), ValueError("a bug"), CheckpointError("no fit")]
)
@pytest.mark.parametrize("where", ["write", "finish"])
def test_a_failure_leaves_the_older_ones_alone(tmp_path: Path, error: Exception, where: str) -> None:
    manager = make_manager(tmp_path)
    folder = save(manager, 1)

    def fail(path: Path, *_: object) -> NoReturn:
        (path / "weights-00000.safetensors").write_bytes(b"half")
        raise error

    def write(path: Path) -> WrittenFiles:
        (path / "weights-00000.safetensors").write_bytes(b"whole")
        return WrittenFiles(None, {})

    expected = ValueError if where == "finish" and isinstance(error, ValueError) else CheckpointError
    with pytest.raises(expected, match=str(error.args[-1])):
        save_now(manager, 2, fail if where == "write" else write, fail if where == "finish" else lambda *_: None)
    assert names(tmp_path) == ["latest", "step-00000001"]
    assert make_manager(tmp_path).find_resumable() == folder


def _in_child(action: Callable[[], None]) -> int:
    """Run in a forked process; its exit status as the shell knows it (negative for a signal)."""
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


FILE_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "shutil.rmtree", "os.truncate"}


def _kill_at_event(number: int) -> None:
    """SIGKILL this process just before its `number`-th operation on the file system."""
    seen = 0

    def hook(event: str, _: tuple[object, ...]) -> None:
        nonlocal seen
        if event in FILE_EVENTS:
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _check_survivors(run_dir: Path) -> None:
    """Whatever has a checkpoint's name is whole, and the newest is found."""
    folders = sorted((run_dir / "checkpoints").glob("step-????????"))
    for folder in folders:
        assert verify(folder).step == int(folder.name[5:]) == value_of(folder)
    assert make_manager(run_dir).find_resumable() == folders[-1]


@pytest.mark.long
@pytest.mark.parametrize("beside", [False, True])
def test_killed_before_every_single_file_operation_of_a_save(tmp_path: Path, beside: bool) -> None:
    """Step 3 is saved and step 1 rotated out; the process dies at each operation in turn."""
    base = tmp_path / "base"
    for step in (1, 2):
        save(make_manager(base), step)
    number = 0
    outcomes = []
    while True:
        number += 3 if beside else 1
        run_dir = tmp_path / f"run-{number}"
        shutil.copytree(base, run_dir)

        def act(run_dir: Path = run_dir, number: int = number) -> None:
            _kill_at_event(number)
            save(make_manager(run_dir, keep_last=2), 3, beside=beside)

        status = _in_child(act)
        _check_survivors(run_dir)
        present = {path.name for path in (run_dir / "checkpoints").glob("step-????????")}
        assert "step-00000002" in present
        outcomes.append("step-00000003" in present)
        # The same command again: leftovers go, saving goes on.
        with RunLock(run_dir).acquire() as lock:
            manager = make_manager(run_dir, keep_last=2, lock=lock)
            manager.clean_leftovers()
            save(manager, 3, beside=beside)
            save(manager, 4, beside=beside)
        assert names(run_dir) == ["latest", "step-00000003", "step-00000004"]
        shutil.rmtree(run_dir)
        if status == 0:
            break
        assert status == -signal.SIGKILL
    # There were points before and after the moment at which the checkpoint came to exist, and no going back.
    assert number > 20 and outcomes[0] is False and outcomes[-2] is True
    assert outcomes == sorted(outcomes)


@pytest.fixture
def disk_for_three(tmp_path: Path) -> Iterator[Path]:
    """A file system that holds three checkpoints of about 560 KB, but not a fourth."""
    with memory_disk(tmp_path / "disk", "2m") as disk:
        yield disk.folder


@pytest.mark.parametrize("seen_beforehand", [True, False])
def test_rotation_comes_early_where_there_is_no_room_for_one_more(disk_for_three: Path, seen_beforehand: bool) -> None:
    """Without it a disk that just holds `keep_last` checkpoints would never take another."""
    manager = make_manager(disk_for_three, keep_last=3)
    for step in (1, 2, 3):
        save(manager, step)
    if not seen_beforehand:
        # As under a quota, which shows itself in writing only.
        with pytest.raises(CheckpointError, match="No space left on device"):
            save(manager, 4, needed_bytes=1)
        assert names(disk_for_three) == ["latest", *(step_name(step) for step in (1, 2, 3))]
    save(manager, 4, needed_bytes=SIZE_BYTES if seen_beforehand else 1)
    assert names(disk_for_three) == ["latest", *(step_name(step) for step in (2, 3, 4))]
    assert make_manager(disk_for_three).find_resumable() == manager.last_good()


def test_the_only_good_checkpoint_never_makes_room(disk_for_three: Path) -> None:
    manager = make_manager(disk_for_three, keep_last=1)
    save(manager, 1)
    (disk_for_three / "filler").write_bytes(bytes(1 << 20))
    with pytest.raises(CheckpointError, match="GB are missing"):
        save(manager, 2)
    assert names(disk_for_three) == ["latest", "step-00000001"]


def test_what_this_process_has_not_seen_intact_does_not_count(disk_for_three: Path) -> None:
    """A checkpoint goes early only beside one that was verified or written by this process."""
    for step in (1, 2, 3):
        save(make_manager(disk_for_three), step)
    (disk_for_three / "checkpoints" / step_name(3) / "index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="GB are missing"):
        save(make_manager(disk_for_three), 4)
    manager = make_manager(disk_for_three)
    assert manager.find_resumable() == disk_for_three / "checkpoints" / step_name(2)
    # 3 is damaged and newer than what stays, 1 and 2 are all there is.
    with pytest.raises(CheckpointError, match="GB are missing"):
        save(manager, 4)
    assert names(disk_for_three) == ["latest", *(step_name(step) for step in (1, 2, 3))]


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("estimate_known", [True, False])
def test_a_full_disk(tmp_path: Path, estimate_known: bool, beside: bool) -> None:
    message = "GB are missing" if estimate_known else "No space left on device"
    with memory_disk(tmp_path / "disk", "1m") as disk:
        folder = save(make_manager(disk.folder), 1)
        for step in (2, 3):
            # About 560 KB each: the second one does not fit.
            with pytest.raises(CheckpointError, match=message):
                save(make_manager(disk.folder), step, needed_bytes=SIZE_BYTES if estimate_known else 1, beside=beside)
            assert names(disk.folder) == ["latest", "step-00000001"]
            assert make_manager(disk.folder).find_resumable() == folder
