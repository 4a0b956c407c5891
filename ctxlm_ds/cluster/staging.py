"""Datasets, sample indexes and tokenizer on each node's own disk before training reads them (CTXLM_STAGE_DIR).

In: a job (or this machine alone, `python -m ctxlm_ds.cluster.staging --into DIR --config RECIPE`). Out: the settings
that make the run read the copies. All nodes read the same: what has no room on one node, or fails there, is read from
the shared file system on all of them, and a line says so. Needs the standard library only, but for the by-hand command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxlm_ds.cluster.preflight import PreflightJob
from ctxlm_ds.cluster.staging_copy import ROOT_NAME, StageItem, StagePlan, copy_items, remove_staged, room
from ctxlm_ds.cluster.staging_node import PLAN_NAME, answer_file, make_plan
from ctxlm_ds.console import format_size
from ctxlm_ds.errors import ClusterError, ConfigError
from ctxlm_ds.process.run_history import ATTEMPTS_DIR

FOLDER_NAME = "staging"
POLL_S = 0.1
ENDING_S = 10.0
FILES_LATE_S = 30.0
Say = Callable[[str], None]


def run_staging(
    job: PreflightJob, words: Sequence[str], environ: Mapping[str, str], say: Say,
    should_stop: Callable[[], bool] = lambda: False, leave_out: Collection[str] = (),
) -> list[str]:  # fmt: skip
    """Stage what a job reads on all of its nodes.

    Args:
        words: options of ctxlm_ds.pretrain, `--config RECIPE --set ...`.
        environ: CTXLM_STAGE_DIR is the folder on each node's own disk.
        say: prints a line.
        should_stop: whether a signal came meanwhile.
        leave_out: nodes that the run does without.

    Returns:
        `a.b=c` for --set; none where everything stays where it is. Staging that fails never fails the job.
    """
    into = Path(environ["CTXLM_STAGE_DIR"])
    folder = job.run_dir / ATTEMPTS_DIR / job.attempt / FOLDER_NAME
    nodes = [node for node in job.tasks if node not in leave_out]
    start_s = time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        step = _Stages(job, folder, environ, should_stop)
        step.run("plan", nodes[:1], "--", *words)
        plan = StagePlan.from_json((folder / PLAN_NAME).read_text(encoding="utf-8"))
        rooms = step.answers("room", nodes, "--into", str(into))
        chosen = choose_items(plan.items, rooms, into, say)
        if not chosen:
            return []
        numbers = ",".join(str(plan.items.index(item)) for item in chosen)
        copies = step.answers("copy", nodes, "--into", str(into), "--items", numbers)
    except (ClusterError, OSError, ValueError, KeyError, TypeError) as error:
        say(f"staging: {error}; everything is read from where the recipe says")
        return []
    staged = proved_items(chosen, copies, say)
    copied = max(sum(one.get("copied_bytes", 0) for one in copies[node]) for node in nodes)
    kept = max(sum(one.get("kept_bytes", 0) for one in copies[node]) for node in nodes)
    say(
        f"staging: {len(staged)} of {len(plan.items)} items in {into / ROOT_NAME} of {len(nodes)} nodes; "
        f"{format_size(copied)} copied, {format_size(kept)} were there, {time.monotonic() - start_s:.0f} s"
    )
    return settings_of(plan, staged, into)


def choose_items(
    items: Sequence[StageItem], rooms: Mapping[str, Mapping[str, Any]], into: Path, say: Say
) -> list[StageItem]:
    """Items that fit on every node, in their order; a line for each that does not."""
    for node, answer in rooms.items():
        if answer["error"]:
            say(f"staging: {node}: {answer['error']}; everything is read from where the recipe says")
            return []
    left = {node: int(answer["free_bytes"]) for node, answer in rooms.items()}
    chosen = []
    for number, item in enumerate(items):
        needs = {node: int(answer["needed_bytes"][number]) for node, answer in rooms.items()}
        short = [node for node in rooms if needs[node] > left[node]]
        if short:
            node = max(short, key=lambda name: needs[name] - left[name])
            say(
                f"staging: no room for {item.source} in {into} of {node}: {format_size(needs[node])} are needed, "
                f"{format_size(left[node])} are free; it is read from where the recipe says"
            )
            continue
        left = {node: left[node] - needs[node] for node in rooms}
        chosen.append(item)
        for index in item.missing_indexes:
            say(f"staging: {index} is not built yet; every node will build its own (tools/build_samples.py saves that)")
    return chosen


def proved_items(
    chosen: Sequence[StageItem], copies: Mapping[str, Sequence[Mapping[str, Any]]], say: Say
) -> list[StageItem]:
    """Items whose copies all nodes have proved; a line for each other one."""
    proved = []
    for number, item in enumerate(chosen):
        failed = {node: answers[number]["error"] for node, answers in copies.items() if answers[number]["error"]}
        if not failed:
            proved.append(item)
        for node, why in list(failed.items())[:1]:
            say(f"staging: {node}: {why}; {item.source} is read from where the recipe says")
    return proved


def settings_of(plan: StagePlan, staged: Sequence[StageItem], into: Path) -> list[str]:
    """What makes a run read the copies; JSON is YAML."""
    targets = {(item.kind, item.source): str(into.resolve() / ROOT_NAME / item.target) for item in staged}
    datasets = {source: target for (kind, source), target in targets.items() if kind == "dataset"}
    settings = []
    for name, sources in (("train", plan.train), ("validation", plan.validation)):
        if any(source["path"] in datasets for source in sources):
            moved = [{**source, "path": datasets.get(source["path"], source["path"])} for source in sources]
            settings.append(f"data.{name}={json.dumps(moved)}")
    tokenizer = [target for (kind, _), target in targets.items() if kind == "tokenizer"]
    settings += [f"tokenizer.path={json.dumps(tokenizer[0])}"] if tokenizer else []
    all_datasets = {item.source for item in plan.items if item.kind == "dataset"}
    if plan.has_index_dir and all_datasets == set(datasets):
        # Else the indexes of those that stay are found there, and the others' as well.
        settings.append("data.sample_index_dir=null")
    return settings


class _Stages:
    """Steps of one task a node."""

    def __init__(
        self, job: PreflightJob, folder: Path, environ: Mapping[str, str], should_stop: Callable[[], bool]
    ) -> None:
        self._job = job
        self._folder = folder
        self._environ = environ
        self._should_stop = should_stop

    def run(self, stage: str, nodes: Sequence[str], *words: str) -> None:
        """Run a stage to its end.

        Raises:
            ClusterError: it failed, or a signal came.
        """
        command = [
            *self._job.srun, f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1",
            f"--nodelist={','.join(nodes)}", "--overlap", "--job-name=ctxlm-staging", *self._job.python, "-m",
            "ctxlm_ds.cluster.staging_node", stage, str(self._folder), *words,
        ]  # fmt: skip
        log = self._folder / f"{stage}.log"
        with open(log, "wb") as output:
            step = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=dict(self._environ))
            try:
                while step.poll() is None and not self._should_stop():
                    time.sleep(POLL_S)
            finally:
                _end(step)
        if self._should_stop():
            raise ClusterError("a signal came meanwhile")
        if step.returncode != 0:
            raise ClusterError(f"{_reason(log.read_text(errors='replace'))} ({log})")

    def answers(self, stage: str, nodes: Sequence[str], *words: str) -> dict[str, Any]:
        """Run a stage and collect each node's answer.

        Raises:
            ClusterError: of run(), or a node's answer is missing.
        """
        for node in nodes:
            answer_file(self._folder, stage, node).unlink(missing_ok=True)
        self.run(stage, nodes, *words)
        found: dict[str, Any] = {}
        deadline_s = time.monotonic() + FILES_LATE_S
        while len(found) < len(nodes):
            for node in nodes:
                with contextlib.suppress(OSError, ValueError):
                    found[node] = json.loads(answer_file(self._folder, stage, node).read_text(encoding="utf-8"))
            if len(found) < len(nodes) and time.monotonic() > deadline_s:
                missing = ", ".join(node for node in nodes if node not in found)
                raise ClusterError(f"what {missing} wrote into {self._folder} is not seen here")
            time.sleep(POLL_S)
        return found


def _end(step: subprocess.Popen[bytes]) -> None:
    if step.poll() is None:
        step.terminate()
        try:
            step.wait(timeout=ENDING_S)
        except subprocess.TimeoutExpired:
            step.kill()
            step.wait()


def _reason(said: str) -> str:
    """The line of a failed step that tells most: a task's own, not what Slurm says of its end."""
    lines = [line for line in said.splitlines() if line.strip()]
    own = [line for line in lines if not line.startswith(("srun: ", "slurmstepd: "))]
    errors = [line.partition("error: ")[2] for line in own if line.startswith("error: ")]
    return [*(errors[:1] or own[-1:] or lines[-1:]), "it failed"][0]


