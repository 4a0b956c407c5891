"""Files for the deepspeed launcher in a Slurm allocation: no secret in them, nothing that a remote shell expands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from ctxlm_ds.apps.cluster.hostfile import environment_lines, hostfile_lines, main, quoted_words
from ctxlm_ds.errors import ConfigError

HOSTILE = ["a=$(touch X)", "b=`id`", 'c="q" $HOME', "d=it's", "e=[{name: a, path: b}]", "f=back\\slash $(id)", "g=;id"]


def test_a_slot_per_task() -> None:
    allocation = {"SLURM_JOB_NODELIST": "gpu[01-03],fat1", "SLURM_TASKS_PER_NODE": "8(x3),4"}
    assert hostfile_lines(allocation) == ["gpu01 slots=8", "gpu02 slots=8", "gpu03 slots=8", "fat1 slots=4"]
    with pytest.raises(ConfigError, match="SLURM_TASKS_PER_NODE is missing: this is no Slurm job"):
        hostfile_lines({"SLURM_JOB_NODELIST": "n1"})
    with pytest.raises(ConfigError, match="do not belong together"):
        hostfile_lines({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "8"})


def test_the_users_files_win_and_are_readable_for_the_launcher(tmp_path: Path) -> None:
    own = tmp_path / ".deepspeed_env"
    own.write_text("NCCL_DEBUG=INFO\n\n# a comment\nFOO=a=b\n")
    given = {"NCCL_DEBUG": "WARN", "CTXLM_HOME": "1", "HOME": "/root", "PATH": "/bin", "TORCH_A": "two\nlines"}
    given |= {"TORCH_B": "two\rA=lines"}
    lines = environment_lines(given, [tmp_path / "missing", own])
    assert lines == ["CTXLM_HOME=1", "NCCL_DEBUG=WARN", "PATH=/bin", "NCCL_DEBUG=INFO", "FOO=a=b"]


def test_secrets_are_not_carried(tmp_path: Path) -> None:
    secrets = ("HF_TOKEN", "CTXLM_API_KEY", "NCCL_SECRET", "TORCH_PASSWORD", "AWS_SECRET_ACCESS_KEY", "CTXLM_AUTH")
    secrets += ("NCCL_AUTH", "CTXLM_OF_A_USER", "MLFLOW_S3_ENDPOINT_URL")
    assert environment_lines({"MLFLOW_TRACKING_URI": "https://me:s3cret@host/a"}, []) == []
    plain = {"MLFLOW_TRACKING_URI": "https://host/a@b"}
    plain |= {"HF_HOME": "/hf", "HF_TOKEN_PATH": "/hf/token", "TOKENIZERS_PARALLELISM": "false"}
    lines = environment_lines({**dict.fromkeys(secrets, "s3cret"), **plain}, [])
    assert lines == [f"{name}={value}" for name, value in sorted(plain.items())]
    own = tmp_path / ".deepspeed_env"
    own.write_text("HF_TOKEN=s3cret\n")
    with pytest.raises(ConfigError, match="HF_TOKEN would be shown by ps") as caught:
        environment_lines({}, [own])
    assert "s3cret" not in str(caught.value)
    own.write_text("MLFLOW_TRACKING_URI=https://me:s3cret@host\n")
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI would be shown by ps"):
        environment_lines({}, [own])


def test_the_launcher_gets_no_variable_that_it_would_carry_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"MLFLOW_TRACKING_PASSWORD": "a", "MLFLOW_TRACKING_URI": "https://host", "UCX_AUTH": "c"}
    given |= {"PYTHONPATH": "/b", "SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "1", "HOME": "/none"}
    monkeypatch.setattr(os, "environ", given)
    monkeypatch.setattr(sys, "argv", ["hostfile", str(tmp_path)])
    main()
    assert (tmp_path / "dropped").read_text().split() == ["MLFLOW_TRACKING_PASSWORD", "UCX_AUTH"]
    carried = (tmp_path / "deepspeed_env").read_text().splitlines()
    assert carried == ["MLFLOW_TRACKING_URI=https://host", "PYTHONPATH=/b"]


def test_the_remote_shell_expands_nothing(tmp_path: Path) -> None:
    """DeepSpeed's own code between these lines and a shell."""
    from deepspeed.launcher.multinode_runner import PDSHRunner

    runner = PDSHRunner(Namespace(user_args=quoted_words(HOSTILE), user_script="x"), "")
    for number, value in enumerate(HOSTILE):
        (line,) = environment_lines({f"TORCH_{number}": value}, [])
        runner.add_export(*line.split("=", maxsplit=1))
    values = "[v for k, v in sorted(os.environ.items()) if 'TORCH_' in k]"
    show = f"import json, os, sys; print(json.dumps([sys.argv[1:], {values}]))"
    exports = "".join(f"export {key}={value}; " for key, value in runner.exports.items())
    command = f'{exports} {sys.executable} -c "{show}" {" ".join(runner.user_arguments)}'
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True, env={})
    assert json.loads(done.stdout) == [HOSTILE, HOSTILE] and not list(tmp_path.iterdir())
