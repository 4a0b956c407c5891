"""What a pipeline keeps in OUTPUT/steps: the order of each step (what its job is to do) and its record (what was done).

    NAME.order.json                what the job runs, written when it is submitted
    NAME.json                      the stamp: settings, and the content of inputs and outputs, as of when it was made
    NAME.00003-of-00016.json       the same of one job of an array
    NAME.yaml                      the recipe of a pretraining step

Written atomically. Needs the standard library alone: a job reads and writes them outside of a container.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import write_text
from ctxlm_ds.cluster.pipeline_outputs import Output, outputs_from_json, outputs_to_json
from ctxlm_ds.errors import ClusterError

VERSION = 1
STEPS_DIR = "steps"
LOGS_DIR = "logs"
ORDER_VARIABLE = "CTXLM_PIPELINE_ORDER"
"""Tells slurm/pretrain.sbatch the order of its step."""
BEGUN, DONE, FAILED = "begun", "done", "failed"


@dataclass(frozen=True)
class Need:
    """A step whose outputs another one reads."""

    step: str
    outputs: tuple[Output, ...]


@dataclass(frozen=True)
class Order:
    """What the job of a step is to do, and what it goes by."""

    step: str
    folder: Path
    """OUTPUT."""
    commands: tuple[str, ...]
    """Lines of shell; none where slurm/pretrain.sbatch does it."""
    settings: Mapping[str, Any]
    """All that decides the content of the outputs, beside the needs."""
    layout: Mapping[str, Any]
    """How it is made, which the content does not depend on."""
    needs: tuple[Need, ...]
    tasks: tuple[tuple[Output, ...], ...]
    """Outputs of each job of the array; of the one job."""

    @property
    def path(self) -> Path:
        """NAME.order.json."""
        return self.folder / STEPS_DIR / f"{self.step}.order.json"

    def write(self) -> None:
        """Where the job looks for it."""
        content = {
            **asdict(self),
            "version": VERSION,
            "folder": str(self.folder),
            "needs": [{"step": need.step, "outputs": outputs_to_json(need.outputs)} for need in self.needs],
            "tasks": [outputs_to_json(outputs) for outputs in self.tasks],
        }
        write_text(self.path, json.dumps(content, indent=1) + "\n")


def read_order(path: Path) -> Order:
    """An order as its job finds it.

    Raises:
        ClusterError: it is missing or no order.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Order(
            step=content["step"],
            folder=Path(content["folder"]),
            commands=tuple(content["commands"]),
            settings=content["settings"],
            layout=content["layout"],
            needs=tuple(Need(need["step"], outputs_from_json(need["outputs"])) for need in content["needs"]),
            tasks=tuple(outputs_from_json(outputs) for outputs in content["tasks"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ClusterError(f"{path}: no order of a step ({error}); submit it with slurm/pipeline.sh") from error


@dataclass(frozen=True)
class Record:
    """What is known of a step, or of one job of its array, since it last began."""

    step: str
    state: str
    settings: Mapping[str, Any]
    layout: Mapping[str, Any]
    needs: Mapping[str, str]
    """Fingerprints of the outputs of the steps that it is made from, when it began."""
    outputs: tuple[Output, ...]
    content: str | None = None
    """Fingerprint of the outputs when it was done."""
    job_id: str = ""
    log: str | None = None
    exit_status: int | None = None
    why: str = ""
    """Of a failure."""
    host: str = field(default_factory=socket.gethostname)
    time_unix_s: float = field(default_factory=lambda: round(time.time(), 3))

    @property
    def unfinished(self) -> str:
        """Why it is not done; empty where it is."""
        return "" if self.state == DONE else self.why or "begun, not finished"

    def write(self, path: Path) -> None:
        """Replace what is there."""
        content = {**asdict(self), "version": VERSION, "outputs": outputs_to_json(self.outputs)}
        write_text(path, json.dumps(content, indent=1) + "\n")


def record_path(folder: Path, step: str, task: int, num_tasks: int) -> Path:
    """Where the record of a step lies, or of one job of its array."""
    suffix = f".{task:05d}-of-{num_tasks:05d}" if num_tasks > 1 else ""
    return folder / STEPS_DIR / f"{step}{suffix}.json"


def read_record(path: Path) -> Record | None:
    """A record; None where there is none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("version") != VERSION:
            return None
        return Record(**{**content, "outputs": outputs_from_json(content["outputs"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def all_records(folder: Path, step: str) -> dict[Path, Record]:
    """Every record of a step, those of an array of another size too."""
    paths = [folder / STEPS_DIR / f"{step}.json", *sorted((folder / STEPS_DIR).glob(f"{step}.*-of-*.json"))]
    found = {path: read_record(path) for path in paths}
    return {path: record for path, record in found.items() if record is not None}


def own_log() -> str | None:
    """The file that this process's output goes to; None for a terminal or a pipe."""
    try:
        path = os.readlink("/proc/self/fd/1")
    except OSError:
        return None
    return path if os.path.isfile(path) else None
