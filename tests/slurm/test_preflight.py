"""slurm/preflight.sh on real nodes: a bad one is named with its reason, and the job is requeued without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.process.run_history import START
from tests.slurm.runs import Runs

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
FAULTY_SMI = """#!/bin/sh
errors=0
[ "$SLURMD_NODENAME" != n1 ] || errors=3
echo "NVIDIA Make-Believe, 81559, 12, 0"
echo "NVIDIA Make-Believe, 81559, 12, $errors"
"""


def test_the_job_is_requeued_without_a_bad_node(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text(FAULTY_SMI)
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    site = tmp_path / "env.sh"
    site.write_text(f"PATH={tmp_path}/bin:$PATH\nCTXLM_PREFLIGHT=1\n")
    job = runs.submit(tmp_path, training={"max_steps": 6}, environment={"CTXLM_ENV": str(site)})
    job.assert_finished()
    text = job.text()
    assert "preflight: n1: BAD: GPU 1: 3 uncorrected ECC errors" in text, text
    assert "preflight: requeueing the job without n1" in text
    assert "preflight: n3: 2 x NVIDIA Make-Believe" in text
    assert "preflight: all-reduce of 64 MiB over 2 ranks" in text
    assert job.restarts() == 1 and [start["host"] for start in job.events(START)] == ["n2"]


def test_what_cannot_be_checked_is_said(runs: Runs, tmp_path: Path) -> None:
    site = tmp_path / "env.sh"
    site.write_text("CTXLM_PREFLIGHT=1\nCTXLM_STAGE_DIR=/proc/nowhere\n")
    job = runs.submit(tmp_path, environment={"CTXLM_ENV": str(site), "CTXLM_RESTART": "off"})
    text = job.text
    job.wait_for(lambda: "BAD" in text(), "the bad nodes")
    runs.cluster.run("scancel", job.id)
    assert "preflight: n1: no nvidia-smi, GPUs are not checked" in text()
    assert "preflight: n1: BAD: /proc/nowhere cannot be written" in text()
