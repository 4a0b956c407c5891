"""The folder where torch compiles DeepSpeed's operators, and locks that a killed process left in it.

torch.utils.cpp_extension keeps one folder a user, so that two environments in turn compile everything anew at every
start; each gets one of its own here. It guards each build by a file `lock` that it removes afterwards; a process killed
while it holds one leaves the file, and every later start waits for it without end. A lock that no process has open is
stale.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import sys
import time
from importlib import metadata
from pathlib import Path

logger = logging.getLogger("ctxlm_ds")

RELEASE_S = 0.5
"""torch closes the file a moment before it removes it."""
FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""That of the machine itself, a constant of Linux (PROC_PID_INIT_INO)."""
REMOTE_STALE_S = 900.0
"""On storage that other hosts share, their processes cannot be seen; no build takes this long."""
NETWORK_FILE_SYSTEMS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "fuse", "9p", "afs", "pvfs", "wekafs")


def use_own_build_folder() -> Path:
    """Let this environment compile into a folder of its own (one a host on shared storage); call it before torch.

    A folder that a person named in TORCH_EXTENSIONS_DIR stays.
    """
    # This environment's ninja, not another version that takes what it built for outdated and builds it anew.
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
    """Remove the build locks that no live process holds; what was removed.

    Args:
        root: the build folder; None is this environment's.
    """
    folder = root or use_own_build_folder()
    locks = {path: _inode(path) for path in [*folder.glob("*/lock"), *folder.glob("*/*/lock")]}
    suspects = [path for path in _not_open(list(locks)) if _old_enough(path)]
    if not suspects:
        return []
    time.sleep(RELEASE_S)
    stale = [path for path in _not_open(suspects) if locks[path] is not None and _inode(path) == locks[path]]
    for path in stale:
        path.unlink(missing_ok=True)
        logger.info("removed the stale build lock %s of a killed process", path)
    return stale


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _not_open(paths: list[Path]) -> list[Path]:
    """Those of `paths` that no process of this machine has open (as far as this user may see)."""
    wanted = {os.path.realpath(path): path for path in paths}
    if not wanted:
        return []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for handle in os.scandir(process / "fd"):
                wanted.pop(os.readlink(handle.path), None)
        except OSError:
            continue
    return list(wanted.values())


def _old_enough(path: Path) -> bool:
    """A lock on shared storage may be another host's, and a container does not see its host's processes: it must also
    be old there."""
    if _sees_all_processes() and not _is_network_path(path):
        return True
    try:
        return time.time() - path.stat().st_mtime > REMOTE_STALE_S
    except OSError:
        return False


def _sees_all_processes() -> bool:
    try:
        return os.readlink("/proc/self/ns/pid") == FIRST_PID_NAMESPACE
    except OSError:
        return False


def _is_network_path(path: Path) -> bool:
    """Whether the path's mount is a network file system, after /proc/mounts."""
    target = os.path.realpath(path)
    best, kind = "", ""
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return True
    for line in lines:
        mount, mount_kind = line.split()[1:3]
        if len(mount) >= len(best) and (target == mount or target.startswith(mount.rstrip("/") + "/")):
            best, kind = mount, mount_kind
    return kind.startswith(NETWORK_FILE_SYSTEMS)
