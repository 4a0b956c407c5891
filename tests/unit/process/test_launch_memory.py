"""Large blocks that a process frees and allocates again are not mapped again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from ctxlm_ds.process import launch
from ctxlm_ds.process.launch import keep_freed_memory

CHILD = """
import ctypes, resource, sys
from ctxlm_ds.process.launch import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def use_block():
    address = libc.malloc(64 << 20)
    ctypes.memset(address, 1, 64 << 20)
    libc.free(address)
use_block()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    use_block()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(mode: str) -> int:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    run = subprocess.run([sys.executable, "-c", CHILD, mode], env=environ, capture_output=True, text=True, check=True)
    return int(run.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_block_of_64_MiB_is_used_again_without_page_faults() -> None:
    assert _faults("kept") <= 8
    assert _faults("returned") >= 8 * 32, "8 blocks are new pages, at most 2 MiB each"


class _Libc:
    """Accepts the settings in `accepted`, and records calls."""

    def __init__(self, *accepted: int) -> None:
        self.accepted = accepted
        self.calls: list[tuple[int, int]] = []

    def mallopt(self, setting: int, value: int) -> int:
        self.calls.append((setting, value))
        return int(setting in self.accepted)


@pytest.mark.parametrize(
    ("accepted", "calls"),
    [((-3, -1), [(-3, 2**30), (-1, 2**31 - 1)]), ((-4, -1), [(-3, 2**30), (-4, 0), (-1, 2**31 - 1)])],
    ids=["glibc", "glibc with the 32 MiB limit"],
)
def test_the_settings(monkeypatch: pytest.MonkeyPatch, accepted: tuple[int, ...], calls: list[tuple[int, int]]) -> None:
    libc = _Libc(*accepted)
    monkeypatch.setattr(launch.platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(launch.ctypes, "CDLL", lambda name: libc)
    assert keep_freed_memory({})
    assert libc.calls == calls


@pytest.mark.parametrize(
    "environ",
    [{"MALLOC_TRIM_THRESHOLD_": "0"}, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}],
    ids=["MALLOC", "TUNABLES"],
)
def test_settings_of_the_environment_stay(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    monkeypatch.setattr(launch.ctypes, "CDLL", lambda name: pytest.fail("changed"))
    assert not keep_freed_memory(environ)


def test_other_c_libraries_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(launch.ctypes, "CDLL", lambda name: pytest.fail("changed"))
    assert not keep_freed_memory({})
