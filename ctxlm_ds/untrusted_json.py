"""Readers of JSON files that another program may have written: regular files only, with limits on size and nesting.

In: a path. Out: the JSON value or the JSON object in it. Each refusal is one error that starts with the path.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 26
MAX_DEPTH = 100


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; raises OSError for a FIFO (without waiting for a writer), a device, a folder."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(handle, "rb")


def read_text(path: Path, error: type[Exception] = ValueError, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a regular UTF-8 file of at most `max_bytes`; a larger one is refused unread.

    Raises `error` if the file is missing, too large, not a regular file, or not UTF-8.
    """
    try:
        with open_regular(path) as file:
            content = file.read(min(max_bytes, os.fstat(file.fileno()).st_size) + 1)
    except FileNotFoundError:
        raise error(f"{path}: missing") from None
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else problem
        raise error(f"{path}: cannot be read ({reason})") from None
    if len(content) > max_bytes:
        raise error(f"{path}: cannot be read (more than {max_bytes:,} bytes)")
    try:
        return content.decode()
    except UnicodeDecodeError as problem:
        raise error(f"{path}: cannot be read as UTF-8 ({problem.reason} at byte {problem.start})") from None


def read_json(path: Path, error: type[Exception] = ValueError, max_bytes: int = MAX_BYTES) -> Any:
    """Return the JSON value in a file; raises `error` as `read_text`, or for no JSON or JSON nested too deeply."""
    text = read_text(path, error, max_bytes)
    try:
        return parse_json(text)
    except ValueError as problem:
        raise error(f"{path}: cannot be read as JSON ({problem})") from None


def parse_json(text: str | bytes, finite: bool = False, unique: bool = False) -> Any:
    """Return the JSON value of a text in UTF-8; raises ValueError for no JSON, or JSON nested too deeply.

    With `finite`, NaN and Infinity are no JSON; Python's own writer writes them. With `unique`, no object may have a
    key twice.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        parse_constant = refuse_constant if finite else None
        value = json.loads(text, parse_constant=parse_constant, object_pairs_hook=_object if unique else None)
    except RecursionError:
        raise ValueError(f"more than {MAX_DEPTH} levels") from None
    if isinstance(value, (dict, list)) and _is_deeper(value, MAX_DEPTH):
        raise ValueError(f"more than {MAX_DEPTH} levels")
    return value


def read_json_object(path: Path, error: type[Exception] = ValueError, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file; raises `error` as `read_json`, or if the value is not an object."""
    value = read_json(path, error, max_bytes)
    if not isinstance(value, dict):
        raise error(f"{path}: holds a JSON {type(value).__name__}, expected an object")
    return value


def one_value_remedy(first_line: str, name: str) -> str:
    """Return what to do if a file that should have JSON on each line begins with a list or a lone brace, or nothing."""
    if not (first_line.strip() == "{" or first_line.lstrip().startswith("[")):
        return ""
    return f"the file is one JSON value: write a list as an object a line, jq -c '.[]' {name} > NAME.jsonl"


def check_regular_files(folder: Path, error: type[Exception]) -> None:
    """Raise `error` if a folder holds a FIFO, a device or a socket, which would block its reader."""
    for path in sorted(folder.iterdir()):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise error(f"{path}: not a regular file; remove it")


def refuse_constant(name: str) -> None:
    """Refuse NaN and Infinity, as json.loads calls its `parse_constant`."""
    raise ValueError(f"{name}: expected a finite number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(twice)}: written twice; keep one")
    return dict(pairs)


def _is_deeper(value: Any, levels: int) -> bool:
    if levels == 0:
        return True
    items = value.values() if isinstance(value, dict) else value
    return any(_is_deeper(item, levels - 1) for item in items if isinstance(item, (dict, list)))
