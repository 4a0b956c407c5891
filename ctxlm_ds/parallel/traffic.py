"""How many bytes tensor parallelism sends: DeepSpeed's comms logger does not see these collectives.

In: one call a collective. Out: message sizes by operation, as the comms logger counts them (the tensor handed to the
collective: the whole one of an all-reduce, the gathered one of an all-gather, the one before a reduce-scatter).
"""

from __future__ import annotations

from collections import Counter


class TrafficCounter:
    """Calls and bytes of one rank's tensor-parallel collectives since the last reset."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()

    def add(self, operation: str, num_bytes: int) -> None:
        """Count one collective: all_reduce, all_gather or reduce_scatter."""
        self.calls[operation] += 1
        self.num_bytes[operation] += num_bytes

    def reset(self) -> None:
        """Begin anew."""
        self.calls.clear()
        self.num_bytes.clear()
