"""tools/plan_run.py as a person starts it: the table, JSON, the command, and each mistake's message."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.plan import plan_run
from tests.integration.route import ROOT, call, call_here, launcher


def plan(*arguments: str, status: int = 0) -> str:
    """Standard output of the tool, or the error's text if `status` is not 0."""
    done = call_here(plan_run.main, ROOT / "tools" / "plan_run.py", *arguments)
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr


def plan_json(*arguments: str) -> Any:
    return json.loads(plan(*arguments, "--json"))


def test_the_table_and_a_command_that_pretraining_accepts() -> None:
    text = plan("--config", "roberta-large", "--nodes", "2", "--gpu", "A100-80")
    lines = text.splitlines()
    header = next(line for line in lines if line.lstrip().startswith("dp "))
    for column in ("tp", "pp", "zero", "activ", "GiB/GPU", "s/step", "MFU", "days"):
        assert column in header
    assert "\x1b" not in text
    words = shlex.split(lines[-1])
    assert words[0] == "torchrun"
    options = words[words.index("--config") :]
    call(*launcher("forked", 1), *options, "--check", "--world-size", 16)


def test_json_has_what_the_table_has() -> None:
    found = plan_json("--config", "bert-large", "--gpu", "H100", "--gpus-per-node", "4")
    best = found["recommended"]
    assert best["memory_bytes"]["total"] <= found["cluster"]["usable_bytes"]
    assert best["layout"]["data"] * best["layout"]["tensor"] * best["layout"]["pipeline"] == 4
    assert best in found["plans"]
    assert {message["axis"] for message in best["messages"]} <= {"data", "tensor", "pipeline"}
    every = plan_json("--config", "bert-large", "--gpu", "H100", "--gpus-per-node", "4", "--all")
    assert len(every["plans"]) > len(found["plans"])


def test_a_slower_network_costs_time() -> None:
    arguments = ("--config", "bert-large", "--nodes", "16", "--gpu", "A100-80", "--deepspeed-config", "zero1")
    fast = plan_json(*arguments)["recommended"]["step_seconds"]
    slow = plan_json(*arguments, "--inter-node-gbps", "10")["recommended"]["step_seconds"]
    assert slow["data"] > 10 * fast["data"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", "bert-base"], ["required: --gpu", "A100-80"]),
        (["--gpu", "H100"], ["required: --config", "RECIPE"]),
        (["--config", "bert-base", "--gpu", "A10"], ["did you mean A100-40 or A100-80"]),
        (["--config", "bert-bse", "--gpu", "H100"], ["did you mean bert-base?"]),
        (["--config", "bert-base", "--gpu", "V100-32"], ["has no bf16", "training.precision=fp16"]),
        (["--config", "bert-base", "--gpu", "H100", "--nodes", "0"], ["at least one GPU"]),
        (["--config", "bert-base", "--gpu", "H100", "--world", "12"], ["not a multiple of --gpus-per-node 8"]),
        (["--config", "bert-base", "--gpu", "H100", "--inter-node-gbps", "-1"], ["expected more than 0"]),
        (
            ["--config", "roberta-large", "--gpu", "A100-40", "--gpus-per-node", "1", "--set", "model.hidden_size=4096",
             "model.num_layers=48", "model.intermediate_size=16384"],
            ["no layout fits", "GiB are missing", "zero3-offload"],
        ),
    ],
)  # fmt: skip
def test_mistakes(arguments: list[str], words: list[str]) -> None:
    text = plan(*arguments, status=2)
    for word in words:
        assert word in text


def test_a_gpu_of_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "memory_gib: 24\ntflops_16bit: 165\ntflops_fp32: 82.6\nmemory_gb_per_s: 1008\nnvlink_gb_per_s: 64\n"
        "inter_node_gbit_per_s: 10\n"
    )
    found = plan_json("--config", "bert-base", "--gpu", str(own), "--world", "2", "--gpus-per-node", "2")
    assert found["cluster"]["gpu"]["name"] == "own"
