"""Build locks of killed processes are removed, those of live ones are not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ctxlm_ds.process import launch
from ctxlm_ds.process.launch import clear_stale_build_locks, use_own_build_folder
from ctxlm_ds.process.run_lock import this_process

# The file alone: importing torch takes seconds.
HOLD = (
    "import importlib.util, runpy, sys, time\n"
    "(folder,) = importlib.util.find_spec('torch').submodule_search_locations\n"
    "FileBaton = runpy.run_path(f'{folder}/utils/file_baton.py')['FileBaton']\n"
    "assert FileBaton(sys.argv[1]).try_acquire()\n"
    "print('held', flush=True)\n"
    "time.sleep(100)\n"
)


@contextmanager
def hold(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds torch's own baton."""
    lock.parent.mkdir(parents=True)
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()


sees_all_processes = pytest.mark.skipif(
    this_process().pid_namespace != launch.FIRST_PID_NAMESPACE, reason="a container: only old locks are removed"
)


@sees_all_processes
def test_only_the_lock_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    killed_lock = tmp_path / "py311_cpu" / "killed_op" / "lock"
    live_lock = tmp_path / "py311_cpu" / "live_op" / "lock"
    with hold(live_lock):
        with hold(killed_lock):
            assert clear_stale_build_locks(tmp_path) == []
        assert clear_stale_build_locks(tmp_path) == [killed_lock]
        assert live_lock.exists() and not killed_lock.exists()


@pytest.mark.long
@sees_all_processes
def test_a_folder_in_which_compilers_still_work_is_waited_for(tmp_path: Path) -> None:
    lock = tmp_path / "py311_cpu" / "op" / "lock"
    with hold(lock):
        compiler = subprocess.Popen(["sleep", "3"], cwd=lock.parent)
    assert clear_stale_build_locks(tmp_path) == [lock]
    assert compiler.poll() is not None or compiler.wait(1) == 0


def test_a_container_leaves_the_locks_of_others_alone(tmp_path: Path) -> None:
    """In there the live holder is not to be seen."""
    lock = tmp_path / "py311_cpu" / "live_op" / "lock"
    clear = "import sys, pathlib\n" + (
        "from ctxlm_ds.process.launch import clear_stale_build_locks as clear\nprint(clear(pathlib.Path(sys.argv[1])))"
    )
    words = ["unshare", "--pid", "--fork", "--mount", "--mount-proc", sys.executable, "-c", clear, str(tmp_path)]
    with hold(lock):
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
        if "unshare" in done.stderr:
            pytest.skip(f"no namespaces here: {done.stderr.strip()}")
        assert done.stdout.strip() == "[]", done.stderr
        assert lock.exists()


def test_nothing_to_clear(tmp_path: Path) -> None:
    assert clear_stale_build_locks(tmp_path / "missing") == []


def test_each_environment_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    first = use_own_build_folder()
    assert first.is_relative_to(tmp_path) and use_own_build_folder() == first
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setattr(sys, "prefix", "/another/environment")
    assert use_own_build_folder() != first


def test_a_named_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert use_own_build_folder() == tmp_path
