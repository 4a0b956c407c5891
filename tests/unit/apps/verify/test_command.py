"""ctxlm verify: the table of a run on split layers, an impossible one, and mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from ctxlm_ds.apps.verify import command
from ctxlm_ds.apps.verify.command import capability_of, main
from ctxlm_ds.apps.verify.parts import CHECKED, NOT_CHECKED, ONLY_A_DEVICE, PROVED, WRONG, Finding
from ctxlm_ds.errors import ConfigError
from tests.integration.route import call_here

ROOT = Path(__file__).resolve().parents[4]
TINY = "model.vocab_size=512", "training.micro_batch_size=2", "training.global_batch_size=1024"


def verify(*arguments: str) -> tuple[int, dict[str, tuple[str, str]], str]:
    """Return the exit status, the findings by part, and what went to stderr."""
    words = [sys.executable, "-c", "from ctxlm_ds.cli import main; main()", "verify", *arguments, "--json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["findings"] if done.stdout else []
    return done.returncode, {one["part"]: (one["state"], one["text"]) for one in found}, done.stderr


@pytest.mark.long
def test_split_layers_on_fake_gpus_send_what_the_planner_counts() -> None:
    layout = "parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2", "parallel.sequence_parallel=true"
    kernels = "kernels.dropout=triton", "kernels.cross_entropy=triton"
    settings = *TINY, *layout, *kernels, "training.activation_checkpointing=true"
    status, found, said = verify("bert-tiny", "--gpus", "1024", "--gpu", "H100", "--set", "phases=[]", *settings)
    assert status == 0, (found, said)
    states = {part: state for part, (state, _) in found.items()}
    assert states == {
        "recipe": CHECKED, "inputs": NOT_CHECKED, "memory": CHECKED,
        "model, tensor-parallel rank 0": PROVED, "collectives, tensor-parallel rank 0": PROVED,
        "model, tensor-parallel rank 1": PROVED, "collectives, tensor-parallel rank 1": PROVED,
        "triton kernels": PROVED, "triton kernels' numbers": PROVED, "a step of 1,024 ranks": PROVED,
        "on a device": ONLY_A_DEVICE,
    }  # fmt: skip
    assert "through 2 pipeline stages" in found["model, tensor-parallel rank 0"][1]
    assert "dropout triton" in found["model, tensor-parallel rank 0"][1]
    assert "compiled for sm_90" in found["triton kernels"][1]


@pytest.mark.soak
def test_shared_rows_on_fake_gpus_send_what_the_planner_counts() -> None:
    """One row of one sequence, whose slot is padded for two ranks."""
    settings = *TINY, "parallel.context_parallel_size=2", "training.micro_batch_size=1"
    status, found, said = verify("bert-tiny", "--gpus", "16", "--gpu", "H100", "--set", "phases=[]", *settings)
    assert status == 0, (found, said)
    rank = "rank 1 of a row"
    assert [found[part][0] for part in (f"model, {rank}", f"collectives, {rank}", "a step of 16 ranks")] == [PROVED] * 3
    assert all("context.all_to_all" in found[part][1] for part in (f"collectives, {rank}", "a step of 16 ranks"))


def test_what_is_wrong_gives_the_status_1() -> None:
    """In this process, which has imported torch: the command stops before the model."""
    settings = ("--set", TINY[0], "phases=[]")
    done = call_here(main, "verify", "bert-tiny", "--gpus", "1", "--gpu", "V100-32", "--json", *settings)
    *_, last = json.loads(done.stdout)["findings"]
    assert (done.returncode, last["part"], last["state"]) == (1, "precision", WRONG), done.stderr


def test_the_device_guard_serves_every_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    guards: list[str] = []
    monkeypatch.setattr(command, "load_device_guard", lambda: guards.append("loaded"))
    monkeypatch.setattr(command, "verify_phase", lambda args, phase, why_not: [Finding(str(why_not), PROVED, "")])
    args = Namespace(config="bert-tiny", set=[], gpus=1)
    assert [finding.part for finding in command.verify(args)][:2] == ["phase 1 of 2: ", "phase 2 of 2: "]
    assert guards == ["loaded"]


def test_the_capability_of_a_gpu() -> None:
    assert capability_of("A100-80", None) == (8, 0) and capability_of("A100-80", "8.6") == (8, 6)
    with pytest.raises(ConfigError, match="add --capability"):
        capability_of("RTX", None)
    with pytest.raises(ConfigError, match="expected two numbers"):
        capability_of("RTX", "nine")
