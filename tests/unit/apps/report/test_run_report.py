"""The report of a run: a picture and a page; what is no run, or damaged, is one message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctxlm_ds.apps.report.run_report import ReportHook, by_label, charts_of, main, read_run, run_page
from ctxlm_ds.checkpoint.ledger import LEDGER_NAME, Ledger, Segment, open_segment
from ctxlm_ds.process.run_files import update_status
from ctxlm_ds.process.run_history import append_event
from ctxlm_ds.training.hooks.hooks import Hooks
from ctxlm_ds.training.loop.state import TrainState
from tests.integration.route import call_here
from tests.unit.training.hooks.test_metrics import end


def report(*words: object, status: int = 0) -> str:
    """What the command prints, or the error's text if `status` is not 0."""
    done = call_here(main, "ctxlm report", *words)
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


def make_run(folder: Path, metrics: str, config: str = "name: a<b\ntraining:\n  max_steps: 20\n") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config)
    (folder / "metrics.jsonl").write_text(metrics)
    return folder


def test_the_report(tmp_path: Path) -> None:
    records = [{"step": step, "masked_lm": 7 - step / 10, "learning_rate": 1e-3} for step in range(1, 11)]
    shown = report(make_run(tmp_path, "".join(f"{json.dumps(record)}\n" for record in records)))
    assert "loss (nats)" in shown and shown.endswith(f"all curves: {tmp_path / 'report.html'}\n")
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 2 and "max_steps: 20" in page and "a&lt;b" in page and "accuracy" not in page


