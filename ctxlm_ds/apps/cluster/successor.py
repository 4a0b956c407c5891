"""A job that continues this one on clusters that do not requeue: same script, arguments and resources.

It waits by --dependency=singleton: Slurm starts it when no job of this user and name is left before it. A job that
waits for this one (`--dependency=afterok:JOB`) would start, or be cancelled, when JOB itself ends; it is made to wait
for the successor instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ctxlm_ds.apps.cluster.job_context import JobContext, log
from ctxlm_ds.apps.cluster.slurm_commands import Job, call, cancel, insist, named, show_job
from ctxlm_ds.atomic import read_object, write_text
from ctxlm_ds.errors import ClusterError
from ctxlm_ds.process.lock_record import CHAIN_VARIABLE

RECORD_NAME = "successor.json"
# A script that runs the supervisor several times names what to submit again; arguments one per line.
SCRIPT_VARIABLE = "CTXLM_BATCH_SCRIPT"
ARGUMENTS_VARIABLE = "CTXLM_BATCH_ARGUMENTS"
# scontrol's field -> sbatch's option, for values that are passed on unchanged.
_OPTIONS = {
    "Partition": "--partition", "Account": "--account", "QOS": "--qos", "TimeLimit": "--time",
    "CPUs/Task": "--cpus-per-task", "Features": "--constraint", "Reservation": "--reservation",
    "ReqNodeList": "--nodelist", "Licenses": "--licenses", "Comment": "--comment", "WorkDir": "--chdir",
    "MinMemoryNode": "--mem", "MinMemoryCPU": "--mem-per-cpu",
}  # fmt: skip
_GPU_OPTIONS = {"TresPerJob": "--gpus", "TresPerTask": "--gpus-per-task", "TresPerSocket": "--gpus-per-socket"}
# `gres:gpu:a100:4`, in later versions `cpu=8,gres/gpu=4`
_GRES = re.compile(r"gres[:/]([^,]+)")
SEPARATOR = "\x1f"
_STATE = re.compile(r"\((?:unfulfilled|failed|fulfilled)\)")
_IDS = re.compile(r"(?<=:)(\d+)(?![\d_])")


class Successors:
    """The successor of one job; never more than one waits."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._submitted: str | None = None

    def submit(self, exclude: Iterable[str] = ()) -> str:
        """Make sure that one waits, and return its id. Raises ClusterError if Slurm refuses it."""
        context = self._context
        waiting = self._find(("PENDING",))
        if waiting is not None and not exclude:
            return waiting
        self.cancel()
        job = show_job(context.job_id)
        environ = context.environ
        arguments = list(context.arguments)
        if SCRIPT_VARIABLE in environ:
            script = environ[SCRIPT_VARIABLE]
            arguments = environ.get(ARGUMENTS_VARIABLE, "").splitlines()
        else:
            script = batch_script(job, arguments, context.run_dir)
        options = [*self._wait_by_name(job), *successor_options(job, environ)]
        # Slurm's form of a list is fine as one item of it.
        excluded = ",".join(filter(None, [job.given("ExcNodeList"), *exclude]))
        options += [f"--exclude={excluded}"] if excluded else []
        words = ["sbatch", *options, script, *arguments]
        new = call(words, successor_environment(environ, context.chain)).strip().split(";")[0]
        self._submitted = new
        write_text(context.run_dir / RECORD_NAME, json.dumps({"job_id": new, "after": context.job_id}) + "\n")
        move_dependants(named(context.job_id), new)
        return new

    def cancel(self, begun: bool = False) -> None:
        """Cancel the one that waits, if there is one; what waited for it waits for this job again.

        With `begun` also one that waits no more: Slurm may start it as soon as this job is cancelled, before this job's
        ranks have saved.
        """
        found = self._find(("PENDING", "CONFIGURING", "RUNNING") if begun else ("PENDING",))
        if found is None:
            return
        move_dependants(found, named(self._context.job_id))
        cancel(found)
        if self._recorded() == found:
            with contextlib.suppress(OSError):
                (self._context.run_dir / RECORD_NAME).unlink(missing_ok=True)
        log(f"successor {found} is cancelled")

    def _find(self, states: Sequence[str]) -> str | None:
        """Return the successor that this job submitted, now or before a requeue, if it is in one of these states."""
        new = self._recorded() or self._submitted
        try:
            return new if new is not None and show_job(new).state in states else None
        except ClusterError:
            return None

    def _recorded(self) -> str | None:
        """Read this job's successor from the file, which may hold the successor's successor by now."""
        record = read_object(self._context.run_dir / RECORD_NAME) or {}
        return str(record.get("job_id")) if str(record.get("after")) == self._context.job_id else None

    def _wait_by_name(self, job: Job) -> list[str]:
        """Return options for a successor's name and what it waits for.

        A singleton waits for every job of its name, so this job and its successor get a name that no job of another run
        has. Slurm renames no job that it has ended: then the successor waits for the job's id.
        """
        name = job.given("JobName")
        mark = f"-{zlib.crc32(str(self._context.run_dir.resolve()).encode()):08x}"
        if name.endswith(mark):
            return [f"--job-name={name}", "--dependency=singleton"]
        try:
            call(["scontrol", "update", f"jobid={named(job.job_id)}", f"jobname={name}{mark}"])
            return [f"--job-name={name}{mark}", "--dependency=singleton"]
        except ClusterError:
            return [f"--job-name={name}{mark}", f"--dependency=afterany:{named(job.job_id)}"]


