"""The command `ctxlm`: a table of subcommands, each imported when it runs. `ctxlm --help` imports nothing else.

The two subcommands that are about this installation, `completion` and `operators`, are here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from ctxlm_ds.console import aligned, run_command


class Command(NamedTuple):
    """A subcommand."""

    name: str
    place: str
    """Module below ctxlm_ds; after a colon the function, if it is not `main`."""
    help: str


GROUPS: dict[str, tuple[Command, ...]] = {
    "all steps in one command": (
        Command("demo", "apps.demo.pretrain_default", "your text (--corpus FILE) to a model that fills masks"),
    ),
    "from text to a dataset": (
        Command("tokenizer", "apps.text.tokenizers", "train a tokenizer"),
        Command("tokenizer-report", "apps.text.tokenizers:report", "compare tokenizers on a text"),
        Command("preprocess", "apps.text.preprocess_data", "tokenize text into an indexed dataset"),
        Command("inspect", "apps.text.indexed_dataset:inspect", "describe, show and verify a dataset"),
        Command("merge", "apps.text.indexed_dataset:merge", "join datasets"),
        Command("samples", "apps.text.indexed_dataset:samples", "build a recipe's sample indexes ahead of the job"),
        Command("docstrings", "apps.text.extract_docstrings", "write the docstrings of this environment as a corpus"),
    ),
    "pretraining": (
        Command("init", "apps.init.command", "write a recipe for this machine, or from another program's arguments"),
        Command("recipes", "apps.init.recipes", "list, show and compare recipes"),
        Command("plan", "apps.plan.plan_run", "memory and time of every layout on a cluster"),
        Command("verify", "apps.verify.command", "what of a run can be proved without its GPUs"),
        Command("operators", "cli:build_operators", "build DeepSpeed's CPU operators, once"),
        Command("pretrain", "pretrain", "train, or check a recipe with --check"),
        Command("check", "apps.cluster.submit:check_main", "check a Slurm job before it is queued"),
        Command("submit", "apps.cluster.submit", "check a Slurm job and queue it, or a sweep of settings"),
        Command("status", "apps.cluster.run_status", "state of runs"),
        Command("report", "apps.report.run_report", "curves of a run"),
        Command("batch", "apps.text.indexed_dataset:batch", "show rows as the model read them"),
        Command("ledger", "apps.report.ledger", "what the weights of a checkpoint have read, and when"),
        Command("fork", "apps.convert.fork", "branch off a run at a checkpoint, with other settings"),
        Command("average", "apps.convert.average", "average the weights of checkpoints"),
        Command("convert", "apps.convert.convert_checkpoint", "to and from Hugging Face and other formats"),
    ),
    "with a model": (
        Command("finetune", "finetune", "fine-tune a model on a task"),
        Command("prompt", "apps.downstream.prompt", "score prompts of a task without training"),
        Command("embed", "apps.downstream.embed", "vectors of words"),
        Command("evaluate", "apps.evaluate.command", "judge models on a suite: minimal pairs, GLUE, CoNLL, SQuAD"),
        Command("compare", "apps.evaluate.compare", "compare the scores of models"),
        Command("study", "apps.study.command", "rerun a comparison of the field: arms, seeds, intervals, a verdict"),
    ),
    "this machine": (
        Command("completion", "cli:completion", "print completion for bash, zsh or fish"),
    ),
}
COMMANDS = {command.name: command for group in GROUPS.values() for command in group}
RENAMED = {"scores": "compare"}
"""Old names of commands, which version 0.3 refuses."""


def main(argv: Sequence[str] | None = None) -> None:
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in RENAMED:
        print(f"ctxlm {name} is now ctxlm {RENAMED[name]}; version 0.3 refuses the old name", file=sys.stderr)
        name = RENAMED[name]
    if name in ("-h", "--help", "help"):
        run_command(lambda: print(help_text()))
    elif name in ("-V", "--version"):
        print(f"ctxlm {version()}")
    elif name in COMMANDS:
        sys.argv = [f"ctxlm {name}", *rest]  # what argparse names in usage lines, and what it reads
        run_command(load(COMMANDS[name]))
    else:
        from difflib import get_close_matches

        near = get_close_matches(name[:100], COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "ctxlm --help lists the commands"
        print(f"error: ctxlm has no command {name}; {hint}", file=sys.stderr)
        sys.exit(2)


def load(command: Command) -> Callable[[], None]:
    """Import the module of a subcommand and return its function."""
    module, _, function = command.place.partition(":")
    return getattr(import_module(f"ctxlm_ds.{module}"), function or "main")


def help_text() -> str:
    """Return the subcommands with a line each."""
    width = max(map(len, COMMANDS))
    lines = ["usage: ctxlm COMMAND [OPTIONS]", "       ctxlm COMMAND --help", "       ctxlm --version"]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:", *aligned([(command.name.ljust(width), command.help) for command in group], (0, 1))]
    return "\n".join(lines)


def version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ctxlm_ds")
    except PackageNotFoundError:
        return f"of {os.path.dirname(os.path.dirname(__file__))}, which is not installed"


COMPLETION_HELP = """Print the completion of `ctxlm` for a shell.

    bash:  source <(ctxlm completion bash)                    (in ~/.bashrc)
    zsh:   source <(ctxlm completion zsh)                     (in ~/.zshrc)
    fish:  ctxlm completion fish > ~/.config/fish/completions/ctxlm.fish

