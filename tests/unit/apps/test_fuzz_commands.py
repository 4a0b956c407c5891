"""Damaged files that status, report, submit and init read: an answer or a refusal, in bounded time and memory."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.cluster import run_status, submit
from ctxlm_ds.apps.cluster.job_context import read_sweep, tasks_of_array
from ctxlm_ds.apps.cluster.rank_start import list_starts, note_cut_short
from ctxlm_ds.apps.init import command as init
from ctxlm_ds.apps.report import run_report
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, step_name
from ctxlm_ds.checkpoint.manifest import write_manifest
from ctxlm_ds.process.run_files import update_status
from ctxlm_ds.process.run_history import append_event
from ctxlm_ds.process.run_lock import this_process
from ctxlm_ds.recipe.load import dump_config
from ctxlm_ds.recipe.schema import RunConfig
from tests.fuzz import DEEP, INSERTS, VALUES, Case, damage, damage_json, run_cases

pytestmark = pytest.mark.long

BOMB = b"\n".join(b"a%d: &a%d {<<: [%s]}" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 9))
PIECES = (
    *INSERTS, DEEP, BOMB, b"\r", "\u2028".encode(), b"\x85", b"NaN", b"-Infinity", b"1e999", b"0-99999999", b"%j",
    b"'", b"\\", b"$HOME", b"#SBATCH --x='\n", b"-" * 300, b"\x1b]0;x\x07",
)  # fmt: skip
FIGURES = {"loss": 6.5, "grad_norm": 1.5, "learning_rate": 1e-4, "tokens_per_second": 900.0, "eval/a/loss": 6.6}
SCRIPT = b"""#!/bin/bash
torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 \\
    --max-position-embeddings 32 --micro-batch-size 4 --global-batch-size 8 --train-iters 50 --lr 1e-3 --min-lr 1e-5 \\
    --lr-warmup-fraction .01 --adam-beta1 0.9 --rampup-batch-size 4 4 64 --train-samples 800 --split 949,50,1 \\
    --data-path 0.3 a_text_document 0.7 b_text_document --fp16 --initial-loss-scale 65536 # the end
