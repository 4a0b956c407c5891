"""state.json of a checkpoint: read as it was written, and every wrong value is named."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, step_name
from ctxlm_ds.checkpoint.manifest import hash_files, write_manifest
from ctxlm_ds.checkpoint.saved_state import (
    phase_to_train,
    reached_words,
    read_progress,
    read_saved_state,
    refuse_changed_data,
    refuse_changed_settings,
    report_resume,
)
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.recipe.load import dump_config, load_config
from ctxlm_ds.recipe.phases import run_phases
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.words import STEPS_FOLLOW
from ctxlm_ds.training.loop.state import TrainState
from tests.sections import changed_config

STATE = asdict(TrainState(step=7, rows_consumed=224, tokens=9000, recent_losses=[7.5, 7.25]))
SOURCE = {"path": "data/a", "documents": [0, 90], "rows": 700, "index": "abcd"}


def write(folder: Path, document: Any) -> Path:
    (folder / "state.json").write_text(json.dumps(document))
    return folder


def test_what_was_written_is_read(tmp_path: Path) -> None:
    data = {"sources": [SOURCE], "tokenizer_fingerprint": "t"}
    found = read_saved_state(write(tmp_path, {"train_state": STATE, "data": data}))
    assert found == {"train_state": STATE, "data": data, "environment": {}}
    assert asdict(TrainState.from_dict(found["train_state"])) == STATE


def test_a_state_that_cannot_be_read_says_nothing_of_words(tmp_path: Path) -> None:
    """The checkpoint may be one that is kept for ever; 0 would say that it is not."""
    assert reached_words(write(tmp_path, {"train_state": {**STATE, "reached_words": 10**6}})) == 10**6
    assert reached_words(write(tmp_path, {"train_state": {}})) == 0
    (tmp_path / "state.json").write_text("{")
    assert reached_words(tmp_path) is None


def test_imported_weights_have_none(tmp_path: Path) -> None:
    assert read_saved_state(tmp_path) == {}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "expected an object"),
        ({}, r"damaged \(train_state: Field required\)"),
        ({"train_state": {**STATE, "step": "7"}}, r"damaged \(train_state\.step: .*valid integer"),
        ({"train_state": {**STATE, "recent_losses": [1, None]}}, r"train_state\.recent_losses\.1: .*valid number"),
        ({"train_state": {**STATE, "step": -1}}, "impossible count"),
        ({"train_state": {**STATE, "tokens": 10**30}}, "impossible count"),
        ({"train_state": STATE, "data": {"sources": [{**SOURCE, "documents": [0]}]}}, r"data\.sources\.0\.documents"),
        ({"train_state": STATE, "data": {"sources": [{**SOURCE, "rows": 1.5}]}}, r"data\.sources\.0\.rows"),
        ({"train_state": STATE, "environment": []}, r"damaged \(environment: "),
    ],
)
def test_damage_is_named(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"state\.json: .*{message}"):
        read_saved_state(write(tmp_path, document))


SAVED = {
    "data": {
        "train": [{"path": "a", "weight": 1}, {"path": "b", "weight": 3}], "blend": "weighted", "split": "9,1",
        "seq_length": 128,
    }
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(dump_config(changed_config(SAVED, {})), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.seq_length": 64}, ["data.seq_length: 128 -> 64"]),
        ({"data.blend": "megatron"}, ["data.blend: 'weighted' -> 'megatron'"]),
        ({"data.split": "8,2"}, ["data.split: '9,1' -> '8,2'"]),
        ({"data.split": None}, ["data.split: '9,1' -> None"]),
        ({"data.temperature": 2.0}, ["data.temperature: 1.0 -> 2.0"]),
        (
            {"data.train": [{"path": "a", "weight": 1}, {"path": "b", "weight": 2}]},
            ["data.train[1]: weight 3.0, epochs 1 -> weight 2.0, epochs 1"],
        ),
        (
            {"data.train": [{"path": "a", "weight": 1}, {"path": "b", "weight": 3, "language": "fr_XX"}]},
            ["data.train[1]: weight 3.0, epochs 1 -> weight 3.0, epochs 1, language fr_XX"],
        ),
        ({"data.train": [{"path": "a", "weight": 1}]}, ["data.train: 2 sources -> 1 source"]),
        ({"data.seq_length": 64, "training.seed": 5}, ["data.seq_length: 128", "training.seed: 1234 -> 5"]),
    ],
)
def test_another_stream_of_rows_is_refused_by_name(checkpoint: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError, match="cannot be continued") as caught:
        refuse_changed_settings(checkpoint, changed_config(SAVED, changes))
    for word in words:
        assert word in str(caught.value)
    assert "initialize_from" in str(caught.value)


def test_of_a_section_only_what_differs_is_named(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        refuse_changed_settings(checkpoint, changed_config(SAVED, {"model.num_layers": 3, "objective.mask_prob": 0.3}))
    lines = [line for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert lines == ["  model.num_layers: 12 -> 3", "  objective.mask_prob: 0.15 -> 0.3"]


def test_another_tokenizer_is_named_with_the_size_of_its_vocabulary(checkpoint: Path) -> None:
    changes = {"model.vocab_size": 999, "tokenizer.path": "other", "data.train": [{"path": "z"}]}
    with pytest.raises(CheckpointError) as caught:
        refuse_changed_settings(checkpoint, changed_config(SAVED, changes))
    lines = [line.strip() for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert [line.split(":")[0] for line in lines[:3]] == ["tokenizer.path", "data.train", "model.vocab_size"]
    assert lines[0].endswith("-> other") and lines[1].endswith("-> z") and lines[2].endswith("-> 999")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"training.global_batch_size": 96, "training.micro_batch_size": 4},
        {"training.max_steps": 5000},
        {"data.num_workers": 5, "data.prefetch_steps": 7},
        {"data.train": [{"path": "elsewhere/a", "weight": 1}, {"path": "b", "weight": 3, "name": "renamed"}]},
        {"data.validation": [{"name": "new", "path": "c", "part": "test"}]},
    ],
)
def test_what_leaves_the_stream_as_it_is_may_change(checkpoint: Path, changes: dict[str, Any]) -> None:
    refuse_changed_settings(checkpoint, changed_config(SAVED, changes))


def described(*indexes: str, tokenizer: str = "t", folder: str = "data") -> dict[str, Any]:
    sources = [
        {"path": f"{folder}/s{number}", "documents": [0, 90], "rows": 700 + number, "index": index * 8}
        for number, index in enumerate(indexes)
    ]
    return {"sources": sources, "tokenizer_fingerprint": tokenizer}


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (
            described("abcd", "1234"),
            ["data.train[1]: data/s1 (documents 0 to 90, 701 rows, samples efefefefefef) in the checkpoint, data/s1"],
        ),
        (described("abcd"), ["data.train[1]: data/s1", "in the checkpoint, no source now"]),
        (described("efef", "abcd"), ["data.train[0]: data/s0", "data.train[1]: data/s1"]),
        (described("abcd", "efef", "1234"), ["data.train[2]: no source in the checkpoint, data/s2"]),
        (described("abcd", "efef", tokenizer="u"), ["tokenizer_fingerprint: 't' in the checkpoint, 'u' now"]),
    ],
)
def test_other_rows_are_refused_source_by_source(tmp_path: Path, now: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError, match="cannot be continued") as caught:
        refuse_changed_data(tmp_path, described("abcd", "efef"), now)
    for word in words:
        assert word in str(caught.value)


def test_a_dataset_may_move(tmp_path: Path) -> None:
    refuse_changed_data(tmp_path, described("abcd", "efef"), described("abcd", "efef", folder="elsewhere"))


def config(**changes: Any) -> RunConfig:
    return changed_config({"training": {"max_steps": 40}}, {name.replace("__", "."): v for name, v in changes.items()})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Checkpoints of the steps 10 and 20, as their files are compared."""
    for step in (10, 20):
        folder = tmp_path / CHECKPOINTS_DIR / step_name(step)
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(dump_config(config(model__vocab_size=300)))
        state = {"step": step, "rows_consumed": 8 * step, "tokens": 100 * step, "words": 25 * step}
        (folder / "state.json").write_text(json.dumps({"train_state": state, "data": {}, "environment": {}}))
        write_manifest(folder, step, hash_files(folder, ["config.yaml", "state.json"]))
    return tmp_path


