"""The lock of a run directory, or of another folder that one process fills: one live job each.

RUN/lock.json names the holder (host, process, job); its modification time is the heartbeat. It is created by a hard
link, which is atomic on every file system, NFS included. A dead holder is replaced: on the same host as soon as its
process has ended, on another host when its heartbeat stops. A job that Slurm has started again replaces its earlier
start even if that still runs on a node that Slurm has lost: cut off the network its heartbeat may continue. Exactly one
of several contenders wins, because the takeover of a lock is itself claimed by a hard link named after that lock's
token. Only rank 0 locks a run.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ctxlm_ds.atomic import PARTIAL_MARK
from ctxlm_ds.console import logger
from ctxlm_ds.errors import ConfigError, RunLockedError
from ctxlm_ds.process.cgroups import read_text
from ctxlm_ds.process.run_history import own_job_id
from ctxlm_ds.untrusted_json import open_regular, parse_json

LOCK_NAME = "lock.json"
LEFTOVERS = (f"*{PARTIAL_MARK}*", f"attempts/*/*{PARTIAL_MARK}*", f"{LOCK_NAME}.new-*")
"""Small files whose writers were killed."""
LEFT_AFTER_S = 3600.0
HEARTBEAT_S = 10.0
STALE_AFTER_S = 60.0
POLL_S = 0.5
HANDOVER_S = 2.0
HANDOVER_POLL_S = 0.05


class RunLock(contextlib.AbstractContextManager["RunLock"]):
    """The lock of one run directory, which is made if missing.

    `remedy` is advice of a refusal, in addition to waiting and stopping the holder; `on_loss` is called from the
    heartbeat's thread when another process has taken the lock over.
    """

    def __init__(
        self,
        run_dir: str | Path,
        stale_after_s: float = STALE_AFTER_S,
        heartbeat_s: float = HEARTBEAT_S,
        remedy: str = "choose another run_dir",
        on_loss: Callable[[], None] | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self._path = self.run_dir / LOCK_NAME
        self._stale_after_s = stale_after_s
        self._heartbeat_s = heartbeat_s
        self._remedy = remedy
        self._on_loss = on_loss
        self._record = this_process()
        self._taken = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost = False
        self._first_seen_s: dict[tuple[str, float], float] = {}
        """By token and heartbeat, by the monotonic clock of this process."""

    def acquire(self, wait_s: float = 0.0) -> RunLock:
        """Take the lock, waiting at most `wait_s` for a live holder. Raises RunLockedError if it is still held then."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._record = this_process()
        self._lost = False
        start_s = time.monotonic()
        announced = False
        while not self._take(self._path):
            holder = look_at_lock(self._path)
            waited_s = time.monotonic() - start_s
            if waited_s >= max(wait_s, self._patience_s(holder)):
                raise RunLockedError(self._refusal(holder, wait_s))
            if not announced:
                announced = True
                logger.info("waiting for %s, held by %s", self.run_dir, self.describe_holder())
            time.sleep(POLL_S if waited_s > HANDOVER_S else min(POLL_S, HANDOVER_POLL_S))
        self._taken = True
        for pattern in LEFTOVERS:
            for path in self.run_dir.glob(pattern):
                with contextlib.suppress(OSError):
                    if time.time() - path.stat().st_mtime > LEFT_AFTER_S:
                        path.unlink()
        self._stop.clear()
        self._thread = threading.Thread(target=self._beat, name="run-lock-heartbeat", daemon=True)
        self._thread.start()
        atexit.register(self.release)
        return self

    @property
    def held(self) -> bool:
        """Whether this process holds the lock, as far as the last heartbeat knows."""
        return self._taken and not self._lost and self._record.pid == os.getpid()

    @property
    def token(self) -> str:
        """The identifier of this lock in RUN/lock.json."""
        return self._record.token

    def check(self) -> None:
        """Raise RunLockedError if another job took the lock over (this process was suspended), or it was released."""
        if self.held:
            self._confirm()
        if not self.held:
            raise RunLockedError(
                f"{self.run_dir} is no longer locked by this process, but by "
                f"{self.describe_holder()}; this process must not write there and stops"
            )

    def describe_holder(self) -> str:
        """Return who holds the lock now, for a message."""
        return (look_at_lock(self._path) or LockRecord()).describe()

    def release(self) -> None:
        """Give the lock back; safe to call twice, and without effect in a forked child."""
        if not self._taken or self._record.pid != os.getpid():
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if _has_token(self._path, self._record.token):
            self._path.unlink(missing_ok=True)
        self._taken = False
        atexit.unregister(self.release)

    def __exit__(self, *_: object) -> None:
        self.release()

    def _take(self, path: Path) -> bool:
        """Make a lock file this process's; return False if somebody has it."""
        holder = look_at_lock(path)
        if holder is None:
            return self._link_own(path)
        return self._is_dead(holder) and self._take_over(path, holder)

    def _take_over(self, path: Path, dead: LockRecord) -> bool:
        """Replace a dead holder's lock file, unless a contender is faster.

        The process that takes the claim file of token T, likewise, may replace the file with token T.
        """
        claim = path.with_name(f"{LOCK_NAME}.claim-{dead.token}")
        if not self._take(claim):
            return False
        if not _has_token(path, dead.token):
            claim.unlink(missing_ok=True)
            return False
        os.replace(claim, path)
        if path == self._path:
            self._taken = True
            lives = not self._is_gone(dead)
            state = "which Slurm has given up" if lives else "which has ended"
            logger.warning("taking over %s from %s, %s", self.run_dir, dead.describe(), state)
            if lives:
                # It may still write, until its next heartbeat.
                time.sleep(1.5 * self._heartbeat_s)
        return True

    def _link_own(self, target: Path) -> bool:
        """Create `target` atomically with this process's record; return False if it exists."""
        aside = self._path.with_name(f"{LOCK_NAME}.new-{self._record.token}")
        try:
            with open(aside, "w", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self._record), indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
                try:
                    os.link(aside, target)
                except FileExistsError:
                    # NFS may report failure for a link that was made; the count of links shows it.
                    return os.fstat(file.fileno()).st_nlink == 2
        finally:
            aside.unlink(missing_ok=True)
        return True

    def _is_dead(self, holder: LockRecord) -> bool:
        """Return whether the holder has ended, or Slurm started this process because the holder's node is lost."""
        if not holder.token or self._is_gone(holder):
            return bool(holder.token)
        return not holder.same_machine(self._record) and holder.is_succeeded_by(self._record)

    def _is_gone(self, holder: LockRecord) -> bool:
        if holder.same_machine(self._record):
            return holder.has_ended()
        now_s = time.monotonic()
        still_s = now_s - self._first_seen_s.setdefault((holder.token, holder.heartbeat_unix_s), now_s)
        return still_s >= self._stale_after_s or (
            holder.age_s > self._stale_after_s and still_s > 1.5 * self._heartbeat_s
        )

    def _patience_s(self, holder: LockRecord | None) -> float:
        """Return how long to watch the holder even if no wait is allowed."""
        if holder is None or (holder.same_machine(self._record) and self._is_dead(holder)):
            # Another contender is faster.
            return HANDOVER_S
        # Clocks may differ: an old heartbeat of another machine is watched for a while.
        is_old = holder.token and not holder.same_machine(self._record) and holder.age_s > self._stale_after_s
        return 2 * self._heartbeat_s if is_old else 0.0

    def _refusal(self, holder: LockRecord | None, wait_s: float) -> str:
        waited = f" after waiting {wait_s:.0f} s" if wait_s else ""
        if holder is None:
            return f"{self.run_dir} is being locked by another process{waited}; start again in a moment"
        if not holder.token:
            return (
                f"{self._path} is not a lock this program wrote{waited}; if no job uses {self.run_dir}, remove the file"
            )
        of_another_job = holder.job_id not in (None, self._record.job_id)
        stop = f"scancel {holder.job_id}" if of_another_job else f"kill {holder.pid} on {holder.host}"
        age_s = max(0.0, holder.age_s)
        return (
            f"{self.run_dir} is in use by {holder.describe()}, last heartbeat {age_s:.0f} s "
            f"ago{waited}. Wait until it ends, stop it ({stop}), or {self._remedy}"
        )

    def _beat(self) -> None:
        failing = False
        while not self._lost and not self._stop.wait(self._heartbeat_s):
            try:
                self._confirm()
                if not self._lost:
                    os.utime(self._path)
                failing = False
            except OSError as error:
                if not failing:
                    logger.warning("heartbeat of %s fails until this is fixed: %s", self._path, error)
                failing = True
        if self._lost and self._on_loss is not None:
            self._on_loss()

    def _confirm(self) -> None:
        """Notice a takeover; restore the file if it was merely removed."""
        if _has_token(self._path, self._record.token):
            return
        if look_at_lock(self._path) is None and self._link_own(self._path):
            return
        self._lost = True
        logger.error("%s was taken over by %s", self.run_dir, self.describe_holder())