"""
PROFILE = b"#SBATCH --nodes=2 --ntasks-per-node=2\n#SBATCH --array=0-1%1 --account='me' # mine\nA=1\n"
SWEEP = b"optimizer.learning_rate=1e-3 training.seed=1\n# a comment\noptimizer.learning_rate=2e-3\n"


def make_run(folder: Path) -> Path:
    """A run directory with every file that status and report read."""
    run_dir = folder / "run"
    checkpoint = run_dir / CHECKPOINTS_DIR / step_name(20)
    checkpoint.mkdir(parents=True)
    write_manifest(checkpoint, 20, {})
    (run_dir / "config.yaml").write_text(dump_config(RunConfig.model_validate({"name": "tiny"})))
    lines = [{"step": step, **FIGURES, "texts": [["given", "written"]]} for step in range(1, 6)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    append_event(run_dir, "start", step=0, environment={"torch": "2"}, changed_settings=["a 1 -> 2"])
    append_event(run_dir, "skip", step=3, why="spike", rows={"first": 8, "count": 8})
    append_event(run_dir, "end", step=5, reason="done", completed=True, failed=False, attempt="job-7-0-0")
    start = {"name": "job-7-0-0", "job_id": "7", "time_unix_s": 5.0, "checkpoint_step": None, "nodes": "n1"}
    attempt = run_dir / "attempts" / "job-7-0-0"
    attempt.mkdir(parents=True)
    (attempt / "start.json").write_text(json.dumps(start))
    (run_dir / "lock.json").write_text(json.dumps(vars(this_process())))
    update_status(
        run_dir, state="running", step=20, of=100, loss=6.8, tokens_per_second=999.4, left_s=80.0, starts=2, skipped=1,
        rollbacks=0, checkpoint=str(checkpoint), job_id="7", log="/logs/7.log", last_failure="rank 1 was killed",
    )  # fmt: skip
    return run_dir


def damage_file(path: Path, drawn: random.Random) -> None:
    """Damage the bytes of a file, or a value of its JSON, in one to three places."""
    content = path.read_bytes()
    for _ in range(drawn.choice([1, 1, 2, 3])):
        lines = content.splitlines(keepends=True)
        if path.suffix in (".json", ".jsonl") and lines and drawn.random() < 0.6:
            number = drawn.randrange(len(lines)) if path.suffix == ".jsonl" else 0
            before, own = lines[:number], lines[number : number + 1] if path.suffix == ".jsonl" else lines
            content = b"".join([*before, damage_json(b"".join(own), drawn), b"\n", *lines[number + len(own) :]])
        else:
            content = damage(content, drawn, PIECES)
    path.write_bytes(content)


def quiet(function: Callable[[], Any]) -> Any:
    """Call a function whose prints must be possible on a terminal."""
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), errors="backslashreplace")):
        return function()


def prepare_runs(folder: Path) -> Case:
    whole = make_run(folder / "whole")
    names = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]

    def case(seed: int) -> str:
        drawn, run_dir = random.Random(seed), folder / "runs" / "run"
        shutil.rmtree(folder / "runs", ignore_errors=True)
        shutil.copytree(whole, run_dir)
        for name in drawn.choices(names, k=drawn.choice([1, 1, 2])):
            damage_file(run_dir / name, drawn)
        (damaged,) = run_status.read_statuses([run_dir], {})
        quiet(partial(run_status.show, [damaged, damaged], as_json=True))
        quiet(partial(run_status.show, [damaged, damaged], as_json=False))
        quiet(partial(run_status.show, [damaged], as_json=False))
        list_starts(run_dir)
        list(note_cut_short(run_dir, "7"))
        sys.argv = ["report", str(run_dir)]
        quiet(run_report.main)
        assert "</html>" in (run_dir / "report.html").read_text()
        return "shown"

    return case


def prepare_scripts(folder: Path) -> Case:
    file, output = folder / "script.sh", folder / "recipe.yaml"

    def case(seed: int) -> str:
        drawn = random.Random(seed)
        file.write_bytes(SCRIPT)
        damage_file(file, drawn)
        if drawn.random() < 0.5:
            words = SCRIPT.decode().replace("\\\n", " ").split()[1:-3]
            value = drawn.choice((*VALUES, "1e999", "9" * 400, "a\u2028deepspeed: b"))
            words[drawn.randrange(3, len(words))] = str(value)
            file.write_text(" ".join(words), errors="surrogatepass")
        output.unlink(missing_ok=True)
        quiet(lambda: init.main(["--from-megatron", str(file), "--output", str(output)]))
        return "written"

    return case


def prepare_jobs(folder: Path) -> Case:
    profile, sweep, recipe = folder / "profile.sh", folder / "sweep.txt", folder / "recipe.yaml"
    recipe.write_text("extends: bert-tiny\n")

    def case(seed: int) -> str:
        drawn = random.Random(seed)
        profile.write_bytes(PROFILE)
        sweep.write_bytes(SWEEP)
        damage_file(drawn.choice([profile, sweep]), drawn)
        array = damage(b"0-3,7%2", drawn, PIECES).decode(errors="surrogateescape")
        read_sweep(sweep)
        submit.read_profile(profile)
        tasks_of_array(array)
        return "read"

    return case


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seeds", [range(70), pytest.param(range(1000, 4400), marks=pytest.mark.soak)])
@pytest.mark.parametrize("prepare", [prepare_runs, prepare_scripts, prepare_jobs])
def test_damaged_files_end_without_a_traceback(prepare: Callable[[Path], Case], seeds: range, tmp_path: Path) -> None:
    found = run_cases(prepare, tmp_path, seeds)
    assert len(found) > 1 and found["refused"] < len(seeds), found
