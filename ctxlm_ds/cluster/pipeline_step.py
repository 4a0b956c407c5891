"""Inside the job of a step: check that its inputs are complete, run its commands, record what came of it.

    python -m ctxlm_ds.cluster.pipeline_step ORDER.json            what slurm/step.sbatch runs
    python -m ctxlm_ds.cluster.pipeline_step --begin ORDER.json    what slurm/pretrain.sbatch runs before its ranks

In: an order. Out: the outputs and the step's record. Needs the standard library alone (a container holds the rest).
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from ctxlm_ds.cluster.pipeline_outputs import join_fingerprints, need_fingerprint
from ctxlm_ds.cluster.pipeline_records import (
    BEGUN,
    DONE,
    FAILED,
    Need,
    Order,
    Record,
    own_log,
    read_order,
    read_record,
    record_path,
)
from ctxlm_ds.cluster.settings import JobSettings, read_settings
from ctxlm_ds.cluster.steps import wrap_in_container
from ctxlm_ds.console import format_duration
from ctxlm_ds.errors import EXIT_USER_ERROR, ClusterError, CtxlmError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: the job's exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    only_begin = words[:1] == ["--begin"]
    try:
        if len(words) != 1 + only_begin:
            raise ClusterError("give the order of one step; slurm/pipeline.sh writes and submits it")
        step = StepJob(read_order(Path(words[-1])), os.environ)
        step.begin()
        return 0 if only_begin else step.run()
    except CtxlmError as error:
        _show(f"error: {error}")
        return EXIT_USER_ERROR


def _show(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class StepJob:
    """One job of a step.

    Args:
        order: what to do.
        environ: the job's environment.
    """

    def __init__(self, order: Order, environ: Mapping[str, str]) -> None:
        self._order = order
        self._environ = environ
        self._task = int(environ.get("SLURM_ARRAY_TASK_ID") or 0) if len(order.tasks) > 1 else 0
        if self._task >= len(order.tasks):
            raise ClusterError(f"{order.step}: job {self._task} of an array of {len(order.tasks)}; submit it anew")
        self._outputs = order.tasks[self._task]
        self._path = record_path(order.folder, order.step, self._task, len(order.tasks))
        self._before = read_record(self._path)
        self._record: Record | None = None

    def begin(self) -> None:
        """Record the beginning.

        Raises:
            ClusterError: an input is not complete, or something stands where an output is to be.
        """
        needs = {need.step: self._fingerprint(need) for need in self._order.needs}
        self._refuse_what_others_made()
        self._record = Record(
            step=self._order.step, state=BEGUN, settings=self._order.settings, layout=self._order.layout,
            needs=needs, outputs=self._outputs, job_id=self._environ.get("SLURM_JOB_ID", ""), log=own_log(),
        )  # fmt: skip
        self._record.write(self._path)

    def _fingerprint(self, need: Need) -> str:
        """Of a step that must be complete: by what it has made, or by its record where it makes nothing."""
        content = need_fingerprint(need.outputs)
        if need.outputs:
            why = "; ".join(output.missing() for output in need.outputs if output.fingerprint() is None)
        else:
            record = read_record(record_path(self._order.folder, need.step, 0, 1))
            why = record.unfinished if record else "it has not run"
        if why or content is None:
            raise ClusterError(f"{self._order.step} needs {need.step}, which is not complete: {why}")
        return content

    def _refuse_what_others_made(self) -> None:
        """Outputs without a record are not this pipeline's."""
        strange = [output.path for output in self._outputs if output.is_exclusive and output.exists()]
        if self._before is None and strange:
            raise ClusterError(
                f"{', '.join(strange)}: there already, and not made by this pipeline; move it away, or choose another "
                "pipeline.output_dir"
            )

    def run(self) -> int:
        """The commands one after another; their exit status."""
        assert self._record is not None
        if self._was_finished():
            _show(f"{self._order.step}: made already by job {self._before.job_id if self._before else ''}")
            return self._done(0.0)
        started_s = time.monotonic()
        settings = read_settings(self._environ)
        for command in self._order.commands:
            _show(f"+ {command}")
            status = _call(command_words(command, settings), self._environ)
            if status != 0:
                return self._failed(status, f"ended with status {status}: {command}")
        return self._done(time.monotonic() - started_s)

    def _was_finished(self) -> bool:
        """Whether a job with this order was killed between its last command and its record. What appears whole at its
        place is finished; a tool that refuses to write it again must not be asked."""
        before, now = self._before, self._record
        assert now is not None
        same = before is not None and (before.settings, before.needs) == (now.settings, now.needs)
        whole = self._outputs and all(output.appears_whole for output in self._outputs)
        return bool(same and whole) and join_fingerprints(self._outputs) is not None

    def _done(self, seconds: float) -> int:
        assert self._record is not None
        content = join_fingerprints(self._outputs)
        if content is None and self._outputs:
            missing = "; ".join(output.missing() for output in self._outputs if output.fingerprint() is None)
            return self._failed(EXIT_USER_ERROR, f"ended with status 0, but {missing}")
        replace(self._record, state=DONE, content=content).write(self._path)
        _show(f"{self._order.step}: done in {format_duration(seconds)}")
        return 0

    def _failed(self, status: int, why: str) -> int:
        assert self._record is not None
        replace(self._record, state=FAILED, exit_status=status, why=why).write(self._path)
        _show(f"{self._order.step}: {why}")
        _show("mend it and run slurm/pipeline.sh again: it goes on from here")
        return status if 0 < status < 256 else 1


def command_words(command: str, settings: JobSettings) -> list[str]:
    """The words that run a line of shell: its first word `python` is the interpreter of slurm/env.sh, and a container
    holds it all where there is one."""
    in_container = bool(settings.container or settings.pyxis)
    python = settings.container_python if in_container else sys.executable
    options, inside = wrap_in_container(["bash", "-c", re.sub(r"^python(?= )", shlex.quote(python), command)], settings)
    return ["srun", "--nodes=1", "--ntasks=1", *options, *inside] if settings.pyxis else inside


def _call(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run words in a process group of their own, to which the job's signals are passed on; their exit status."""
    environ = dict(environ)
    if "SLURM_CPUS_PER_TASK" in environ:
        environ.setdefault("SRUN_CPUS_PER_TASK", environ["SLURM_CPUS_PER_TASK"])  # srun does not inherit it
    try:
        process = subprocess.Popen(list(words), env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
    except FileNotFoundError:
        raise ClusterError(f"{words[0]}: not found; load it in slurm/env.sh") from None

    def pass_on(number: int, frame: FrameType | None) -> None:
        try:
            os.killpg(process.pid, signal.SIGTERM)
        except ProcessLookupError:
            return

    for number in STOP_SIGNALS:
        signal.signal(number, pass_on)
    status = process.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
