"""One task's part of a preflight: `srun python -m ctxlm_ds.cluster.preflight_rank FOLDER ...`.

In: srun's variables. Out: what this rank sees of its node, once as FOLDER/local-NODE-003.json (the shared file system)
and once as a line of its output (Slurm's own connection), so that a node whose storage or network fails can still be
told from a dead one. Stage `local` needs neither torch nor the network, `bandwidth` (preflight_network.py) both.
Not here: what is good enough (preflight_judgement.py).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import write_text
from ctxlm_ds.cluster.preflight_network import ClockServer, measure_clock
from ctxlm_ds.process.slurm import SlurmTask, read_task

LINE_MARK = "CTXLM_PREFLIGHT "
TOKEN_NAME = "shared-token"
PROBE_BYTES = 1 << 20
POLL_S = 0.05
CONNECT_S = 5.0
NVIDIA_SMI_S = 20.0
PACKAGES = ("torch", "deepspeed", "numpy", "ctxlm_ds")


def rank_file(folder: Path, stage: str, node: str, local_rank: int) -> Path:
    """Where a rank leaves what it saw."""
    return folder / f"{stage}-{node}-{local_rank:03d}.json"


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of a task."""
    parser = argparse.ArgumentParser(prog="python -m ctxlm_ds.cluster.preflight_rank")
    parser.add_argument("folder", type=Path, help="shared folder of this preflight")
    parser.add_argument("--stage", choices=("local", "bandwidth"), required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--limit", type=float, required=True, help="seconds for the stage, or for each of its rounds")
    parser.add_argument("--mib", type=float, default=64.0, help="size of a reduction")
    arguments = parser.parse_args(argv)
    task = read_task(os.environ)
    if arguments.stage == "bandwidth":
        from ctxlm_ds.cluster.preflight_network import measure_bandwidth

        for record in measure_bandwidth(task, arguments.limit, int(arguments.mib * (1 << 20))):
            publish(arguments.folder, "bandwidth", task, record)
        return
    for record in look_around(task, arguments):
        publish(arguments.folder, "local", task, record)


def publish(folder: Path, stage: str, task: SlurmTask, record: dict[str, Any]) -> None:
    """Tell it both ways; a later record of the rank replaces an earlier one."""
    node = node_name()
    place = {"stage": stage, "node": node, "rank": task.rank, "local_rank": task.local_rank}
    record = {**place, "time_unix_s": round(time.time(), 3), **record}
    sys.stdout.write(f"{LINE_MARK}{json.dumps(record)}\n")
    sys.stdout.flush()
    # Storage that fails is the finding, not an error: the line above names the node.
    with contextlib.suppress(OSError):
        write_text(rank_file(folder, stage, node, task.local_rank), json.dumps(record, indent=1) + "\n")


def node_name(environ: Mapping[str, str] | None = None) -> str:
    """This node as Slurm calls it."""
    environ = os.environ if environ is None else environ
    return environ.get("SLURMD_NODENAME") or platform.node().partition(".")[0]


def look_around(task: SlurmTask, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What this rank sees: at once without the others, then with their files, then with their ports."""
    deadline_s = time.monotonic() + arguments.limit
    first = task.local_rank == 0
    server = ClockServer() if first else None
    record: dict[str, Any] = {
        "world_size": task.world_size,
        "versions": versions(),
        "gpus": visible_gpus(os.environ),
        "port": server.port if server else None,
    }
    if first:
        record["run_dir"] = probe_folder(arguments.run_dir)
        record["scratch"] = probe_folder(arguments.scratch)
        record["gpus_present"] = present_gpus()
    if task.rank == 0:
        with contextlib.suppress(OSError):
            write_text(arguments.folder / TOKEN_NAME, secrets.token_hex(8))
    yield record
    if not first:
        return
    record["sees_shared_file"] = wait_for_file(arguments.folder / TOKEN_NAME, deadline_s)
    yield record
    if record["sees_shared_file"] and len(task.hosts) > 1:
        record["peers"] = ask_peers(task, arguments.folder, deadline_s)
        record["asked_all"] = True
        yield record
        # Others may still be asking this node.
        wait_until_asked(task, arguments.folder, deadline_s)


def versions() -> dict[str, str]:
    """Of Python and what training needs, without importing any of it; an editable install tells its place too."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    spec = importlib.util.find_spec("ctxlm_ds")
    if found["ctxlm_ds"] == "missing" and spec is not None:
        found["ctxlm_ds"] = "checkout"
    return found


def visible_gpus(environ: Mapping[str, str]) -> int | None:
    """GPUs that Slurm gave this task; None where it says nothing."""
    given = environ.get("CUDA_VISIBLE_DEVICES") or environ.get("ROCR_VISIBLE_DEVICES")
    return len([name for name in given.split(",") if name.strip()]) if given else None


def present_gpus() -> int | None:
    """GPUs that the driver answers for; None without NVIDIA's tools. A GPU that fell off the bus is missing here."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False
        )
    except FileNotFoundError:
        return None
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len([line for line in done.stdout.splitlines() if line.startswith("GPU ")]) if done.returncode == 0 else 0


def probe_folder(folder: Path) -> dict[str, Any]:
    """Free bytes, and the error of really writing a file there (None where all is well)."""
    probe = folder / f".preflight-{node_name()}-{os.getpid()}"
    result: dict[str, Any] = {"path": str(folder), "free_bytes": None, "error": None}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        status = os.statvfs(folder)
        result["free_bytes"] = status.f_bavail * status.f_frsize
        with open(probe, "wb") as file:
            file.write(os.urandom(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        result["error"] = error.strerror or str(error)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return result


def wait_for_file(path: Path, deadline_s: float) -> bool:
    """Whether a file that another node wrote appears in time."""
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):
            if path.read_text(encoding="utf-8"):
                return True
        time.sleep(POLL_S)
    return False


def peers_of(index: int, count: int) -> list[int]:
    """Nodes that a node asks: the first one, for the clock, and those 1, 2, 4, 8 ... further on, in a ring."""
    steps = [1 << power for power in range(max(1, (count - 1).bit_length()))]
    return sorted({0, *((index + step) % count for step in steps)} - {index})


def ask_peers(task: SlurmTask, folder: Path, deadline_s: float) -> dict[str, dict[str, Any]]:
    """Round trip and clock offset, or the error, by peer; peers that never came up are left out."""
    index = task.hosts.index(node_name())
    waiting = {task.hosts[peer] for peer in peers_of(index, len(task.hosts))}
    found: dict[str, dict[str, Any]] = {}
    while waiting and time.monotonic() < deadline_s:
        for host in sorted(waiting):
            record = read_record(rank_file(folder, "local", host, 0))
            if record is not None:
                waiting.discard(host)
                found[host] = ask(host, int(record["port"]), deadline_s)
        time.sleep(POLL_S)
    return found


def ask(host: str, port: int, deadline_s: float) -> dict[str, Any]:
    """One peer's figures, or its error."""
    timeout_s = max(0.5, min(CONNECT_S, deadline_s - time.monotonic()))
    try:
        trip = measure_clock(host, port, timeout_s)
    except OSError as error:
        return {"error": f"{host}: {error.strerror or error}"}
    return {"round_trip_s": trip.round_trip_s, "offset_s": trip.offset_s}


def wait_until_asked(task: SlurmTask, folder: Path, deadline_s: float) -> None:
    """Until every node has asked its peers, or the time is up."""
    waiting = set(task.hosts)
    while waiting and time.monotonic() < deadline_s:
        records = {host: read_record(rank_file(folder, "local", host, 0)) or {} for host in waiting}
        waiting = {host for host, record in records.items() if not record.get("asked_all")}
        time.sleep(POLL_S)


def read_record(path: Path) -> dict[str, Any] | None:
    """A rank's file; None while it is not there."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


if __name__ == "__main__":
    main()
