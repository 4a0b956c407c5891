"""The command `ctxlm`: a table of subcommands, each imported when it runs. `ctxlm --help` imports nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

from ctxlm_ds.console import aligned, run_command


class Command(NamedTuple):
    """A subcommand."""

    name: str
    place: str
    """Module below ctxlm_ds; after a colon the function, if it is not `main`."""
    help: str


GROUPS: dict[str, tuple[Command, ...]] = {
    "from text to a dataset": (
        Command("tokenizer", "apps.text.train_tokenizer", "train a tokenizer"),
        Command("tokenizer-report", "apps.text.tokenizer_report", "compare tokenizers on a text"),
        Command("preprocess", "apps.text.preprocess_data", "tokenize text into an indexed dataset"),
        Command("inspect", "apps.text.inspect_dataset", "describe, show and verify a dataset"),
        Command("merge", "apps.text.merge_datasets", "join datasets"),
        Command("samples", "apps.text.build_samples", "build the sample indexes of a recipe ahead of the job"),
        Command("docstrings", "apps.text.extract_docstrings", "write the docstrings of this environment as a corpus"),
    ),
    "pretraining": (
        Command("init", "apps.init.command", "write a recipe for this machine, or from another program's arguments"),
        Command("recipes", "apps.init.recipes", "list, show and compare recipes"),
        Command("plan", "apps.plan.plan_run", "memory and time of every layout on a cluster"),
        Command("operators", "apps.machine.build_operators", "build DeepSpeed's CPU operators, once"),
        Command("pretrain", "pretrain:run", "train, or check a recipe with --check"),
        Command("check", "apps.cluster.submit:check_main", "check a Slurm job before it is queued"),
        Command("submit", "apps.cluster.submit", "check a Slurm job and queue it, or a sweep of settings"),
        Command("status", "apps.cluster.run_status", "state of runs"),
        Command("report", "apps.report.run_report", "curves of a run"),
        Command("batch", "apps.text.show_batch", "show rows as the model read them"),
        Command("convert", "apps.convert.convert_checkpoint", "to and from Hugging Face and other formats"),
    ),
    "with a model": (
        Command("finetune", "finetune", "fine-tune a model on a task"),
        Command("prompt", "apps.downstream.prompt", "score prompts of a task without training"),
        Command("embed", "apps.downstream.embed", "vectors of words"),
        Command("scores", "apps.downstream.compare_scores", "compare the scores of models"),
    ),
    "this machine": (
        Command("demo", "apps.demo.pretrain_default", "text to a model that fills masks, in minutes"),
        Command("demo-downstream", "apps.demo.downstream_default", "fine-tune that model, next to random weights"),
        Command("completion", "apps.machine.completion", "print completion for bash, zsh or fish"),
    ),
}
COMMANDS = {command.name: command for group in GROUPS.values() for command in group}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a subcommand."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help", "help"):
        run_command(lambda: print(help_text()))
    elif name in ("-V", "--version"):
        print(f"ctxlm {version()}")
    elif name in COMMANDS:
        sys.argv = [f"ctxlm {name}", *rest]  # what argparse names in usage lines, and what it reads
        run_command(load(COMMANDS[name]))
    else:
        print(f"error: ctxlm has no command {name}; {_nearest(name)}", file=sys.stderr)
        sys.exit(2)


def load(command: Command) -> Callable[[], None]:
    """Import the module of a subcommand and return its function."""
    module, _, function = command.place.partition(":")
    loaded: Callable[[], None] = getattr(import_module(f"ctxlm_ds.{module}"), function or "main")
    return loaded


def help_text() -> str:
    """Return the subcommands with a line each."""
    width = max(map(len, COMMANDS))
    lines = ["usage: ctxlm COMMAND [OPTIONS]", "       ctxlm COMMAND --help", "       ctxlm --version"]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:", *aligned([(command.name.ljust(width), command.help) for command in group], (0, 1))]
    return "\n".join(lines)


def version() -> str:
    """Return the version of the installed package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ctxlm_ds")
    except PackageNotFoundError:
        return f"of {os.path.dirname(os.path.dirname(__file__))}, which is not installed"


def _nearest(name: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name[:100], COMMANDS, n=1)
    return f"did you mean {near[0]}?" if near else "ctxlm --help lists the commands"


if __name__ == "__main__":
    main()
