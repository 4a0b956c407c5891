"""Two-way tables between our parameters and the tensors of a plain Hugging Face class; each family brings its own.

A row of a table names one parameter of ours and the tensors it becomes there. In a family's rows `{i}` stands for the
number of a layer, `{p}` for `weight` and `bias`. Every parameter of either side is in exactly one row; what a Hugging
Face file may hold besides (a buffer, the second name of a tied tensor) is listed too, so that nothing is dropped
unseen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ctxlm_ds.errors import ExportError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Change:
    """How one parameter of ours becomes their tensors, and back bit for bit; on the meta device too."""

    to_theirs: Callable[[torch.Tensor, int], Sequence[torch.Tensor]]
    """From ours and their number to theirs, in the order of the row."""
    to_ours: Callable[[list[torch.Tensor]], torch.Tensor]
    """From theirs to ours."""


def _stack(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(values) if len(values) > 1 else values[0]


def _transpose(value: torch.Tensor) -> torch.Tensor:
    return value.t().contiguous() if value.dim() == 2 else value


STACKED = Change(lambda value, count: value.chunk(count), _stack)
"""Ours is theirs one below the other; with one tensor, the two are equal."""
TRANSPOSED = Change(lambda value, _: [_transpose(value)], lambda values: _transpose(values[0]))
"""They have a matrix as [inputs, outputs]; a bias is equal."""


@dataclass(frozen=True)
class Row:
    """One parameter of ours and its tensors in the Hugging Face class."""

    ours: str
    theirs: tuple[str, ...]
    change: Change = STACKED

    def to_theirs(self, value: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return our parameter as their tensors, in the order of `theirs`."""
        return self.change.to_theirs(value, len(self.theirs))

    def to_ours(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return our parameter, their tensors read with `read(name in the table)`."""
        return self.change.to_ours([read(name) for name in self.theirs])

    def their_shapes(self, shape: Shape) -> list[Shape]:
        """Return the shapes of `theirs` for a parameter of ours of `shape`."""
        return [tuple(value.shape) for value in self.to_theirs(torch.empty(shape, device="meta"))]

    def our_shape(self, shape_of: Callable[[str], Shape]) -> Shape:
        """Return the shape of our parameter, theirs told by `shape_of(name in the table)`.

        Raises:
            ExportError: their tensors do not fit together.
        """
        try:
            return tuple(self.to_ours(lambda name: torch.empty(shape_of(name), device="meta")).shape)
        except RuntimeError as error:
            raise ExportError(f"{', '.join(self.theirs)} do not fit together: {error}") from error


@dataclass(frozen=True)
class KeyMap:
    """The rows of one Hugging Face class with everything else that its files may hold."""

    hf_class: str
    rows: tuple[Row, ...]
    tied: Mapping[str, str] = field(default_factory=dict)
    """Second name of a tensor -> the name under which it is written."""
    unused: tuple[str, ...] = ()
    """Patterns of tensors that files hold although the class has no such parameter."""
    old_endings: Mapping[str, str] = field(default_factory=dict)
    """Ending of a name in older files -> the present one."""
    optional_prefix: str = ""
    """Beginning of their names that a file saved from the bare model leaves out."""


def expand(rows: Sequence[Row], num_layers: int) -> tuple[Row, ...]:
    """Fill in `{i}` and `{p}`: one row a parameter."""
    expanded = []
    for row in rows:
        layers = range(num_layers) if "{i}" in row.ours else (0,)
        leaves = ("weight", "bias") if "{p}" in row.ours else ("",)
        for layer in layers:
            for leaf in leaves:
                ours, *theirs = (name.format(i=layer, p=leaf) for name in (row.ours, *row.theirs))
                expanded.append(replace(row, ours=ours, theirs=tuple(theirs)))
    return tuple(expanded)


@dataclass(frozen=True)
class Assignment:
    """How the tensors of a Hugging Face file belong to a table."""

    stored: dict[str, str]
    """Name in the table -> name in the file that holds it."""
    doubles: dict[str, str]
    """Name in the file -> name in the file that must be equal to it (both names of a tied tensor were written)."""
    unused: tuple[str, ...]
    """Names in the file that the class does not use."""


def assign(key_map: KeyMap, file_names: Sequence[str], where: str) -> Assignment:
    """Find each tensor of the table among the names of a file, under its own, its tied or its older name.

    Raises:
        ExportError: names every tensor that is missing and every one that is unknown.
    """
    wanted = {name for row in key_map.rows for name in row.theirs}
    stored: dict[str, str] = {}
    aliases: dict[str, str] = {}
    unused: list[str] = []
    unknown: list[str] = []
    for file_name, name in _present_names(key_map, file_names).items():
        if name in wanted:
            stored[name] = file_name
        elif name in key_map.tied:
            aliases[name] = file_name
        elif any(re.fullmatch(pattern, name) for pattern in key_map.unused):
            unused.append(file_name)
        else:
            unknown.append(name)
    doubles: dict[str, str] = {}
    for alias, file_name in aliases.items():
        name = key_map.tied[alias]
        if name in stored:
            doubles[file_name] = stored[name]
        else:
            stored[name] = file_name
    missing = sorted(wanted - stored.keys())
    if missing or unknown:
        raise ExportError(_mismatch(key_map.hf_class, where, missing, sorted(unknown)))
    return Assignment(stored, doubles, tuple(sorted(unused)))


def _present_names(key_map: KeyMap, file_names: Sequence[str]) -> dict[str, str]:
    """Map each name in the file to the name that the class has for it today."""
    names = {name: _with_present_ending(name, key_map.old_endings) for name in file_names}
    prefix = key_map.optional_prefix
    if prefix and not any(name.startswith(prefix) for name in names.values()):
        names = {file: name if name in key_map.tied else prefix + name for file, name in names.items()}
    return names


def _with_present_ending(name: str, old_endings: Mapping[str, str]) -> str:
    for old, new in old_endings.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _mismatch(hf_class: str, where: str, missing: Sequence[str], unknown: Sequence[str]) -> str:
    parts = [f"{where} is not a {hf_class}"]
    if missing:
        parts.append(f"missing: {', '.join(missing)}")
    if unknown:
        parts.append(f"unknown: {', '.join(unknown)}")
    remedy = f"save it with {hf_class}.save_pretrained (a bare encoder or a fine-tuned head is not enough)"
    return "; ".join([*parts, remedy])
