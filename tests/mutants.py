"""Break the package on purpose, one expression at a time, and report which faults the tests notice.

`python -m tests.mutants` (or `make mutants`) runs the tests that mutant_table.py names for each mutant in a copy of the
checkout. `--only TEXT` selects mutants by function, `--tree PATH` takes another checkout of the project.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, namedtuple
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.mutant_table import MUTANTS

IMPORTED = ("numba", "torch", "deepspeed.runtime.engine", "transformers", "tokenizers", "hypothesis", "pydantic")
"""What most tests import, imported once before tests are forked; nothing of this project."""
LIMIT_S = 240.0
STATUS = {0: "survived", 1: "killed"}


Mutant = namedtuple("Mutant", "function old new tests")
Source = namedtuple("Source", "path begin text is_compiled")
"""A function's place in a file: its text from `begin` on."""


def functions(tree: Path, name: str, files: str) -> Iterator[Source]:
    """Yield the functions of a qualified name in files of the package."""
    parts = name.split(".")
    for path in sorted((tree / "ctxlm_ds").rglob(files)):
        text = path.read_text()
        found: list[ast.AST] = [ast.parse(text)] if f"def {parts[-1]}(" in text else []
        for part in parts:
            inside = [node for owner in found for node in getattr(owner, "body", [])]
            found = [node for node in inside if getattr(node, "name", "") == part]
        lines = text.splitlines(keepends=True)
        for node in (node for node in found if isinstance(node, ast.FunctionDef)):
            begin, marks = len("".join(lines[: node.lineno - 1])), set(map(ast.unparse, node.decorator_list))
            body = "".join(lines[node.lineno - 1 : node.end_lineno])
            yield Source(path, begin, body, bool({"compiled", "inlined"} & marks))


def find(tree: Path, mutant: Mutant) -> Source | None:
    """Return the function that holds the old expression exactly once; of several the one in the named module."""
    module, name = mutant.function.split(":")
    found = (source for files in (f"{module}.py", "*.py") for source in functions(tree, name, files))
    return next((source for source in found if source.text.count(mutant.old) == 1), None)


def test_files(tree: Path, mutant: Mutant) -> list[str]:
    """Return the test files of a mutant: tests move, their names stay."""
    return [str(path.relative_to(tree)) for name in mutant.tests.split() for path in (tree / "tests").rglob(name)]


def run_tests(tree: Path, files: list[str], cache: Path, timeout_s: float) -> str:
    """Run tests of a tree in a fork of this process; return `killed`, `survived` or what else happened."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(tree)
        with open(tree / "output.txt", "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "ctxlm_ds")]:
            del sys.modules[name]
        sys.path.insert(0, str(tree))
        os.environ |= {"PYTHONPATH": str(tree), "NUMBA_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
        import_module("numba").config.reload_config()
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *files]))
        sys.stdout.flush()
        os._exit(code)
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return STATUS.get(code := os.waitstatus_to_exitcode(status), f"exit status {code}")
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "killed (too slow)"


def judge(tree: Path, mutant: Mutant) -> str:
    """Return what becomes of one mutant in the copy `tree`, which is as before afterwards."""
    source, files = find(tree, mutant), test_files(tree, mutant)
    if source is None or not files:
        return "not found" if source is None else "no tests"
    path, text = source.path, source.path.read_text()
    body = source.text.replace(mutant.old, mutant.new)
    before = path.stat().st_mtime_ns
    with tempfile.TemporaryDirectory(dir=tree) as cache:
        if not source.is_compiled:  # numba does not see that a function changed which functions of other files call
            shutil.copytree(tree / "numba", cache, dirs_exist_ok=True)
        path.write_text(text[: source.begin] + body + text[source.begin + len(source.text) :])
        try:
            return run_tests(tree, files, Path(cache), LIMIT_S)
        finally:
            path.write_text(text)
            os.utime(path, ns=(before, before))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="functions whose names contain a TEXT")
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="checkout to test")
    settings = parser.parse_args()
    for name in IMPORTED:
        import_module(name)
    mutants = [row for row in map(Mutant._make, MUTANTS) if any(text in row.function for text in settings.only)]
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(settings.tree, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "site"))
        (tree / "numba").mkdir()
        every = sorted({file for mutant in mutants for file in test_files(tree, mutant)})
        if run_tests(tree, every, tree / "numba", 10 * LIMIT_S) != "survived":
            print("the tests fail without a mutant:\n" + (tree / "output.txt").read_text()[-4000:])
            return 1
        for mutant in mutants:
            started_s = time.monotonic()
            counts[result := judge(tree, mutant)] += 1
            print(f"{result:17} {time.monotonic() - started_s:4.0f} s  {mutant.function}: {mutant.old}", flush=True)
    print(", ".join(f"{number} {result}" for result, number in counts.most_common()))
    return int(any(not result.startswith("killed") for result in counts))


if __name__ == "__main__":
    sys.exit(main())
