"""Write a recipe for this machine, or for the arguments of Megatron's or transformers' scripts.

The recipe extends a shipped one, has a comment for each setting, and is loaded before it is written. On a terminal,
what is not given is asked.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from glob import glob
from pathlib import Path

from ctxlm_ds.console import at_least, counted, run_command
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.installed import shipped_folder

MAX_HOURS = 8760
FEW_STEPS = 50
"""Steps below which the hours are too few for a run that learns anything."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(prog="ctxlm init", description=__doc__)
    add = parser.add_argument
    add("--family", metavar="NAME", help="family of the model (default: bert)")
    add("--size", choices=("laptop", "small", "base"), help="shipped recipe to start from (default: laptop)")
    add("--text", metavar="FILE", help="text to train on; the commands that prepare it are printed")
    add("--data", metavar="PREFIX", help="dataset to train on (of preprocess, or Megatron's)")
    add("--tokenizer", metavar="DIR", help="tokenizer of the dataset")
    add("--gpus", "--ranks", dest="ranks", type=at_least(1), metavar="N", help="ranks (default: every GPU, or one)")
    add("--hours", type=float, metavar="H", help="time of the run; the steps follow from the estimated speed")
    add("--output", type=Path, metavar="FILE", help="recipe to write (default: FAMILY.yaml)")
    source = parser.add_mutually_exclusive_group()
    add = source.add_argument
    add("--from-megatron", metavar="ARGS|FILE", help="command or script of pretrain_bert.py or pretrain_gpt.py")
    add("--from-run-mlm", metavar="ARGS|FILE", help="the same of run_mlm.py, run_clm.py, or their _no_trainer forms")
    add("--slurm", type=Path, metavar="DIR", help="copy the Slurm scripts to a folder named slurm; write no recipe")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = build_parser()
    arguments = sys.argv[1:] if argv is None else list(argv)
    args = parser.parse_args(arguments)
    if args.slurm is not None:
        _copy_slurm(args.slurm)
    elif args.from_megatron is not None:
        _migrate("megatron", args.from_megatron, args)
    elif args.from_run_mlm is not None:
        _migrate("run_mlm", args.from_run_mlm, args)
    else:
        if not arguments:
            if not sys.stdin.isatty():
                parser.error("give --family, and --data or --text; questions need a terminal")
            _ask(args)
        _start(args)


def _copy_slurm(folder: Path) -> None:
    source = shipped_folder("slurm")
    if folder.exists():
        raise ConfigError(f"{folder} exists; give a new folder")
    if folder.name != "slurm":
        raise ConfigError(f"{folder}: the scripts find each other in a folder named slurm; give {folder / 'slurm'}")
    shutil.copytree(source, folder)
    print(f"{folder}: {sum(path.is_file() for path in folder.rglob('*'))} files")
    print(f"next: edit {folder / 'env.sh'} for your cluster")
    print(f"next: {_cd(folder.parent)}ctxlm submit RECIPE.yaml --nodes 1 --ranks 1")


def _cd(folder: Path) -> str:
    return "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "


def _ask(args: argparse.Namespace) -> None:
    """Ask for what a recipe needs; Enter takes the default."""
    from ctxlm_ds.apps.init.start import SIZES, families, shipped_recipe

    print(f"Families: {', '.join(families())}")
    args.family = _answer("Family", "bert")
    args.size = _answer(f"Size ({', '.join(SIZES)})", "laptop")
    shipped_recipe(args.family, args.size)
    given = _answer("Dataset prefix, or text file", "")
    if Path(f"{given}.idx").is_file():
        args.data = given
    else:
        args.text = given or None
    while (folder := _answer("Tokenizer folder (empty: train one)", "")) and not Path(folder).exists():
        print(f"{folder}: no such file or folder")
    args.tokenizer = folder or None
    args.ranks = _number("GPUs or CPU processes (empty: all GPUs, or one process)", int)
    args.hours = _number("Hours (empty: steps of the shipped recipe)", float)
    args.output = Path(_answer("Write to", f"{args.family}.yaml"))


def _answer(question: str, default: str) -> str:
    return input(f"{question}{f' [{default}]' if default else ''}: ").strip() or default


def _number(question: str, kind: type) -> int | float | None:
    while True:
        text = _answer(question, "")
        try:
            value = kind(text) if text else None
        except ValueError:
            value = -1
        if value is None or value > 0:
            return value
        print(f"{text}: expected a number above 0, or nothing")


