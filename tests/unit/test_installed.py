"""An interpreter without the packages is named, with what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ctxlm_ds import installed
from ctxlm_ds.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_this_one_has_them() -> None:
    installed.check_installed()


def test_the_checkout_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert installed.checkout() == ROOT
    monkeypatch.setattr(installed, "__file__", str(tmp_path / "site-packages" / "ctxlm_ds" / "installed.py"))
    assert installed.checkout() is None


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "NEEDED", ("torch", "no_such_package"))
    with pytest.raises(ConfigError, match=r"has no no_such_package: .*CTXLM_VENV in slurm/env\.sh"):
        installed.check_installed()


def test_missing_packages_of_an_extra_are_named() -> None:
    installed.check_extra("downstream", ["torch"])
    with pytest.raises(ConfigError, match=r"no_such_package: not installed; pip install 'ctxlm_ds\[downstream\]'"):
        installed.check_extra("downstream", ["torch", "no_such_package"])


def test_a_bare_interpreter_can_say_so() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "ctxlm_ds.apps.cluster.job_context", "2", "--config", "x"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "has no torch, deepspeed" in done.stderr