def test_a_new_run_has_none(tmp_path: Path) -> None:
    assert read_progress(tmp_path / "none", config()) is None


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "resumes at step 20 of 40"),
        ({"training__max_steps": 2000}, "resumes at step 20 of 2,000"),
        ({"training__max_steps": 20}, "complete already: step 20 of 20"),
        ({"training__max_tokens": 2000}, "complete already: step 20 of 40"),
        ({"training__max_tokens": 2001}, "resumes at step 20 of 40"),
        ({"training__max_steps": STEPS_FOLLOW, "training__max_words": 500}, "complete already: step 20"),
        ({"training__max_steps": STEPS_FOLLOW, "training__max_words": 501}, "resumes at step 20"),
    ],
)
def test_where_a_run_goes_on(run_dir: Path, changes: dict[str, Any], line: str) -> None:
    found = read_progress(run_dir, config(**changes))
    assert found is not None and found.describe() == line


def test_it_goes_on_at_the_newest_that_is_whole(run_dir: Path) -> None:
    (run_dir / CHECKPOINTS_DIR / step_name(20) / "state.json").write_text("{")
    found = read_progress(run_dir, config())
    assert found is not None and found.step == 10


@pytest.mark.parametrize(("seconds", "is_complete"), [(3600.0, True), (3599.0, False)])
def test_a_last_phase_of_hours_is_complete_after_them(run_dir: Path, seconds: float, is_complete: bool) -> None:
    phases = "phases=[{steps: 10}, {hours: 1, set: {schedule: {name: constant}}}]"
    recipe = load_config("bert-laptop", [phases, "model.vocab_size=300"])
    folder = run_dir / CHECKPOINTS_DIR / step_name(20)
    (folder / "config.yaml").write_text(dump_config(run_phases(recipe)[1].config))
    state = TrainState(step=20, rows_consumed=160, phase=1, first_step=10, first_seconds=100.0, seconds=100.0 + seconds)
    (folder / "state.json").write_text(json.dumps({"train_state": asdict(state), "data": {}, "environment": {}}))
    write_manifest(folder, 20, hash_files(folder, ["config.yaml", "state.json"]))
    found = read_progress(run_dir, recipe)
    assert found is not None and found.complete == is_complete


