"""Check that this interpreter has the packages for training; on clusters it is often another Python than expected."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from ctxlm_ds.errors import ConfigError

NEEDED = ("torch", "deepspeed", "numpy", "numba", "transformers", "tokenizers", "safetensors", "pydantic", "yaml")


def check_installed() -> None:
    """Look for the packages without importing them.

    Raises:
        ConfigError: some are missing; the message names the interpreter.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{sys.executable} has no {', '.join(missing)}: install ctxlm_ds for it (docs/install.md), or use the "
            "Python that has them (under Slurm: CTXLM_VENV in slurm/env.sh)"
        )
