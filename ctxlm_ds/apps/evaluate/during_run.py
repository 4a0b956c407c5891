"""Evaluation while a run trains: a separate process exports and judges a checkpoint on rank 0's host.

The training only looks whether it has ended. It shares no memory, accelerator, random state or collective with it, so a
run's numbers are the same without it, and any layout can be judged, because checkpoints have none. The checkpoint's
files are linked, so that rotation does not remove them. This file is the hook and, as a program, the process.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ctxlm_ds.apps.downstream.metrics import check_packages
from ctxlm_ds.apps.downstream.results import RESULT_NAME
from ctxlm_ds.apps.downstream.task import is_file_name
from ctxlm_ds.apps.evaluate.suite import Suite, SuiteTask, entries_of, is_suite, load_suite
from ctxlm_ds.atomic import PARTIAL_MARK, read_object, write_text
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, list_checkpoints, step_name
from ctxlm_ds.checkpoint.manifest import MANIFEST_NAME, list_files
from ctxlm_ds.console import logger
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.check import JUDGED_FOLDERS
from ctxlm_ds.recipe.schema import DownstreamTask, FineTuning
from ctxlm_ds.registry import load_object
from ctxlm_ds.training.hooks.hooks import Hook, RunEnd, RunStart, StepMetrics

FOLDER = "downstream"
LINKED, EXPORTED = JUDGED_FOLDERS
LOG = "log.txt"
REPORTED = "reported"
"""File in a task's folder: the hooks have its scores."""
NICENESS = 10
END_POLL_S = 0.5
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "CROSS_", "TORCHELASTIC_", "GROUP_", "ROLE_", "PMI_", "OMPI_",
             "MV2_", "MPI_")  # fmt: skip
"""Beginnings of variables that would make the process a rank of the run."""


class Work(NamedTuple):
    """One task, by its number in the recipe, to judge on the checkpoint of one step."""

    step: int
    number: int


def check_tasks(tasks: Sequence[DownstreamTask], family: str) -> None:
    """Refuse tasks whose description, files, packages or class of transformers are missing (ConfigError, DataError)."""
    if not tasks:
        return
    check_packages()
    import transformers

    from ctxlm_ds.apps.downstream.prepare import kind_class
    from ctxlm_ds.apps.evaluate.command import read_examples
    from ctxlm_ds.export.base import export_of

    for entry in (entry for one in tasks for entry in entries_of(*suite_of(one), Path(one.data))):
        read_examples(entry)
        auto = "" if entry.task is None else kind_class(entry.task).auto
        exported = getattr(transformers, export_of(family).models()[0].config_class)
        if entry.task is not None and exported not in getattr(transformers, auto)._model_mapping:
            raise ConfigError(
                f"evaluation.downstream: {entry.name}: transformers has no model of model.family {family} for tasks of "
                f"kind {entry.task.kind} ({auto.removeprefix('AutoModel')}); leave it out"
            )


def suite_of(task: DownstreamTask) -> tuple[Path, Suite]:
    """Return the suite that a recipe names, or one of the task that it names, and its file (ConfigError)."""
    settings = {name: getattr(task, name) for name in FineTuning.model_fields}
    if not is_suite(task.task):
        path = str(Path(task.task).resolve()) if is_file_name(task.task) else task.task
        return Path(), Suite(tasks={task.name: SuiteTask(task=path, seeds=[task.seed], **settings)})
    if unused := task.model_fields_set & {"seed", *settings}:
        raise ConfigError(f"evaluation.downstream: {task.task} is a suite, which has its own {', '.join(unused)}")
    return load_suite(task.task)


def command(task: DownstreamTask, folder: Path) -> list[str]:
    """Return the command that judges the checkpoint in the folder of a step."""
    output, suite = folder / task.name, task.task
    if not is_suite(suite):
        suite = str(output / "suite.yaml")
        write_text(Path(suite), suite_of(task)[1].model_dump_json(exclude_unset=True))
    options = ["--suite", suite, "--data", task.data, "--output", str(output)]
    return [sys.executable, "-m", "ctxlm_ds.apps.evaluate.during_run", str(folder), *options]


