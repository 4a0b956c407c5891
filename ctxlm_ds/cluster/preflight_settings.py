"""What a preflight checks against: CTXLM_PREFLIGHT_* of slurm/env.sh.

In: the environment. Out: PreflightSettings. Needs the standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from ctxlm_ds.errors import ConfigError

PREFIX = "CTXLM_PREFLIGHT_"
SCRATCH_VARIABLES = ("CTXLM_STAGE_DIR", "TMPDIR")


@dataclass(frozen=True)
class PreflightSettings:
    """One field a variable: `limit_s` is CTXLM_PREFLIGHT_LIMIT_S."""

    limit_s: float = 120.0
    """Seconds that a node has to answer. Network storage shows a new file only after up to a minute."""
    bandwidth: float = 1.0
    """0: no reductions are timed."""
    bandwidth_limit_s: float = 60.0
    """Seconds that one round of reductions may take, with the start of CUDA and NCCL."""
    mib: float = 64.0
    """Size of a reduction in MiB; less where the network is so slow that it would take longer than a second."""
    min_bandwidth: float = 0.5
    """A node is bad whose bandwidth is below this share of the nodes' median (three nodes or more)."""
    min_run_gb: float = 10.0
    """Free space in GB that a node must see at the run directory."""
    min_scratch_gb: float = 1.0
    """Free space in GB at a node's scratch folder."""
    max_clock_s: float = 2.0
    """A node is bad whose clock is further from the nodes' median (three nodes or more)."""
    min_nodes: float = 0.0
    """Fewest good nodes with which the job goes on at once; 0: all of its nodes, so that a bad one is replaced."""


def read_settings(environ: Mapping[str, str] | None = None) -> PreflightSettings:
    """The settings, checked.

    Raises:
        ConfigError: a variable is unknown or no number of its range; names all of them.
    """
    environ = os.environ if environ is None else environ
    known = {PREFIX + item.name.upper(): item.name for item in fields(PreflightSettings)}
    values: dict[str, float] = {}
    problems = []
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX) or not text.strip():
            continue
        if variable not in known:
            problems.append(f"{variable} is unknown; known are {', '.join(known)}")
            continue
        value = _number(text)
        if value is None:
            problems.append(f"{variable} is {text!r}, a number of 0 or more is expected")
        else:
            values[known[variable]] = value
    if values.get("min_bandwidth", 0.0) > 1:
        problems.append(f"{PREFIX}MIN_BANDWIDTH is {values['min_bandwidth']:g}, a share of the median (0 to 1)")
    if problems:
        raise ConfigError("slurm/env.sh: " + "; ".join(problems))
    return PreflightSettings(**values)


def scratch_folder(environ: Mapping[str, str]) -> Path:
    """The node-local folder that is checked: CTXLM_STAGE_DIR, else TMPDIR, else /tmp."""
    return Path(next((environ[name] for name in SCRATCH_VARIABLES if environ.get(name)), "/tmp"))


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None
