"""The route's commands as a user types them, for tests: each returns the finished process."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import IO, Any

import pytest

from ctxlm_ds.console import run_command
from tests.integration.forked import Forked, can_fork

ROOT = Path(__file__).resolve().parent.parent.parent
BIN = Path(sys.executable).parent
FORKED = "forked"
"""First word of a command that runs in a fork of this process; the number of ranks follows."""
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
"""Settings under which the losses of several ranks are nearly those of one."""


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without any launcher's variables, one thread a process."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in ranks and not k.startswith("SLURM_")}
    return {**kept, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false", **extra}


Finished = subprocess.CompletedProcess[str]


def call(*command: object, check: bool = True, timeout_s: float = 240, folder: Path = ROOT, **extra: str) -> Finished:
    """Run a command from a folder, the repository's root; with `check` a failure shows its output."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = _begin(command, out, err, folder, **extra)
        try:
            status = process.wait(timeout_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        texts = [file.seek(0) or file.read() for file in (out, err)]
    done = Finished([str(word) for word in command], status, *texts)
    if check:
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done


def call_here(main: Callable[[], None], *command: object) -> Finished:
    """Run a command's main function in this process, which has imported torch; the status is that of the command."""
    words, out, err = [str(word) for word in command], io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", words)
        try:
            run_command(main)
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
    return Finished(words, status, out.getvalue(), err.getvalue())


def tool(name: str, *arguments: object, check: bool = True) -> Finished:
    """Run tools/NAME."""
    return call(*launcher("forked", 1)[:2], ROOT / "tools" / name, *arguments, check=check)


def pretrain_words(recipe: Path, overrides: Sequence[str] = (), stage: int = 1) -> list[object]:
    """Arguments of ctxlm_ds.pretrain."""
    extra = ["--set", *overrides] if overrides else []
    return ["--config", recipe, "--deepspeed_config", f"zero{stage}", *extra]


def launcher(kind: str, num_ranks: int) -> list[object]:
    """The words before the module's own arguments, for each launcher; `forked` is the quickest."""
    module = "ctxlm_ds.pretrain"
    if kind == "forked":
        return [FORKED, num_ranks, "-m", module]
    if kind == "deepspeed":
        # All runs use port 29500 by default; two test workers on one machine would share it.
        return [BIN / "deepspeed", "--num_gpus", num_ranks, "--master_port", free_port(), "--module", module]
    if kind == "torchrun":
        return [BIN / "torchrun", "--standalone", "--nproc_per_node", num_ranks, "-m", module]
    return [sys.executable, "-m", module, *(["--ranks", num_ranks] if kind == "ranks" else [])]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def metrics(run_dir: Path, key: str = "loss") -> dict[int, Any]:
    """`key` by step from metrics.jsonl, lines that have it."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def last_step(run_dir: Path) -> int:
    """The newest step in metrics.jsonl, 0 before the first; reads only the file's end."""
    try:
        with open(run_dir / "metrics.jsonl", "rb") as handle:
            handle.seek(max(0, handle.seek(0, 2) - 4096))
            lines = handle.read().splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue  # torn by the cut, or being written
    return 0


def alone_losses(folder: Path, steps: int) -> dict[int, float]:
    """The losses of the first steps of the recipe in FOLDER/recipe.yaml, without dropout, in one process."""
    recipe, run_dir = folder / "recipe.yaml", folder / "alone"
    total = json.loads(recipe.read_text())["training"]["max_steps"]
    overrides = [f"run_dir={run_dir}", f"training.max_steps={steps}", f"schedule.total_steps={total}"]
    call(*launcher("forked", 1), *pretrain_words(recipe, overrides))
    return metrics(run_dir)


def start(words: Sequence[object], log: Path, **extra: str) -> Any:
    """Start a command in a process group of its own, its output in a file."""
    with open(log, "ab") as output:
        return _begin(words, output, output, **extra)


def _begin(words: Sequence[object], output: IO[Any], errors: IO[Any], folder: Path = ROOT, **extra: str) -> Any:
    """Start a command from a folder, in a session of its own."""
    texts, environ = [str(word) for word in words], environment(**extra)
    if texts[0] == FORKED and not can_fork():
        texts = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", *texts[1:]]
    if texts[0] == FORKED:
        ranks = int(texts[1])
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if ranks > 1 else {}
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)) if ranks > 1 else {}
        return Forked(texts[2:], {**environ, **meeting, **sizes}, folder, output.fileno(), errors.fileno(), ranks)
    return subprocess.Popen(texts, cwd=folder, env=environ, stdout=output, stderr=errors, start_new_session=True)


def kill_group(process: Any, number: int = signal.SIGKILL) -> None:
    """Send a signal to a started command and all it started."""
    os.killpg(process.pid, number)
    process.wait()


def wait_for(condition: Any, timeout_s: float, what: str) -> None:
    """Poll until `condition()` holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"timed out waiting for {what}"
        time.sleep(0.02)


def write_recipe(path: Path, settings: Mapping[str, Any]) -> Path:
    """A recipe file."""
    path.write_text(json.dumps(settings))
    return path
