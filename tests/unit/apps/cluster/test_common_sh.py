"""slurm/common.sh, which every batch script sources: the site's env.sh and the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ctxlm_ds.apps.cluster.job_context import read_settings

ROOT = Path(__file__).resolve().parents[4]
PROFILES = sorted((ROOT / "slurm" / "profiles").glob("*.sh"))
SHOW = 'echo "$CTXLM_PYTHON|$PATH|$PYTHONPATH"'
ONCE = 'source "$CTXLM_HOME/slurm/common.sh"'
AGAIN = f"bash -c '{ONCE} && {SHOW}'"


def source(env_sh: Path, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Source it as a job does, then run a command."""
    return subprocess.run(
        ["bash", "-c", f"{ONCE} && {command}"], capture_output=True, text=True, check=False,
        env={"PATH": os.environ["PATH"], "CTXLM_HOME": str(ROOT), "CTXLM_ENV": str(env_sh), **environment},
    )  # fmt: skip


@pytest.fixture
def env_sh(tmp_path: Path) -> Path:
    path = tmp_path / "env.sh"
    path.write_text("")
    return path


def test_settings_that_cannot_be_read_end_the_job(env_sh: Path, tmp_path: Path) -> None:
    missing = source(tmp_path / "elsewhere.sh", SHOW)
    assert missing.returncode == 2 and "elsewhere.sh cannot be read" in missing.stderr and missing.stdout == ""
    env_sh.write_text('CTXLM_CONTAINER="/images/a.sif\n')
    broken = source(env_sh, SHOW)
    assert broken.returncode == 2 and "is not valid shell" in broken.stderr and broken.stdout == ""


def test_a_last_line_that_is_false_is_no_mistake(env_sh: Path) -> None:
    env_sh.write_text("CTXLM_RESTART=off\n[ -d /nowhere ] && module load cuda\n")
    assert source(env_sh, "echo $CTXLM_RESTART").stdout == "off\n"


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("commented", [False, True], ids=["as it is", "without its comment signs"])
def test_a_shipped_profile_loads(profile: Path, commented: bool, tmp_path: Path) -> None:
    """Its commented lines are valid too: each setting is known, and no other output comes."""
    text = profile.read_text()
    if commented:
        starts = ("# module ", "# export ", "# CTXLM_STAGE_DIR")
        text = "".join(line.removeprefix("# ") if line.startswith(starts) else line for line in text.splitlines(True))
        text = "module() { true; }\n" + text
    copy = tmp_path / "profile.sh"
    copy.write_text(text)
    done = source(copy, "env", CTXLM_PYTHON=sys.executable, USER="me")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    variables = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert read_settings(variables)
    if profile.stem == "cpu":
        assert variables["DS_ACCELERATOR"] == "cpu" and read_settings(variables).srun_options == ("--cpu-bind=cores",)


def make_venv(folder: Path) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    return folder / "bin" / "python"


def test_a_submitted_job_looks_for_its_own_interpreter(env_sh: Path, tmp_path: Path) -> None:
    """What the login node had found travels with the environment; the compute node's env.sh may say otherwise."""
    login, compute = make_venv(tmp_path / "login"), make_venv(tmp_path / "compute")
    env_sh.write_text(f"CTXLM_VENV={tmp_path}/login\n[ -z $SLURM_JOB_ID ] || CTXLM_VENV={tmp_path}/compute\n")
    assert source(env_sh, SHOW).stdout.startswith(f"{login}|{login.parent}:")
    python, path, modules = source(env_sh, f"SLURM_JOB_ID=1 {AGAIN}").stdout.strip().split("|")
    assert python == str(compute)
    assert path == f"{compute.parent}:{os.environ['PATH']}" and modules == str(ROOT)


def test_an_interpreter_that_was_given_stays(env_sh: Path, tmp_path: Path) -> None:
    given = make_venv(tmp_path / "given")
    python, path, modules = source(env_sh, AGAIN, CTXLM_PYTHON=str(given), PYTHONPATH="/a").stdout.strip().split("|")
    assert python == str(given)
    assert path == f"{given.parent}:{os.environ['PATH']}" and modules == f"{ROOT}:/a"


def test_a_job_that_goes_on_from_an_unfinished_run_ends(env_sh: Path, tmp_path: Path) -> None:
    """As the export does after a run that a person stopped: its job had ended with status 0."""
    given = {"CTXLM_PYTHON": sys.executable}
    refused = source(env_sh, "need_run && echo goes on", CTXLM_NEEDED_RUN=str(tmp_path / "run"), **given)
    assert refused.returncode == 2 and "has not been trained to its end" in refused.stderr and not refused.stdout
    assert source(env_sh, "need_run && echo goes on", **given).stdout == "goes on\n"
