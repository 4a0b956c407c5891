"""List the shipped recipes, show one with all its settings, or compare two.

    ctxlm recipes
    ctxlm recipes show bert-base --set training.max_steps=1000
    ctxlm recipes diff bert-base roberta-base

A recipe is a path, or the name of a shipped one.
"""

from __future__ import annotations

import argparse
import json
from itertools import takewhile
from pathlib import Path
from typing import Any

from ctxlm_ds.console import aligned

ABSENT = "-"
MAX_LINE = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", metavar="list | show | diff")
    commands.add_parser("list", help="list the shipped recipes (as without a word)")
    show = commands.add_parser("show", help="print a recipe's comment and all its settings")
    show.add_argument("recipe", metavar="RECIPE")
    show.add_argument("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="override settings")
    diff = commands.add_parser("diff", help="print the settings that differ between two recipes")
    diff.add_argument("recipes", nargs=2, metavar="RECIPE")
    args = parser.parse_args()
    from ctxlm_ds.recipe.load import RECIPE_DIR, dump_config, load_config

    if args.command in (None, "list"):
        print_recipes()
    elif args.command == "show":
        settings = dump_config(load_config(args.recipe, args.set))
        named = Path(args.recipe)
        comment = head(named if named.is_file() else RECIPE_DIR / f"{named.name.removesuffix('.yaml')}.yaml")
        print("\n".join(["".join(f"# {line}".rstrip() + "\n" for line in comment), settings.rstrip()]))
    else:
        one, other = (load_config(recipe).flat() for recipe in args.recipes)
        rows = differences(one, other)
        print("\n".join(aligned([("", *args.recipes), *rows], (0, 1, 2), "")) if rows else "the same settings")


def print_recipes() -> None:
    """Print the shipped recipes with a line each."""
    from ctxlm_ds.recipe.load import RECIPE_DIR

    print("\n".join(aligned(sorted((path.stem, summary(path)) for path in RECIPE_DIR.glob("*.yaml")), (0, 1), "")))


def head(path: Path) -> list[str]:
    """Return the lines of the comment at the head of a recipe."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return [line[1:].removeprefix(" ") for line in lines]


def summary(path: Path) -> str:
    """Return the first sentence of a recipe's comment, cut to a line."""
    text = " ".join(line.strip() for line in head(path))
    text = text.partition(". ")[0].rstrip(".:")
    return text if len(text) <= MAX_LINE else f"{text[: MAX_LINE - 1].rpartition(' ')[0]} …"


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return (dotted setting, value of one, value of the other) of each setting that differs."""
    rows = ((name, _shown(one.get(name, ABSENT)), _shown(other.get(name, ABSENT))) for name in {**one, **other})
    return [row for row in rows if row[1] != row[2]]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