def _start(args: argparse.Namespace) -> None:
    from ctxlm_ds.apps.init.start import Answers, new_settings, shipped_recipe
    from ctxlm_ds.apps.init.text import recipe_text, write_recipe

    if args.data is not None and args.text is not None:
        raise ConfigError("--data is a finished dataset, --text is made into one; give one of them")
    if args.text is not None and not glob(args.text):
        raise ConfigError(f"--text {args.text}: no such file; check its name")
    if args.hours is not None and not 0 < args.hours <= MAX_HOURS:
        raise ConfigError(f"--hours {args.hours:g}: expected a number above 0 and up to {MAX_HOURS:,}, a year")
    answers = Answers(
        args.family or "bert", args.size or "laptop", args.data, args.text, args.tokenizer, args.hours
    )
    base = shipped_recipe(answers.family, answers.size)
    output = args.output or Path(f"{answers.family}.yaml")
    _check_output(output)
    from ctxlm_ds.apps.init.machine import find_machine

    machine = find_machine(args.ranks)
    settings = new_settings(answers, machine, output.stem)
    head = [f"{base}, for {machine}. Written by `ctxlm init`."]
    write_recipe(output, recipe_text(head, settings))
    steps = settings["training.max_steps"].value
    print(f"{output}: {base} for {machine}, {counted(steps, 'step')}")
    if answers.hours is not None and steps < FEW_STEPS:
        told = f"{answers.hours:g} hours allow {counted(steps, 'step')}"
        print(f"warning: {told}; give more --hours, or a smaller --size")
    for line in [*_preparation(answers, base), _launch(output, machine.ranks)]:
        print(f"next: {line}")


def _preparation(answers: object, base: str) -> list[str]:
    """Return the commands that make tokenizer and dataset, if they are not given."""
    from ctxlm_ds.apps.init.start import Answers, dataset_prefix, fitting_vocab_size, preprocess_options
    from ctxlm_ds.recipe.load import load_config
    from ctxlm_ds.registry import FAMILIES

    assert isinstance(answers, Answers)
    config = load_config(base)
    text, lines = shlex.quote(answers.text or "TEXT"), []
    tokenizer = answers.tokenizer or "tokenizer"
    if answers.tokenizer is None:
        kind = FAMILIES.get(config.model.family).tokenizer
        size = fitting_vocab_size(kind, answers.text)
        option = "" if size is None else f" --vocab-size {size}"
        lines.append(f"ctxlm tokenizer --input {text} --type {kind}{option} --output-dir {tokenizer}")
    if answers.data is None:
        options = "".join(f" {option}" for option in preprocess_options(config.data))
        prefix = dataset_prefix(config)
        lines.append(
            f"ctxlm preprocess --input {text} --tokenizer {shlex.quote(tokenizer)}{options} "
            f"--output-prefix {prefix.rpartition('_text_')[0]}"
        )
        lines.append(f"ctxlm inspect {prefix} --verify --show 1")
    return lines


def _launch(output: Path, ranks: int) -> str:
    return f"ctxlm pretrain --config {shlex.quote(str(output))}{f' --ranks {ranks}' if ranks > 1 else ''}"


def _check_output(output: Path) -> None:
    if output.exists():
        raise ConfigError(f"{output} exists; give another --output, or remove it")


def _migrate(original: str, text: str, args: argparse.Namespace) -> None:
    from ctxlm_ds.apps.init.arguments import read_command
    from ctxlm_ds.apps.init.text import recipe_text, write_recipe
    from ctxlm_ds.apps.init.translate import load_table, translate

    command = read_command(text, list(load_table(original)["scripts"]))
    result = translate(original, command, args.ranks, args.data, args.tokenizer)
    if args.tokenizer is not None:
        result.set("tokenizer.path", args.tokenizer, "--tokenizer")
    output = args.output or Path(f"{Path(command.script).stem}.yaml")
    _check_output(output)
    head = [f"Written by `ctxlm init` from the arguments of {command.script}; each comment is the argument."]
    write_recipe(output, recipe_text(head, result.settings), result.settings)
    print(f"{output}: {len(result.settings)} settings from {len(command.given)} arguments of {command.script}")
    for why, names in result.without.items():
        print(f"no setting: {', '.join(names)}: {why}")
    for name, near in result.unknown.items():
        print(f"unknown: {name}{f'; did you mean {near}?' if near else ''}")
    for note in result.notes:
        print(f"note: {note}")
    print(f"next: {_launch(output, result.ranks)}")


if __name__ == "__main__":
    run_command(main)
