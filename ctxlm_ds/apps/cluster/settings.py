"""A job's settings from slurm/env.sh and the user: CTXLM_... variables, checked."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from ctxlm_ds.errors import ConfigError

PREFLIGHT = {
    "LIMIT_S": 120.0, "BANDWIDTH": 1.0, "BANDWIDTH_LIMIT_S": 60.0, "MIB": 64.0, "MIN_BANDWIDTH": 0.5,
    "MIN_RUN_GB": 10.0, "MIN_SCRATCH_GB": 1.0, "MIN_MEMORY_GB": 1.0, "MIN_GPU_FREE": 0.9, "MAX_CLOCK_S": 2.0,
    "MIN_NODES": 0.0,
}  # fmt: skip
"""CTXLM_PREFLIGHT_... and its default; slurm/env.sh explains each."""
VARIABLES = (
    "CTXLM_CONTAINER", "CTXLM_CONTAINER_OPTIONS", "CTXLM_CONTAINER_PYTHON", "CTXLM_ENV", "CTXLM_GPU", "CTXLM_HOME",
    "CTXLM_MAX_RESTARTS", "CTXLM_PREFLIGHT", "CTXLM_PYTHON", "CTXLM_PYXIS", "CTXLM_PYXIS_OPTIONS", "CTXLM_RESTART",
    "CTXLM_RESTART_DELAY_S", "CTXLM_RUNS", "CTXLM_SRUN_OPTIONS", "CTXLM_STAGE_DIR", "CTXLM_VENV",
    *(f"CTXLM_PREFLIGHT_{name}" for name in PREFLIGHT),
)  # fmt: skip
OWN_VARIABLES = (
    "CTXLM_ATTEMPT", "CTXLM_BATCH_ARGUMENTS", "CTXLM_BATCH_SCRIPT", "CTXLM_CHAIN", "CTXLM_FOUND_PYTHON",
    "CTXLM_LOCAL_RANKS", "CTXLM_LOG_FILE", "CTXLM_NEEDED_RUN", "CTXLM_NOTICE", "CTXLM_PATH_HEAD", "CTXLM_RANK_MARK",
    "CTXLM_SWEEP_TASK",
)  # fmt: skip
"""Messages between the parts of a job."""
RESTART_MODES = ("auto", "requeue", "successor", "off")


@dataclass(frozen=True)
class JobSettings:
    """How a job starts its ranks, and what it does when they end early."""

    restart: str = "auto"  # auto (requeue, or a successor if that is disabled), requeue, successor, off
    max_restarts: int = 4  # starts in a row that leave no new checkpoint before the job gives up
    restart_delay_s: float = 10.0
    """Pause before a restart in this allocation, four times longer with each start without progress."""
    srun_options: tuple[str, ...] = ()
    container: str = ""  # image for apptainer
    container_options: tuple[str, ...] = ()
    pyxis: str = ""  # image for srun --container-image
    pyxis_options: tuple[str, ...] = ()
    container_python: str = "python3"


def read_settings(environ: Mapping[str, str]) -> JobSettings:
    """Read the settings from the environment. Raises ConfigError for an impossible value."""
    restart = environ.get("CTXLM_RESTART") or "auto"
    if restart not in RESTART_MODES:
        raise ConfigError(f"CTXLM_RESTART={restart}: expected one of {', '.join(RESTART_MODES)}")
    container, pyxis = environ.get("CTXLM_CONTAINER", ""), environ.get("CTXLM_PYXIS", "")
    if container and pyxis:
        raise ConfigError(f"CTXLM_CONTAINER={container} and CTXLM_PYXIS={pyxis}: set one of them in slurm/env.sh")
    return JobSettings(
        restart=restart,
        max_restarts=int(_number(environ, "CTXLM_MAX_RESTARTS", 4, lowest=1)),
        restart_delay_s=_number(environ, "CTXLM_RESTART_DELAY_S", 10.0, lowest=0),
        srun_options=_words(environ, "CTXLM_SRUN_OPTIONS"),
        container=container,
        container_options=_words(environ, "CTXLM_CONTAINER_OPTIONS"),
        pyxis=pyxis,
        pyxis_options=_words(environ, "CTXLM_PYXIS_OPTIONS"),
        container_python=environ.get("CTXLM_CONTAINER_PYTHON") or "python3",
    )


def read_preflight(environ: Mapping[str, str]) -> dict[str, float]:
    """Read PREFLIGHT with the environment's changes. Raises ConfigError for an impossible value."""
    return {name: _number(environ, f"CTXLM_PREFLIGHT_{name}", default, 0) for name, default in PREFLIGHT.items()}


def misspelt(environ: Mapping[str, str]) -> list[str]:
    """Return a line for each unknown variable whose name resembles a setting."""
    lines = []
    for name in sorted(environ):
        near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.85) if name.startswith("CTXLM_") else []
        if near and name not in VARIABLES + OWN_VARIABLES:
            lines.append(f"{name} is no setting and is ignored; did you mean {near[0]}?")
    return lines


def _number(environ: Mapping[str, str], name: str, default: float, lowest: float) -> float:
    text = environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = lowest - 1
    if not value >= lowest:
        raise ConfigError(f"{name}={text}: expected a number, {lowest:g} or more")
    return value


def _words(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(environ.get(name, "")))
    except ValueError as error:
        raise ConfigError(f"{name}={environ[name]}: {error}") from error
