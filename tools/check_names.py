"""Find comparisons with the name of a registered entry, loss term or type of tokenizer outside its own files.

Part of `make check`. The names are those of the registry and of the objectives' terms. A comparison is `==`, `!=`,
`in`, `not in`, a `match` case, a look-up by such a string, or a constant made of one. Files of registered entries and
the registry itself may spell names.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from ctxlm_ds.apps.downstream.kinds.entries import TASKS
from ctxlm_ds.registry import FAMILIES, FORMATS, LAUNCHERS, OBJECTIVES, OPTIMIZERS, SCHEDULES, TOKENIZERS, TRACKERS

ROOT = Path(__file__).resolve().parent.parent
REGISTRIES = (FAMILIES, OBJECTIVES, FORMATS, OPTIMIZERS, SCHEDULES, TRACKERS, TASKS, TOKENIZERS)
OWN_FILES = (
    "ctxlm_ds/families/", "ctxlm_ds/objectives/", "ctxlm_ds/data/formats/", "ctxlm_ds/training/optimizers/",
    "ctxlm_ds/training/schedules/", "ctxlm_ds/training/hooks/metrics.py", "ctxlm_ds/training/hooks/trackers.py",
    "ctxlm_ds/apps/downstream/kinds/", "ctxlm_ds/tokenizers/kinds/", "ctxlm_ds/registry.py",
)
OTHER_MEANINGS = {
    "ctxlm_ds/apps/demo/pretrain_default.py": {"unigram"},
    "ctxlm_ds/apps/text/extract_docstrings.py": {"tensorboard"},
    "ctxlm_ds/apps/text/preprocess_data.py": {"characters"},
    "ctxlm_ds/data/dataset/merge.py": {"characters"},
    "ctxlm_ds/data/preprocess/job.py": {"characters"},
    "ctxlm_ds/tokenizers/train.py": {"characters"},
    "ctxlm_ds/recipe/deepspeed_rules.py": {"tensorboard", "wandb"},
    "ctxlm_ds/recipe/sections.py": {"linear", "constant"},
}
"""Names that mean something else in a file: a package, a section of DeepSpeed's JSON, the shape of a warmup, the
distribution of single tokens, a count of characters."""
ATTRIBUTES = {"is_decoder"}
"""Attributes that ask for a family without its name."""


def registered_names() -> set[str]:
    """Return every name that only its own files may compare with."""
    names = {name for registry in REGISTRIES for name in registry.shipped_names()}
    for name in OBJECTIVES.shipped_names():
        names |= {term.name for term in OBJECTIVES.get(name).terms}
    for name in TOKENIZERS.shipped_names():
        names |= {*TOKENIZERS.get(name).types}
    return names


def comparisons(tree: ast.AST, names: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and name of every comparison in a syntax tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            operands = (node.left, *node.comparators)
            found = [name for operand in operands for name in _strings(operand)]
            # The names of launchers are common words.
            if any(getattr(operand, "attr", getattr(operand, "id", None)) == "launcher" for operand in operands):
                yield from ((node.lineno, name) for name in found if name in LAUNCHERS.shipped_names())
        elif isinstance(node, ast.MatchValue):
            found = _strings(node.value)
        elif isinstance(node, ast.Subscript):
            found = _strings(node.slice)
        elif isinstance(node, ast.Assign) and all(_is_constant(target) for target in node.targets):
            found = _strings(node.value)
        elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            yield node.lineno, node.attr
            continue
        else:
            continue
        yield from ((node.lineno, name) for name in found if name in names)


def _is_constant(target: ast.expr) -> bool:
    """Return whether names in capitals are assigned to: constants that something may be compared with."""
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    return all(isinstance(name, ast.Name) and name.id.isupper() for name in names)


def _strings(node: ast.expr) -> list[str]:
    """Return the string constants of an operand, and of a tuple, list or set of them."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return [name for item in node.elts for name in _strings(item)]
    return []


def find_all(root: Path) -> list[str]:
    """Return one line per comparison in the package and the tools below `root`."""
    names = registered_names()
    lines = []
    for path in sorted([*root.glob("ctxlm_ds/**/*.py"), *root.glob("tools/*.py")]):
        place = path.relative_to(root).as_posix()
        if place.startswith(OWN_FILES):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), place)
        checked = names - OTHER_MEANINGS.get(place, set())
        lines += [f"{place}:{line}: compares with {name!r}" for line, name in comparisons(tree, checked)]
    return lines


def main() -> None:
    """Print what is found; the exit status is 1 if there is anything."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    found = find_all(ROOT)
    if found:
        print("\n".join(found))
        sys.exit("ask the registered entry, its section or its terms instead (docs/extending.md)")


if __name__ == "__main__":
    main()
