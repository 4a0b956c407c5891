"""Check that this interpreter has the packages for training; on clusters it is often another Python than expected."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ctxlm_ds.errors import ConfigError

NEEDED = ("torch", "deepspeed", "numpy", "numba", "transformers", "tokenizers", "safetensors", "pydantic", "yaml")


def checkout() -> Path | None:
    """Return the checkout that holds this package, or None if a wheel was installed."""
    folder = Path(__file__).resolve().parents[1]
    return folder if (folder / "tools").is_dir() and (folder / "pyproject.toml").is_file() else None


def shipped_folder(name: str) -> Path:
    """Return `ds_configs` or `slurm`: next to the package in a checkout, inside of it in an installed package."""
    package = Path(__file__).resolve().parent
    return (package.parent if checkout() else package) / name


def check_installed() -> None:
    """Look for the packages without importing them; ConfigError names the interpreter if some are missing."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{sys.executable} has no {', '.join(missing)}: install ctxlm_ds for it (docs/install.md), or use the "
            "Python that has them (under Slurm: CTXLM_VENV in slurm/env.sh)"
        )


def check_extra(extra: str, packages: Sequence[str]) -> None:
    """Look for the packages of an extra without importing them; ConfigError names the missing ones."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)}: not installed; pip install 'ctxlm_ds[{extra}]'")
