"""The status of a run on a real terminal and in a log file, and the time that is left."""

from __future__ import annotations

import logging
import os
import pty
import re
import select
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.recipe.schema import LoggingConfig, RunConfig, TrainingConfig
from ctxlm_ds.run import build_hooks
from ctxlm_ds.training.hooks.hooks import RunEnd, RunStart
from ctxlm_ds.training.hooks.status import StatusHook, TimeLeft, figures_line, rough_moment
from tests.integration.forked import Forked
from tests.unit.training.hooks.test_metrics import end, metrics_of, start


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    caplog.set_level(logging.INFO, "ctxlm_ds")
    return lambda: "".join(f"{message}\n" for message in caplog.messages)


def test_plain_lines(tmp_path: Path, logged: Callable[[], str]) -> None:
    config = RunConfig(logging=LoggingConfig(interval_steps=2, tensorboard=False), name="small")
    hooks = build_hooks(config, tmp_path / "a run", Topology())
    for hook in hooks:
        hook.on_run_start(RunStart(0, 5, config))
    for step in range(1, 6):
        for hook in hooks:
            hook.on_step_end(metrics_of(step))
    figures = {"eval/wiki/loss": 3.21, "eval/wiki/masked_lm_accuracy": 0.5}
    for hook in hooks:
        hook.on_evaluation(5, figures)
        hook.on_run_end(RunEnd("training.max_steps (5) reached", 5, 500, 2.5))
    lines = logged().splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("step ") and "|" in line] == [
        "step 1/5", "step 2/5", "step 4/5", "step 5/5",
    ]  # fmt: skip
    assert re.fullmatch(
        r"step 2/5 \| loss 5.0000 \| masked_lm 4.5000 \| next_sentence 0.5000 \| lr 2.00e-04 \| grad norm 1.50 \| "
        r"tokens/s 200 \| s/step 0.50 \| left 0:00 \| memory \d\.\d\d GB",
        lines[1],
    )
    assert "step 5 held out: wiki loss 3.2100, masked_lm_accuracy 0.5000" in lines
    assert lines[-6:] == [
        "small: training.max_steps (5) reached",
        "  5 steps (5 since this start), 500 tokens in 0:02 of training (200 tokens/s)",
        "  last training loss 2.0000",
        "  held out: wiki loss 3.2100, masked_lm_accuracy 0.5000",
        f"  checkpoints and metrics.jsonl are in {tmp_path}/a run",
        f"  to export: ctxlm convert to-hf --checkpoint '{tmp_path}/a run' --output '{tmp_path}/a run/hf'",
    ]
    assert len((tmp_path / "a run" / "metrics.jsonl").read_text().splitlines()) == 5


def test_an_interrupted_run_is_told_how_to_go_on(logged: Callable[[], str]) -> None:
    hook = StatusHook("runs/bert")
    hook.on_run_start(start(40))
    hook.on_run_end(end(57, completed=False))
    text = logged()
    assert "57 steps (17 since this start)" in text and "to resume: the same command again" in text
    assert "to-hf --checkpoint runs/bert --output runs/bert/hf" in text


@pytest.mark.parametrize(
    ("reason", "restart", "told"),
    [
        ("stopped by signal SIGUSR1", "auto", "to resume, if the job was cancelled: submit the same command again"),
        ("stopped by signal SIGTERM", "auto", "to resume, if the job was cancelled: submit the same command again"),
        ("stopped by signal SIGINT", "auto", "to resume: the same command again"),
        ("late", "off", "to resume: the same command again"),
    ],
)
def test_the_ranks_of_a_job_promise_nothing(
    reason: str, restart: str, told: str, logged: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether Slurm has cancelled the job or it continues is the job's to say."""
    monkeypatch.setenv("CTXLM_ATTEMPT", "job-7-0-1")
    monkeypatch.setenv("CTXLM_RESTART", restart)
    hook = StatusHook("runs/bert")
    hook.on_run_start(start(40))
    hook.on_run_end(RunEnd(reason, 57, 5700, 28.5, completed=False))
    assert f"  {told}\n" in logged() and "queue" not in logged()


TERMINAL_RUN = """
import time
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.console import logger, setup_logging
from ctxlm_ds.training.hooks.hooks import Hooks, RunStart, StepMetrics, RunEnd
from ctxlm_ds.training.hooks.metrics import MetricsWriter
from ctxlm_ds.training.hooks.status import StatusHook
from ctxlm_ds.process.signals import StopSignal
import os, signal, sys
setup_logging()
stop_signal = StopSignal().install()
hook = StatusHook("runs/my-run", 1000, stop_signal)
hooks = Hooks([MetricsWriter("runs/my-run/metrics.jsonl"), hook])
hooks.call("on_run_start", RunStart(0, 40, RunConfig(name="my-run")))
for step in range(1, 41):
    time.sleep(0.02)
    terms = {"masked_lm": 9 / step, "next_sentence": 1 / step}
    hooks.call("on_step_end", StepMetrics(step=step, loss=10 / step, terms=terms, accuracy={},
        learning_rate=1e-4, grad_norm=2.0, tokens=64 * step, step_tokens=64, step_seconds=0.02,
        total_seconds=0.02 * step, epoch=0))
    if step == 20:
        hooks.call("on_evaluation", step, {"eval/wiki/loss": 1.25})
    if step == 30 and sys.argv[1].startswith("stop"):
        hook._table.is_drawing = sys.argv[1] == "stop while drawing"
        hook._table._shown_s = 0.0  # the next view is due
        os.kill(os.getpid(), signal.SIGINT)
if sys.argv[1] == "fail":
    raise SystemExit("broken off")
hooks.call("on_run_end", RunEnd("done", 40, 2560, 0.8))
logger.info("after the end")
"""


def on_terminal(outcome: str, tmp_path: Path) -> tuple[int, str]:
    """Exit status of the run, and all that it wrote to a pseudo-terminal."""
    leader, follower = pty.openpty()
    checkpoints = tmp_path / "runs/my-run/checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "latest").write_text("step-00000016\n")
    (tmp_path / "run.py").write_text(TERMINAL_RUN)
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "130", "LINES": "30"}
    process = Forked([str(tmp_path / "run.py"), outcome], environ, tmp_path, follower, follower, 1)
    os.close(follower)
    shown = b""
    while True:
        if not select.select([leader], [], [], 60)[0]:
            process.wait(0)
            pytest.fail("no more output")
        try:
            chunk = os.read(leader, 65536)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    os.close(leader)
    return process.wait(), shown.decode()


