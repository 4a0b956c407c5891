"""One task of a preflight: `srun python -m ctxlm_ds.apps.cluster.preflight_rank RUN_DIR TOKEN`.

Out: the task's record as lines of its output, each replacing the last (by Slurm's connection, which works if storage or
network fails).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from ctxlm_ds.apps.cluster.settings import read_preflight
from ctxlm_ds.apps.cluster.srun import NODE_MARK
from ctxlm_ds.process.slurm import SlurmTask, expand_tasks, read_task

GB, MIB = 1e9, 1 << 20
TICKS, TICK_S, ITERATIONS, MOST_TURNS = 5, 0.05, 5, 4
NVIDIA_SMI = "nvidia-smi --query-gpu=name,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"
NVIDIA_SMI_S, DCGMI_S = 20.0, 60.0


def main() -> None:
    """Entry point of a task."""
    settings, task = read_preflight(os.environ), read_task(os.environ)
    run_dir, token = map(Path, sys.argv[1:])
    node = os.environ["SLURMD_NODENAME"]
    record: dict[str, Any] = {"node": node, "local_rank": task.local_rank, "faults": [], "gb_per_s": {}, "errors": {}}
    for _ in range(TICKS):  # the quickest line shows the clock
        publish(record)
        time.sleep(TICK_S)
    if task.local_rank == 0:
        look_at_node(record, settings, run_dir, token)
        publish(record)
    if settings["BANDWIDTH"] and task.world_size > 1:
        measure_reductions(record, settings, task)
    if task.local_rank == 0:
        # Without its service dcgmi checks nothing and ends with another error.
        lines = _ask("dcgmi diag -r 1", DCGMI_S).splitlines()
        record["faults"] += [f"dcgmi diag: {' '.join(line.split())}" for line in lines if "Fail" in line]
    publish({**record, "done": True})


def publish(record: Mapping[str, Any]) -> None:
    """Send the record to the batch script, with the time of this node's clock."""
    sys.stdout.write(NODE_MARK + json.dumps({**record, "sent_unix_s": time.time()}) + "\n")
    sys.stdout.flush()


def look_at_node(record: dict[str, Any], settings: Mapping[str, float], run_dir: Path, token: Path) -> None:
    """Record this node's faults, its GPUs, and its free disk and memory."""
    end_s = time.monotonic() + settings["LIMIT_S"]
    scratch = Path(os.environ.get("CTXLM_STAGE_DIR") or os.environ.get("TMPDIR") or "/tmp")
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())["MemAvailable"]
    record["free_gb"] = free_gb = {"memory": int(memory.split()[0]) * 1024 / GB}
    least_gb = {"memory": settings["MIN_MEMORY_GB"]}
    for name, folder, bound in (("run directory", run_dir, "MIN_RUN_GB"), ("scratch", scratch, "MIN_SCRATCH_GB")):
        least_gb[f"{name} {folder}"] = settings[bound]
        probe = folder / f".preflight-{record['node']}-{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open(probe, "wb") as file:
                file.write(os.urandom(MIB))
                file.flush()
                os.fsync(file.fileno())
            free_gb[f"{name} {folder}"] = shutil.disk_usage(folder).free / GB
        except OSError as error:
            record["faults"].append(f"{name} {folder} cannot be written: {error.strerror or error}")
        if os.path.lexists(probe):
            probe.unlink()
    for name, found_gb in free_gb.items():
        if found_gb < least_gb[name]:
            record["faults"].append(f"{name} has {found_gb:.2f} GB free, {least_gb[name]:g} are needed")
    record["gpus"] = look_at_gpus(settings["MIN_GPU_FREE"], record["faults"])
    while not token.exists() and time.monotonic() < end_s:
        time.sleep(TICK_S)
    if not token.exists():
        record["faults"].append(f"does not see what the batch script writes into the run directory ({token})")


def look_at_gpus(min_free: float, faults: list[str]) -> str:
    """Describe the node's GPUs (`8 x NVIDIA H100, 81559 MiB`): one that fell off the bus is missing."""
    kinds = []
    for number, line in enumerate(_ask(f"{NVIDIA_SMI} --format=csv,noheader,nounits", NVIDIA_SMI_S).splitlines()):
        name, total, used, errors = [*line.rsplit(", ", 3), "", "", ""][:4]
        if not total.isdigit():
            faults += [f"nvidia-smi: {line}"] if "No devices" not in line else []
            continue
        kinds.append(f"{name}, {total} MiB")
        if errors.isdigit() and int(errors) > 0:
            faults.append(f"GPU {number}: {errors} uncorrected ECC errors, 0 are allowed")
        if used.isdigit() and int(total) - int(used) < min_free * int(total):
            faults.append(f"GPU {number}: {used} of {total} MiB are in use, {min_free:g} of them must be free")
    return "; ".join(f"{kinds.count(kind)} x {kind}" for kind in sorted(set(kinds))) or "none"


