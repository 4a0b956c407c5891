"""Write a recipe for this machine, or for the arguments of Megatron's or transformers' scripts.

The recipe extends a shipped one, has a comment for each setting, and is loaded before it is written.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxlm_ds.console import at_least, counted
from ctxlm_ds.data.sources.types import DOCUMENT_HELP, NOT_UTF8, text_format
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.installed import shipped_folder

MAX_HOURS = 8760
READ_CHARACTERS = 4_000_000
FEW_STEPS = 50
"""Steps below which the hours are too few for a run that learns anything."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="ctxlm init", description=__doc__)
    add = parser.add_argument
    add("--family", default="bert", metavar="NAME", help="family of the model (default: bert)")
    sizes_help = "shipped recipe to start from (default: laptop)"
    add("--size", default="laptop", choices=("laptop", "small", "base"), help=sizes_help)
    add("--text", metavar="FILE", help="text to train on; the commands that prepare it are printed")
    add("--document", default="blank", metavar="UNIT", help=DOCUMENT_HELP)
    add("--data", metavar="PREFIX", help="dataset to train on (of preprocess, or Megatron's)")
    add("--tokenizer", metavar="DIR", help="tokenizer of the dataset")
    add("--gpus", "--ranks", dest="ranks", type=at_least(1), metavar="N", help="ranks (default: every GPU, or one)")
    add("--hours", type=float, metavar="H", help="time of the run; the steps follow from the estimated speed")
    add("--output", type=Path, metavar="FILE", help="recipe to write (default: FAMILY.yaml)")
    add("--force", action="store_true", help="replace a recipe that exists")
    add = parser.add_mutually_exclusive_group().add_argument
    file: dict[str, Any] = {"nargs": "?", "type": Path, "const": Path(), "metavar": "FILE"}
    add("--from-megatron", **file, help="arguments of pretrain_bert.py or pretrain_gpt.py: FILE, or what follows --")
    add("--from-run-mlm", **file, help="the same of run_mlm.py, run_clm.py, or their _no_trainer forms")
    add("--slurm", type=Path, metavar="DIR", help="copy the Slurm scripts to a folder named slurm; write no recipe")
    arguments = sys.argv[1:] if argv is None else list(argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    args = parser.parse_args(arguments[:end])
    originals = {"megatron": args.from_megatron, "run_mlm": args.from_run_mlm}
    original = next((name for name, file in originals.items() if file is not None), None)
    if args.slurm is not None:
        _copy_slurm(args.slurm)
    elif original is not None:
        _migrate(original, originals[original], arguments[end + 1 :], args)
    elif not arguments:
        parser.error("give --family, and --data or --text")
    else:
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
    away = "" if folder.parent.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder.parent))} && "
    print(f"next: {away}ctxlm submit RECIPE.yaml --nodes 1 --ranks 1")


def _start(args: argparse.Namespace) -> None:
    from ctxlm_ds.apps.init.settings import check_output, recipe_text, write_recipe
    from ctxlm_ds.apps.init.start import find_machine, new_settings, shipped_recipe

    if args.data is not None and args.text is not None:
        raise ConfigError("--data is a finished dataset, --text is made into one; give one of them")
    text_format(args.document)
    if args.text is not None:
        _read_beginning(args.text, args.document)
    if args.hours is not None and not 0 < args.hours <= MAX_HOURS:
        raise ConfigError(f"--hours {args.hours:g}: expected a number above 0 and up to {MAX_HOURS:,}, a year")
    base, output = shipped_recipe(args.family, args.size), args.output or Path(f"{args.family}.yaml")
    check_output(output, args.force)
    machine = find_machine(args.ranks)
    settings = new_settings(args, machine, output.stem)
    head = [f"{base}, for {machine}. Written by `ctxlm init`."]
    write_recipe(output, recipe_text(head, settings))
    steps, why, _ = settings["training.max_steps"]
    other = "; for another length: --hours H" if args.hours is None else ""
    print(f"{output}: {base} for {machine}, {counted(steps, 'step')} ({why}{other})")
    if args.hours is not None and steps < FEW_STEPS:
        told = f"{args.hours:g} hours allow {counted(steps, 'step')}"
        print(f"warning: {told}; give more --hours, or a smaller --size")
    for line in [*_preparation(args, base, output.stem), _launch(output, machine.ranks)]:
        print(f"next: {line}")


