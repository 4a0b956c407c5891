"""Trackers through the real packages, offline: the files that they write hold one run over a resume."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.training.hooks.hooks import Hook, Hooks
from ctxlm_ds.training.hooks.trackers import WandbTracker, is_logged_in
from tests.unit.training.hooks.test_metrics import end, metrics_of, start


def follow(hook: Hook, first: int, last: int, completed: bool) -> None:
    hook.on_run_start(start(first - 1))
    for step in range(first, last + 1):
        hook.on_step_end(metrics_of(step, step_rows=8))
    hook.on_evaluation(last, {"eval/wiki/loss": float(last)})
    hook.on_continuations(last, [("The quiet", " sea")])
    hook.on_run_end(end(last, completed=completed))


def wandb_records(path: Path) -> list[Any]:
    """The records of an offline file: LevelDB's log format (blocks of 32 KiB) after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, found, parts = path.read_bytes(), 7, [], b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a complete record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def test_wandb_files_of_a_resumed_run_have_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for first, last, completed in ((1, 4, False), (5, 8, True)):
        follow(WandbTracker(tmp_path, 2), first, last, completed)
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    identity = (tmp_path / "wandb-id").read_text().strip()
    assert [file.name for file in files] == [f"run-{identity}.wandb"] * 2
    points: list[tuple[float, float]] = []
    for file in files:
        for record in wandb_records(file):
            if record.HasField("run"):
                assert (record.run.project, record.run.display_name) == ("ctxlm_ds", "run")
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "train/loss" in items:
                points.append((float(items["step"]), float(items["train/loss"])))
    assert points == [(step, 10.0 / step) for step in (1, 2, 4, 6, 8)]


def test_a_login_is_found_without_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not is_logged_in()
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password key\n")
    (tmp_path / "netrc").chmod(0o600)
    assert is_logged_in()
    monkeypatch.setenv("WANDB_BASE_URL", "https://other.example")
    assert not is_logged_in()
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert is_logged_in()


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(WandbTracker):
        def on_run_start(self, start: Any) -> None:
            raise RuntimeError("no server")

    hooks = Hooks([Failing(tmp_path, 1)])
    hooks.call("on_run_start", start(0))
    hooks.call("on_step_end", metrics_of(1))
    assert "Failing stops writing for the rest of this run, training continues: no server" in caplog.text
