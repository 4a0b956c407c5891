"""The holder of a run directory, as RUN/lock.json names it: a process, its machine, its job."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from dataclasses import dataclass, fields
from pathlib import Path

from ctxlm_ds.process.cgroups import read_text
from ctxlm_ds.untrusted_json import open_regular

MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class LockRecord:
    """The holder of a run directory."""

    token: str
    host: str
    pid: int
    process_start_ticks: int  # start time of the process since boot, which distinguishes a reused pid
    boot_id: str
    pid_namespace: str  # a pid is valid within one boot and one pid namespace (a container has its own)
    job_id: str | None
    acquired_unix_s: float
    restart_count: int = 0  # how often Slurm had put the job back into the queue

    def describe(self) -> str:
        job = f" (Slurm job {self.job_id})" if self.job_id else ""
        return f"process {self.pid} on {self.host}{job}"

    def same_machine(self, other: LockRecord) -> bool:
        """Return whether both processes see the same process table."""
        mine, theirs = (self.host, self.boot_id, self.pid_namespace), (other.host, other.boot_id, other.pid_namespace)
        return mine == theirs and "" not in mine

    def has_ended(self) -> bool:
        """Return whether the process has ended; only for a record of this machine."""
        return process_start_ticks(self.pid) != self.process_start_ticks

    def is_succeeded_by(self, other: LockRecord) -> bool:
        """Return whether Slurm ended this start of a job (as far as it could) before it started the other."""
        return self.job_id is not None and self.job_id == other.job_id and self.restart_count < other.restart_count


@dataclass(frozen=True)
class ObservedLock:
    """A lock file as one look found it."""

    record: LockRecord | None  # None if the file is not a lock record
    heartbeat_unix_s: float

    @property
    def age_s(self) -> float:
        """Seconds since the last heartbeat."""
        return time.time() - self.heartbeat_unix_s


def look_at_lock(path: Path) -> ObservedLock | None:
    """Read a lock file; None if there is none. Raises OSError if it cannot be read."""
    try:
        # Opened, so that a network file system asks its server for the time of the last heartbeat.
        with open_regular(path) as handle:
            heartbeat_unix_s = os.fstat(handle.fileno()).st_mtime
            values = json.loads(handle.read(MOST_BYTES))
            # Earlier versions wrote further values.
            record = LockRecord(**{field.name: values[field.name] for field in fields(LockRecord)})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, RecursionError):
        return ObservedLock(None, heartbeat_unix_s)
    numbers = (record.pid, record.acquired_unix_s, record.restart_count)
    whole = all(isinstance(number, (int, float)) for number in numbers) and isinstance(record.job_id, (str, type(None)))
    return ObservedLock(record if whole else None, heartbeat_unix_s)


def this_process() -> LockRecord:
    """Return a record of the calling process, with a new token."""
    pid_namespace = ""
    with contextlib.suppress(OSError):
        pid_namespace = os.readlink("/proc/self/ns/pid")
    return LockRecord(
        token=uuid.uuid4().hex,
        host=socket.gethostname(),
        pid=os.getpid(),
        process_start_ticks=process_start_ticks(os.getpid()) or 0,
        boot_id=read_text(Path("/proc/sys/kernel/random/boot_id")).strip(),
        pid_namespace=pid_namespace,
        job_id=os.environ.get("SLURM_JOB_ID"),
        acquired_unix_s=time.time(),
        restart_count=int(os.environ.get("SLURM_RESTART_COUNT") or "0"),
    )


def process_start_ticks(pid: int) -> int | None:
    """Return the clock ticks since boot at which a process started; None if it has ended or is a zombie."""
    fields = process_fields(pid)
    return int(fields[19]) if fields else None


def process_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the process's state on; empty if it has ended or is a zombie."""
    # The command name may hold spaces and brackets; the fields after its last bracket do not.
    fields = read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return fields if fields and fields[0] not in "ZXx" else []
