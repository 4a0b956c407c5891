"""The page of a run, from its files; a run that ends writes it, and a failure of it ends nothing."""

from __future__ import annotations

import io
import json
from pathlib import Path

from ctxlm_ds.process.run_history import append_event
from ctxlm_ds.training.hooks.hooks import Hooks
from ctxlm_ds.training.hooks.run_page import ReportHook, by_label, charts_of, read_run, run_page
from tests.unit.training.hooks.test_metrics import end

ENVIRONMENT = {
    "world_size": 2, "tensor_parallel_size": 2, "zero_stage": 1, "precision": "bf16", "torch": "2.13.0", "device": "cpu"
}  # fmt: skip


def make_run(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("name: tiny\nparallel:\n  tensor_parallel_size: 2\n")
    records: list[dict[str, object]] = [{"step": step, "masked_lm": 7.0 - step / 10} for step in range(1, 11)]
    records += [{"step": step, "texts": [["a <b>", f"written at {step}"]]} for step in range(1, 11)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    append_event(folder, "start", step=0, last_step=10, world_size=2, environment=ENVIRONMENT)
    append_event(folder, "end", step=10, reason="stopped by <SIGTERM>", completed=False, failed=False)
    return folder


def test_a_page_has_texts_layout_and_events(tmp_path: Path) -> None:
    runs = by_label([read_run(make_run(tmp_path))])
    page = run_page(runs, charts_of(runs))
    assert [f"written at {step}<" in page for step in (1, 4, 7, 10)] == [True] * 4 and "written at 5<" not in page
    assert "a &lt;b&gt;" in page and "data 1 x tensor 2 x pipeline 1" in page and "2.13.0" in page
    assert "stopped by &lt;SIGTERM&gt;" in page
    assert "<td>start</td><td>0</td><td>last_step 10, world_size 2</td>" in page


def test_runs_of_one_name_have_their_folders_as_labels(tmp_path: Path) -> None:
    runs = by_label([read_run(make_run(tmp_path / name)) for name in ("one", "other")])
    assert list(runs) == [str(tmp_path / "one"), str(tmp_path / "other")]
    assert [chart.title for chart in charts_of(runs)] == ["loss (nats)"]


def test_a_run_that_ends_writes_its_page(tmp_path: Path, log: io.StringIO) -> None:
    Hooks([ReportHook(make_run(tmp_path))]).call("on_run_end", end(10))
    assert "<svg" in (tmp_path / "report.html").read_text() and "report.html" in log.getvalue()


def test_a_page_that_cannot_be_made_is_a_warning(tmp_path: Path, log: io.StringIO) -> None:
    make_run(tmp_path)
    (tmp_path / "config.yaml").write_text("nonsense: 1\n")
    Hooks([ReportHook(tmp_path)]).call("on_run_end", end(10))
    assert "ReportHook stops writing" in log.getvalue() and not (tmp_path / "report.html").exists()


def test_a_run_without_a_step_has_no_page(tmp_path: Path, log: io.StringIO) -> None:
    (make_run(tmp_path) / "metrics.jsonl").write_text("")
    Hooks([ReportHook(tmp_path)]).call("on_run_end", end(0))
    assert not (tmp_path / "report.html").exists() and not log.getvalue()
