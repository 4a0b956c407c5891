"""English prose that every installation carries: the docstrings of the standard library, numpy and torch.

Modules are read with `ast` and never imported; a module is a document, a docstring's prose paragraphs its lines. The
same installation gives the same files, byte for byte. A tenth of the modules, chosen by a hash of their names, is held
out.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ctxlm_ds.atomic import output_folder
from ctxlm_ds.data.preprocess.pool import ordered_map
from ctxlm_ds.errors import DataError

PACKAGES = ("numpy", "torch")
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
_BULLET = re.compile(r"\s*([-*•+]|\(?\d{1,2}[.)]|\(?[a-z]\))\s+")
_HEADING = re.compile(
    r"\s*[A-Z][a-z]+( [a-z]+){0,2}:\s*$|\s*(Parameters|Returns|Notes|See Also|Examples|References)\s*$"
)
_PARAMETER = re.compile(r"\s*\*{0,2}\w+(, \*{0,2}\w+)* : .*$")
"""A parameter in numpy's style; its description follows on lines of its own."""
_ENTRY = re.compile(r"\s+[\w.*`]+ ?(\([^)]*\))?: (?=\S)|\s*:(param|returns?|raises|rtype|type|arg)\b[^:]*: ?")
"""A parameter in Google's or Sphinx's style; its description follows on the line."""
_SENTENCE_END = (".", "!", "?", ":", '."', ".)")


@dataclass(frozen=True, slots=True)
class CorpusSize:
    """What was written for one split."""

    modules: int
    bytes: int


def extract_docstrings(
    output_dir: str | Path, packages: tuple[str, ...] = PACKAGES, workers: int = 1
) -> dict[str, CorpusSize]:
    """Write `train.jsonl` and `heldout.jsonl` ({"title": module, "text": prose}) into a new folder, atomically.

    Raises DataError where a package is not installed or the folder exists.
    """
    output_dir = Path(output_dir)
    if output_dir.exists():
        raise DataError(f"{output_dir} exists already; choose another --output-dir, or remove it first")
    roots = [("", Path(sysconfig.get_path("stdlib")))] + [(name, _package_folder(name)) for name in packages]
    counts = {split: [0, 0] for split in FILES}
    with output_folder(output_dir) as folder:
        handles = {split: open(folder / name, "wb") for split, name in FILES.items()}  # noqa: SIM115
        try:
            for title, text in _documents(roots, workers):
                split = "heldout" if is_held_out(title) else "train"
                line = json.dumps({"title": title, "text": text}, ensure_ascii=False).encode() + b"\n"
                handles[split].write(line)
                counts[split][0] += 1
                counts[split][1] += len(line)
        finally:
            for handle in handles.values():
                handle.close()
    return {split: CorpusSize(*count) for split, count in counts.items()}


def is_held_out(module: str) -> bool:
    """A fixed tenth of all module names."""
    return int.from_bytes(hashlib.sha256(module.encode()).digest()[:8], "big") < HELD_OUT_SHARE * 2**64


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"the package {name} is not installed here; pip install {name}, or leave it out")
    return Path(next(iter(spec.submodule_search_locations)))


def _documents(roots: list[tuple[str, Path]], workers: int) -> Iterator[tuple[str, str]]:
    """Module name and prose, in order of name within each root; a paragraph said before is not said again."""
    seen: set[bytes] = set()
    modules: list[str] = []
    paths: list[Path] = []
    for prefix, root in roots:
        for path in sorted(_python_files(root), key=lambda path: path.relative_to(root).parts):
            modules.append(_module_name(prefix, path.relative_to(root)))
            paths.append(path)
    for module, prose in zip(modules, ordered_map(_prose_reader, paths, workers), strict=True):
        paragraphs = []
        for paragraph in prose:
            key = hashlib.sha256(paragraph.encode()).digest()[:16]
            if key not in seen:
                seen.add(key)
                paragraphs.append(paragraph)
        text = "\n".join(paragraphs)
        if len(_WORD.findall(text)) >= MIN_WORDS:
            yield module, text


