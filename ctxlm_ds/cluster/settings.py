"""What slurm/env.sh and the user set for a job: CTXLM_... variables, checked."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from ctxlm_ds.errors import ConfigError

RESTART_MODES = ("auto", "requeue", "successor", "off")


@dataclass(frozen=True)
class JobSettings:
    """How a job starts its ranks, and what it does when they end too early."""

    restart: str = "auto"
    """auto (requeue, or a successor where that is disabled), requeue, successor, off."""
    max_restarts: int = 4
    """Starts in a row that leave no new checkpoint before the job gives up."""
    restart_delay_s: float = 10.0
    """Pause before a restart in place, four times longer with each start that makes no progress."""
    srun_options: tuple[str, ...] = ()
    container: str = ""
    """Image for apptainer."""
    container_options: tuple[str, ...] = ()
    pyxis: str = ""
    """Image for srun --container-image."""
    pyxis_options: tuple[str, ...] = ()
    container_python: str = "python3"


def read_settings(environ: Mapping[str, str]) -> JobSettings:
    """The settings in the environment.

    Raises:
        ConfigError: a value makes no sense.
    """
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
