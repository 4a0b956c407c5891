"""Checks an allocation before training: names bad nodes with the reason, and says how the job goes on without them.

In: the job's nodes and srun. Out: Outcome; RUN/attempts/ATTEMPT/preflight/ with every rank's record and report.json;
RUN/excluded_nodes.json. Needs the standard library only; the ranks' side is preflight_rank.py, run by srun. Nothing
here trusts a node: one that hangs, is cut off or sees another disk is named when its time is up.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import write_text
from ctxlm_ds.cluster.exclusions import (
    EXCLUDED_NAME,
    excluded_nodes,
    job_exclusions,
    partition_nodes,
    remember_excluded,
    srun_words,
)
from ctxlm_ds.cluster.preflight_judgement import (
    Evidence,
    Judgement,
    PreflightSettings,
    judge_bandwidth,
    judge_local,
    over_all_gb_per_s,
    read_settings,
    scratch_folder,
    table_lines,
)
from ctxlm_ds.errors import ClusterError
from ctxlm_ds.process.run_history import ATTEMPTS_DIR

LINE_MARK = "CTXLM_PREFLIGHT "
FOLDER_NAME = "preflight"
REPORT_NAME = "report.json"
POLL_S = 0.1
START_S = 60.0
"""What srun and the imports may take besides."""
MOST_ROUNDS = 7
FILES_LATE_S = 5.0
ENDING_S = 10.0

QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}

GO = "go"
REPLACE = "replace"
STOP = "stop"
INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class PreflightJob:
    """The job that is checked."""

    run_dir: Path
    attempt: str
    """Name of this start below RUN/attempts."""
    tasks: Mapping[str, int]
    """Tasks of each node, in the allocation's order; the batch script runs on the first one."""
    job_id: str
    partition: str | None = None
    srun: tuple[str, ...] = ("srun",)
    """srun and the options that every step of this site needs."""
    python: tuple[str, ...] = ("python3",)
    """What runs Python on a node, a container's words included."""

    @property
    def folder(self) -> Path:
        """Where the ranks leave their records."""
        return self.run_dir / ATTEMPTS_DIR / self.attempt / FOLDER_NAME


@dataclass(frozen=True)
class Outcome:
    """How the job goes on."""

    action: str
    """`go`: train. `replace`: back into the queue without `exclude`. `stop`: no use. `interrupted`: asked to stop."""
    why: str = ""
    exclude: tuple[str, ...] = ()
    """All nodes to keep away from, those that the job was submitted without included."""
    srun_words: tuple[str, ...] = ()
    """`go`: what training's srun needs to leave bad nodes out."""
    bad: Mapping[str, str] = field(default_factory=dict)
    """Nodes of this allocation that are out, with the reason."""


