"""Shell scripts are clean: shellcheck finds nothing, and bash parses what Slurm will run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = sorted(
    path.relative_to(ROOT)
    for folder, patterns in {"slurm": ("**/*.sh", "**/*.sbatch"), "tests/slurm": ("*.sh",), ".ci": ("run",),
                             "ctxlm_ds/completion": ("*.bash",)}.items()
    for pattern in patterns
    for path in (ROOT / folder).glob(pattern)
)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_is_clean() -> None:
    """Files that are sourced are followed (-x), so that a misspelt name of env.sh shows in every script."""
    found = subprocess.run(
        ["shellcheck", "-x", "-P", "SCRIPTDIR", *map(str, SCRIPTS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_bash_parses_it(script: Path) -> None:
    parsed = subprocess.run(["bash", "-n", str(script)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert parsed.returncode == 0, parsed.stderr


def test_the_scripts_are_found() -> None:
    """The patterns above still match: a moved folder does not silently end the checks."""
    assert Path(".ci/run") in SCRIPTS
    assert Path("slurm/pretrain.sbatch") in SCRIPTS
    assert Path("tests/slurm/testbed.sh") in SCRIPTS