def _prose_reader() -> Callable[[Path], list[str]]:
    return module_prose


def _python_files(root: Path) -> Iterator[Path]:
    for path in root.rglob("*.py"):
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            yield path


def _module_name(prefix: str, relative: Path) -> str:
    parts = [part for part in (prefix, *relative.with_suffix("").parts) if part]
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def module_prose(path: Path) -> list[str]:
    """The prose paragraphs of all docstrings of a source file, in order; none where it is not valid Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return []
    paragraphs: list[str] = []
    for text in _docstrings(tree):
        paragraphs.extend(prose_paragraphs(text))
    return paragraphs


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Docstrings depth first, and the long strings that torch and numpy hand to functions that attach them."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield text
    for child in _statements(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
            for argument in child.value.args:
                yield from map(inspect.cleandoc, _attached_texts(argument))
        yield from _docstrings(child)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    for name in ("body", "orelse", "handlers", "finalbody"):
        children = getattr(node, name, ())
        if isinstance(children, list):
            yield from children


def _attached_texts(argument: ast.expr) -> Iterator[str]:
    """Multi-line string literals: alone, in a tuple, or with `.format(...)` called on one."""
    if isinstance(argument, ast.Tuple):
        for element in argument.elts:
            yield from _attached_texts(element)
    if isinstance(argument, ast.Call) and isinstance(argument.func, ast.Attribute) and argument.func.attr == "format":
        argument = argument.func.value
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str) and argument.value.count("\n") >= 3:
        yield argument.value


class _Prose:
    """Collects the prose paragraphs of one docstring, a line at a time."""

    def __init__(self) -> None:
        self.paragraphs: list[str] = []
        self._block: list[str] = []
        self._code_indent: int | None = None

    def add(self, line: str) -> None:
        indent = len(line) - len(line.lstrip())
        if self._code_indent is not None and line.strip():
            if indent > self._code_indent:
                return
            self._code_indent = None
        if not line.strip() or _HEADING.match(line) or _PARAMETER.match(line):
            self.finish()
        elif entry := _ENTRY.match(line) or _BULLET.match(line):
            self.finish()
            self._block = [" " * indent + line[entry.end() :]]
        elif directive := _DIRECTIVE.match(line):
            self.finish()
            self._code_indent = indent if directive.group("code") else None
        elif not _ORNAMENT.match(line):
            self._block.append(line)

    def finish(self) -> None:
        """End the paragraph; keep it where it is prose."""
        block, self._block = self._block, []
        if not block:
            return
        if block[-1].rstrip().endswith("::"):
            self._code_indent = len(block[0]) - len(block[0].lstrip())
        if not any(line.lstrip().startswith((">>>", "...")) for line in block):
            text = _clean(" ".join(line.strip() for line in block))
            if _is_prose(text):
                self.paragraphs.append(text)


def prose_paragraphs(docstring: str) -> list[str]:
    """The prose of a docstring, a string without line ends for each paragraph.

    Doctests, literal blocks, tables, directives, headings, underlines and the names of parameters are dropped; a
    parameter's description is a paragraph.
    """
    prose = _Prose()
    for line in docstring.expandtabs().splitlines():
        prose.add(line)
    prose.finish()
    return prose.paragraphs


def _clean(text: str) -> str:
    text = _ROLE.sub(r"\1", text)
    text = _LITERAL.sub(lambda match: match.group(1) or match.group(2), text)
    text = text.replace("::", ":").replace("**", "").replace("`", "")
    return re.sub(r"\s+", " ", text).strip()


def _is_prose(text: str) -> bool:
    """At least five words, mostly letters, ending like a sentence or long enough to be one."""
    words = _WORD.findall(text)
    if len(words) < 5 or not (text.endswith(_SENTENCE_END) or len(words) >= 12):
        return False
    letters = sum(character.isalpha() or character == " " for character in text)
    symbols = sum(character in "=(){}[]<>|\\_$#@/*&" for character in text)
    return letters >= 0.8 * len(text) and symbols <= 0.06 * len(text)
