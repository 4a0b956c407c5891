"""The commands that pages show, and the real parsers that read them without running anything."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from ctxlm_ds.apps.cluster.job_context import pretrain_words
from ctxlm_ds.cli import COMMANDS, load

ROOT = Path(__file__).resolve().parents[2]
SPAN = re.compile(r"`([^`\n]+)`")
STARTS = {"ctxlm", "python", "deepspeed", "torchrun", "srun", "sbatch", "make"}
ASSIGNMENT = re.compile(r"[A-Z_]+=")
OPEN = re.compile(r"^(…|\.\.\.)[,)]?$|^\$\{@")
NAME = re.compile(r"[a-z][a-z0-9-]*")
SETTING = re.compile(r"([a-z_]+(?:\.[a-z_]+)*)=")
REFERENCE = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
SETTINGS = frozenset(re.findall(r"^\| `([a-z_.]+)` \|", REFERENCE, re.MULTILINE))
SHIPPED = {"--config": ("ctxlm_ds/recipes", ".yaml"), "--deepspeed_config": ("ds_configs", ".json")}
SEPARATORS = re.compile(r"^(&&|\|\|?|;|>>?|<|2>&1)$")


class Shown(NamedTuple):
    """A command of a page."""

    place: str
    words: tuple[str, ...]
    is_open: bool
    """Arguments may be missing: it has an ellipsis or brackets, or is a part of a sentence."""


class ParsedError(BaseException):
    """A parser has accepted a command. No handler of the commands catches it."""


def shown_commands(page: Path) -> Iterator[Shown]:
    """Yield the commands of a page: of its blocks of code, and of its sentences and tables."""
    in_fence = False
    joined = page.read_text(encoding="utf-8").replace("\\\n", "\\")
    number = 0
    for line in joined.split("\n"):
        number += 1
        in_fence ^= line.lstrip().startswith("```")
        is_code = in_fence or line.startswith("    ")
        texts = [line.strip().removeprefix("$ ")] if is_code else SPAN.findall(line)
        for text in texts:
            yield from _commands(f"{page.name}:{number}", text, is_open=not is_code)
        number += line.count("\\")


def _commands(place: str, text: str, is_open: bool) -> Iterator[Shown]:
    lexer = shlex.shlex(re.sub(r"\\ *", " ", text), posix=True, punctuation_chars="")
    lexer.whitespace_split, lexer.commenters = True, "#"
    try:
        words = list(lexer)
    except ValueError:  # an apostrophe in shown output
        return
    part: list[str] = []
    for word in [*words, ";"]:
        if not SEPARATORS.match(word):
            ends = word.endswith(";")
            part.append(word.rstrip(";"))
            if not ends:
                continue
        while part and ASSIGNMENT.match(part[0]):
            part.pop(0)
        if part and (part[0] in STARTS or part[0].startswith("slurm/")):
            bare = [word.strip("[]") for word in part]
            is_elided = bare != part or any(OPEN.match(word) for word in bare)
            yield Shown(place, tuple(word for word in bare if not OPEN.match(word)), is_open or is_elided)
        part = []


def refusal(shown: Shown, targets: frozenset[str]) -> str | None:
    """Return why a command cannot be typed, or None; programs that are not of this project pass."""
    first, *rest = shown.words
    if first == "make":
        return next((f"no target {word}" for word in rest if word.islower() and word not in targets), None)
    for index, word in enumerate(shown.words):
        arguments = shown.words[index + 1 :]
        if word in ("-m", "--module") and arguments and arguments[0].startswith("ctxlm_ds"):
            return _module(arguments[0], arguments[1:], shown.is_open)
        if word.startswith(("tools/", "slurm/")):
            if not (ROOT / word).exists() and "*" not in word:
                return f"no file {word}"
            return _file(word, arguments, shown.is_open)
    if first == "ctxlm" and rest and NAME.fullmatch(rest[0]):
        return _subcommand(rest[0], rest[1:], shown.is_open)
    return None


def _file(path: str, arguments: Sequence[str], is_open: bool) -> str | None:
    if path == "tools/benchmark":
        return parse(import_module("tools.benchmark.__main__").main, path, arguments, is_open)
    if path.startswith("tools/"):
        door = re.match(r'"""Run `ctxlm ([a-z-]+)`', (ROOT / path).read_text(encoding="utf-8"))
        return _subcommand(door[1], arguments, is_open) if door else None
    if path == "slurm/pretrain.sbatch" and arguments:
        return _subcommand("pretrain", pretrain_words(arguments), is_open)
    return None


def _module(name: str, arguments: Sequence[str], is_open: bool) -> str | None:
    module = import_module(name)
    if name not in ("ctxlm_ds.pretrain", "ctxlm_ds.finetune"):
        return None
    return parse(module.main, name, arguments, is_open)


def _subcommand(name: str, arguments: Sequence[str], is_open: bool) -> str | None:
    if name not in COMMANDS:
        return f"ctxlm has no command {name}"
    return parse(load(COMMANDS[name]), f"ctxlm {name}", arguments, is_open)


def parse(main: Any, name: str, arguments: Sequence[str], is_open: bool) -> str | None:
    """Let a command parse its arguments; return its error message, or which name in them is unknown."""
    messages: list[str] = []
    argv = [name, *("1" if word == "N" else word for word in arguments)]
    with _only_parsing(messages, is_open), patch.object(sys, "argv", argv):
        try:
            main()
        except ParsedError:
            return _unknown_name(arguments)
        except SystemExit:
            return messages[0] if messages else None  # --help and --version end so
    return "the command parsed nothing"


def _unknown_name(arguments: Sequence[str]) -> str | None:
    """Return the first recipe, DeepSpeed file or setting that does not exist."""
    for option, value in zip(arguments, arguments[1:], strict=False):
        folder, ending = SHIPPED.get(option, ("", ""))
        shipped = re.sub(r"-phase\d$", "", value)  # one phase of a recipe
        if folder and NAME.fullmatch(value) and not (ROOT / folder / f"{shipped}{ending}").is_file():
            return f"no {folder}/{value}{ending}"
    given = arguments[arguments.index("--set") + 1 :] if "--set" in arguments else ()
    for setting in filter(None, map(SETTING.match, given)):
        if setting[1] not in SETTINGS and setting[1] != "a.b":
            return f"no setting {setting[1]}"
    return None


@contextmanager
def _only_parsing(messages: list[str], is_open: bool) -> Iterator[None]:
    parse_args, parse_known = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_known_args
    depth = 0

    def stopping(original: Any) -> Any:
        def wrapped(parser: argparse.ArgumentParser, *args: Any, **options: Any) -> Any:
            nonlocal depth
            if is_open:
                for part in (*parser._actions, *parser._mutually_exclusive_groups):
                    part.required = False
            depth += 1
            result = original(parser, *args, **options)
            depth -= 1
            if depth == 0:
                raise ParsedError
            return result

        return wrapped

    def error(parser: argparse.ArgumentParser, message: str) -> None:
        messages.append(message)
        sys.exit(2)

    with (
        patch.object(argparse.ArgumentParser, "parse_args", stopping(parse_args)),
        patch.object(argparse.ArgumentParser, "parse_known_args", stopping(parse_known)),
        patch.object(argparse.ArgumentParser, "error", error),
    ):
        yield