@pytest.mark.parametrize("outcome", ["stop", "stop while drawing"])
def test_a_stop_leaves_the_table_and_its_own_line(outcome: str, tmp_path: Path) -> None:
    """Nothing is redrawn over the line about the stop, which comes once."""
    status, text = on_terminal(outcome, tmp_path)
    assert text.count("stopping: ") == 1
    before, line, after = text.partition("stopping: the last complete step is saved; Ctrl-C again ends it immediately")
    assert status == 0 and line and "\x1b[1A" in before and "\x1b[1A" not in after and "\x1b[2K" not in after
    assert before.rfind("\x1b[?25h") > before.rfind("\x1b[?25l") >= 0
    assert "step 40/40 | " in after and "after the end" in after


@pytest.mark.parametrize("outcome", ["end", "fail"])
def test_a_live_table_on_a_terminal(outcome: str, tmp_path: Path) -> None:
    """On a pseudo-terminal: the table is redrawn in place, log lines stay whole, the cursor comes back."""
    status, text = on_terminal(outcome, tmp_path)
    assert status == (0 if outcome == "end" else 1)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "my-run" in plain and "masked_lm" in plain and "tokens/s" in plain and "memory" in plain
    assert "my-run in runs/my-run" in plain and "━" in plain
    assert re.search(r"100%  0:00 left, done about (\w+ )?\d\d:\d\d", plain)
    assert "held out at step 20: wiki loss 1.2500" in plain
    assert re.search(r"last checkpoint step-00000016, \d:\d\d ago", plain)
    assert ". training" in plain and "o wiki" in plain and re.search(r"\d \|\.", plain)
    assert "40/40" in plain and re.search(r"\b[2-9]/40|1\d/40", plain)
    assert re.search(r"\d\d:\d\d:\d\d step 20 held out: wiki loss 1.2500\s*$", plain, re.MULTILINE)
    # Cursor up: redrawn in place. Cursor hidden, and shown again at the end.
    assert "\x1b[1A" in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0
    assert ("after the end" in plain) is (outcome == "end")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("ctxlm_ds.training.hooks.status.time.monotonic", lambda: now[0])
    return now


def test_time_left(now: list[float]) -> None:
    by_steps = TimeLeft(RunStart(10, 100, RunConfig()))
    by_tokens = TimeLeft(RunStart(10, 100, RunConfig(training=TrainingConfig(max_tokens=2000))))
    by_hours = TimeLeft(RunStart(10, 100, RunConfig(training=TrainingConfig(max_hours=0.01))))
    now[0] += 222.0  # the first step, which is in no time left
    for step in range(11, 31):
        now[0] += 2.0
        left = [clock.update(metrics_of(step)) for clock in (by_steps, by_tokens, by_hours)]
    # Steps of 100 tokens, 2 s each; 30 done (3,000 tokens): 70 left, no tokens left, 36 s less the time passed.
    assert left == pytest.approx([140.0, 0.0, 0.0])
    # An evaluation of 40 s counts among the last steps' wall time.
    now[0] += 40.0
    assert by_steps.update(metrics_of(31)) == pytest.approx(69 * 78 / 20)


def test_time_left_after_going_back(now: list[float]) -> None:
    """Measured anew from there, without the first step; a limit of hours still counts from the start."""
    by_steps = TimeLeft(RunStart(10, 100, RunConfig()))
    by_hours = TimeLeft(RunStart(10, 100, RunConfig(training=TrainingConfig(max_hours=0.01))))
    for step in range(11, 21):
        now[0] += 2.0
        by_steps.update(metrics_of(step))
    now[0] += 10.0
    for clock in (by_steps, by_hours):
        clock.go_back()
    for clock in (by_steps, by_hours):
        assert clock.update(metrics_of(13)) is None
    now[0] += 4.0
    assert by_steps.update(metrics_of(14)) == pytest.approx(86 * 4.0)
    assert by_hours.update(metrics_of(14)) == pytest.approx(36.0 - 34.0)


def test_figures_of_several_sources() -> None:
    figures = {"eval/wiki/loss": 1.0, "eval/books/old/loss": 2.0, "eval/wiki/masked_lm_accuracy": 0.25}
    assert figures_line(figures) == "wiki loss 1.0000, masked_lm_accuracy 0.2500; books/old loss 2.0000"


def test_moments_to_come() -> None:
    noon = time.mktime((2026, 3, 2, 12, 0, 0, 0, 0, -1))  # a Monday
    moments = [rough_moment(hours * 3600, noon) for hours in (2, 26, 24 * 10)]
    assert moments == ["14:00", "Tuesday 14:00", "12 March 2026"]