class DownstreamHook(Hook):
    """Starts the processes, one at a time, and reports their scores as `downstream/TASK/METRIC` of their step."""

    may_fail = True

    def __init__(
        self,
        tasks: Sequence[DownstreamTask],
        save_minutes: float | None,
        run_dir: Path,
        call_hooks: Callable[..., object],
        asked_to_stop: Callable[[], bool] = lambda: False,
        make_command: Callable[[DownstreamTask, Path], list[str]] = command,
    ) -> None:
        """Judge `tasks` (evaluation.downstream) on checkpoints of a run; `call_hooks` calls a method of every hook.

        `save_minutes` is the time that the watchdogs of the other ranks allow for the end of the run (watchdog), which
        `asked_to_stop` may cut short; `make_command` returns the command of a task and the folder of a step.
        """
        self._tasks = tasks
        self._longest_wait_s = math.inf if save_minutes is None else save_minutes * 60.0 / 2
        self._folder, self._checkpoints = run_dir / FOLDER, run_dir / CHECKPOINTS_DIR
        self._call_hooks, self._asked_to_stop, self._make_command = call_hooks, asked_to_stop, make_command
        self._queue: list[Work] = []
        """Work that is due, in order; it starts when the checkpoint of its step is linked."""
        self._linked: set[int] = set()
        self._running: tuple[Work, subprocess.Popen[bytes]] | None = None
        self._last_step: int | None = None
        """Step at which the run ended, which is always judged."""

    def on_run_start(self, start: RunStart) -> None:
        """Continue what an earlier attempt left, except for steps that this one takes again."""
        self.on_rollback(start.step)
        steps = {step for step, folder in list_checkpoints(self._folder).items() if (folder / LINKED).is_dir()}
        for step in sorted(steps | ({start.step} if start.step else set())):
            self._add(step, last=step == start.last_step)
        self._advance()

    def on_step_end(self, metrics: StepMetrics) -> None:
        self._add(metrics.step)
        if self._queue or self._running:
            self._advance()

    def on_run_end(self, end: RunEnd) -> None:
        """Judge the last step too and wait for all (half of save_minutes), unless the run will be resumed or failed."""
        if end.completed and not end.failed and end.step:
            self._last_step = end.step
            self._add(end.step, last=True)
            self._wait()
        self._stop()

    def _wait(self) -> None:
        self._advance()
        if self._running is not None:
            logger.info("waiting for %d downstream evaluations (logs: %s)", len(self._queue) + 1, self._folder)
        end_s = time.monotonic() + self._longest_wait_s
        while self._running is not None and not self._asked_to_stop() and time.monotonic() < end_s:
            self._call_hooks("on_phase", "evaluation")  # progress, for the watchdog
            time.sleep(END_POLL_S)
            self._advance()
        if self._running is not None:
            logger.warning("%d downstream evaluations are left; the same command does them", len(self._queue) + 1)

    def _add(self, step: int, last: bool = False) -> None:
        """Queue what is due at a step and was not reported by an earlier attempt."""
        known = [*self._queue, *([self._running[0]] if self._running else [])]
        for number, task in enumerate(self._tasks):
            work = Work(step, number)
            reported = self._folder / step_name(step) / task.name / REPORTED
            if (last or step % task.every_steps == 0) and work not in known and not reported.is_file():
                self._queue.append(work)

    def _advance(self) -> None:
        """Take the result of the process if it has ended, and start the next one."""
        self._link_complete()
        if self._running is not None:
            work, process = self._running
            if process.poll() is None:
                return
            self._running = None
            self._finish(work, process.returncode)
        for work in [one for one in self._queue if one.step in self._linked]:
            self._queue.remove(work)
            try:
                self._running = work, self._start(work)
                return
            except OSError as error:
                self._drop(work, error)

    def _link_complete(self) -> None:
        """Link the files of checkpoints that are complete; give up work whose checkpoint will not come."""
        waiting = [work for work in self._queue if work.step not in self._linked]
        newest = max(list_checkpoints(self._checkpoints), default=0) if waiting else 0
        for work in waiting:
            source, linked = self._checkpoints / step_name(work.step), self._folder / step_name(work.step) / LINKED
            try:
                if not linked.is_dir() and (source / MANIFEST_NAME).is_file():
                    # A linked checkpoint stays on the disk.
                    earlier = [one.step for one in self._queue if one.step < work.step and one.step in self._linked]
                    if earlier and work.step != self._last_step:
                        raise OSError(f"step {earlier[0]} still waits for its evaluation; raise every_steps")
                    _link_tree(source, linked)
            except OSError as error:
                self._drop(work, error)
            else:
                if linked.is_dir():
                    self._linked.add(work.step)
                elif newest > work.step:
                    self._drop(work, "it was not saved")

    def _start(self, work: Work) -> subprocess.Popen[bytes]:
        task, folder = self._tasks[work.number], self._folder / step_name(work.step)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OF_A_RANK)}
        # No accelerator: its memory and time are the run's.
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(task.threads)}
        with open(folder / f"{task.name}-{LOG}", "ab") as log:
            return subprocess.Popen(
                self._make_command(task, folder), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def _finish(self, work: Work, status: int) -> None:
        task, folder = self._tasks[work.number], self._folder / step_name(work.step)
        found = [read_object(path) or {} for path in (folder / task.name).glob(f"*/*/{RESULT_NAME}")]
        if status != 0 or not found:
            log = folder / f"{task.name}-{LOG}"
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
            self._drop(work, f"{lines[-1] if lines else f'status {status}'} ({log})")
            return
        scores = {"/".join(dict.fromkeys((task.name, one["task"]))): one["chosen"]["dev"] for one in found}
        figures = {f"{FOLDER}/{place}/{name}": float(value["mean"])
                   for place, values in scores.items() for name, value in values.items()}  # fmt: skip
        self._call_hooks("on_evaluation", work.step, figures)
        with suppress(OSError):  # a resume would report them again
            (folder / task.name / REPORTED).touch()
        self._clean(work.step)

    def _drop(self, work: Work, why: object) -> None:
        name = self._tasks[work.number].name
        logger.warning("step %d is not judged on %s, training continues: %s", work.step, name, why)
        self._queue = [one for one in self._queue if one != work]
        self._clean(work.step)

    def _clean(self, step: int) -> None:
        """Remove the checkpoint and the export of a step without further work."""
        folder = self._folder / step_name(step)
        if all(one.step != step for one in self._queue):
            self._linked.discard(step)
            for path in (folder / EXPORTED, folder / LINKED, *folder.glob(f"{EXPORTED}{PARTIAL_MARK}*")):
                shutil.rmtree(path, ignore_errors=True)

    def on_rollback(self, step: int) -> None:
        """Drop work and results of later steps."""
        if self._running is not None and self._running[0].step > step:
            self._stop()
        self._queue = [work for work in self._queue if work.step <= step]
        for later, folder in list_checkpoints(self._folder).items():
            if later > step:
                self._linked.discard(later)
                try:
                    shutil.rmtree(folder)
                except OSError as error:
                    logger.warning("%s cannot be removed, so its tasks are not judged again: %s", folder, error)

    def _stop(self) -> None:
        """End the process; its work is done again if the run is resumed."""
        if self._running is not None:
            _, process = self._running
            process.kill()
            process.wait()
            self._running = None


def _link_tree(source: Path, target: Path) -> None:
    """Make a folder with hard links to a checkpoint's files; OSError if it cannot: a copy would delay the training."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for name in (*list_files(source), MANIFEST_NAME):
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(source / name, partial / name)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Export the checkpoint of a step's folder unless it is, and judge it with the remaining arguments."""
    folder, *options = sys.argv[1:] if argv is None else argv
    os.nice(NICENESS)
    from ctxlm_ds.process.launchers import die_with_launcher

    die_with_launcher(watch_grandparent=False)
    from ctxlm_ds.export.huggingface import to_hf

    exported = Path(folder) / EXPORTED
    if not (exported / "config.json").is_file():
        to_hf(Path(folder) / LINKED, exported)
    load_object("ctxlm_ds.apps.evaluate.command:main")([str(exported), *options])


if __name__ == "__main__":
    load_object("ctxlm_ds.console:run_command")(main)