It completes subcommands, their options, the names of recipes after --config and of DeepSpeed's JSON files.
"""


def completion() -> None:
    parser = argparse.ArgumentParser(description=COMPLETION_HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shell", choices=["bash", "fish", "zsh"])
    print(completion_script(parser.parse_args().shell), end="")


def completion_script(shell: str) -> str:
    """Return the script for a shell; zsh reads that for bash."""
    from ctxlm_ds.installed import shipped_folder

    package = Path(__file__).resolve().parent
    script = (package / "completion" / f"ctxlm.{'fish' if shell == 'fish' else 'bash'}").read_text(encoding="utf-8")
    names = {"commands": " ".join(COMMANDS), "recipes": _stems(package / "recipes"),
             "jsons": _stems(shipped_folder("ds_configs"))}  # fmt: skip
    for name, filled in names.items():
        script = script.replace(f"@{name}@", filled)
    return script if shell != "zsh" else f"autoload -U +X bashcompinit && bashcompinit\n{script}"


def _stems(folder: Path) -> str:
    return " ".join(sorted(path.stem for path in folder.iterdir() if path.suffix in (".yaml", ".json")))


def build_operators() -> None:
    """Build DeepSpeed's CPU operators in this environment's build folder, once.

    Without this the first process that needs an operator compiles it, which takes minutes. An operator that cannot be
    built is reported; the status is 0 all the same, because only some layouts need one.
    """
    every = ["CPUAdam", "FusedAdam", "async_io"]
    parser = argparse.ArgumentParser(description=build_operators.__doc__)
    parser.add_argument("--only", nargs="+", choices=every, default=every, metavar="NAME", help=", ".join(every))
    names = parser.parse_args().only
    from ctxlm_ds.process.launch import clear_stale_build_locks, use_own_build_folder

    folder = use_own_build_folder()
    print(f"building DeepSpeed's operators in {folder} (minutes the first time, seconds later)", flush=True)
    clear_stale_build_locks()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from ctxlm_ds.errors import KernelError
    from ctxlm_ds.training.engine.runtime import deepspeed_adam, load_async_io

    for name in names:
        try:
            load_async_io() if name == "async_io" else deepspeed_adam(name == "CPUAdam")
        except KernelError as error:
            print(f"{name} is not available: {error}")


if __name__ == "__main__":
    main()
