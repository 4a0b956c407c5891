"""Suites of tasks: YAML files, shipped (`suites/`) or a user's own, and their data. Imports no torch until it judges.

Tasks of causal models by lm-evaluation-harness (extra `lm-eval`): those that it ships, and YAML files of a user.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ctxlm_ds.apps.downstream.task import TaskDescription, is_file_name, load_description, load_task, shipped
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.recipe.problems import Problem, did_you_mean, raise_problems
from ctxlm_ds.recipe.schema import FineTuning
from ctxlm_ds.recipe.sections import NonNegativeSteps, PositiveSteps, Section
from ctxlm_ds.recipe.yaml_source import MAX_CHARACTERS, read_yaml
from ctxlm_ds.untrusted_json import read_text

SUITE_DIR = Path(__file__).resolve().parent / "suites"
PAIRS, HARNESS = "minimal-pairs", "lm-eval"
"""Tasks without training: minimal pairs in the entry's files, and a task of lm-evaluation-harness."""
METRIC, HARNESS_METRIC = "accuracy", "acc"
"""Their metrics: the mean over the paradigms of minimal pairs, and what is taken of HARNESS if an entry names none."""
HARNESS_FILTER = ",none"
"""End of the name of a metric of unchanged answers."""
HARNESS_BATCH = 16
NAME = re.compile(r"\w[\w.-]*")


class SuiteTask(FineTuning):
    """One task of a suite."""

    task: str
    """minimal-pairs, lm-eval, a shipped task of fine-tuning, or the YAML file of one, relative to the suite's."""
    files: str = "."
    """Its folder (of lm-eval, of YAML files), or file of pairs, in --data; case and hyphens do not matter."""
    harness: str | None = None
    """Name of the task in lm-evaluation-harness, for lm-eval."""
    shots: NonNegativeSteps | None = None
    """Solved examples before each one of lm-eval; null takes the task's."""
    first_pairs: PositiveSteps | None = None
    """Pairs of each paradigm that are scored; null scores all."""
    start: str | None = None
    """Fine-tuned task of the suite whose model (of its first seed) is fine-tuned, with a new head."""
    seeds: Annotated[list[NonNegativeSteps], Field(min_length=1)] = [1]
    """Seeds of the head and of the order of the examples."""
    metric: str | None = None
    """Metric of the table; null takes the first of the task."""
    published: dict[str, float] | None = None
    """Model -> score in its publication; null takes the task's."""
    source: str | None = None
    """The publication; null takes the suite's."""


class Suite(Section):
    """Tasks that a model is judged on."""

    title: str = ""
    """What they measure, for people."""
    tasks: Annotated[dict[str, SuiteTask], Field(min_length=1)]
    """Name in the table -> task."""
    source: str = ""
    """Publication of the published scores."""


@dataclass(frozen=True)
class Entry:
    """A task of a suite with its data."""

    name: str
    settings: SuiteTask
    described: str
    """Name or file of the task's description."""
    task: TaskDescription | None
    """None without fine-tuning."""
    data: Path
    source: str
    saves: bool
    """Whether another task starts from its models, also if `only` leaves that out: it may be run later."""
    start_seed: int | None
    """Seed of the model that it starts from."""

    @property
    def seeds(self) -> list[int]:
        return [0] if self.task is None else self.settings.seeds

    @property
    def metric(self) -> str:
        known = {PAIRS: METRIC, HARNESS: HARNESS_METRIC}
        return self.settings.metric or (self.task.judged_by[0] if self.task else known[self.settings.task])

    def harness_tasks(self) -> Any:
        """Return the harness's manager that knows the task, of the YAML files of `data` or its own; reads its data.

        Raises ConfigError if the harness is not installed, or knows no task of this name or no such metric of it,
        DataError if the data cannot be read, or a file names Python code.
        """
        name, files = str(self.settings.harness), self.data
        if importlib.util.find_spec("lm_eval") is None:
            raise ConfigError("tasks of lm-evaluation-harness need lm_eval: pip install 'ctxlm_ds[lm-eval]'")
        for path in sorted(files.rglob("*.y*ml")) if files.is_dir() else ():
            if "!function" in path.read_text(encoding="utf-8", errors="replace"):
                raise DataError(f"{path}: names Python code (!function), which is not run here; use lm_eval itself")
        managers = (_harness_manager(files, own) for own in (False, True))
        manager = next((one for one in managers if name in one.all_subtasks), None)
        if manager is None:
            near = did_you_mean(name, _harness_manager(files, True).all_subtasks)
            raise ConfigError(f"harness: {name}: no task of lm-evaluation-harness or of {files}{near}")
        try:
            task = manager.load(name)["tasks"][name]
            known = [f"{key},{one['name']}".removesuffix(HARNESS_FILTER) for key in task.aggregation()
                     for one in task.config.filter_list or [{"name": "none"}]]  # fmt: skip
        except Exception as error:  # datasets raises any exception
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(f"harness: {name}: its data cannot be read: {reason}") from error
        if self.metric not in known:
            raise ConfigError(f"harness: {name}: has no metric {self.metric}; there are {', '.join(known)}")
        return manager

    def judge_by_harness(self, folder: Path, manager: Any) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return the metrics of a model, computed in fp32, and a row of each example: its number and value.

        The rows have the entry's metric, of unchanged answers or, as METRIC,FILTER, of filtered ones. Raises
        ConfigError if the harness did not compute it.
        """
        import torch
        from lm_eval import simple_evaluate

        name = self.settings.harness
        done = simple_evaluate(
            model="hf", model_args={"pretrained": str(folder), "dtype": "float32"}, tasks=[name], task_manager=manager,
            num_fewshot=self.settings.shots, batch_size=HARNESS_BATCH, bootstrap_iters=0,
            device="cuda" if torch.cuda.is_available() else "cpu",
        )  # fmt: skip
        found = done["results"][name].items()
        values = {key.removesuffix(HARNESS_FILTER): float(value) for key, value in found if isinstance(value, float)}
        if self.metric not in values:
            raise ConfigError(f"harness: {name}: has no metric {self.metric}; there are {' and '.join(values)}")
        counted, _, chosen = self.metric.partition(",")
        samples = [sample for sample in done["samples"][name] if sample.get("filter", "none") == (chosen or "none")]
        samples.sort(key=lambda sample: int(sample["doc_id"]))
        numbers = [sample.get(counted) if isinstance(sample.get(counted), (int, float)) else None for sample in samples]
        return values, [{"id": one["doc_id"], "value": value} for one, value in zip(samples, numbers, strict=True)]


@cache
def _harness_manager(files: Path, own: bool) -> Any:
    """Return a manager of the tasks in a folder, with the harness's `own` 14,000 only if asked, which takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(files) if files.is_dir() else None, include_defaults=own)


