"""The name and folder of the run that a command line of ctxlm_ds.pretrain means; the recipe is checked.

Needs pydantic and PyYAML: if the ranks have a container, `python -m ctxlm_ds.cluster.run_folder` runs in it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ctxlm_ds.cluster.settings import JobSettings
from ctxlm_ds.cluster.srun import wrap_in_container
from ctxlm_ds.errors import EXIT_USER_ERROR, ClusterError, ConfigError, CtxlmError
from ctxlm_ds.installed import check_installed

MARK = "ctxlm-run-folder "
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class RunFolder:
    """Facts of a recipe that the job needs."""

    name: str
    path: str
    """Absolute, or relative to the working directory, as in the recipe."""
    max_steps: int

    @property
    def directory(self) -> Path:
        return Path(self.path)


def find_run_folder(
    words: Sequence[str], world_size: int, settings: JobSettings, environ: Mapping[str, str]
) -> RunFolder:
    """Check the recipe and return the folder of its run.

    Raises:
        ConfigError: the recipe or the options are wrong (a container has printed its message already).
        ClusterError: the container cannot run.
    """
    if not settings.container and not settings.pyxis:
        check_installed()
        return read_run_folder(words, world_size)
    inner = [settings.container_python, "-m", "ctxlm_ds.cluster.run_folder", str(world_size), *words]
    options, inside = wrap_in_container(inner, settings)
    command = ["srun", "--nodes=1", "--ntasks=1", *options, *inside] if settings.pyxis else inside
    try:
        done = subprocess.run(
            command, env=dict(environ), stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise ClusterError(f"{command[0]}: not found; load it in slurm/env.sh") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{' '.join(command)}: no answer within {TIMEOUT_S:.0f} s") from None
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return RunFolder(**json.loads(line[len(MARK) :]))
    if done.returncode == EXIT_USER_ERROR:
        raise ConfigError("the recipe was refused; see above")
    raise ClusterError(f"the container cannot run python (status {done.returncode}); tried: {' '.join(command)}")


def read_run_folder(words: Sequence[str], world_size: int) -> RunFolder:
    """Check the recipe in this process."""
    from ctxlm_ds.pretrain import parse_arguments
    from ctxlm_ds.recipe.check import check_config
    from ctxlm_ds.recipe.load import load_config

    arguments = parse_arguments(words)
    config = load_config(arguments.config, arguments.set)
    check_config(config, world_size)
    return RunFolder(config.name, str(config.run_dir or Path("runs") / config.name), config.training.max_steps)


def main() -> None:
    """Print the answer for WORLD_SIZE WORDS... as one marked line."""
    try:
        check_installed()
        found = read_run_folder(sys.argv[2:], int(sys.argv[1]))
    except CtxlmError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(EXIT_USER_ERROR)
    sys.stdout.write(MARK + json.dumps(asdict(found)) + "\n")


if __name__ == "__main__":
    main()