def _read_beginning(text: str, document: str) -> None:
    """Read the first megabytes as preprocess will; raise DataError for what it refuses with any options."""
    from ctxlm_ds.data.sources.corpus import Corpus

    size = 0
    try:
        for one in Corpus([text], document=document):
            if (size := size + len(one)) > READ_CHARACTERS:
                return
    except DataError as error:
        if NOT_UTF8 in str(error) or not (size or "--json-keys" in str(error)):
            raise
        return print(f"warning: {error}")
    if not size:
        raise DataError(f"--text {text}: the files hold no text")


def _preparation(args: argparse.Namespace, base: str, name: str) -> list[str]:
    """Return the commands that make tokenizer and dataset of a recipe with this name, if they are not given."""
    from ctxlm_ds.apps.init.start import dataset_prefix, fitting_vocab_size, preprocess_options
    from ctxlm_ds.recipe.load import load_config
    from ctxlm_ds.registry import FAMILIES

    config = load_config(base)
    text, tokenizer, lines = shlex.quote(args.text or "TEXT"), args.tokenizer or f"{name}-tokenizer", []
    if args.tokenizer is None:
        kind = FAMILIES.get(config.model.family).tokenizer
        size = fitting_vocab_size(kind, args.text)
        option = "" if size is None else f" --vocab-size {size}"
        lines.append(f"ctxlm tokenizer --input {text} --type {kind}{option} --output-dir {tokenizer}")
    if args.data is None:
        unit = [] if args.document == "blank" else [f"--document {args.document}"]
        options = "".join(f" {option}" for option in [*unit, *preprocess_options(config.data)])
        prefix = dataset_prefix(config.data, name)
        lines.append(
            f"ctxlm preprocess --input {text} --tokenizer {shlex.quote(tokenizer)}{options} "
            f"--output-prefix {prefix.rpartition('_text_')[0]}"
        )
        lines.append(f"ctxlm inspect {prefix} --verify --show 1")
    return lines


def _launch(output: Path, ranks: int) -> str:
    return f"ctxlm pretrain --config {shlex.quote(str(output))}{f' --ranks {ranks}' if ranks > 1 else ''}"


def _migrate(original: str, file: Path, words: list[str], args: argparse.Namespace) -> None:
    if (file == Path()) == (not words):
        raise ConfigError("give the arguments, with the script's name before them, in a FILE or after --")
    from ctxlm_ds.apps.init.settings import check_output, read_command, read_words, recipe_text, write_recipe
    from ctxlm_ds.apps.init.translate import load_table, translate
    from ctxlm_ds.apps.plan.check_run import deepspeed_settings

    command = read_command(words or read_words(file), list(load_table(original)["scripts"]))
    result = translate(original, command, args.ranks, args.data, args.tokenizer)
    if meant := [f"{name}: did you mean {near}?" for name, near in result.unknown.items() if near]:
        raise ConfigError(f"{command.script} has no such argument: {' '.join(meant)} Correct it or leave it out")
    if args.tokenizer is not None:
        result.set("tokenizer.path", args.tokenizer, "--tokenizer")
    output = args.output or Path(f"{Path(command.script).stem}.yaml")
    check_output(output, args.force)
    if "name" not in result.settings:
        result.set("name", output.stem, "the name of this file")
    head = [f"Written by `ctxlm init` from the arguments of {command.script}; each comment is the argument."]
    config = write_recipe(output, recipe_text(head, result.settings), result.settings)
    try:
        deepspeed_settings(argparse.Namespace(deepspeed_config=None), config, result.ranks)
    except ConfigError as error:
        result.notes.append(f"pretrain will refuse DeepSpeed's JSON: {error}")
    print(f"{output}: {len(result.settings)} settings from {len(command.arguments)} arguments of {command.script}")
    for why, names in result.without.items():
        print(f"no setting: {', '.join(names)}: {why}")
    for name in result.unknown:
        print(f"unknown: {name}")
    for note in result.notes:
        print(f"note: {note}")
    print(f"next: {_launch(output, result.ranks)}")