def load_suite(name_or_path: str) -> tuple[Path, Suite]:
    """Return the file and the content of a shipped suite, or of a YAML file; ConfigError lists every problem."""
    return load_description(Suite, name_or_path, SUITE_DIR, "suite", "title, tasks, source", SuiteTask.model_fields)


def entries_of(path: Path, suite: Suite, data: Path, only: Sequence[str] = ()) -> list[Entry]:
    """Return the tasks of a suite of the file `path`, whose files are in `data`: all, or `only` some and their starts.

    A task that starts from another one is behind it. Raises ConfigError with every problem of the description,
    DataError if `data` has no such file or folder.
    """
    raise_problems(f"suite {path}", list(_problems(suite, only)))
    starts = {suite.tasks[name].start for name in only or suite.tasks}
    entries = []
    used = [name for name in suite.tasks if not only or name in only or name in starts]
    for name in sorted(used, key=lambda name: suite.tasks[name].start is not None):
        settings = suite.tasks[name]
        described = str(path.parent / settings.task) if is_file_name(settings.task) else settings.task
        task = None if settings.task in (PAIRS, HARNESS) else load_task(described)[1]
        known = (settings.metric,) if settings.task == HARNESS else task.judged_by if task else (METRIC,)
        if settings.metric not in (None, *known):
            raise ConfigError(f"suite {path}: tasks.{name}.metric: {settings.metric} is no metric of {settings.task}")
        source = suite.source if settings.source is None else settings.source
        seed = None if settings.start is None else suite.tasks[settings.start].seeds[0]
        found, saves = _find(data, settings.files), any(one.start == name for one in suite.tasks.values())
        entries.append(Entry(name, settings, described, task, found, source, saves, seed))
    return entries


def is_suite(name_or_path: str) -> bool:
    """Return whether a name is that of a shipped suite, or a YAML file describes one."""
    if not is_file_name(name_or_path):
        return name_or_path in shipped(SUITE_DIR)
    source = read_yaml(read_text(Path(name_or_path), ConfigError, MAX_CHARACTERS), name_or_path)
    return isinstance(source.data, dict) and "tasks" in source.data


def _problems(suite: Suite, only: Iterable[str]) -> Iterator[Problem]:
    for name in only:
        if name not in suite.tasks:
            yield Problem("tasks", f"--tasks {name}: the suite has {', '.join(suite.tasks)}")
    for name, task in suite.tasks.items():
        if not NAME.fullmatch(name):
            yield Problem(f"tasks.{name}", "a name has letters, digits, hyphens, dots and underscores")
        tuned = [one for one in ("start", "seeds", *FineTuning.model_fields) if one in task.model_fields_set]
        if task.task in (PAIRS, HARNESS) and tuned:
            yield Problem(f"tasks.{name}.{tuned[0]}", f"only for tasks of fine-tuning, not for {task.task}")
        if len(set(task.seeds)) < len(task.seeds):
            yield Problem(f"tasks.{name}.seeds", "give each seed once")
        for key, kind in {"first_pairs": PAIRS, "harness": HARNESS, "shots": HARNESS}.items():
            if task.task != kind and getattr(task, key) is not None:
                yield Problem(f"tasks.{name}.{key}", f"only for {kind}")
        if task.task == HARNESS and not task.harness:
            yield Problem(f"tasks.{name}.harness", "missing; name the task in lm-evaluation-harness")
        start = None if task.start is None else suite.tasks.get(task.start)
        if task.start is not None and (start is None or start.task in (PAIRS, HARNESS) or start.start is not None):
            near = did_you_mean(task.start, suite.tasks)
            yield Problem(f"tasks.{name}.start", f"{task.start}: name a fine-tuned task without a start{near}")


def _find(data: Path, name: str) -> Path:
    if (data / name).exists():
        return data / name
    near = [path for path in (data.iterdir() if data.is_dir() else ()) if _folded(path.name) == _folded(name)]
    if len(near) != 1:
        raise DataError(f"{data / name}: no such file or folder; --data is the folder that holds it")
    return near[0]


def _folded(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()
