"""ctxlm_ds.pretrain: its files, its refusals.

Launchers: test_hang.py (torchrun), test_interrupt.py (deepspeed, --ranks), tests/slurm/test_pretrain.py (srun).
"""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests.integration.conftest import Prepared
from tests.integration.route import call, kill_group, launcher, metrics, pretrain_words, start, wait_for

HAS_FP16 = torch.ops.mkldnn._is_mkldnn_fp16_supported()
"""As DeepSpeed asks: newer CPUs have it."""


@pytest.fixture(scope="module")
def single(bert_route: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of `python -m ctxlm_ds.pretrain`, one process."""
    folder = tmp_path_factory.mktemp("single")
    recipe = bert_route.recipe(folder / "recipe.yaml", model={"hidden_dropout": 0.0, "attention_dropout": 0.0})
    call(*launcher("forked", 1), *pretrain_words(recipe, [f"run_dir={folder / 'run'}"]))
    return folder / "run"


def test_a_run_leaves_what_is_documented(single: Path) -> None:
    assert sorted(metrics(single)) == list(range(1, 13))
    first, last = metrics(single)[1], metrics(single)[12]
    assert last < first
    assert sorted(metrics(single, "eval/heldout/masked_lm_loss")) == [6, 12]
    line = json.loads((single / "metrics.jsonl").read_text().splitlines()[0])
    assert {"step", "loss", "masked_lm", "next_sentence", "learning_rate", "grad_norm", "tokens"} <= set(line)
    config = yaml.safe_load((single / "config.yaml").read_text())
    assert config["model"]["vocab_size"] == 400
    checkpoints = sorted(path.name for path in (single / "checkpoints").iterdir())
    assert checkpoints == ["latest", "step-00000004", "step-00000008", "step-00000012"]
    lines = (single / "output.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)
    for text in ("importing torch", "reading the data", "step 12/12 | loss", "to export: ctxlm convert"):
        assert len([line for line in lines if text in line]) == 1, text


def test_the_output_log_has_what_rank_0_says_over_all_starts(bert_route: Prepared, tmp_path: Path) -> None:
    recipe, run_dir = bert_route.recipe(tmp_path / "recipe.yaml", schedule={"warmup_steps": 1}), tmp_path / "run"

    def start(status: int, *overrides: str) -> str:
        words = pretrain_words(recipe, [f"run_dir={run_dir}", *overrides])
        done = call(*launcher("forked", 2), *words, check=False)
        assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
        return done.stderr

    assert "error: " in start(2, "model.hidden_size=33") and not run_dir.exists()
    said = start(0, "training.max_steps=4")
    said += start(3, "optimizer.learning_rate=1000", "optimizer.weight_decay=1000")  # the losses diverge
    assert "Training stopped" in said and "step 4/4" in said and (run_dir / "checkpoints" / "step-00000004").is_dir()
    line = re.compile(r"^(?:\d{4}-\d\d-\d\d )?(\d\d:\d\d:\d\d .*)", re.MULTILINE)
    expected = [text for text in line.findall(said) if "[rank " not in text]  # other ranks' lines have a tag
    assert line.findall((run_dir / "output.log").read_text()) == expected


def test_checkpoints_at_words_are_kept_and_the_budget_gives_the_steps(bert_route: Prepared, tmp_path: Path) -> None:
    """The same steps on one rank and, resumed, on two."""
    words = json.loads(Path(f"{bert_route.train}.json").read_text())["words"]
    marks = [words // 2, words]
    recipe = bert_route.recipe(
        tmp_path / "recipe.yaml",
        training={"max_words": 2 * words, "max_steps": None, "global_batch_size": 16, "micro_batch_size": 8},
        checkpoint={"interval_steps": 3, "keep_last": 1, "at_words": marks}, data={"max_epochs": 2},
    )  # fmt: skip
    found = []
    for name, starts in (("one", [(1, ())]), ("two", [(2, ["training.max_hours=1e-6"]), (2, ())])):
        for ranks, overrides in starts:
            call(*launcher("forked", ranks), *pretrain_words(recipe, [f"run_dir={tmp_path / name}", *overrides]))
        kept = sorted((tmp_path / name / "checkpoints").glob("step-*"))
        states = [json.loads((path / "state.json").read_text())["train_state"] for path in kept]
        found.append([(state["step"], state["words"], state["reached_words"]) for state in states])
        assert (
            yaml.safe_load((tmp_path / name / "config.yaml").read_text())["training"]["max_steps"] == found[-1][-1][0]
        )
    assert found[0] == found[1]
    (first, second, last), a_step = found[0], found[0][0][1] / found[0][0][0]
    assert [first[2], second[2], last[2]] == [*marks, 0] and last[1] >= 2 * words
    for _, read, mark in (first, second):
        assert mark <= read < mark + a_step + 1
    checked = call(*launcher("forked", 1), "--check", *pretrain_words(recipe, [f"run_dir={tmp_path / 'two'}"])).stdout
    assert f"as many as read {2 * words:,} words" in checked and "2.00 epochs" in checked and "complete" in checked
    refused = call(*launcher("forked", 1), "--check", *pretrain_words(recipe, ["data.max_epochs=1"]), check=False)
    assert refused.returncode == 2 and "data.max_epochs: 1, but the run would read" in refused.stderr


def test_initialize_from_evaluates_the_weights_and_starts_a_second_phase(
    single: Path, bert_route: Prepared, tmp_path: Path
) -> None:
    """Weights are taken, the step count is not; the longer position table repeats its rows."""
    recipe = bert_route.recipe(tmp_path / "recipe.yaml", model={"max_position_embeddings": 96})
    overrides = [f"run_dir={tmp_path / 'run'}", f"initialize_from={single}", "training.max_steps=6"]
    call(*launcher("forked", 1), *pretrain_words(recipe, overrides))
    assert sorted(metrics(tmp_path / "run")) == list(range(1, 7))
    assert metrics(tmp_path / "run")[1] < metrics(single)[1]
    before, after = (metrics(run_dir, "eval/heldout/loss") for run_dir in (single, tmp_path / "run"))
    assert sorted(after) == [0, 6] and after[0] == pytest.approx(before[12], rel=1e-6)


def test_a_second_start_on_a_live_run_is_refused(bert_route: Prepared, tmp_path: Path) -> None:
    recipe = bert_route.recipe(tmp_path / "recipe.yaml", training={"max_steps": 100000})
    words = [*launcher("forked", 1), *pretrain_words(recipe, [f"run_dir={tmp_path / 'run'}"])]
    live = start(words, tmp_path / "live.log")
    try:
        wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists(), 120, "the first run to train")
        second = call(*words, "--wait-for-lock", "1", check=False)
    finally:
        kill_group(live)
    assert second.returncode == 2
    assert str(live.pid) in second.stderr and "Traceback" not in second.stderr


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trainin.max_steps=3"], "training"),
        (["data.train=[/nowhere/at_all]"], "/nowhere/at_all"),
        (["tokenizer.path=/nowhere"], "/nowhere"),
        (["parallel.tensor_parallel_size=2"], "tensor_parallel_size"),
        pytest.param(["training.precision=fp16"], "fp16", marks=pytest.mark.skipif(HAS_FP16, reason="a CPU with fp16")),
        (["initialize_from=/nowhere"], "/nowhere"),
    ],
)
def test_mistakes_get_one_clear_message(
    overrides: list[str], expected: str, bert_route: Prepared, tmp_path: Path
) -> None:
    recipe = bert_route.recipe(tmp_path / "recipe.yaml")
    done = call(
        *launcher("forked", 1), *pretrain_words(recipe, [f"run_dir={tmp_path / 'run'}", *overrides]), check=False
    )
    assert done.returncode == 2
    assert expected in done.stderr and "error:" in done.stderr and "Traceback" not in done.stderr


def test_a_port_in_use_is_one_clear_message(bert_route: Prepared, tmp_path: Path) -> None:
    recipe = bert_route.recipe(tmp_path / "tiny.yaml")
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        words = pretrain_words(recipe, [f"run_dir={tmp_path / 'run'}"])
        done = call(*launcher("forked", 1), *words, check=False, MASTER_PORT=port, **ranks)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"port {port}, on which the ranks meet, is in use" in done.stderr and "--master_port" in done.stderr


def test_check_needs_no_torch(bert_route: Prepared, tmp_path: Path) -> None:
    recipe = bert_route.recipe(tmp_path / "recipe.yaml")
    code = (
        "import sys; sys.modules['torch'] = None; from ctxlm_ds.pretrain import main\n"
        f"words = ['--config', {str(recipe)!r}, '--check', '--world-size', '4']\n"
        "main([*words, '--print']); print('====')\n"
        "main(words)"
    )
    printed, _, checked = call(sys.executable, "-c", code).stdout.partition("====\n")
    assert yaml.safe_load(printed)["training"]["max_steps"] == 12
    lines = checked.splitlines()
    assert lines[0].endswith("the recipe is valid for 4 ranks") and lines[-1].endswith("torch is not installed here")
