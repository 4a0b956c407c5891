"""Numbers as Slurm and people write them: `0-2,5` for 0, 1, 2, 5."""

from __future__ import annotations

from collections.abc import Iterable


def expand_numbers(text: str) -> list[str]:
    """Expand `08-10,3` to 08, 09, 10, 3; leading zeros stay.

    Raises:
        ValueError: an item is not a number or a range, or a range runs backwards; names the item.
    """
    numbers: list[str] = []
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"{item!r} is not a number or a range")
        end = int(last) if dash else int(first)
        if end < int(first):
            raise ValueError(f"the range {item!r} runs backwards")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), end + 1)]
    return numbers


def join_numbers(numbers: Iterable[int], separator: str = ",") -> str:
    """Join ascending numbers as ranges: `[0, 1, 2, 5]` -> `0-2,5`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return separator.join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
