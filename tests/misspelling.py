"""Slips of the keyboard."""

from __future__ import annotations


def misspell(name: str, position: int, kind: str) -> str:
    """`name` with one character dropped, doubled or swapped with the next (`kind`: drop, double, swap)."""
    position %= len(name)
    if kind == "drop":
        return name[:position] + name[position + 1 :]
    if kind == "double":
        return name[: position + 1] + name[position:]
    after = name[position + 1 : position + 2]
    return name[:position] + after + name[position] + name[position + 2 :]
