"""Compile device_guard.cpp once per torch and user, and load it before torch.

With it torch takes fake tensors on `cuda` forward and backward (fake_cuda.py) without a device: a CPU build, and a CUDA
build. torch reads the registry of devices when it is imported, so the library comes first.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from ctxlm_ds.atomic import fsync_path, partial_path, publish
from ctxlm_ds.errors import VerifyError

SOURCE = Path(__file__).with_name("device_guard.cpp")
FLAGS = ("-O1", "-std=c++20", "-shared", "-fPIC")
COMPILERS = ("c++", "g++", "clang++")
COMPILE_S = 120.0
"""A compiler takes 3 s."""


def load_device_guard() -> Path:
    """Load the guard into this process, after compiling it if this user has none for this torch; return its file.

    Raises VerifyError if torch was imported already, no compiler is found or it fails, or the cache cannot be written.
    """
    if "torch" in sys.modules:
        raise VerifyError("the device guard must be loaded before torch, which this process has imported already")
    folder = _torch_folder()
    library = _cached(folder)
    if not library.exists():
        _compile(folder, library)
    try:
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise VerifyError(f"the device guard cannot be loaded: {error}; remove {library} to compile it again") from None
    _import_torch()
    return library


def _import_torch() -> None:
    """Import torch, a CUDA build as on a machine without GPUs, and without what it says of the earlier registration."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    said = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            import torch
        finally:
            os.dup2(said, 2)
            os.close(said)
    # A CUDA build has put its own guard in the place of this one; it has no device here, and torch has one for fakes.
    torch._C._ensureCUDADeviceGuardSet()


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise VerifyError("torch is not installed")
    return Path(spec.submodule_search_locations[0])


def _cached(torch: Path) -> Path:
    """Return the library's path in the user's cache, whose name changes with the source and with torch."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parts = SOURCE.read_text(encoding="utf-8"), metadata.version("torch"), str(torch), *FLAGS
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    return cache / "ctxlm_ds" / "device_guard" / f"{name}.so"


def _compile(torch: Path, library: Path) -> None:
    """Write the library under a temporary name and rename it, so that processes may compile it side by side."""
    libraries = torch / "lib"
    partial = partial_path(library)
    command = [
        *_compiler(), *FLAGS, f"-I{torch / 'include'}", str(SOURCE), "-o", str(partial),
        f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}",
    ]  # fmt: skip
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMPILE_S)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
            reason = lines[0] if lines else f"exit status {done.returncode}"
            raise VerifyError(f"{command[0]} cannot compile the device guard: {reason}")
        fsync_path(partial)
        publish(partial, library)
    except subprocess.TimeoutExpired:
        raise VerifyError(f"{command[0]} did not compile the device guard in {COMPILE_S:.0f} s") from None
    except OSError as error:
        raise VerifyError(
            f"the device guard cannot be written to {library.parent} ({error.strerror}); "
            "set XDG_CACHE_HOME to a folder that you can write"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def _compiler() -> list[str]:
    """Return the C++ compiler of the environment variable CXX, or the first that is found, with its options."""
    asked = shlex.split(os.environ.get("CXX", ""))
    found = next(filter(None, map(shutil.which, [asked[0]] if asked else COMPILERS)), None)
    if found is None:
        missing = f"CXX is {asked[0]}, which is not found" if asked else f"none of {', '.join(COMPILERS)} is found"
        raise VerifyError(f"the device guard needs a C++ compiler, and {missing}; install g++ or set CXX")
    return [found, *asked[1:]]
