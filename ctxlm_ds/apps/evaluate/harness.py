"""Tasks of causal models by lm-evaluation-harness (extra `lm-eval`): those that it ships, and YAML files of a user."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.recipe.problems import did_you_mean

FILTER = ",none"
"""End of the name of a metric of unchanged answers."""
BATCH_SIZE = 16


def find_tasks(name: str, files: Path, metric: str) -> Any:
    """Return the harness's manager that knows a task, of the YAML files of a folder or its own; reads the task's data.

    Raises ConfigError if the harness is not installed, or knows no task of this name or no such metric of it, DataError
    if the data cannot be read, or a file names Python code.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("tasks of lm-evaluation-harness need lm_eval: pip install 'ctxlm_ds[lm-eval]'")
    for path in sorted(files.rglob("*.y*ml")) if files.is_dir() else ():
        if "!function" in path.read_text(encoding="utf-8", errors="replace"):
            raise DataError(f"{path}: names Python code (!function), which is not run here; use lm_eval itself")
    manager = next((one for one in (_manager(files, False), _manager(files, True)) if name in one.all_subtasks), None)
    if manager is None:
        near = did_you_mean(name, _manager(files, True).all_subtasks)
        raise ConfigError(f"harness: {name}: no task of lm-evaluation-harness or of {files}{near}")
    try:
        known = manager.load(name)["tasks"][name].aggregation()
    except Exception as error:  # datasets raises any exception
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"harness: {name}: its data cannot be read: {reason}") from error
    if metric.partition(",")[0] not in known:
        raise ConfigError(f"harness: {name}: has no metric {metric}; there are {', '.join(known)}")
    return manager


@cache
def _manager(files: Path, own: bool) -> Any:
    """Return a manager of the tasks in a folder, with the harness's `own` 14,000 only if asked, which takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(files) if files.is_dir() else None, include_defaults=own)


def judge(
    folder: Path, name: str, shots: int | None, metric: str, manager: Any
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return the metrics of a model on a task, computed in fp32, and a row of each example: its number and value.

    `metric` is what the rows have, of unchanged answers or, as METRIC,FILTER, of filtered ones. Raises ConfigError if
    the harness did not compute it.
    """
    import torch
    from lm_eval import simple_evaluate

    done = simple_evaluate(
        model="hf", model_args={"pretrained": str(folder), "dtype": "float32"}, tasks=[name], task_manager=manager,
        num_fewshot=shots, batch_size=BATCH_SIZE, device="cuda" if torch.cuda.is_available() else "cpu",
        bootstrap_iters=0,
    )  # fmt: skip
    found = done["results"][name].items()
    values = {key.removesuffix(FILTER): float(value) for key, value in found if isinstance(value, float)}
    if metric not in values:
        raise ConfigError(f"harness: {name}: has no metric {metric}; there are {' and '.join(values)}")
    counted, _, chosen = metric.partition(",")
    samples = [sample for sample in done["samples"][name] if sample.get("filter", "none") == (chosen or "none")]
    samples.sort(key=lambda sample: int(sample["doc_id"]))
    return values, [{"id": sample["doc_id"], "value": sample.get(counted)} for sample in samples]