def test_what_cannot_change_is_refused(run_dir: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step-00000020 cannot be continued(.|\n)*model.vocab_size: 300 -> 400"):
        read_progress(run_dir, config(model__vocab_size=400))


def test_it_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import ctxlm_ds.checkpoint.saved_state"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


RESUMED = {"training": {"max_steps": 300, "global_batch_size": 64}, "optimizer": {"learning_rate": 1e-3}}


@pytest.fixture
def report(caplog: pytest.LogCaptureFixture) -> Any:

    def run(changes: dict[str, Any], environment: list[str] | None = None) -> tuple[list[str], list[tuple[int, str]]]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "ctxlm_ds"):
            found = report_resume(changed_config(RESUMED, {}), changed_config(RESUMED, changes), 100, environment or [])
        return found, [(record.levelno, record.getMessage()) for record in caplog.records]

    return run


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer.learning_rate": 5e-3}, ["optimizer.learning_rate 0.001 -> 0.005", "of step 101: 0.0006667 ->"]),
        ({"training.global_batch_size": 32}, ["training.global_batch_size 64 -> 32"]),
        ({"schedule.name": "constant"}, ["schedule.name linear -> constant", "of step 101: 0.0006667 -> 0.001"]),
        ({"training.max_steps": 150}, ["training.max_steps 300 -> 150", "learning rate of step 101"]),
        ({"optimizer.weight_decay": 0.1}, ["optimizer.weight_decay 0.01 -> 0.1"]),
        ({"optimizer.gradient_clipping": 0.0}, ["optimizer.gradient_clipping 1.0 -> 0.0"]),
        ({"anomalies.max_skips": 1}, ["anomalies.max_skips 10 -> 1"]),
    ],
)
def test_a_changed_curve_is_a_warning(report: Any, changes: dict[str, Any], words: list[str]) -> None:
    found, lines = report(changes, ["world_size 1 -> 2"])
    (level, warning), (_, setting), (_, rounding) = lines
    assert level == logging.WARNING and "its curve is not that of an uninterrupted run" in warning
    assert found == [words[0]] and setting == f"  {words[0]}"
    for word in words[1:]:
        assert word in warning
    assert rounding == "resuming with other rounding: world_size 1 -> 2"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training.max_steps": 400}, ["training.max_steps 300 -> 400", "learning rate of step 301: 0 -> 0.00025"]),
        ({"training.max_steps": 400, "optimizer.learning_rate": 5e-3}, ["0.001 -> 0.005", "step 301: 0 -> 0.00125"]),
    ],
)
def test_what_an_ended_run_goes_on_with_is_compared(
    caplog: pytest.LogCaptureFixture, changes: dict[str, Any], words: list[str]
) -> None:
    report_resume(changed_config(RESUMED, {}), changed_config(RESUMED, changes), 300, [])
    for word in words:
        assert word in caplog.text
    assert caplog.text.count("WARNING") == 1 + len(changes) and "without effect" not in caplog.text


def test_a_change_of_a_few_last_steps_of_a_long_run_is_found(caplog: pytest.LogCaptureFixture) -> None:
    long = {"training": {"max_steps": 10**6}, "schedule": {"name": "wsd", "decay_fraction": 1e-5}}
    report_resume(changed_config(long, {}), changed_config(long, {"schedule.decay_fraction": 2e-5}), 500, [])
    assert "schedule.decay_fraction 1e-05 -> 2e-05" in caplog.text and "its curve is not" in caplog.text