def _has_token(path: Path, token: str) -> bool:
    holder = look_at_lock(path)
    return holder is not None and holder.token == token


def make_run_dir(run_dir: Path) -> Path:
    """Create a run directory and return it; ConfigError if it cannot be created or written."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "not a folder" if isinstance(error, FileExistsError) else (error.strerror or str(error)).lower()
        raise ConfigError(f"run_dir {run_dir} cannot be created: {reason}; set run_dir to another folder") from error
    if not os.access(run_dir, os.W_OK | os.X_OK):
        raise ConfigError(f"run_dir {run_dir} is not writable; set run_dir to another folder")
    return run_dir


MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class LockRecord:
    """The holder of a run directory, as its lock file names it; without a token if that is no such file."""

    token: str = ""
    host: str = ""
    pid: int = 0
    process_start_ticks: int = 0  # start time of the process since boot, which distinguishes a reused pid
    boot_id: str = ""
    pid_namespace: str = ""  # a pid is valid within one boot and one pid namespace (a container has its own)
    job_id: str | None = None
    restart_count: int = 0  # how often Slurm had put the job back into the queue
    heartbeat_unix_s: float = 0.0  # the last one: the file's time; in the file, when the lock was taken

    @property
    def age_s(self) -> float:
        """Seconds since the last heartbeat."""
        return time.time() - self.heartbeat_unix_s

    def describe(self) -> str:
        job = f" (Slurm job {self.job_id})" if self.job_id else ""
        return f"process {self.pid} on {self.host}{job}" if self.token else "another process"

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


def look_at_lock(path: Path) -> LockRecord | None:
    """Read a lock file; None if there is none. Raises OSError if it cannot be read."""
    try:
        # Opened, so that a network file system asks its server for the time of the last heartbeat.
        with open_regular(path) as handle:
            heartbeat_unix_s = os.fstat(handle.fileno()).st_mtime
            values = {**parse_json(handle.read(MOST_BYTES)), "heartbeat_unix_s": heartbeat_unix_s}
        # Earlier versions wrote further values.
        record = LockRecord(**{field.name: values[field.name] for field in fields(LockRecord)})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        return LockRecord(heartbeat_unix_s=heartbeat_unix_s)
    kinds = {field.name: type(field.default) for field in fields(LockRecord)} | {"job_id": (str, type(None))}
    is_sound = all(isinstance(value, kinds[name]) for name, value in vars(record).items())
    return record if is_sound else LockRecord(heartbeat_unix_s=heartbeat_unix_s)


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
        job_id=own_job_id(),
        restart_count=int(os.environ.get("SLURM_RESTART_COUNT") or "0"),
        heartbeat_unix_s=time.time(),
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
