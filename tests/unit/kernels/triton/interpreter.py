"""Tests in a process in which numpy computes the kernels: TRITON_INTERPRET is read when Triton is imported."""

from __future__ import annotations

import atexit
import os
import pickle
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import IO, Any

VARIABLE = "TRITON_INTERPRET"
ROOT = Path(__file__).resolve().parents[4]
SIZE = struct.Struct("<q")


def in_interpreter(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test of a module's top level in the interpreter's process."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        if os.environ.get(VARIABLE) == "1":
            test(*arguments, **named)
            return
        server = _server()
        _send(server.stdin, (test.__module__, test.__name__, arguments, named))
        if (failure := _receive(server.stdout)) is not None:
            raise AssertionError(failure)

    return run


@cache
def _server() -> subprocess.Popen[bytes]:
    """Start the process, which ends with this one; a fork of this one knows nothing of it, as of a pool's."""
    command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, VARIABLE: "1"}
    )
    atexit.register(server.kill)
    return server


def serve() -> None:
    """Run the tests that arrive, and answer with None or a traceback."""
    answers, sys.stdout = os.fdopen(os.dup(1), "wb"), sys.stderr
    import torch

    from ctxlm_ds.kernels.triton.launch import round_as_devices

    torch.set_num_threads(1)
    round_as_devices()
    while (asked := _receive(sys.stdin.buffer)) is not None:
        module, name, arguments, named = asked
        try:
            getattr(import_module(module), name)(*arguments, **named)
            _send(answers, None)
        except BaseException:
            _send(answers, traceback.format_exc())


def _send(pipe: IO[bytes] | None, value: object) -> None:
    assert pipe is not None
    content = pickle.dumps(value)
    pipe.write(SIZE.pack(len(content)) + content)
    pipe.flush()


def _receive(pipe: IO[bytes] | None) -> Any:
    """Return the next value, or None after the last."""
    assert pipe is not None
    size = pipe.read(SIZE.size)
    return pickle.loads(pipe.read(SIZE.unpack(size)[0])) if size else None