def test_a_longer_run_of_a_fixed_schedule_keeps_its_curve(report: Any) -> None:
    fixed = changed_config(RESUMED, {"schedule.total_steps": 300})
    longer = changed_config(RESUMED, {"schedule.total_steps": 300, "training.max_steps": 500})
    assert report_resume(fixed, longer, 100, []) == ["training.max_steps 300 -> 500"]
    _, lines = report({"logging.interval_steps": 1})
    assert lines == [
        (20, "settings changed since the checkpoint, without effect on the training:"),
        (20, "  logging.interval_steps 10 -> 1"),
    ]


@pytest.mark.parametrize(
    ("before", "changed"),
    [
        ({"deepspeed.optimizer.type": "Adam", "deepspeed.optimizer.params.betas": [0.9, 0.99]}, True),
        ({"deepspeed.optimizer.type": "Adam"}, True),
        ({"deepspeed.optimizer.type": "Adam", "deepspeed.optimizer.params.betas": [0.9, 0.95]}, False),
    ],
)
def test_a_changed_optimizer_of_a_deepspeed_json_changes_the_curve(
    before: dict[str, Any], changed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    now = {"deepspeed.optimizer.type": "Adam", "deepspeed.optimizer.params.betas": [0.9, 0.95]}
    config = changed_config(RESUMED, {})
    old = before.get("deepspeed.optimizer.params.betas")
    line = f"deepspeed.optimizer.params.betas {old} -> [0.9, 0.95]"
    assert report_resume(config, config, 100, [], (before, now)) == [line] * changed
    assert ("its curve is not" in caplog.text) == (f"  {line}" in caplog.text) == changed


def test_another_layout_or_kernel_is_exact_but_not_bitwise(report: Any) -> None:
    changes = {"parallel.tensor_parallel_size": 2, "kernels.attention": "reference"}
    found, lines = report(changes, ["tensor_parallel_size 1 -> 2"])
    assert lines == [
        (20, "resuming exactly, but not bitwise: tensor_parallel_size 1 -> 2, kernels.attention auto -> reference")
    ]
    assert found == ["parallel.tensor_parallel_size 1 -> 2", "kernels.attention auto -> reference"]


def test_nothing_is_said_of_an_equal_resume(report: Any) -> None:
    assert report({"logging.tensorboard": True}) == ([], [])


@pytest.mark.parametrize(("state", "number"), [
    (TrainState(step=3), 0), (TrainState(step=5), 1), (TrainState(step=7, phase=1, first_step=5), 1),
    (TrainState(step=9, phase=1, first_step=5, first_seconds=5.0, seconds=4000.0), 2),
    (TrainState(step=9, phase=2, first_step=9), 2), (TrainState(step=99, phase=2, first_step=9), 2),
])  # fmt: skip
def test_the_phase_that_follows_a_checkpoint(state: TrainState, number: int, tmp_path: Path) -> None:
    """Phases of 5 steps, one hour and 3 steps; the last one is never left."""
    hours = "{hours: 1, set: {schedule: {name: constant}}}"
    phases = run_phases(load_config("bert-laptop", [f"phases=[{{steps: 5}}, {hours}, {{steps: 3}}]"]))
    write(tmp_path, {"train_state": asdict(state)})
    assert phase_to_train(tmp_path, phases) == number and phase_to_train(None, phases) == 0


def test_a_phase_that_its_schedule_ended_early_was_left_at_any_step(tmp_path: Path) -> None:
    wsd = "{steps: 1000, set: {schedule: {name: wsd, until_hours: 1, warmup_steps: 0, warmup_fraction: null}}}"
    then = "{steps: 5, set: {schedule: {name: constant}}}"
    phases = run_phases(load_config("bert-laptop", [f"phases=[{wsd}, {then}]"]))
    write(tmp_path, {"train_state": asdict(TrainState(step=703, phase=1, first_step=700))})
    assert phase_to_train(tmp_path, phases) == 1


def test_a_phase_that_was_left_has_its_length(tmp_path: Path) -> None:
    phases = run_phases(load_config("bert-laptop", ["phases=[{steps: 5}, {steps: 3}]"]))
    for state in (TrainState(step=7, phase=1, first_step=4), TrainState(step=7, phase=2, first_step=6)):
        write(tmp_path, {"train_state": asdict(state)})
        with pytest.raises(CheckpointError, match=r"phase \d, which began at step \d; the recipe has 2 phases of 5, 3"):
            phase_to_train(tmp_path, phases)
