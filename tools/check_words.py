"""Find antique and unclear wording in docstrings, comments, string literals and docs.

Part of `make check`. Without paths, the package, tools/, docs/ and README.md are checked.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EVERYTHING = ("ctxlm_ds", "tools", "docs", "README.md")
WORDS = {
    r"anew|afresh": "again, from scratch",
    r"alike": "identically, the same",
    r"mend(s|ed|ing)?": "fix",
    r"but for": "except",
    r"for ever|without end|for good": "indefinitely, forever",
    r"(go|goes|going|gone|went) on( with)?": "continue, resume",
    r"for want of": "because ... is missing",
    r"farewell|affair|dearest|whoever|nobody's|behold|thereof|whence|wherein|hitherto": "a common word",
    r"bears? out": "confirm",
    r"(None|False|True|empty|null|nothing) where": "None if",
    r"(?<!there )(is|are|was|were) (?-i:none)|is had": "does not exist, is not a ...",
    r"(has|have) not(?! (been|yet|run|already))": "does not have",
    r"makes? do": "use ... instead",
    r"comes? of": "is caused by",
    r"had from": "obtained from",
    r"such as (are|is)|that are such": "those that",
    r"gone": "missing, removed, finished",
    r"stands? (in|there|beside|for)|stood": "is, is in, was",
    r"lies? (in|on|beside|below)": "is in, is stored in",
    r"besides?": "next to, in addition to",
    r"whole": "complete, full, entire",
    r"(tell|tells|told)( of)?": "report, log, show",
    r"of (one's|its|their|his|your) own": "separate, a separate",
    r"whatever|wherever": "any, regardless of",
    r"(a|per) (step|rank|node|row|layer) each": "per ...",
    r"shall": "will, must",
    r"at once": "immediately, together",
}
"""Pattern: what to write instead."""
ALLOWED = re.compile(
    r"whole (word|number|words|numbers)|whole_word|whole-word|wholeWord|tell_\w+|beside_\w+|of your own|WholeModel",
    re.IGNORECASE,
)
"""Uses that are correct."""
PATTERN = re.compile("|".join(rf"(?P<w{index}>\b(?:{words})\b)" for index, words in enumerate(WORDS)), re.IGNORECASE)
REPLACEMENTS = list(WORDS.values())


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring, string literal and comment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for offset, line in enumerate(node.value.split("\n")):
                yield node.lineno + offset, line
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def page_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of a Markdown page without its code."""
    in_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.startswith("    "):
            yield number, re.sub(r"`[^`]*`", "", line)


def find_words(path: Path) -> list[str]:
    """Return one line for each word in a file that should be replaced."""
    source = path.read_text(encoding="utf-8")
    texts = python_texts(source) if path.suffix == ".py" else page_texts(source)
    place = path.relative_to(ROOT)
    found = set()
    for number, text in texts:
        for match in PATTERN.finditer(ALLOWED.sub("", text)):
            replacement = REPLACEMENTS[int(str(match.lastgroup)[1:])]
            found.add((number, f'{place}:{number}: "{match[0]}": write {replacement}'))
    return [line for _, line in sorted(found)]


def files_below(names: list[str]) -> Iterator[Path]:
    """Yield the Python files and Markdown pages of some paths, except this file, which lists the words."""
    for name in names:
        path = (ROOT / name).resolve()
        files = sorted([*path.rglob("*.py"), *path.rglob("*.md")]) if path.is_dir() else [path]
        yield from (file for file in files if file != Path(__file__).resolve())


def main() -> None:
    """Print what is found; the exit status is 1 if there is anything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", help="files and folders to check (default: all)")
    arguments = parser.parse_args()
    names = arguments.paths or list(EVERYTHING)
    found = [line for path in files_below(names) for line in find_words(path)]
    if found:
        print("\n".join(found))
        sys.exit(f"{len(found)} found; reword them (the list of words is in tools/check_words.py)")


if __name__ == "__main__":
    main()
