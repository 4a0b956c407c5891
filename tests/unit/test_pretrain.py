"""What the command connects with the trainer (runs: tests/integration/test_pretrain.py)."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctxlm_ds.pretrain import main, train
from ctxlm_ds.process.failure import Watchdog
from ctxlm_ds.process.launch import RankInfo
from ctxlm_ds.recipe.schema import WatchdogConfig
from ctxlm_ds.training.hooks.hooks import Hooks

ROOT = Path(__file__).resolve().parents[2]
RANKS = RankInfo(0, 1, 0, 1, "localhost", 0, "single", 0)


def test_held_out_batches_and_passes_of_continuations_are_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation with long continuations takes longer than a step may."""
    watchdog = Watchdog(WatchdogConfig(start_minutes=120, step_minutes=1, save_minutes=None), tmp_path, RANKS)
    limits_s: list[float] = []
    beat = watchdog.beat

    def noted(phase: str | None = None, step: int | None = None) -> None:
        beat(phase, step)
        limits_s.append(watchdog._limits_s[watchdog._phase])

    monkeypatch.setattr(watchdog, "beat", noted)
    continuations = SimpleNamespace(on_pass=None)
    trainer: Any = SimpleNamespace(
        hooks=Hooks([]), saves=SimpleNamespace(pending_age_s=lambda: None),
        engine=SimpleNamespace(topology=SimpleNamespace(is_main=False)),
        validation={"heldout": [None, None]}, continuations=continuations,
    )  # fmt: skip

    def run() -> None:
        trainer.hooks.call("on_phase", "evaluation")
        assert len(list(trainer.validation["heldout"])) == 2
        for _ in range(3):
            trainer.continuations.on_pass()
        trainer.hooks.call("on_phase", "saving")

    trainer.run = run
    watchdog.beat("training", 1)
    limits_s.clear()
    train(trainer, watchdog, tmp_path, RANKS)
    assert limits_s == [60.0] * 6 + [math.inf]


def test_the_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--list"])
    assert "\nbert-base  " in capsys.readouterr().out


def test_sigterm_ends_a_check() -> None:
    code = (
        "import time, ctxlm_ds.pretrain as p\n"
        "p.check_only = lambda arguments: (print('ready', flush=True), time.sleep(60))\n"
        "p.main(['--config', 'bert-tiny', '--check'])\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        started_s = time.monotonic()
        process.terminate()
        assert process.wait(20) == -signal.SIGTERM
        assert time.monotonic() - started_s < 10
