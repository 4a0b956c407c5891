"""Write the embedded corpus: docstrings of the standard library and installed packages as jsonl (nothing is imported).

Modules are read with `ast` and never imported. A module is a document, and the prose paragraphs of its docstrings are
its lines. A paragraph that repeats an earlier one except for names is dropped, so no held-out paragraph is a copy of
one that is trained on. The same installation gives the same files, byte for byte. A tenth of the modules,
chosen by a hash of their names, is held out.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib.util
import inspect
import json
import os
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from ctxlm_ds.atomic import output_folder
from ctxlm_ds.console import at_least, byte_progress, setup_logging
from ctxlm_ds.data.preprocess.pool import ordered_map
from ctxlm_ds.errors import DataError

PACKAGES = (
    "numpy", "torch", "transformers", "sympy", "pandas", "scipy", "networkx", "numba", "megatron", "deepspeed",
    "huggingface_hub", "datasets", "setuptools", "tensorboard", "pydantic", "accelerate", "mpmath", "werkzeug",
)  # fmt: skip
"""What the installation brings, the most prose first; a package that is not installed is skipped."""
MIN_WORDS = 50
"""Modules with fewer words of prose are left out."""
HELD_OUT_SHARE = 0.1
FILES = {"train": "train.jsonl", "heldout": "heldout.jsonl"}

_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"})
_WORD = re.compile(r"[A-Za-z]{2,}")
_DIRECTIVE = re.compile(r"\s*\.\. (?P<code>code|math|image|figure|testcode|plot|table|list-table|parsed-literal)?")
_ORNAMENT = re.compile(r"\s*(:\w[\w ,*.`\[\]|]*:|[=\-~^\"'#*+`_ ]{3,}\s*$|\+[-=+]{3,}|\|.*\|\s*$)")
_ROLE = re.compile(r":[a-z][a-z:+-]*:`~?\.?([^`<]*?)\s*(?:<[^`>]*>)?`")
_LITERAL = re.compile(r"``([^`]+)``|`([^`]+)`_{0,2}")
_PARAGRAPH_END = re.compile(
    r"\s*$|\s*[A-Z][a-z]+( [a-z]+){0,2}:\s*$|\s*(Parameters|Returns|Notes|See Also|Examples|References)\s*$"
    r"|\s*\*{0,2}\w+(, \*{0,2}\w+)* : .*$"
)
"""A blank line, a heading, or a parameter in numpy's style, whose description follows on other lines."""
_ENTRY = re.compile(
    r"\s+[\w.*`]+ ?(\([^)]*\))?: (?=\S)|\s*:(param|returns?|raises|rtype|type|arg)\b[^:]*: ?"
    r"|\s*([-*•+]|\(?\d{1,2}[.)]|\(?[a-z]\))\s+"
)
"""A parameter in Google's or Sphinx's style, or a bullet; its description follows on the line."""
_NAME = re.compile(r"(?<=[\w,] )[A-Z]\S*|\S*(?:_|[A-Za-z][A-Z]|\w\.\w)\S*")
_SENTENCE_END = (".", "!", "?", ":", '."', ".)")


def extract_docstrings(
    output_dir: str | Path, packages: Sequence[str] | None = None, workers: int = 1
) -> dict[str, tuple[int, int]]:
    """Write `train.jsonl` and `heldout.jsonl` ({"title": module, "text": prose}) into a new folder, atomically.

    `packages` are read in addition to the standard library; None takes those of PACKAGES that are installed.

    Returns the modules and bytes of each. Raises DataError if a package is not installed or the folder exists.
    """
    output_dir = Path(output_dir)
    if output_dir.exists():
        raise DataError(f"{output_dir} exists already; choose another --output-dir, or remove it first")
    if packages is None:
        packages = [name for name in PACKAGES if importlib.util.find_spec(name) is not None]
    roots = [("", Path(sysconfig.get_path("stdlib")))] + [(name, _package_folder(name)) for name in packages]
    lines: dict[str, list[bytes]] = {split: [] for split in FILES}
    with output_folder(output_dir) as folder:
        for title, text in _documents(roots, workers):
            line = json.dumps({"title": title, "text": text}, ensure_ascii=False).encode() + b"\n"
            lines["heldout" if is_held_out(title) else "train"].append(line)
        for split, name in FILES.items():
            (folder / name).write_bytes(b"".join(lines[split]))
    return {split: (len(found), sum(map(len, found))) for split, found in lines.items()}


def is_held_out(module: str) -> bool:
    """Return True for a fixed tenth of all module names."""
    return int.from_bytes(hashlib.sha256(module.encode()).digest()[:8], "big") < HELD_OUT_SHARE * 2**64


def _package_folder(name: str) -> Path:
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"{name} is no package that is installed here; pip install {name}, or leave it out")
    return Path(next(iter(spec.submodule_search_locations)))


