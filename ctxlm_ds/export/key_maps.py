"""Tables between our parameters and the tensors of a plain Hugging Face class, for both directions.

A row names one parameter of ours and the tensors it becomes there. In a family's rows `{i}` is the number of a layer
and `{p}` is `weight` and `bias`. Every parameter of either side is in exactly one row. Other tensors that a file may
hold (a buffer, the second name of a tied tensor) are listed too, so that none is dropped unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from ctxlm_ds.errors import ExportError

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
MOST_NAMES = 3
"""Names of tensors in a message."""


class WeightSource(Protocol):
    """Full parameters under our names, read one at a time."""

    def names(self) -> Sequence[str]: ...

    def shape(self, name: str) -> Shape: ...

    def read_full(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True)
class Change:
    """Conversion of one parameter of ours to their tensors and back, bit for bit; on the meta device too."""

    to_theirs: Callable[[torch.Tensor, int], Sequence[torch.Tensor]]
    """Converts ours and the number of theirs to theirs, in the order of the row."""
    to_ours: Callable[[list[torch.Tensor]], torch.Tensor]
    """Converts theirs to ours."""


def _stack(values: list[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.cat(values) if len(values) > 1 else values[0]


def _transpose(value: torch.Tensor) -> torch.Tensor:
    return value.t().contiguous() if value.dim() == 2 else value


def stacked(rows: Sequence[int]) -> Change:
    """Return the change for theirs of different heights: ours is theirs stacked by `rows` of each."""

    def join(values: list[torch.Tensor]) -> torch.Tensor:
        found = [len(value) for value in values]
        if found != list(rows):
            raise ValueError(f"they have {found} rows, and the config describes {list(rows)}")
        return _stack(values)

    return Change(lambda value, _: value.split(list(rows)), join)


STACKED = Change(lambda value, count: value.chunk(count), _stack)
"""Ours is theirs stacked by rows; with one tensor, the two are equal."""
TRANSPOSED = Change(lambda value, _: [_transpose(value)], lambda values: _transpose(values[0]))
"""Their matrices are [inputs, outputs]; a bias is equal."""


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
        """Return our parameter from their tensors, which `read(name in the table)` reads."""
        return self.change.to_ours([read(name) for name in self.theirs])

    def their_shapes(self, shape: Shape) -> list[Shape]:
        """Return the shapes of `theirs` for a parameter of ours of `shape`."""
        import torch

        return [tuple(value.shape) for value in self.to_theirs(torch.empty(shape, device="meta"))]

    def our_shape(self, shape_of: Callable[[str], Shape]) -> Shape:
        """Return the shape of our parameter from theirs, which `shape_of(name in the table)` returns.

        Raises ExportError if their tensors do not fit together.
        """
        import torch

        try:
            return tuple(self.to_ours(lambda name: torch.empty(shape_of(name), device="meta")).shape)
        except (RuntimeError, IndexError, ValueError) as error:
            raise ExportError(f"{', '.join(self.theirs)} do not fit together: {error}") from error


@dataclass(frozen=True)
class KeyMap:
    """The rows of one Hugging Face class, and other tensors that its files may hold."""

    hf_class: str
    rows: tuple[Row, ...]
    tied: Mapping[str, str] = field(default_factory=dict)
    """Second name of a tensor -> the name under which it is saved."""
    unused: tuple[str, ...] = ()
    """Patterns of tensors that files hold although the class has no such parameter."""
    old_endings: Mapping[str, str] = field(default_factory=dict)
    """Ending of a name in older files -> the present one."""
    zero: tuple[str, ...] = ()
    """Patterns of tensors of the class that our model lacks and that must be 0."""
    optional_prefix: str = ""
    """Prefix of their names that a file saved from the bare model does not have."""
    body: tuple[str, ...] = ()
    """Beginnings of their names in the bare model, if they have no such prefix."""


def expand(rows: Sequence[Row], num_layers: int) -> tuple[Row, ...]:
    """Fill in `{i}` and `{p}`: one row per parameter."""
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
    """The tensors of a Hugging Face file by their place in a table."""

    stored: dict[str, str]
    """Name in the table -> name in the file that holds it."""
    doubles: dict[str, str]
    """Name in the file -> name in the file that must be equal to it (both names of a tied tensor were written)."""
    unused: tuple[str, ...]
    """Names in the file that the class does not use."""
    zero: tuple[str, ...] = ()
    """Names in the file of tensors that must be 0."""


def assign(key_map: KeyMap, file_names: Sequence[str], where: str, new_head: bool = False) -> Assignment:
    """Find each tensor of the table among the names of a file, under its present, tied or older name.

    With `new_head` the file may lack the class's heads, or have others. Raises ExportError, which names the missing and
    the unknown tensors.
    """
    wanted = {name for row in key_map.rows for name in row.theirs}
    present = _present_names(key_map, file_names)
    stored = {name: file for file, name in present.items() if name in wanted}
    others = {file: name for file, name in present.items() if name not in wanted}
    aliases = {file: key_map.tied[name] for file, name in others.items() if name in key_map.tied}
    doubles = {file: stored[name] for file, name in aliases.items() if name in stored}
    stored |= {name: file for file, name in aliases.items() if name not in stored}
    unused = {file for file, name in others.items() if any(re.fullmatch(row, name) for row in key_map.unused)}
    zero = {file for file, name in others.items() if any(re.fullmatch(row, name) for row in key_map.zero)}
    unknown = sorted(name for file, name in others.items() if file not in unused | zero | aliases.keys())
    missing = sorted(wanted - stored.keys())
    are_heads = not any(name.startswith(key_map.body or key_map.optional_prefix) for name in (*missing, *unknown))
    if (missing or unknown) and not (new_head and are_heads):
        save = f"save it with {key_map.hf_class}.save_pretrained"
        remedy = f"ctxlm convert from-hf --new-head gives it fresh heads, or {save}" if are_heads else save
        lists = [f"{what}: {_first(names)}" for what, names in (("missing", missing), ("unknown", unknown)) if names]
        raise ExportError(f"{where} is not a {key_map.hf_class}; {remedy}. {'; '.join(lists)}")
    unused |= others.keys() - zero - aliases.keys()
    return Assignment(stored, doubles, tuple(sorted(unused)), tuple(sorted(zero)))


def _present_names(key_map: KeyMap, file_names: Sequence[str]) -> dict[str, str]:
    """Map each name in the file to the name that the class has for it today."""
    names = {name: name for name in file_names}
    for old, new in key_map.old_endings.items():
        names |= {file: name.removesuffix(old) + new for file, name in names.items() if name.endswith(old)}
    prefix = key_map.optional_prefix
    if prefix and not any(name.startswith(prefix) for name in names.values()):
        names = {file: name if name in key_map.tied else prefix + name for file, name in names.items()}
    return names


def _first(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