def successor_options(job: Job, environ: Mapping[str, str]) -> list[str]:
    """Return sbatch's options that request a job's resources again, without its name and excluded nodes."""
    options = ["--parsable", "--requeue" if job.may_requeue else "--no-requeue"]
    options += [f"{option}={job.given(name)}" for name, option in _OPTIONS.items() if job.given(name)]
    of_nodes = [found.replace("=", ":") for found in _GRES.findall(job.given("TresPerNode"))]
    options += [f"--gres={','.join(of_nodes)}"] if of_nodes else []
    for name, option in _GPU_OPTIONS.items():
        options += [f"{option}={found[4:]}" for found in _GRES.findall(job.given(name)) if found.startswith("gpu")]
    # Slurm's record counts the nodes that are left.
    options.append(f"--nodes={environ.get('SLURM_JOB_NUM_NODES') or job.given('NumNodes')}")
    tasks_per_node, tasks = environ.get("SLURM_NTASKS_PER_NODE"), environ.get("SLURM_NTASKS") or job.given("NumTasks")
    options.append(f"--ntasks-per-node={tasks_per_node}" if tasks_per_node else f"--ntasks={tasks}")
    if job.given("OverSubscribe") == "NO":
        options.append("--exclusive")
    output = job.given("StdOut")
    if output:
        own_id = rf"(?<!\d){re.escape(job.job_id)}(?!\d)"
        options.append("--output=" + re.sub(own_id, "%j", output.replace("%", "%%")))
    return options


def successor_environment(environ: Mapping[str, str], chain: str) -> dict[str, str]:
    """Return the environment without the variables of this job."""
    of_job = {key for key in environ if key.startswith(("SLURM_", "SLURMD_", "SRUN_")) and key != "SLURM_CONF"}
    return {**{key: value for key, value in environ.items() if key not in of_job}, CHAIN_VARIABLE: chain}


def batch_script(job: Job, arguments: Sequence[str], folder: Path) -> str:
    """Return the job's script, or Slurm's copy if it no longer exists. Raises ClusterError without a copy."""
    command = job.given("Command")
    joined = " ".join(arguments)
    script = command[: -len(joined) - 1] if joined and command.endswith(f" {joined}") else command
    if script.startswith("/") and os.access(script, os.R_OK):
        return script
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / "job.sbatch"
    call(["scontrol", "write", "batch_script", named(job.job_id), str(copy)])
    return str(copy)


def move_dependants(old_id: str, new_id: str) -> None:
    """Let every pending job of this user that waits for one job wait for another.

    A job that ends or starts meanwhile is passed over. Raises ClusterError if Slurm does not answer.
    """
    words = ["squeue", "--noheader", "--states=PENDING", f"--user={os.getuid()}", f"--format=%A{SEPARATOR}%E"]
    for line in dict.fromkeys(insist(words).splitlines()):
        job_id, _, dependency = line.strip().partition(SEPARATOR)
        changed = moved_dependency(dependency, old_id, new_id)
        if changed is not None and job_id != new_id:
            with contextlib.suppress(ClusterError):
                insist(["scontrol", "update", f"jobid={job_id}", f"dependency={changed}"])


def moved_dependency(dependency: str, old_id: str, new_id: str) -> str | None:
    """Write squeue's `afterok:12(unfulfilled),afterok:3_*(unfulfilled)` for scontrol, with another id.

    Returns None if the old id is not in it.
    """
    plain = _STATE.sub("", dependency).replace("_*", "")
    ids = _IDS.findall(plain)
    if old_id not in ids:
        return None
    return _IDS.sub(lambda match: new_id if match[1] == old_id else match[1], plain)
