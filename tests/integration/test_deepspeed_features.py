"""DeepSpeed's profilers and scaling from a user's own JSON, through ctxlm_ds.pretrain on CPU ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.conftest import Prepared
from tests.integration.route import Finished, call, launcher, metrics

STEPS = 3


def run_with(route: Prepared, folder: Path, name: str, user_json: dict[str, Any]) -> Finished:
    """A run of 3 steps on 2 ranks in folder/NAME."""
    recipe = route.recipe(
        folder / f"{name}.yaml", training={"max_steps": STEPS, "micro_batch_size": 2}, schedule={"warmup_steps": 1},
        evaluation={"interval_steps": 0, "max_rows": 4},
    )  # fmt: skip
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}, **user_json}))
    words = ["--config", recipe, "--deepspeed_config", path, "--set", f"run_dir={folder / name}"]
    return call(*launcher("forked", 2), *words, FEATURES_FOLDER=str(folder))


def test_reports_are_written_and_leave_the_losses_alone(bert_route: Prepared, tmp_path: Path) -> None:
    """The profiler counts the model, the table of messages comes once, and rank 0 alone reports times."""
    run_with(bert_route, tmp_path, "plain", {})
    wanted = {
        "flops_profiler": {"enabled": True, "profile_step": 2, "output_file": "${FEATURES_FOLDER}/flops.txt"},
        "comms_logger": {"enabled": True, "prof_all": True}, "wall_clock_breakdown": True, "steps_per_print": 1,
        "gradient_predivide_factor": 2.0, "prescale_gradients": True,
    }  # fmt: skip
    output = run_with(bert_route, tmp_path, "reported", wanted).stdout
    assert metrics(tmp_path / "reported") == pytest.approx(metrics(tmp_path / "plain"), rel=1e-6)
    flops = (tmp_path / "flops.txt").read_text()
    assert "DeepSpeed Flops Profiler" in flops and "Profile Summary at step" in flops
    assert "params of model" in flops or "params per" in flops
    assert output.count("Comm. Op ") == 1 and "all_reduce" in output
    lines = [line for line in output.splitlines() if "time (ms)" in line]
    assert any("fwd" in line and "bwd" in line and "step" in line for line in lines)
    assert all(line.startswith("[Rank 0]") for line in lines) and len(lines) <= 10 * STEPS


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has Lion's kernel")
def test_lion_without_a_gpu_or_offload_is_refused_in_a_sentence(bert_route: Prepared, tmp_path: Path) -> None:
    recipe = bert_route.recipe(tmp_path / "recipe.yaml", optimizer={"name": "from_ds_config"})
    user_json = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "Lion", "params": {}}}
    (tmp_path / "my.json").write_text(json.dumps(user_json))
    words = ["--config", recipe, "--deepspeed_config", tmp_path / "my.json", "--set", f"run_dir={tmp_path / 'run'}"]
    assert "DeepSpeed's Lion needs one, or offload" in call(*launcher("forked", 1), *words, "--check").stdout
    done = call(*launcher("forked", 1), *words, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "DeepSpeed's FusedLion cannot be built here" in done.stderr


def test_a_resume_tells_what_changed_in_the_optimizer_of_the_json(bert_route: Prepared, tmp_path: Path) -> None:
    recipe = bert_route.recipe(tmp_path / "recipe.yaml", optimizer={"name": "from_ds_config"})
    words = ["--config", recipe, "--deepspeed_config", tmp_path / "my.json", "--set", f"run_dir={tmp_path / 'run'}"]
    for beta, last_step in ((0.9, 2), (0.9, 3), (0.8, 4)):
        optimizer = {"type": "Adam", "params": {"betas": [beta, 0.95], "weight_decay": "auto"}}
        (tmp_path / "my.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, "optimizer": optimizer}))
        limits = [f"training.max_steps={last_step}", "schedule.total_steps=9"]
        output = call(*launcher("forked", 1), *words, *limits).stderr
        line = "deepspeed.optimizer.params.betas [0.9, 0.95] -> [0.8, 0.95]"
        assert (f"  {line}" in output) == ("its curve is not" in output) == (last_step == 4)
    events = (tmp_path / "run" / "history.jsonl").read_text().splitlines()
    assert any(line in json.loads(event).get("changed_settings", []) for event in events)
