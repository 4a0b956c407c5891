"""The settings that DeepSpeed reads: a list made from the pinned release (tests/deepspeed_source.py).

DeepSpeed ignores a top-level key that it does not know, so a misspelt one would silently change the run. A test
compares the list with the installed release. In: the shipped file. Out: names. Not here: what a setting may be.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

KeyPath = tuple[str, ...]
KEYS_FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True, slots=True)
class DeepSpeedKeys:
    """What DeepSpeed reads."""

    top_level: frozenset[str]
    nested: dict[KeyPath, frozenset[str]]
    """Keys of each section whose keys are known in full, by its path."""
    removed: dict[KeyPath, str]
    """Keys of older releases that DeepSpeed refuses, with its reason."""


@cache
def deepspeed_keys() -> DeepSpeedKeys:
    """Return the keys of the pinned DeepSpeed."""
    values = json.loads(KEYS_FILE.read_text(encoding="utf-8"))
    return DeepSpeedKeys(
        frozenset(values["top_level"]),
        {tuple(path.split(".")): frozenset(names) for path, names in values["nested"].items()},
        {tuple(path.split(".")): text for path, text in values["removed"].items()},
    )
