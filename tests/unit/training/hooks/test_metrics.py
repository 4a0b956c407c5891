"""metrics.jsonl and TensorBoard: one continuous curve whatever was lost on the way, read back by other readers."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.training.hooks.hooks import RunEnd, RunStart, StepMetrics
from ctxlm_ds.training.hooks.metrics import (
    MetricsWriter,
    TensorBoardWriter,
    peak_row_seconds,
    published_peak_tflops,
    rewind,
    step_figures,
)
from ctxlm_ds.training.measure import useful_flops_per_row


def metrics_of(step: int, **changes: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": step, "loss": 10.0 / step, "terms": {"masked_lm": 9.0 / step, "next_sentence": 1.0 / step},
        "accuracy": {"masked_lm": 0.25, "next_sentence": 0.5}, "learning_rate": 1e-4 * step, "grad_norm": 1.5,
        "tokens": 100 * step, "step_tokens": 100, "step_seconds": 0.5, "total_seconds": 0.5 * step, "epoch": 0,
    }  # fmt: skip
    return StepMetrics(**{**values, **changes})


def start(step: int, last_step: int = 100) -> RunStart:
    return RunStart(step, last_step, RunConfig())


def end(step: int, completed: bool = True) -> RunEnd:
    return RunEnd("done", step, 100 * step, 0.5 * step, completed)


def await_next_second() -> None:
    """Wait until files of events get a later name: TensorBoard reads a folder in the order of names, which hold whole
    seconds first and then a counter without leading zeros (10 sorts before 9)."""
    second = int(time.time())
    while int(time.time()) == second:
        time.sleep(0.02)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(path: Path, first: int, last: int, interval: int = 1, evaluate_every: int = 0) -> MetricsWriter:
    """A run that is killed, unless on_run_end is called."""
    writer = MetricsWriter(path, interval)
    writer.on_run_start(start(first - 1))
    for step in range(first, last + 1):
        writer.on_step_end(metrics_of(step))
        if evaluate_every and step % evaluate_every == 0:
            writer.on_evaluation(step, {"eval/wiki/loss": 5.0 / step})
    return writer


def test_a_line_holds_everything(tmp_path: Path) -> None:
    run(tmp_path / "m.jsonl", 1, 1)
    (line,) = lines(tmp_path / "m.jsonl")
    memory = line.pop("memory_bytes")
    assert 10**6 < memory < 10**12
    assert line == {
        "step": 1, "loss": 10.0, "masked_lm": 9.0, "next_sentence": 1.0, "masked_lm_accuracy": 0.25,
        "next_sentence_accuracy": 0.5, "learning_rate": 1e-4, "grad_norm": 1.5, "epoch": 0, "tokens": 100,
        "tokens_per_second": 200.0, "step_seconds": 0.5, "total_seconds": 0.5,
    }  # fmt: skip


def test_fp16_and_missing_figures(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.on_run_start(start(0))
    writer.on_step_end(metrics_of(1, loss_scale=1024.0, skipped_steps=2, grad_norm=None, loss=math.nan))
    text = (tmp_path / "m.jsonl").read_text()
    line = json.loads(text, parse_constant=pytest.fail)
    assert (line["loss_scale"], line["skipped_steps"], line["loss"]) == (1024.0, 2, None)
    assert "grad_norm" not in line


def test_interval_means_speed_not_loss(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m.jsonl", interval_steps=3)
    writer.on_run_start(start(0))
    for step in range(1, 8):
        writer.on_step_end(metrics_of(step, step_seconds=0.1 * step))
    written = lines(tmp_path / "m.jsonl")
    assert [line["step"] for line in written] == [1, 3, 6]
    assert [line["loss"] for line in written] == [10.0, 10 / 3, 10 / 6]
    assert [line["tokens_per_second"] for line in written] == pytest.approx([1000, 400, 200])
    writer.on_run_end(end(7))
    assert lines(tmp_path / "m.jsonl")[-1]["step"] == 7


def test_a_run_that_is_to_go_on_gets_no_extra_point(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    run(whole, 1, 20, interval=5)
    run(parts, 1, 8, interval=5).on_run_end(end(8, completed=False))
    run(parts, 9, 20, interval=5)
    assert [(line["step"], line["loss"]) for line in lines(parts)] == [
        (line["step"], line["loss"]) for line in lines(whole)
    ]


@pytest.mark.parametrize("resumed_at", [0, 4, 7, 10])
@pytest.mark.parametrize("torn", [b"", b'{"step": 11, "lo', b'{"step": 11}', b"\0\0\0\0"])
def test_a_resume_makes_one_continuous_curve(tmp_path: Path, resumed_at: int, torn: bytes) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    run(whole, 1, 15, evaluate_every=5)
    run(parts, 1, 10, evaluate_every=5)
    with open(parts, "ab") as handle:
        handle.write(torn)
    run(parts, resumed_at + 1, 15, evaluate_every=5)
    assert [{**line, "memory_bytes": 0} for line in lines(parts)] == [
        {**line, "memory_bytes": 0} for line in lines(whole)
    ]
    assert [path.name for path in tmp_path.glob("*partial*")] == []


def test_nothing_is_rewritten_where_all_may_stay(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    run(path, 1, 5)
    before = path.stat()
    run(path, 6, 5)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_torn_line_in_the_middle_goes_too(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "loss": 2}\n{"step": 2, "l{"step": 3, "loss": 1}\nnull\n{"no": "step"}\n{"step": 4}\n')
    run(path, 10, 9)
    assert lines(path) == [{"step": 1, "loss": 2}, {"step": 4}]


def test_going_back_makes_one_continuous_curve(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m.jsonl", 2)
    writer.on_run_start(start(0))
    for step in range(1, 8):
        writer.on_step_end(metrics_of(step, step_seconds=5.0))
    writer.on_evaluation(4, {"eval/wiki/loss": 4.0})
    writer.on_evaluation(6, {"eval/wiki/loss": 6.0})
    writer.on_rollback(4)
    for step in range(5, 8):
        writer.on_step_end(metrics_of(step, loss=50.0 + step, skipped_steps=1, rollbacks=1))
    writer.on_evaluation(6, {"eval/wiki/loss": 60.0})
    writer.on_run_end(end(7))
    written = lines(tmp_path / "m.jsonl")
    losses = [(line["step"], line["loss"]) for line in written if "loss" in line]
    assert losses == [(1, 10.0), (2, 5.0), (4, 2.5), (6, 56.0), (7, 57.0)]
    assert [line["eval/wiki/loss"] for line in written if "eval/wiki/loss" in line] == [4.0, 60.0]
    last = written[-1]
    assert (last["skipped_steps"], last["rollbacks"], last["step_seconds"]) == (1, 1, 0.5)
    assert "rollbacks" not in written[0]


def test_an_evaluation_done_again_at_the_resumed_step_is_not_doubled(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    run(path, 1, 5, evaluate_every=5)
    run(path, 6, 5).on_evaluation(5, {"eval/wiki/loss": 1.0, "eval/books/loss": 2.0})
    assert lines(path)[-2:] == [{"step": 5, "eval/wiki/loss": 1.0}, {"step": 5, "eval/books/loss": 2.0}]


def test_figures_of_other_weights_at_step_0_are_not_kept(tmp_path: Path) -> None:
    for loss in (1.0, 9.0):
        writer, board = MetricsWriter(tmp_path / "m.jsonl"), TensorBoardWriter(tmp_path, 1)
        for hook in (writer, board):
            hook.on_run_start(start(0))
            hook.on_evaluation(0, {"eval/wiki/loss": loss})
        writer.on_run_end(end(0))
        board.on_run_end(end(0))
        await_next_second()
    assert lines(tmp_path / "m.jsonl") == [{"step": 0, "eval/wiki/loss": 9.0}]
    assert _points(tmp_path / "tensorboard")["eval/wiki/loss"] == [(0, 9.0)]


def test_continued_texts_are_in_tensorboard(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    writer.on_run_start(start(0))
    writer.on_continuations(5, [("a <b>", " c"), ("d", " \n"), ("# 1*2\n\n_x_", "** `y`\n")])
    writer.on_run_end(end(5))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (text,) = events.Tensors("continuations/text_summary")
    shown = r"a &lt;b&gt; **c**" "\n\nd\n\n" r"\# 1\*2 \_x\_ **\*\* \`y\`**"
    assert (text.step, text.tensor_proto.string_val[0].decode()) == (5, shown)


def test_killed_while_writing(tmp_path: Path) -> None:
    """kill -9 at any moment leaves a file that the next start continues without a gap."""
    path = tmp_path / "m.jsonl"
    done = 0
    for attempt in range(5):
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 0.02 + 0.01 * attempt)
            run(path, done + 1, 10**9)
        os.waitpid(pid, 0)
        rewind(path, 10**9)
        done = max([line["step"] for line in lines(path)] if path.exists() else [0])
    assert [line["step"] for line in lines(path)] == list(range(1, done + 1)) and done > 50


def _points(directory: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(directory))
    events.Reload()
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def board(folder: Path, interval: int, begin: RunStart, last: int, before_step_0: float) -> TensorBoardWriter:
    """A run up to a step, whose losses rise by 1."""
    writer = TensorBoardWriter(folder, interval)
    writer.on_run_start(begin)
    for step in range(begin.step + 1, last + 1):
        writer.on_step_end(metrics_of(step, loss=before_step_0 + step))
    return writer


def test_tensorboard_is_one_curve_after_a_resume(tmp_path: Path) -> None:
    first = board(tmp_path, 1, start(0), 8, 100.0)
    first.on_evaluation(4, {"eval/wiki/loss": 4.0})
    first.on_evaluation(8, {"eval/wiki/loss": 8.0})
    first.on_run_end(end(8))
    await_next_second()
    second = board(tmp_path, 1, start(5), 10, 200.0)
    second.on_evaluation(8, {"eval/wiki/loss": 80.0})
    second.on_run_end(end(10))
    points = _points(tmp_path / "tensorboard")
    assert points["train/loss"] == [(s, 100.0 + s) for s in range(1, 6)] + [(s, 200.0 + s) for s in range(6, 11)]
    assert points["eval/wiki/loss"] == [(4, 4.0), (8, 80.0)]
    assert {"train/masked_lm", "train/next_sentence_accuracy", "train/learning_rate", "train/grad_norm"} <= set(points)


def test_tensorboard_is_one_curve_after_going_back(tmp_path: Path) -> None:
    writer = board(tmp_path, 1, start(0), 6, 100.0)
    writer.on_rollback(4)
    writer.on_step_end(metrics_of(5, loss=205.0))
    writer.on_run_end(end(5))
    assert _points(tmp_path / "tensorboard")["train/loss"] == [(s, 100.0 + s) for s in range(1, 5)] + [(5, 205.0)]


def test_tensorboard_over_tokens_and_with_the_recipe(tmp_path: Path) -> None:
    first = board(tmp_path, 2, start(0), 8, 100.0)
    first.on_evaluation(8, {"eval/wiki/loss": 8.0})
    first.on_rollback(5)
    first.on_step_end(metrics_of(6, loss=106.5))
    first.on_run_end(end(6))
    await_next_second()
    second = board(tmp_path, 2, RunStart(5, 100, RunConfig(), tokens=500), 8, 200.0)
    second.on_evaluation(8, {"eval/wiki/loss": 80.0})
    second.on_run_end(end(8))
    points = _points(tmp_path / "tensorboard" / "by_token")
    assert points["by_token/loss"] == [(100, 101.0), (200, 102.0), (400, 104.0), (600, 206.0), (800, 208.0)]
    assert points["by_token/eval/wiki/loss"] == [(800, 80.0)]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = events.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    optimizer:\n" in shown and "      learning_rate: 0.0001" in shown
    assert b"optimizer.learning_rate" in events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content


def test_mfu_is_six_operations_a_weight_and_token() -> None:
    config = load_config("gpt2-laptop", ["logging.peak_tflops=2.0", "model.vocab_size=8192"])
    seconds = peak_row_seconds(
        config.logging.peak_tflops, config.training.precision, 4, lambda: useful_flops_per_row(config)
    )
    model, tokens = config.model, config.data.seq_length
    width, layers = model.width, model.num_blocks
    assert seconds is not None and width is not None
    weights = 12 * layers * width**2 + 8192 * width
    attention = layers * 2 * width * (tokens + 1)  # scores and mixing of the positions that are seen, on average
    assert seconds == pytest.approx(tokens * (6 * weights + 3 * attention) / 8e12, rel=2e-3)
    figures = step_figures(metrics_of(1), 200.0, 0.5, 0.25 / seconds, seconds)
    assert figures["mfu"] == 0.25
    assert figures["rows_per_second"] == pytest.approx(0.25 / seconds, rel=1e-2)


def test_no_figure_without_a_peak() -> None:
    assert published_peak_tflops("NVIDIA H100 80GB HBM3", "bf16") == 989.0
    assert published_peak_tflops("NVIDIA H100 PCIe", "bf16") is None
    assert published_peak_tflops("NVIDIA A100-SXM4-80GB", "fp32") == 19.5
    assert "mfu" not in step_figures(metrics_of(1), 200.0, 0.5, 3.0)
