"""Check the structure of ctxlm_ds: no circles of files or rooms, no import upward, and the written limits of size.

Imports inside functions count, imports for annotations alone (`if TYPE_CHECKING`) do not. A room is the first folder
below ctxlm_ds, a file there, or a folder of apps/. Only the commands and the Python interface import applications; a
string that names a module counts as an import of it there.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = "ctxlm_ds"
APPS = f"{PACKAGE}.apps"
ABOVE_APPS = ("cli", "pretrain", "finetune", "api")
"""Rooms that may import applications."""
MOST_LINES, MOST_FUNCTION_LINES = 400, 60
RUN_BUILDER, MOST_BUILDER_LINES = ("run.py", "run_data.py"), 40
"""Files of the run builder and the lines of a function there."""

RECIPE, MOST_RECIPES = "RunConfig", 50
"""Class of a complete recipe, and how many parameters of functions may be one: a part takes its own section."""

Graph = Mapping[str, set[str]]


def modules_of(root: Path) -> dict[str, Path]:
    """Return the files of the package below `root` by the name of their module."""
    files = sorted((root / PACKAGE).rglob("*.py"))
    return {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imports_of(tree: ast.AST, module: str, modules: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules of the package that a file imports, except imports for annotations alone."""
    for node in _executed(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules else str(node.module)


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree without the bodies of `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from _executed(node)


def room_of(module: str) -> str:
    """Return the room of a module: `data`, `run`, `apps.plan`."""
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] == ["apps"] else 1])


def circles(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components with more than one member (Tarjan 1972)."""
    found: list[list[str]] = []
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in order:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == order[node]:
            members = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(members) > 1:
                found.append(sorted(members))

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return found


def named_apps(tree: ast.AST, imported: set[str]) -> set[str]:
    """Return the applications that a file imports or names in a string of code, such as `ctxlm_ds.apps.x:y`."""
    docs = {id(node.body[0].value) for node in ast.walk(tree) if _has_docstring(node)}  # type: ignore[attr-defined]
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    named = {str(node.value) for node in strings if id(node) not in docs}
    return {name for name in named | imported if name == APPS or name.startswith(f"{APPS}.")}


def _has_docstring(node: ast.AST) -> bool:
    body = getattr(node, "body", None)
    return isinstance(body, list) and bool(body) and isinstance(body[0], ast.Expr)


def long_functions(tree: ast.AST, most: int) -> Iterator[tuple[str, int, int]]:
    """Yield name, first line and number of lines of each function that is longer than `most` lines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > most:
                yield node.name, node.lineno, lines


def recipe_parameters(tree: ast.AST) -> int:
    """Return the number of parameters that are complete recipes."""
    arguments = (node for node in ast.walk(tree) if isinstance(node, ast.arg) and node.annotation is not None)
    return sum(RECIPE in ast.unparse(node.annotation) for node in arguments if node.annotation is not None)


def find_problems(root: Path) -> list[str]:
    """Return a line for each circle, import upward and exceeded limit of the package below `root`."""
    modules = modules_of(root)
    problems: list[str] = []
    files: dict[str, set[str]] = {}
    rooms: dict[str, set[str]] = {}
    recipes = 0
    for module, path in modules.items():
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        files[module] = set(imports_of(tree, module, modules)) - {module}
        room = room_of(module)
        rooms.setdefault(room, set()).update(room_of(other) for other in files[module])
        shown = path.relative_to(root)
        recipes += recipe_parameters(tree)
        if room not in ABOVE_APPS and not room.startswith("apps"):
            problems += [f"{shown}: names {name}" for name in sorted(named_apps(tree, files[module]))]
        if (lines := text.count("\n")) > MOST_LINES:
            problems.append(f"{shown}: {lines} lines, more than {MOST_LINES}")
        most = MOST_BUILDER_LINES if path.name in RUN_BUILDER and room == path.stem else MOST_FUNCTION_LINES
        problems += [f"{shown}:{first}: {name} has {lines} lines, more than {most}"
                     for name, first, lines in long_functions(tree, most)]  # fmt: skip
    if recipes > MOST_RECIPES:
        problems.append(f"{recipes} parameters of type {RECIPE}, more than {MOST_RECIPES}")
    problems += [f"circle of files: {', '.join(members)}" for members in circles(files)]
    return problems + [f"circle of rooms: {', '.join(members)}" for members in circles(rooms)]


def main() -> None:
    """Print every problem; the exit status is 1 if there is one."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    problems = find_problems(Path(__file__).resolve().parents[1])
    print("\n".join(problems) or "no circles, no imports of applications by the core, no file or function too long")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
