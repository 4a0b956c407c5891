"""Pipelines for tests: recipe files with real texts, and plans of cheap shell commands run by the real step runner."""

from __future__ import annotations

import contextlib
import io
import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctxlm_ds.cluster.pipeline_outputs import PATH, Output
from ctxlm_ds.cluster.pipeline_plan import make_plan
from ctxlm_ds.cluster.pipeline_step import STOP_SIGNALS, main
from ctxlm_ds.cluster.pipeline_steps import Plan, Step
from ctxlm_ds.recipe.pipeline_schema import StepResources
from tests.text import write_corpus

ROOT = Path(__file__).resolve().parents[3]


def write_recipe(folder: Path, pipeline: Mapping[str, Any], **sections: Any) -> str:
    """A tiny recipe over texts in `folder`; `pipeline` goes over the usual section."""
    write_corpus(folder / "train.jsonl", num_documents=8, seed=1)
    write_corpus(folder / "heldout.jsonl", num_documents=4, seed=2)
    usual = {
        "input": [str(folder / "train.jsonl")],
        "heldout": [str(folder / "heldout.jsonl")],
        "tokenizer": {"vocab_size": 400},
        "output_dir": str(folder / "out"),
    }
    settings = {"extends": "bert-laptop", "name": "tiny", "pipeline": {**usual, **pipeline}, **sections}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    return str(path)


def recipe_plan(folder: Path, pipeline: Mapping[str, Any] | None = None, *overrides: str, **sections: Any) -> Plan:
    """The plan of such a recipe."""
    return make_plan(write_recipe(folder, pipeline or {}, **sections), overrides)


def shell_step(folder: Path, name: str, command: str, *needs: str, jobs: int = 1, **more: Any) -> Step:
    """A step whose jobs make FOLDER/NAME (FOLDER/NAME-0, ... of an array)."""
    names = [f"{name}-{task}" for task in range(jobs)] if jobs > 1 else [name]
    tasks = tuple((Output(PATH, str(folder / made)),) for made in names)
    settings = more.pop("settings", {"command": command})
    return Step(name, (command,), settings, tasks, StepResources(), needs=needs, **more)


def shell_plan(folder: Path, *steps: Step) -> Plan:
    """A plan of such steps."""
    return Plan("shell", "shell.yaml", folder, steps, {})


def run_step(plan: Plan, name: str, task: int = 0) -> tuple[int, str]:
    """Do the step as its job would: order written, then the runner; its exit status and what it says."""
    order = plan.order(plan.by_name[name])
    order.write()
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    said = io.StringIO()
    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(said),
        ):
            patch.setenv("SLURM_ARRAY_TASK_ID", str(task))
            patch.setenv("SLURM_JOB_ID", "7")
            return main([str(order.path)]), said.getvalue()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def record_json(plan: Plan, name: str) -> dict[str, Any]:
    """A step's record as it lies on the disk."""
    content: dict[str, Any] = json.loads((plan.folder / "steps" / f"{name}.json").read_text())
    return content