def run_preflight(
    job: PreflightJob,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Check the nodes, print a table, and decide.

    Args:
        environ: CTXLM_PREFLIGHT_*, CTXLM_STAGE_DIR, TMPDIR.
        say: prints a line.
        should_stop: whether a signal came meanwhile.

    Raises:
        ConfigError: a threshold makes no sense.
        ClusterError: srun does not start a task on any node.
        OSError: the run directory cannot be written here, or srun is missing.
    """
    settings = read_settings(environ)
    job.folder.mkdir(parents=True, exist_ok=True)
    judgement = Judgement(job.tasks, next(iter(job.tasks)))
    for node, why in excluded_nodes(job.run_dir).items():
        if node in job.tasks:
            judgement.blame(node, f"excluded earlier: {why} ({job.run_dir / EXCLUDED_NAME})")
    local = Evidence({})
    speed = None
    # A start without enough of its nodes is not worth a measurement.
    if not judgement.reasons or len(judgement.good()) >= _least_nodes(job, settings):
        say(f"preflight: {len(judgement.good())} nodes, {sum(job.tasks[node] for node in judgement.good())} tasks")
        local = _look_at_nodes(job, settings, environ, judgement, should_stop)
        judge_local(judgement, local, settings)
        good = judgement.good()
        if settings.bandwidth and sum(job.tasks[node] for node in good) > 1 and not should_stop():
            measured = _run_stage(job, settings, environ, "bandwidth", judgement, should_stop)
            judge_bandwidth(judgement, measured, settings)
            speed = over_all_gb_per_s(measured)
    if should_stop():
        return Outcome(INTERRUPTED, "a signal came during the preflight")
    _tell(judgement, local, speed, say)
    outcome = decide(job, judgement.bad(), settings)
    _record(job, judgement, local, outcome)
    return outcome


def decide(job: PreflightJob, bad: Mapping[str, str], settings: PreflightSettings) -> Outcome:
    """Go on with the good nodes if they are enough, else ask for others, if the partition has enough of them."""
    if not bad:
        return Outcome(GO)
    exclude = tuple(sorted({*bad, *excluded_nodes(job.run_dir), *job_exclusions(job.job_id)}))
    names = ", ".join(bad)
    good = [node for node in job.tasks if node not in bad]
    if good and len(good) >= _least_nodes(job, settings):
        words = tuple(srun_words(job.tasks, bad))
        return Outcome(GO, f"going on with {len(good)} of {len(job.tasks)} nodes, without {names}", exclude, words, bad)
    others = [node for node in partition_nodes(job.partition) if node not in exclude]
    if len(others) < len(job.tasks):
        where = f"partition {job.partition}" if job.partition else "the cluster"
        return Outcome(
            STOP, f"{names} cannot be used, and without {', '.join(exclude)} {where} has {len(others)} nodes where the "
            f"job needs {len(job.tasks)}; mend them and remove {job.run_dir / EXCLUDED_NAME}, submit with fewer nodes, "
            "or set CTXLM_PREFLIGHT_MIN_NODES in slurm/env.sh to go on with fewer", exclude, (), bad,
        )  # fmt: skip
    return Outcome(REPLACE, f"{names} cannot be used; asking Slurm for other nodes", exclude, (), bad)


def _least_nodes(job: PreflightJob, settings: PreflightSettings) -> int:
    return int(settings.min_nodes) or len(job.tasks)


def _tell(judgement: Judgement, local: Evidence, speed: float | None, say: Callable[[str], None]) -> None:
    for line in table_lines(judgement, local):
        say(line)
    if speed is not None:
        say(f"preflight: {speed:.3g} GB/s in a reduction over all ranks")
    for warning in judgement.warnings:
        say(f"preflight: warning: {warning}")
    for node, why in judgement.bad().items():
        say(f"preflight: {node} is bad: {why}")


def _record(job: PreflightJob, judgement: Judgement, local: Evidence, outcome: Outcome) -> None:
    """Keep what was found; a disk that refuses it must not keep the job from going on."""
    with contextlib.suppress(OSError):
        remember_excluded(job.run_dir, judgement.bad(), job.attempt)
    report = {
        "action": outcome.action,
        "why": outcome.why,
        "bad": judgement.bad(),
        "exclude": list(outcome.exclude),
        "warnings": judgement.warnings,
        "clock_s": judgement.clock_s,
        "gb_per_s": judgement.gb_per_s,
        "ranks": [dict(record) for record in local.records.values()],
    }
    with contextlib.suppress(OSError):
        write_text(job.folder / REPORT_NAME, json.dumps(report, indent=1) + "\n")


# A stage: srun on the nodes that are good so far


def _look_at_nodes(
    job: PreflightJob, settings: PreflightSettings, environ: Mapping[str, str], judgement: Judgement,
    should_stop: Callable[[], bool],
) -> Evidence:  # fmt: skip
    """Stage `local`. One node on which srun can start nothing ends the step everywhere: it is found and left out."""
    local = _run_stage(job, settings, environ, "local", judgement, should_stop)
    silent = [node for node in judgement.good() if not local.of(node)]
    if not silent or should_stop():
        return local
    refused = _cannot_start(job, settings, silent)
    if set(refused) == set(judgement.good()):
        raise ClusterError(f"srun cannot start a task on any node: {next(iter(refused.values()))}")
    for node, why in refused.items():
        judgement.blame(node, f"srun cannot start a task on it: {why}")
    return _run_stage(job, settings, environ, "local", judgement, should_stop) if refused else local


def _cannot_start(job: PreflightJob, settings: PreflightSettings, nodes: Iterable[str]) -> dict[str, str]:
    """Of some nodes, those on which srun cannot even start `true`, each with srun's last word."""
    steps = {}
    for node in nodes:
        words = ["--nodes=1", "--ntasks=1", f"--nodelist={node}", "--overlap", "--job-name=ctxlm-preflight", "true"]
        steps[node] = subprocess.Popen([*job.srun, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline_s = time.monotonic() + settings.limit_s
    refused = {}
    for node, step in steps.items():
        try:
            said = step.communicate(timeout=max(0.1, deadline_s - time.monotonic()))[1]
        except subprocess.TimeoutExpired:
            _end(step)
            said = f"no answer within {settings.limit_s:g} s".encode()
        if step.returncode != 0:
            lines = said.decode(errors="replace").strip().splitlines() or [f"status {step.returncode}"]
            refused[node] = lines[0].replace("srun: error: ", "")
    return refused


def _run_stage(
    job: PreflightJob, settings: PreflightSettings, environ: Mapping[str, str], stage: str, judgement: Judgement,
    should_stop: Callable[[], bool],
) -> Evidence:  # fmt: skip
    """Every rank's last record, from its output and its file."""
    good = judgement.good()
    tasks = {node: job.tasks[node] for node in good}
    limit_s = settings.limit_s if stage == "local" else settings.bandwidth_limit_s
    whole_s = START_S + (limit_s if stage == "local" else limit_s * sum(range(1, MOST_ROUNDS + 1)))
    command = [
        *job.srun, f"--nodes={len(tasks)}", f"--ntasks={sum(tasks.values())}", f"--nodelist={','.join(tasks)}",
        "--distribution=block", "--kill-on-bad-exit=0", "--overlap", "--job-name=ctxlm-preflight", *job.python, "-m",
        "ctxlm_ds.cluster.preflight_rank", str(job.folder), "--stage", stage, "--run-dir", str(job.run_dir),
        "--scratch", str(scratch_folder(environ)), "--limit", str(limit_s), "--mib", str(settings.mib),
    ]  # fmt: skip
    for leftover in job.folder.glob(f"{stage}-*.json"):
        leftover.unlink()
    with open(job.folder / f"{stage}.log", "wb") as errors:
        step = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env={**environ, **QUIET})
        lines = _LineReader(step)
        deadline_s = time.monotonic() + whole_s
        try:
            while step.poll() is None and time.monotonic() < deadline_s and not should_stop():
                time.sleep(POLL_S)
        finally:
            _end(step)
            lines.join()
    files = _read_files(job.folder, stage, tasks)
    return Evidence({**lines.records, **files}, frozenset(node for node, _ in files))


class _LineReader(threading.Thread):
    """Collects the records that the ranks print."""

    def __init__(self, step: subprocess.Popen[bytes]) -> None:
        super().__init__(name="preflight-reader", daemon=True)
        self.records: dict[tuple[str, int], dict[str, Any]] = {}
        self._step = step
        self.start()

    def run(self) -> None:
        for line in self._step.stdout or ():
            text = line.decode(errors="replace")
            if LINE_MARK in text:
                _keep(self.records, text.partition(LINE_MARK)[2])


def _keep(records: dict[tuple[str, int], dict[str, Any]], text: str) -> None:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        record = json.loads(text)
        records[(str(record["node"]), int(record["local_rank"]))] = record


def _read_files(folder: Path, stage: str, tasks: Mapping[str, int]) -> dict[tuple[str, int], dict[str, Any]]:
    """Records that the shared file system shows; it may be some seconds behind."""
    records: dict[tuple[str, int], dict[str, Any]] = {}
    deadline_s = time.monotonic() + FILES_LATE_S
    while time.monotonic() < deadline_s and len(records) < sum(tasks.values()):
        for path in folder.glob(f"{stage}-*.json"):
            with contextlib.suppress(OSError):
                _keep(records, path.read_text(encoding="utf-8"))
        time.sleep(POLL_S)
    return records


def _end(step: subprocess.Popen[bytes]) -> None:
    """End srun, which ends the tasks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if step.poll() is not None:
            return
        step.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            step.wait(timeout=ENDING_S)


def is_wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Whether slurm/env.sh asks for a preflight."""
    environ = os.environ if environ is None else environ
    return environ.get("CTXLM_PREFLIGHT", "0") not in ("", "0", "no", "false", "off")
