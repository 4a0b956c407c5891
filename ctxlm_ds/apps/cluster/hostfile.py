"""Files for the `deepspeed` launcher under Slurm: `python -m ctxlm_ds.apps.cluster.hostfile FOLDER [ARGUMENT ...]`.

In: the batch script's environment and the arguments of ctxlm_ds.pretrain. Out: FOLDER/hostfile, `n1 slots=8` per line;
FOLDER/deepspeed_env, the variables of every rank: those named below and the user's ~/.deepspeed_env and
./.deepspeed_env; the arguments on stdout, each behind a NUL byte, quoted for the shell of the other nodes. Needs the
standard library only.

DeepSpeed writes variables and arguments into the command line of pdsh, which `ps` and its log show: secrets are never
carried. It puts double quotes around some of them, in which the remote shell still expands `$(...)`.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from ctxlm_ds.console import run_command
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.process.slurm import expand_hostlist, expand_tasks
from ctxlm_ds.untrusted_json import read_text

CARRIED = (
    "PATH", "LD_LIBRARY_PATH", "TMPDIR", "OMP_NUM_THREADS", "DS_ACCELERATOR", "TOKENIZERS_PARALLELISM", "HF_HOME",
    "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "HF_ENDPOINT", "HF_TOKEN_PATH",
    "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_BASE_URL", "WANDB_MODE", "WANDB_PROJECT", "CTXLM_ATTEMPT",
    "CTXLM_HOME", "CTXLM_LOG_FILE", "CTXLM_RESTART", "CTXLM_VENV",
)  # fmt: skip
"""ssh carries no environment, and the launcher only that of Python and NCCL."""
CARRIED_PREFIXES = ("GLOO_", "NCCL_", "PYTHON", "TORCH_", "UCX_")
OF_DEEPSPEED = ("MLFLOW", "MV2", "NCCL", "PYTHON", "UCX")
"""The launcher carries what begins so in its own environment."""
SECRETS = re.compile(r"TOKEN(?!_PATH$|IZERS_)|SECRET|PASSW|CREDENTIAL|AUTH|(^|_)KEY(_|$)|API_?KEY", re.IGNORECASE)
PASSWORD_IN_URL = re.compile(r"://[^/\s]*@")
ENV_FILE = ".deepspeed_env"


def hostfile_lines(environ: Mapping[str, str]) -> list[str]:
    """Return a line per node with as many slots as tasks. Raises ConfigError outside of a Slurm job."""
    try:
        nodes, counts = environ["SLURM_JOB_NODELIST"], environ["SLURM_TASKS_PER_NODE"]
    except KeyError as error:
        raise ConfigError(f"{error.args[0]} is missing: this is no Slurm job; submit the script with sbatch") from None
    hosts, slots = expand_hostlist(nodes), expand_tasks(counts)
    if len(hosts) != len(slots):
        raise ConfigError(f"SLURM_JOB_NODELIST={nodes} and SLURM_TASKS_PER_NODE={counts} do not belong together")
    return [f"{host} slots={slots[index]}" for index, host in enumerate(hosts)]


def environment_lines(environ: Mapping[str, str], files: Sequence[Path]) -> list[str]:
    """Return `KEY=VALUE` lines; those of the user's files win. Raises ConfigError if a file carries a secret."""
    lines = [f"{name}={_escaped(environ[name])}" for name in sorted(filter(partial(_is_carried, environ), environ))]
    for path in files:
        for line in read_text(path, ConfigError).splitlines() if path.is_file() else []:
            name = line.partition("=")[0].strip()
            if SECRETS.search(name) or PASSWORD_IN_URL.search(line):
                raise ConfigError(
                    f"{path}: {name} would be shown by ps and in DeepSpeed's log; remove the line, and keep the secret "
                    "in a file that only you can read (for Hugging Face: HF_TOKEN_PATH, or what `hf auth login` writes)"
                )
            # The launcher stops at a line without `=`.
            lines += [line] if "=" in line else []
    return lines


def _is_carried(environ: Mapping[str, str], name: str) -> bool:
    is_named = name in CARRIED or name.startswith(CARRIED_PREFIXES)
    is_secret = SECRETS.search(name) or PASSWORD_IN_URL.search(environ[name])
    return is_named and not is_secret and len(environ[name].splitlines()) <= 1


def quoted_words(words: Sequence[str]) -> list[str]:
    """Quote arguments for the remote shell; DeepSpeed puts double quotes around those with blanks."""
    return [_escaped(word, quotes="") if " " in word else shlex.quote(word) for word in words]


def _escaped(text: str, quotes: str = '"') -> str:
    """Escape what a shell expands between double quotes."""
    return re.sub(rf"([\\$`{quotes}])", r"\\\1", text)


def main() -> None:
    folder = Path(sys.argv[1])
    hosts = hostfile_lines(os.environ)
    variables = environment_lines(os.environ, [Path.home() / ENV_FILE, Path(ENV_FILE)])
    (folder / "hostfile").write_text("\n".join(hosts) + "\n", encoding="utf-8")
    dropped = [name for name in os.environ if name.startswith(OF_DEEPSPEED) and not _is_carried(os.environ, name)]
    (folder / "dropped").write_text("".join(f"{name}\n" for name in dropped), encoding="utf-8")
    (folder / "deepspeed_env").write_text("\n".join(variables) + "\n", encoding="utf-8")
    sys.stdout.write("".join(f"{word}\0" for word in quoted_words(sys.argv[2:])))


if __name__ == "__main__":
    run_command(main)
