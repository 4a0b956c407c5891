"""`--help` of every command imports no library that takes seconds. Modules are counted, not time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = sorted((ROOT / "tools").glob("*.py"))
PRETRAIN = "ctxlm_ds.pretrain"
HEAVY = {"corpus.py": "['tokenizers', 'numpy', 'pyarrow']", "write_parts_docs.py": "['torch', 'numpy']"}
"""Tools of classes of datatrove, and of this package's classes, whose help imports these libraries."""
SLOW = (
    "torch", "deepspeed", "transformers", "datasets", "tokenizers", "tensorboard", "numba", "megatron", "numpy",
    "pyarrow",
)  # fmt: skip
CODE = """
import os, runpy, sys
import ctxlm_ds.recipe.load  # once for all of them
for target in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    try:
        sys.argv, end = [target, "--help"], None
        sys.path.insert(0, target.rpartition("/")[0])
        try:
            (runpy.run_path if target.endswith(".py") else runpy.run_module)(target, run_name="__main__")
        except SystemExit as ended:
            end = ended.code
        print(f"{target} ended with {end or 0} and has loaded {[name for name in {slow} if name in sys.modules]}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
"""


@pytest.fixture(scope="module")
def shown() -> str:
    """What the commands say, each in a fork of one process; then its status and the slow libraries it has imported."""
    command = [sys.executable, "-c", CODE.replace("{slow}", repr(SLOW)), *map(str, TOOLS), PRETRAIN]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def loaded(target: str, shown: str) -> str:
    """The slow libraries that the help of a command has imported."""
    said, _, after = shown.partition(f"{target} ended with 0 and has loaded ")
    assert after and "usage:" in said.rpartition(" and has loaded ")[2]
    return after.partition("\n")[0]


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: str(path.name))
def test_help_of_a_tool(path: Path, shown: str) -> None:
    slow = loaded(str(path), shown)
    assert slow == HEAVY.get(path.name, "[]")


def test_help_of_pretraining(shown: str) -> None:
    assert loaded(PRETRAIN, shown) == "[]"