def test_two_runs_over_each_other(tmp_path: Path) -> None:
    line = json.dumps({"step": 1, "masked_lm": 7.0}) + "\n"
    runs = [tmp_path / name for name in ("one", "other")]
    make_run(runs[0], line)
    make_run(runs[1], line, "name: b\ntraining:\n  max_steps: 30\n")
    report(*runs, "--output", tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text()
    assert "a&lt;b training 7" in page and "b training 7" in page
    assert "<td>training.max_steps=20</td>" in page and "<td>training.max_steps=30</td>" in page
    assert not (runs[0] / "report.html").exists()


def test_a_branch_begins_at_the_tokens_of_its_trunk(tmp_path: Path) -> None:
    """A fork goes on counting; a run from weights counts from 0 after what these have read, by its ledger."""
    folders = {name: tmp_path / name for name in ("trunk", "fork", "second")}
    for name, folder in folders.items():
        records = [{"step": step, "loss": 5.0, "masked_lm": 5.0, "tokens": 100 * step} for step in (4, 5)]
        lines = "".join(f"{json.dumps(record)}\n" for record in [*records, {"step": 5, "eval/a/loss": 4.5}])
        begun = f"initialize_from: {folders['trunk']}\n" if name == "second" else ""
        make_run(folder, lines, f"name: {name}\n{begun}")
    segments: list[Segment] = []
    for name, tokens in (("trunk", 7000), ("second", 500)):
        sources = [{"path": "p", "index": name, "rows": 10, "tokens": tokens}]
        segments = open_segment(segments, read_run(folders[name]).config, {"sources": sources}, 0)
        segments[-1] = segments[-1].up_to(TrainState(step=5, rows_consumed=10))
    (folders["second"] / LEDGER_NAME).write_text(Ledger(segments=segments).model_dump_json())
    charts = charts_of(by_label([read_run(folder) for folder in folders.values()]))
    (chart,) = [chart for chart in charts if chart.title == "loss (nats) by tokens"]
    assert chart.curves == {
        **{f"{name} training": [(400.0, 5.0), (500.0, 5.0)] for name in ("trunk", "fork")},
        **{f"{name} a": [(500.0, 4.5)] for name in ("trunk", "fork")},
        "second training": [(7400.0, 5.0), (7500.0, 5.0)], "second a": [(7500.0, 4.5)],
    }  # fmt: skip
    assert not any("tokens" in chart.title for chart in charts_of(by_label([read_run(folders["fork"])])))


def test_a_sweep_is_compared(tmp_path: Path) -> None:
    (tmp_path / "sweep.txt").write_text("optimizer.learning_rate=1e-4\noptimizer.learning_rate=2e-4\n\n")
    for task, rate in enumerate(("1.0e-4", "2.0e-4", "3.0e-4")):
        text = f"name: a\nrun_dir: {tmp_path}/{task}\noptimizer: {{learning_rate: {rate}}}\n"
        lines = [{"step": step, "loss": 7.0 - step - task, "masked_lm": 7.0 - step - task} for step in (1, 2)]
        make_run(tmp_path / str(task), "".join(f"{json.dumps(line)}\n" for line in lines), text)
    (tmp_path / "2" / "metrics.jsonl").write_text("")
    shown = report(tmp_path)
    assert shown.endswith(f"all curves: {tmp_path / 'report.html'}\n") and (tmp_path / "report.html").is_file()
    table = shown.splitlines()[-4:-1]
    assert [row.split() for row in table] == [
        ["run", "step", "loss", "different", "settings"],
        [f"{tmp_path}/0", "2", "5.0000", "optimizer.learning_rate=0.0001"],
        [f"{tmp_path}/1", "2", "4.0000", "optimizer.learning_rate=0.0002"],
    ]
    assert f"{tmp_path}/2: no step is finished yet; left out" in shown
    again = report(*sorted(tmp_path.glob("*")), "--output", tmp_path / "report.html")
    assert again == shown, "the shell's pattern matches sweep.txt and report.html, too"
    assert "is missing" in report(tmp_path / "0", tmp_path / "none", status=2)


@pytest.mark.parametrize("metrics", ["", '{"st', "[1]\n"])
def test_what_is_no_curve(tmp_path: Path, metrics: str) -> None:
    told = report(make_run(tmp_path, metrics), status=2)
    assert "is missing or has no complete line; give the directory of a run" in told


ENVIRONMENT = {
    "world_size": 2, "tensor_parallel_size": 2, "zero_stage": 1, "precision": "bf16", "torch": "2.13.0", "device": "cpu"
}  # fmt: skip


def ended_run(folder: Path) -> Path:
    records: list[dict[str, object]] = [{"step": step, "masked_lm": 7.0 - step / 10} for step in range(1, 11)]
    records += [{"step": step, "texts": [["a <b>", f"written at {step}"]]} for step in range(1, 11)]
    config = "name: tiny\nparallel:\n  tensor_parallel_size: 2\n"
    make_run(folder, "".join(f"{json.dumps(record)}\n" for record in records), config)
    append_event(folder, "start", step=0, last_step=10, world_size=2, environment=ENVIRONMENT)
    append_event(folder, "end", step=10, reason="stopped by <SIGTERM>", completed=False, failed=False)
    return folder


def test_a_page_has_texts_layout_and_events(tmp_path: Path) -> None:
    runs = by_label([read_run(ended_run(tmp_path))])
    page = run_page(runs, charts_of(runs))
    assert [f"written at {step}<" in page for step in (10, 8, 6, 4, 2)] == [True] * 5 and "written at 5<" not in page
    assert "a &lt;b&gt;" in page and "<td>tensor_parallel_size</td><td>2</td>" in page and "2.13.0" in page
    assert "stopped by &lt;SIGTERM&gt;" in page
    assert "<td>start</td><td>0</td><td>last_step 10, world_size 2</td>" in page


def test_runs_of_one_name_have_their_folders_as_labels(tmp_path: Path) -> None:
    runs = by_label([read_run(ended_run(tmp_path / name)) for name in ("one", "other")])
    assert list(runs) == [str(tmp_path / "one"), str(tmp_path / "other")]
    assert [chart.title for chart in charts_of(runs)] == ["loss (nats)"]


def test_the_verdict_is_printed_and_on_the_page(tmp_path: Path) -> None:
    runs = [ended_run(tmp_path / name) for name in ("one", "other")]
    update_status(runs[0], verdict=["held: 3.40 nats <b>", "the model repeats its text"])
    told = "\nverdict of tiny: held: 3.40 nats <b>\nverdict of tiny: the model repeats its text\n"
    assert told in report(runs[0])
    assert "<td>held: 3.40 nats &lt;b&gt;</td>" in (runs[0] / "report.html").read_text()
    both = report(*runs, "--output", tmp_path / "both.html")
    assert f"\nverdict of {runs[0]}: held: 3.40 nats <b>\n" in both


def test_a_run_that_ends_writes_its_page(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ctxlm_ds")
    Hooks([ReportHook(ended_run(tmp_path))]).call("on_run_end", end(10))
    assert "<svg" in (tmp_path / "report.html").read_text() and "report.html" in caplog.text


def test_a_page_that_cannot_be_made_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ended_run(tmp_path)
    (tmp_path / "config.yaml").write_text("nonsense: 1\n")
    Hooks([ReportHook(tmp_path)]).call("on_run_end", end(10))
    assert "ReportHook stops writing" in caplog.text and not (tmp_path / "report.html").exists()


def test_a_run_without_a_step_has_no_page(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = ended_run(tmp_path) / "metrics.jsonl"
    metrics.write_text("")
    Hooks([ReportHook(tmp_path)]).call("on_run_end", end(0))
    metrics.unlink()
    Hooks([ReportHook(tmp_path)]).call("on_run_end", end(0))
    assert not (tmp_path / "report.html").exists() and not caplog.text


ODD = ["NaN", "Infinity", "1e400", '"x"', "[]", "{}", "true", "1" + "0" * 400, "[" * 500 + "]" * 500, "5e-324", "1e300"]


@pytest.mark.parametrize("value", ODD)
def test_a_value_that_is_no_figure_costs_its_point(tmp_path: Path, value: str) -> None:
    line = '{"step": 2, "loss": %s, "masked_lm": %s, "eval/a/loss": %s, "texts": %s}\n' % ((value,) * 4)
    other = json.dumps({"step": 3, "loss": 6.5, "masked_lm": 6.5, "texts": [["given", "written"], ["alone"], 5]}) + "\n"
    run = make_run(tmp_path, other.replace("3", "1") + line + f'{{"step": {value}}}\n' + other)
    event = '{"event": "start", "time_unix_s": %s, "environment": %s, "step": %s}\n'
    (run / "history.jsonl").write_text(event % ((value,) * 3) + event % (5, value, value))
    assert "loss (nats)" in report(run)
    page = (run / "report.html").read_text()
    drawn = page[page.index("<svg") : page.rindex("</svg>")]
    assert page.count("<td>written<") == 2 and "nan" not in drawn and "inf" not in drawn
    assert [step for step, _ in charts_of(by_label([read_run(run)]))[0].curves["training"]][::2] in ([1.0, 3.0], [1.0])
