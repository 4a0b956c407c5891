"""`--help` of every command imports no library that takes seconds. Modules are counted, not time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = sorted((ROOT / "tools").glob("*.py"))
HEAVY = {"corpus.py": "its steps are classes of datatrove, which imports numpy and pyarrow"}
SLOW = (
    "torch", "deepspeed", "transformers", "datasets", "tokenizers", "tensorboard", "numba", "megatron", "numpy",
    "pyarrow",
)  # fmt: skip
CODE = """
import runpy, sys
kind, target = sys.argv[1:]
sys.argv = [target, "--help"]
sys.path.insert(0, target.rpartition("/")[0])
try:
    runpy.run_path(target, run_name="__main__") if kind == "file" else runpy.run_module(target, run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
print("loaded:", [name for name in {slow} if name in sys.modules])
"""


def loaded(kind: str, target: str) -> str:
    """The last line of a command that shows its help: the slow libraries that it has imported."""
    code = CODE.replace("{slow}", repr(SLOW))
    done = subprocess.run(
        [sys.executable, "-c", code, kind, target], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: str(path.name))
def test_help_of_a_tool(path: Path) -> None:
    slow = loaded("file", str(path))
    assert slow == "loaded: []" or (path.name in HEAVY and "torch" not in slow)


def test_help_of_pretraining() -> None:
    assert loaded("module", "ctxlm_ds.pretrain") == "loaded: []"
