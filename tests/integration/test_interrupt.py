"""Ctrl-C in a terminal, under every launcher: one line, no traceback, a checkpoint if a step was done, nobody left.

Until then the losses of two ranks are those of one process.
"""

from __future__ import annotations

import os
import pty
import re
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.process.run_history import read_history
from tests.integration.conftest import Prepared
from tests.integration.route import NO_DROPOUT, ROOT, alone_losses, environment, launcher, metrics, pretrain_words

CTRL_C = b"\x03"
STEPS = 4
START_S = 180
END_S = 180


class Terminal:
    """A run in a terminal of its own."""

    def __init__(self, words: list[object]) -> None:
        self.text = ""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            os.execve(str(words[0]), [str(word) for word in words], environment(COLUMNS="120"))

    def read(self, until: Callable[[], bool], limit_s: float) -> None:
        """Read what is shown until a condition holds or the terminal closes."""
        end_s = time.monotonic() + limit_s
        while not until():
            assert time.monotonic() < end_s, self.text[-4000:]
            if select.select([self._terminal], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self._terminal, 1 << 16).decode(errors="replace")
                except OSError:
                    return

    def interrupt(self) -> None:
        os.write(self._terminal, CTRL_C)

    def close(self) -> int:
        os.close(self._terminal)
        return os.waitpid(self.pid, 0)[1]


def processes(run_dir: Path) -> list[str]:
    """Command lines of processes that name the run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_text(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if str(run_dir) in text:
            found.append(text)
    return found


def interrupted(
    route: Prepared, folder: Path, kind: str, global_batch_size: int, ready: Callable[[Path], bool], times: int = 1
) -> tuple[str, Path]:
    """Start, interrupt, and wait for every process; what was shown, and the run directory."""
    run_dir = folder / "run"
    never: dict[str, Any] = {"interval_steps": 10_000}
    training = {"global_batch_size": global_batch_size, "max_steps": 10_000}
    recipe = route.recipe(
        folder / "recipe.yaml", model=NO_DROPOUT, training=training, checkpoint=never, evaluation=never
    )
    terminal = Terminal([*launcher(kind, 2), *pretrain_words(recipe, [f"run_dir={run_dir}"])])
    terminal.read(lambda: ready(run_dir), START_S)
    begin = len(terminal.text)
    for _ in range(times):
        terminal.interrupt()
        time.sleep(0.5)
    terminal.read(lambda: False, END_S) if kind != "python" else terminal.read(lambda: not processes(run_dir), END_S)
    status = terminal.close()
    if kind in ("python", "ranks"):
        assert os.waitstatus_to_exitcode(status) == 130
    end_s = time.monotonic() + END_S
    while processes(run_dir) and time.monotonic() < end_s:
        time.sleep(0.1)
    assert processes(run_dir) == []
    shown = terminal.text[begin:]
    assert "Traceback" not in shown, shown
    assert terminal.text.count("stopping: ") == shown.count("; Ctrl-C again ends it immediately") == 1, terminal.text
    return shown, run_dir


def has_steps(run_dir: Path) -> bool:
    return (run_dir / "metrics.jsonl").exists() and len(metrics(run_dir)) >= STEPS


def has_begun(run_dir: Path) -> bool:
    return (run_dir / "history.jsonl").exists()


@pytest.mark.parametrize(
    "kind", ["ranks", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("deepspeed", "torchrun", "python"))]
)
def test_an_interrupted_run_saves_its_last_step(kind: str, bert_route: Prepared, tmp_path: Path) -> None:
    shown, run_dir = interrupted(bert_route, tmp_path, kind, 64, has_steps)
    end = read_history(run_dir)[-1]
    assert shown.count("stopping: the last complete step is saved; Ctrl-C again ends it immediately") == 1, shown
    assert (end["event"], end["reason"], end["failed"]) == ("end", "stopped by signal SIGINT", False)
    assert (run_dir / "checkpoints" / f"step-{end['step']:08d}").is_dir()
    log = (run_dir / "output.log").read_text()
    assert log.count("stopping: ") == 1 and "\x1b" not in log
    assert re.search(r" step \d+/10000 \| loss ", log)
    alone = alone_losses(tmp_path, STEPS)
    assert {step: loss for step, loss in metrics(run_dir).items() if step <= STEPS} == pytest.approx(alone, rel=1e-5)


def test_a_first_step_of_minutes_is_abandoned(bert_route: Prepared, tmp_path: Path) -> None:
    _, run_dir = interrupted(bert_route, tmp_path, "deepspeed", 1 << 16, has_begun)
    end = read_history(run_dir)[-1]
    assert (end["event"], end["step"], end["failed"]) == ("end", 0, False)
    assert not (run_dir / "checkpoints").exists()


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["deepspeed", "torchrun", "ranks"])
def test_a_second_interrupt_ends_immediately(kind: str, bert_route: Prepared, tmp_path: Path) -> None:
    interrupted(bert_route, tmp_path, kind, 1 << 16, has_begun, times=2)
