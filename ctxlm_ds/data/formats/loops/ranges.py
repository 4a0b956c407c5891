"""Ranges of documents for threads, and work done range by range.

Each range is independent (compiled, without Python's lock), and results keep the order of the documents, so that they
are the same for any number of threads. Memory is bounded by the ranges in progress, some megabytes each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item")
Result = TypeVar("Result")
DocumentRange = tuple[int, int]

SENTENCES_PER_RANGE = 1 << 15


def document_ranges(documents: NDArray[np.int64], size: int = SENTENCES_PER_RANGE) -> Iterator[DocumentRange]:
    """Yield consecutive documents of about `size` sentences together, at least one document each."""
    documents, first = np.array(documents), 0  # aligned: a search would copy the array each time
    while first < len(documents) - 1:
        after = int(np.searchsorted(documents, documents[first] + size, side="right")) - 1
        after = max(first + 1, after)
        yield first, after
        first = after


def in_order(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Yield `work` of each item, in the items' order, by `workers` threads that are at most two items each ahead."""
    if workers == 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(workers) as pool:
        under_way: deque[Future[Result]] = deque()
        for item in items:
            under_way.append(pool.submit(work, item))
            if len(under_way) == 2 * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