def stage_here(words: Sequence[str], into: Path, say: Say) -> list[str]:
    """The same on this machine alone, without Slurm.

    Raises:
        ConfigError, DataError, TokenizerError: the recipe or what it names is wrong.
    """
    plan = make_plan(words)
    chosen = choose_items(plan.items, {"this machine": room(plan.items, into)}, into, say)
    staged = proved_items(chosen, {"this machine": copy_items(chosen, into)}, say)
    return settings_of(plan, staged, into)


def _complain(line: str) -> None:
    sys.stderr.write(line + "\n")


def main() -> None:
    """By hand: copies, then prints the settings, one a line."""
    parser = argparse.ArgumentParser(prog="python -m ctxlm_ds.cluster.staging", description=__doc__)
    parser.add_argument("--into", type=Path, required=True, metavar="DIR", help="folder on this machine's own disk")
    parser.add_argument("--remove", action="store_true", help="remove all copies in it instead")
    parser.add_argument("--config", metavar="RECIPE", help="a path, or the name of a shipped recipe")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="change settings")
    arguments = parser.parse_args()
    if arguments.remove:
        remove_staged(arguments.into)
        return
    if arguments.config is None:
        raise ConfigError("--config is missing: a recipe's path or a shipped one's name")
    words = ["--config", arguments.config, *(["--set", *arguments.set] if arguments.set else [])]
    for setting in stage_here(words, arguments.into, _complain):
        sys.stdout.write(setting + "\n")


if __name__ == "__main__":
    from ctxlm_ds.console import run_command

    run_command(main)
