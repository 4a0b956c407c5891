"""Files of torch.save from other systems, read by torch's restricted unpickler.

Tensors, containers, numbers, strings and argparse.Namespace are read. An object of any other class becomes an `Opaque`
with its state: its class is neither imported nor called.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import warnings
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from ctxlm_ds.errors import ExportError
from ctxlm_ds.untrusted_json import open_regular

T = TypeVar("T")
PICKLES_OF_OLD_FORMAT = 5
"""Before torch 1.6: magic number, protocol, system, the object, and the names of storages, then raw numbers."""

MOST_LEVELS, MOST_ENTRIES = 20, 1_000_000
UNPICKLER_MARK = "WeightsUnpickler error:"
END_OF_ADVICE = "from a trusted source."


class Opaque:
    """An object whose class is not read."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def read_torch_file(path: Path) -> dict[str, Any]:
    """Return the dict that torch.save wrote into a file, its tensors on the CPU and mapped from the file.

    Raises ExportError if the file is missing, damaged, not a dict, or needs a class that cannot stand as an Opaque.
    """
    try:
        names = _global_names(path)
        # A defaultdict becomes a dict: its default is not kept.
        stands_in: list[Any] = [Namespace, (lambda *_: {}, "collections.defaultdict")]
        stands_in += [(Opaque, name) for name in names - {"argparse.Namespace", "collections.defaultdict"}]
        with torch.serialization.safe_globals(stands_in), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except FileNotFoundError as error:
        raise ExportError(f"{path}: missing") from error
    except (OSError, RuntimeError, ValueError, EOFError, TypeError, KeyError, AttributeError, IndexError,
            pickle.UnpicklingError) as error:  # fmt: skip
        raise ExportError(f"{path}: cannot be read as a file of torch.save ({_reason(error)})") from error
    if not isinstance(content, dict):
        raise ExportError(f"{path}: holds {type(content).__name__}, not the dict of a checkpoint")
    return content


def _reason(error: Exception) -> str:
    """Return the sentence of torch's message that names the problem, without its advice to trust the file."""
    text = str(error)
    parts = (text.partition(UNPICKLER_MARK)[2], text.rpartition(END_OF_ADVICE)[2], text, type(error).__name__)
    lines = [line.strip().partition(". ")[0] for part in parts for line in part.splitlines()]
    reason = next(line for line in lines if line).removesuffix(".")
    return f"{reason}: not the pickle protocol 2 of torch.save" if "operand" in reason else reason


def _is_zip(path: Path) -> bool:
    with open_regular(path) as file:
        return file.read(2) == b"PK"


def _global_names(path: Path) -> set[str]:
    """Return the names of classes and functions that the file's pickles mention."""
    if _is_zip(path):
        return set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    with open_regular(path) as file:
        operations = [item for _ in range(PICKLES_OF_OLD_FORMAT) for item in pickletools.genops(file)]
    names = {str(value).replace(" ", ".") for operation, value, _ in operations if operation.name == "GLOBAL"}
    # Protocol 2 writes Python 2's name of the module, which torch replaces.
    return {name.replace("__builtin__.", "builtins.", 1) for name in names}


def flatten(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of nested dicts, named by their keys joined with dots; other values are left out.

    Raises ExportError if there are more than MOST_LEVELS levels or MOST_ENTRIES entries, as in a dict that contains
    itself or one dict many times, or if a tensor repeats its storage.
    """
    found: dict[str, torch.Tensor] = {}
    waiting, num_entries = [("", values, 1)], 0
    for prefix, inner, level in waiting:
        num_entries += len(inner)
        if level > MOST_LEVELS or num_entries > MOST_ENTRIES:
            limits = f"{MOST_LEVELS} levels or {MOST_ENTRIES:,} entries of dicts"
            raise ExportError(f"{prefix:.80}: more than {limits}; this is not a checkpoint's model")
        for key, value in inner.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict):
                waiting.append((f"{name}.", value, level + 1))
            elif isinstance(value, torch.Tensor):
                if value.numel() * value.element_size() > value.untyped_storage().nbytes():
                    raise ExportError(f"{name:.80}: a tensor larger than what the file stores of it; save it complete")
                found[name] = value
    return found


def renamed(name: str, table: Iterable[tuple[str, str]]) -> str | None:
    """Return our name of a tensor by a table of patterns -> ours, with {} for each group; None for an unknown one."""
    matches = ((re.fullmatch(pattern, name), ours) for pattern, ours in table)
    return next((ours.format(*match.groups()) for match, ours in matches if match), None)


def depth_of(names: Iterable[str], stack: str) -> int:
    """Return how many layers of a stack have parameters of ours."""
    return len({name.split(".")[1] for name in names if name.startswith(f"{stack}.")})


def required(values: Mapping[str, T], name: str, path: Path) -> T:
    """Return values[name]; raise ExportError if there is none."""
    if values.get(name) is None:
        raise ExportError(f"{path}: {name} is missing, without which the model cannot be converted")
    return values[name]


def as_number(value: Any, name: str, path: Path) -> float:
    """Return a number of a file; raise ExportError if it is missing."""
    if not isinstance(value, (int, float)):
        raise ExportError(f"{path}: {name} is {value!r:.80}, not a number")
    return float(value)
