"""What the `deepspeed` launcher needs of a Slurm allocation: `python -m ctxlm_ds.cluster.hostfile FOLDER`.

In: the batch script's environment. Out: FOLDER/hostfile, `n1 slots=8` a line, and FOLDER/deepspeed_env, what every rank
gets: the variables named below and the user's own ~/.deepspeed_env and ./.deepspeed_env. Needs the standard library
only. Not here: starting it (slurm/deepspeed_hostfile.sbatch).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ctxlm_ds.errors import ConfigError, CtxlmError
from ctxlm_ds.process.slurm import expand_hostlist, expand_tasks

CARRIED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR", "OMP_NUM_THREADS", "DS_ACCELERATOR")
"""ssh carries no environment, and the launcher only that of Python and NCCL."""
CARRIED_PREFIXES = ("CTXLM_", "GLOO_", "NCCL_", "TORCH_", "HF_", "TOKENIZERS_")
ENV_FILE = ".deepspeed_env"


def hostfile_lines(environ: Mapping[str, str]) -> list[str]:
    """A line a node: as many slots as tasks.

    Raises:
        ConfigError: this is no Slurm job.
    """
    try:
        nodes, counts = environ["SLURM_JOB_NODELIST"], environ["SLURM_TASKS_PER_NODE"]
    except KeyError as error:
        raise ConfigError(f"{error.args[0]} is missing: this is no Slurm job; submit the script with sbatch") from None
    hosts, slots = expand_hostlist(nodes), expand_tasks(counts)
    if len(hosts) != len(slots):
        raise ConfigError(f"SLURM_JOB_NODELIST={nodes} and SLURM_TASKS_PER_NODE={counts} do not belong together")
    return [f"{host} slots={slots[index]}" for index, host in enumerate(hosts)]


def environment_lines(environ: Mapping[str, str], files: Sequence[Path]) -> list[str]:
    """`KEY=VALUE` lines; those of the user's files come last and win."""
    carried = [name for name in sorted(environ) if name in CARRIED or name.startswith(CARRIED_PREFIXES)]
    lines = [f"{name}={environ[name]}" for name in carried if "\n" not in environ[name]]
    for path in files:
        if path.is_file():
            # The launcher stops at a line without `=`.
            lines += [line for line in path.read_text(encoding="utf-8").splitlines() if "=" in line]
    return lines


def main() -> None:
    """Entry point."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m ctxlm_ds.cluster.hostfile FOLDER\n")
        sys.exit(2)
    folder = Path(sys.argv[1])
    try:
        hosts = hostfile_lines(os.environ)
    except CtxlmError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    files = [Path.home() / ENV_FILE, Path(ENV_FILE)]
    (folder / "hostfile").write_text("\n".join(hosts) + "\n", encoding="utf-8")
    (folder / "deepspeed_env").write_text("\n".join(environment_lines(os.environ, files)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
