"""The folder where torch compiles DeepSpeed's operators, and locks that a killed process left in it.

torch.utils.cpp_extension keeps one folder per user, so that two environments in turn compile everything again at every
start; here each environment gets its own. torch guards each build by a file `lock` that it removes afterwards. A
process that is killed while it holds one leaves the file, and every later start would wait for it indefinitely. A lock
is stale if no process has it open and none works in its folder: compilers may outlive the process that started them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sys
import time
from glob import glob
from importlib import metadata
from pathlib import Path

from ctxlm_ds.console import logger
from ctxlm_ds.process.cgroups import read_text
from ctxlm_ds.process.run_lock import this_process

RELEASE_S = 0.5  # torch closes the file a moment before it removes it
COMPILERS_S = 900.0  # how long to wait for the compilers of a killed process
FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The machine's first namespace, a constant of Linux (PROC_PID_INIT_INO)."""
REMOTE_STALE_S = 900.0
"""Processes of other hosts that share the storage cannot be seen; no build takes this long."""
NETWORK_FILE_SYSTEMS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "fuse", "9p", "afs", "pvfs", "wekafs")


def use_own_build_folder() -> Path:
    """Give this environment a build folder (one per host on shared storage), or keep TORCH_EXTENSIONS_DIR.

    Call it before torch is imported.
    """
    # This environment's ninja: another version would take the builds for outdated and repeat them.
    own, others = Path(sys.executable).parent, os.environ.get("PATH", "").split(os.pathsep)
    if others[:1] != [str(own)]:
        os.environ["PATH"] = os.pathsep.join([str(own), *others])
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ctxlm_ds"
        parts = [sys.prefix, sys.version, metadata.version("torch"), metadata.version("deepspeed")]
        if _is_network_path(cache):
            parts.append(socket.gethostname())
        name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
        os.environ["TORCH_EXTENSIONS_DIR"] = str(cache / "torch_extensions" / name)
    return Path(os.environ["TORCH_EXTENSIONS_DIR"])


def clear_stale_build_locks(root: Path | None = None) -> list[Path]:
    """Remove the build locks that no live process holds, below `root` or this environment's folder; return them."""
    folder = root or use_own_build_folder()
    locks = [*folder.glob("*/lock"), *folder.glob("*/*/lock")]
    used = _paths_in_use() if locks else set()
    suspects = [path for path in locks if os.path.realpath(path) not in used and _old_enough(path)]
    if not suspects:
        return []
    end_s, announced = time.monotonic() + COMPILERS_S, False
    while True:
        time.sleep(RELEASE_S)
        used = _paths_in_use()
        busy = [str(path.parent) for path in suspects if os.path.realpath(path.parent) in used]
        if not busy or time.monotonic() > end_s:
            break
        if not announced:
            logger.info("waiting for the compilers that a killed process left in %s", ", ".join(busy))
        announced = True
    stale = [path for path in suspects if path.exists() and os.path.realpath(path) not in used and _old_enough(path)]
    for path in stale:
        path.unlink(missing_ok=True)
        logger.info("removed the stale build lock %s of a killed process", path)
    return stale


def _paths_in_use() -> set[str]:
    """Return the open files and working directories of this machine's processes, as far as this user may see."""
    used = set()
    # Unlike Path.glob, glob passes over processes that end meanwhile.
    for link in [*glob("/proc/[0-9]*/cwd"), *glob("/proc/[0-9]*/fd/*")]:
        with contextlib.suppress(OSError):
            used.add(os.readlink(link))
    return used


def _old_enough(path: Path) -> bool:
    """Return whether a lock may be removed by its age.

    It must be old on shared storage, where it may be another host's, and in a container, which does not see its host's
    processes.
    """
    if this_process().pid_namespace == FIRST_PID_NAMESPACE and not _is_network_path(path):
        return True
    try:
        return time.time() - path.stat().st_mtime > REMOTE_STALE_S
    except OSError:
        return False


def _is_network_path(path: Path) -> bool:
    """Return whether the path's mount is a network file system, by /proc/mounts."""
    target = os.path.realpath(path)
    best, kind = "", ""
    for line in read_text(Path("/proc/mounts")).splitlines():
        mount, mount_kind = line.split()[1:3]
        if len(mount) >= len(best) and (target == mount or target.startswith(mount.rstrip("/") + "/")):
            best, kind = mount, mount_kind
    return kind.startswith(NETWORK_FILE_SYSTEMS)
