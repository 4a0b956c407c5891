"""tools/run_status.py: folders, runs and what is not there, with nothing but the standard library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.unit.apps.cluster.status_runs import make_run, started

TOOL = Path(__file__).resolve().parents[4] / "tools" / "run_status.py"


def call(*words: object, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, TOOL, *map(str, words)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (status, "")
    return done.stdout


def test_the_tool(tmp_path: Path) -> None:
    for name in ("a", "b"):
        started(make_run(tmp_path / "runs" / name))
    (tmp_path / "runs" / "notes").mkdir()
    table = call(tmp_path / "runs" / "*").splitlines()
    assert [row.split()[0].rpartition("/")[2] for row in table[:4]] == ["run", "a", "b", "notes"]
    assert "never started" in table[3]
    # A folder of runs, a run named twice, and what is not there.
    assert len(call(tmp_path / "runs").splitlines()) == 5
    (only,) = json.loads(call(tmp_path / "runs" / "a", tmp_path / "runs" / "a", "--json"))
    assert only["step"] == 20 and only["state"] == "failed"
    # The shell's form of a pattern matches files, too.
    (tmp_path / "runs" / "sweep.txt").write_text("a.b=1\n")
    (tmp_path / "runs" / "2").mkdir()
    paths = [tmp_path / "runs" / name for name in ("a", "b", "sweep.txt")]
    assert "sweep.txt" not in call(*paths) and "no such folder" in call(*paths, tmp_path / "runs" / "c")
    shown = json.loads(call(tmp_path / "runs", "--json"))
    assert [Path(run["run"]).name for run in shown] == ["2", "a", "b"], "a task that waits is one of the sweep"
    assert "sweep.txt: no such folder" in call(tmp_path / "runs" / "sweep.txt", status=2)
    missing = call(tmp_path / "none", status=2)
    assert missing.startswith(f"{tmp_path / 'none'}: no such folder; give a run directory") and missing.count("\n") == 1
    assert call("--help").startswith("usage: run_status.py")


def test_the_tool_needs_no_library_that_trains(tmp_path: Path) -> None:
    started(make_run(tmp_path / "a"))
    code = (
        "import runpy, sys\n"
        "for name in ('torch', 'numpy', 'deepspeed', 'transformers', 'pydantic'): sys.modules[name] = None\n"
        f"sys.argv = ['run_status.py', {str(tmp_path / 'a')!r}]\n"
        f"runpy.run_path({str(TOOL)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "step        20/100" in done.stdout