def _ask(command: str, limit_s: float) -> str:
    try:
        done = subprocess.run(command.split(), capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return f"Fail: no answer within {limit_s:g} s"
    except OSError:
        return ""
    return done.stdout + done.stderr


def measure_reductions(record: dict[str, Any], settings: Mapping[str, float], task: SlurmTask) -> None:
    """Time all-reduces among this node's ranks, and with the equal local rank of each neighbour in a ring."""
    groups = groups_of(task, int(os.environ["SLURM_NODEID"]), expand_tasks(os.environ["SLURM_STEP_TASKS_PER_NODE"]))
    record["errors"] = {partner: "no answer" for _, partner, *_ in groups}
    publish(record)
    from torch.distributed import PrefixStore, TCPStore

    limit = timedelta(seconds=settings["BANDWIDTH_LIMIT_S"])
    try:
        store = TCPStore(task.hosts[0], task.port, is_master=task.rank == 0, timeout=limit, wait_for_workers=False)
        store.set(f"begun-{task.rank}", "")
    except Exception as error:
        others = [partner for partner in record["errors"] if partner != record["node"]]
        record["errors"] = {partner: f"{task.hosts[0]}: {str(error).partition(chr(10))[0][:200]}" for partner in others}
        return
    for turn, partner, name, rank, size in groups:
        try:
            own = PrefixStore(name, store)
            own.set_timeout(turn * limit)  # the partner may be late from an earlier turn
            speed = reduce(own, rank, size, task.local_rank, turn * limit, int(settings["MIB"] * MIB))
            record["gb_per_s"][partner] = speed
            del record["errors"][partner]
        except Exception as error:
            record["errors"][partner] = f"with {partner}: {str(error).partition(chr(10))[0][:200]}"
        publish(record)
    with contextlib.suppress(Exception):
        store.set(f"done-{task.rank}", "")
        if task.rank == 0:  # it has the store
            begun = [rank for rank in range(task.world_size) if store.check([f"begun-{rank}"])]
            store.wait([f"done-{rank}" for rank in begun], MOST_TURNS * limit)


def groups_of(task: SlurmTask, own: int, counts: Sequence[int]) -> list[tuple[int, str, str, int, int]]:
    """Return a task's groups by turn: turn, partner (or its own node), name, rank, size. A turn's are disjoint."""
    groups = [(1, task.hosts[own], f"node-{own}", task.local_rank, counts[own])] if counts[own] > 1 else []
    number = len(counts)
    for first in range(number if number > 2 else number - 1):
        second = (first + 1) % number
        turn = MOST_TURNS if second == 0 and number % 2 else 2 + first % 2
        if own in (first, second) and task.local_rank < min(counts[first], counts[second]):
            partner = task.hosts[second if own == first else first]
            groups.append((turn, partner, f"pair-{first}-{second}-{task.local_rank}", int(own == second), 2))
    return sorted(groups)


def reduce(store: Any, rank: int, size: int, local_rank: int, limit: timedelta, num_bytes: int) -> float:
    """Return the median GB/s of a group's all-reduces, counted as by nccl-tests. Raises torch.distributed's errors."""
    import torch
    from torch import distributed

    with_cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if with_cuda else torch.device("cpu")
    if with_cuda:
        torch.cuda.set_device(device)
    group = (distributed.ProcessGroupNCCL if with_cuda else distributed.ProcessGroupGloo)(store, rank, size, limit)
    values = torch.zeros(num_bytes // 4, device=device)
    times_s = []
    for _ in range(1 + ITERATIONS):
        start_s = time.perf_counter()
        group.allreduce([values]).wait()
        if with_cuda:
            torch.cuda.synchronize()
        times_s.append(time.perf_counter() - start_s)
    return 2 * (size - 1) / size * values.nbytes / statistics.median(times_s[1:]) / GB


if __name__ == "__main__":
    main()