def _documents(roots: list[tuple[str, Path]], workers: int) -> Iterator[tuple[str, str]]:
    """Yield module name and prose, by name within each root; of paragraphs that differ in names, one is kept."""
    found = [
        (_module_name(prefix, path.relative_to(root)), path)
        for prefix, root in roots
        for path in sorted(root.rglob("*.py"), key=lambda path: path.parts)
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    ]
    seen: set[str] = set()
    prose_of = ordered_map(_prose_reader, [path for _, path in found], workers)
    sizes = [path.stat().st_size for _, path in found]
    with byte_progress("reading modules", sum(sizes)) as progress:
        for (module, _), prose, done_bytes in zip(found, prose_of, accumulate(sizes), strict=True):
            new = {key: paragraph for paragraph in reversed(prose) if (key := _NAME.sub("#", paragraph)) not in seen}
            seen.update(new)
            text = "\n".join(reversed(new.values()))
            progress.update(done_bytes)
            if len(_WORD.findall(text)) >= MIN_WORDS:
                yield module, text


def _prose_reader() -> Callable[[Path], list[str]]:
    return module_prose


def _module_name(prefix: str, relative: Path) -> str:
    parts = [part for part in (prefix, *relative.with_suffix("").parts) if part]
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def module_prose(path: Path) -> list[str]:
    """Return the prose paragraphs of all docstrings of a source file, in order; none if it is not valid Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return []
    return [paragraph for text in _docstrings(tree) for paragraph in prose_paragraphs(text)]


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Yield docstrings depth first, and the long strings that torch and numpy hand to functions that attach them."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield ast.get_docstring(node) or ""
    for name in ("body", "orelse", "handlers", "finalbody"):
        children = getattr(node, name, ())
        for child in children if isinstance(children, list) else ():
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
                for argument in child.value.args:
                    yield from map(inspect.cleandoc, _attached_texts(argument))
            yield from _docstrings(child)


def _attached_texts(argument: ast.expr) -> Iterator[str]:
    """Yield multi-line string literals: alone, in a tuple, or with `.format(...)` called on one."""
    if isinstance(argument, ast.Tuple):
        for element in argument.elts:
            yield from _attached_texts(element)
    if isinstance(argument, ast.Call) and isinstance(argument.func, ast.Attribute) and argument.func.attr == "format":
        argument = argument.func.value
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str) and argument.value.count("\n") >= 3:
        yield argument.value


def prose_paragraphs(docstring: str) -> list[str]:
    """Return the prose of a docstring, a string without line ends for each paragraph.

    Doctests, literal blocks, tables, directives, headings, underlines and the names of parameters are dropped; a
    parameter's description is a paragraph.
    """
    blocks: list[list[str]] = [[]]
    code_indent: int | None = None
    for line in [*docstring.expandtabs().splitlines(), ""]:
        indent = len(line) - len(line.lstrip())
        if code_indent is not None and line.strip():
            if indent > code_indent:
                continue
            code_indent = None
        entry = _ENTRY.match(line)
        directive = None if entry else _DIRECTIVE.match(line)
        if _PARAGRAPH_END.match(line) or entry or directive:
            if blocks[-1] and blocks[-1][-1].rstrip().endswith("::"):
                code_indent = len(blocks[-1][0]) - len(blocks[-1][0].lstrip())
            blocks.append([])
        if _PARAGRAPH_END.match(line):
            continue
        if entry:
            blocks[-1] = [" " * indent + line[entry.end() :]]
        elif directive:
            code_indent = indent if directive["code"] else None
        elif not _ORNAMENT.match(line):
            blocks[-1].append(line)
    return [text for block in blocks if (text := _prose(block))]


def _prose(block: list[str]) -> str:
    """Return the text of a block; empty if it is not prose: at least five words, mostly letters, like a sentence."""
    if any(line.lstrip().startswith((">>>", "...")) for line in block):
        return ""
    text = _ROLE.sub(r"\1", " ".join(line.strip() for line in block))
    text = _LITERAL.sub(lambda match: match[1] or match[2], text)
    text = re.sub(r"\s+", " ", text.replace("::", ":").replace("**", "").replace("`", "")).strip()
    words = _WORD.findall(text)
    if len(words) < 5 or not (text.endswith(_SENTENCE_END) or len(words) >= 12):
        return ""
    letters = sum(character.isalpha() or character == " " for character in text)
    symbols = sum(character in "=(){}[]<>|\\_$#@/*&" for character in text)
    return text if letters >= 0.8 * len(text) and symbols <= 0.06 * len(text) else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--output-dir", required=True, metavar="DIR", help="new folder for train.jsonl and heldout.jsonl")
    packages = f"in addition to the standard library; default: those that are installed of {', '.join(PACKAGES)}"
    add("--packages", nargs="*", metavar="NAME", help=packages)
    add("--workers", type=at_least(1), default=os.cpu_count() or 1, metavar="N", help="default: all cores")
    args = parser.parse_args()
    setup_logging()
    for split, (num_modules, num_bytes) in extract_docstrings(args.output_dir, args.packages, args.workers).items():
        print(f"{args.output_dir}/{FILES[split]}: {num_modules:,} modules, {num_bytes / 1e6:.2f} MB")
