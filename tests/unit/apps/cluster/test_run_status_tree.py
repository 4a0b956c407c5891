"""`ctxlm status --tree`: each run below the one that it began with, whatever is missing or refers to itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from ctxlm_ds.apps.cluster.run_status import Begin, begin_of, main, read_statuses, tree_lines
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, step_name
from ctxlm_ds.process.run_files import FORK_RECORD, update_status
from tests.integration.route import call_here


def make_run(run: Path, source: Path | None = None, begun: bool = True) -> Path:
    run.mkdir()
    named = "" if source is None else f"initialize_from: {source}\n"
    (run / "config.yaml").write_text(f"name: {run.name}\n{named}")
    if begun:
        lines = [{"step": step, "tokens": 1000 * step} for step in (1, 7)] + [{"step": 7, "eval/heldout/loss": 3}]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        update_status(run, state="completed", step=7, of=7, loss=3.25)
    return run


def make_branch(trunk: Path, step: int, run: Path, begun: bool = True) -> Path:
    make_run(run, begun=begun)
    (run / FORK_RECORD).write_text(
        json.dumps({"checkpoint": str(trunk / CHECKPOINTS_DIR / step_name(step)), "step": step})
    )
    folder = run / CHECKPOINTS_DIR / step_name(step)
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"train_state": {"step": step, "tokens": 50 * step}}))
    return run


def test_the_tree(tmp_path: Path) -> None:
    trunk = make_run(tmp_path / "a-trunk")
    later = make_branch(trunk, 4000, tmp_path / "later", begun=False)
    early = make_branch(trunk, 300, tmp_path / "x-early")
    make_run(tmp_path / "from-early", early / CHECKPOINTS_DIR / step_name(320))
    make_run(tmp_path / "elsewhere", Path("/weights/bert"))
    head, *lines = call_here(main, "ctxlm status", "--tree", tmp_path).stdout.splitlines()
    assert head.split() == ["run", "began", "with", "step", "tokens", "loss", "state"]
    assert [" ".join(line.split()) for line in lines] == [
        f"{trunk} 7 7,000 3.2500 completed",
        f"├─ {early} branch of step 300 7 7,000 3.2500 completed",
        f"│ └─ {tmp_path / 'from-early'} weights of step 320 7 7,000 3.2500 completed",
        f"└─ {later} branch of step 4,000 4,000 200,000 - not started: `ctxlm pretrain --config "
        f"{later / 'config.yaml'}` starts it",
        f"{tmp_path / 'elsewhere'} weights 7 7,000 3.2500 completed",
    ]
    shown = call_here(main, "ctxlm status", later).stdout
    assert "no status.json" not in shown and f"`ctxlm pretrain --config {later / 'config.yaml'}` starts it" in shown


def test_no_run_is_lost_or_drawn_twice(tmp_path: Path) -> None:
    """Two that name each other, one that names itself, and damaged files."""
    one, other = (make_run(tmp_path / name, tmp_path / named) for name, named in (("one", "other"), ("other", "one")))
    own = make_run(tmp_path / "own", tmp_path / "own")
    damaged = make_branch(one, 4, tmp_path / "damaged", begun=False)
    (damaged / FORK_RECORD).write_text('{"checkpoint": [5]}')
    (damaged / "metrics.jsonl").write_text("[1]\n{")
    next(damaged.glob("checkpoints/*/state.json")).write_text("[]")
    lines = tree_lines(read_statuses([one, other, own, damaged], {}))[1:]
    assert sorted(line.split("─ ")[-1].split()[0] for line in lines) == sorted(map(str, (one, other, own, damaged)))
    (own / "config.yaml").write_text("{ nonsense")
    assert begin_of(own) is None and begin_of(tmp_path) is None
    assert begin_of(one) == Begin(other, 0, "weights")


def test_it_needs_no_numpy_and_only_a_tree_needs_yaml() -> None:
    code = "import sys, ctxlm_ds.apps.cluster.run_status; print({'torch', 'numpy', 'yaml'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"
