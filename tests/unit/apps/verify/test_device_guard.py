"""The device guard is compiled once into the user's cache, loaded before torch only, and missing parts are named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ctxlm_ds.apps.verify import device_guard

LOAD = """
import sys
from ctxlm_ds.errors import VerifyError
from ctxlm_ds.apps.verify.device_guard import load_device_guard
try:
    print(load_device_guard())
except VerifyError as error:
    sys.exit(f"refused: {error}")
"""
ROOT = Path(device_guard.__file__).resolve().parents[3]


def start(cache: Path, code: str = LOAD, **environment: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), **environment}
    words = [sys.executable, "-c", code]
    return subprocess.Popen(words, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def refusal(cache: Path, code: str = LOAD, **environment: str) -> str:
    """What one process says that cannot load the guard, in one line and without a traceback."""
    run = start(cache, code, **environment)
    said = run.communicate()[1].strip()
    assert run.returncode == 1 and said.startswith("refused: ") and "\n" not in said, said
    assert not list(cache.rglob("*.partial-*")) and not list(cache.rglob("*.so"))
    return said.removeprefix("refused: ")


@pytest.mark.long
def test_processes_side_by_side_and_later_ones_share_one_library(tmp_path: Path) -> None:
    runs = [start(tmp_path) for _ in range(2)]
    (first, *_), (second, *_) = said = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    library = Path(first.strip())
    assert first == second and library.is_relative_to(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [library]
    before = library.stat()
    without_compiler = start(tmp_path, CXX="nothing")
    out, errors = without_compiler.communicate()
    assert out.splitlines() == [str(library)], errors
    assert library.stat().st_mtime_ns == before.st_mtime_ns


def test_torch_must_not_be_imported_before(tmp_path: Path) -> None:
    assert "before torch" in refusal(tmp_path, "import sys; sys.modules['torch'] = sys" + LOAD)


def test_a_missing_or_failing_compiler_is_named(tmp_path: Path) -> None:
    said = refusal(tmp_path, CXX="no-compiler -O1")
    assert said.startswith("the device guard needs a C++ compiler, and CXX is no-compiler, which is not found; ")
    assert "none of c++, g++, clang++ is found" in refusal(tmp_path, PATH="/nowhere", CXX="")
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho 'guard.cpp:1: error: no such standard' >&2\nexit 1\n", encoding="utf-8")
    failing.chmod(0o755)
    said = refusal(tmp_path, CXX=str(failing))
    assert said == f"{failing} cannot compile the device guard: guard.cpp:1: error: no such standard"


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file is where the folder would be: root may write into folders without the permission."""
    (tmp_path / "ctxlm_ds").write_text("", encoding="utf-8")
    said = refusal(tmp_path)
    assert str(tmp_path) in said and said.endswith("set XDG_CACHE_HOME to a folder that you can write")


@pytest.mark.long
def test_a_damaged_library_says_how_to_make_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = device_guard._cached(device_guard._torch_folder())
    library.parent.mkdir(parents=True)
    library.write_bytes(b"no library")
    run = start(tmp_path)
    assert f"remove {library} to compile it again" in run.communicate()[1] and run.returncode == 1


def test_the_name_changes_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = device_guard._torch_folder()
    names = {device_guard._cached(folder), device_guard._cached(folder / "other")}
    monkeypatch.setattr(device_guard.metadata, "version", lambda name: "2.14.0")
    assert len({*names, device_guard._cached(folder)}) == 3
