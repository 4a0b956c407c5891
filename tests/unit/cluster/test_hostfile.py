"""What the deepspeed launcher is told of a Slurm allocation."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.cluster.hostfile import environment_lines, hostfile_lines
from ctxlm_ds.errors import ConfigError


def test_a_slot_a_task() -> None:
    allocation = {"SLURM_JOB_NODELIST": "gpu[01-03],fat1", "SLURM_TASKS_PER_NODE": "8(x3),4"}
    assert hostfile_lines(allocation) == ["gpu01 slots=8", "gpu02 slots=8", "gpu03 slots=8", "fat1 slots=4"]
    with pytest.raises(ConfigError, match="SLURM_TASKS_PER_NODE is missing: this is no Slurm job"):
        hostfile_lines({"SLURM_JOB_NODELIST": "n1"})
    with pytest.raises(ConfigError, match="do not belong together"):
        hostfile_lines({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "8"})


def test_the_users_files_win_and_are_readable_for_the_launcher(tmp_path: Path) -> None:
    own = tmp_path / ".deepspeed_env"
    own.write_text("NCCL_DEBUG=INFO\n\n# a comment\nFOO=a=b\n")
    given = {"NCCL_DEBUG": "WARN", "CTXLM_X": "1", "HOME": "/root", "PATH": "/bin", "TORCH_A": "two\nlines"}
    lines = environment_lines(given, [tmp_path / "missing", own])
    assert lines == ["CTXLM_X=1", "NCCL_DEBUG=WARN", "PATH=/bin", "NCCL_DEBUG=INFO", "FOO=a=b"]
