"""What attention is asked for: the kind of layer, the sequences of the rows, the places that a position sees.

Shape letters: b rows, s positions of a row, t positions of a row of keys (s in self-attention), n heads, k heads of
keys and values (n unless grouped), d size of a head, m sequences of a row. The spec of a Need is an AttentionSpec.

A position sees the positions of its sequence: only itself and earlier ones if causal, only near ones in a window, only
those of no higher rank if ranked.
Padding sees padding or, if a row holds one sequence, that sequence. A position without a key of its sequence sees every
key of its row, so no softmax is empty and nothing is NaN. The results at such positions are never read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ctxlm_ds.kernels.dropout import keyed_row_dropout

Made = TypeVar("Made")


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of a layer; the implementation is chosen for it."""

    head_size: int
    causal: bool = False
    """Positions see no later ones."""
    shares_rows: bool = False
    """A row holds several sequences that never see each other."""
    dropout: float = 0.0
    """Dropout of the attention probabilities in training."""
    window: int | None = None
    """Most positions that a position sees to each side of itself (if causal: to the left); None sees all."""
    ranked: bool = False
    """Positions see none of a higher rank (Sequences.ranks)."""
    grouped: bool = False
    """Several query heads share a head of keys and values: k < n, and n is a multiple of k."""
    bias: bool = False
    """Each call brings a bias of the scores."""
    by_distance: bool = False
    """The bias depends on the head and on the distance of query and key only."""
    cross: bool = False
    """Keys and values are of another sequence than the queries."""
    scale: float | None = None
    """Factor of the products of queries and keys; None is 1 / sqrt(head_size)."""

    @property
    def ordered(self) -> bool:
        """True if visibility depends on the places of query and key."""
        return self.causal or self.window is not None

    def __post_init__(self) -> None:
        if self.cross and (self.ordered or self.ranked):
            raise ValueError(
                "cross attention is neither causal nor windowed nor ranked: its two sequences share no positions"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"an attention window is at least 1 position wide, not {self.window}")


class Sequences(NamedTuple):
    """The sequences of the queries' rows, and for cross attention those of the keys' rows (data/sample.py)."""

    ids: Tensor
    """[b, s], 1 to m for the sequences of a row, 0 at padding."""
    starts: Tensor
    """[b, m + 1], first position of each sequence and of the padding; s if there is none."""
    key_ids: Tensor | None = None
    """[b, t], the queries with id i see the keys with id i."""
    key_starts: Tensor | None = None
    """[b, m + 1]"""
    ranks: Tensor | None = None
    """[b, s], of the positions if the attention is ranked."""


class ProbabilityKeys(NamedTuple):
    """The draws of dropout of probabilities, which do not depend on the kernel or on the ranks that share the heads."""

    key: Tensor
    """0-d int64 on the device (kernels/dropout.py)."""
    first_head: int
    """Number of this rank's first head."""
    num_heads: int
    """Heads of all ranks."""


def default_keys(query: Tensor) -> ProbabilityKeys:
    """Return the keys of query heads [b, n, s, d] that no run has keys for."""
    return ProbabilityKeys(torch.zeros((), dtype=torch.int64, device=query.device), 0, query.shape[1])


def probability_dropout(probabilities: Tensor, p: float, keys: ProbabilityKeys) -> Tensor:
    """Drop probabilities [b, n, s, t] by the number of each in those of all heads."""
    rows, heads, length, _ = probabilities.shape
    device = probabilities.device
    numbers = torch.arange(rows, device=device)[:, None] * keys.num_heads + keys.first_head
    numbers = numbers + torch.arange(heads, device=device)
    queries = numbers[..., None] * length + torch.arange(length, device=device)
    return keyed_row_dropout(probabilities, p, keys.key, queries)


class AttentionCall(NamedTuple):
    """What a call brings in addition to query, key and value."""

    sequences: Sequences
    p: float = 0.0
    """Dropout of the attention probabilities, 0 in evaluation."""
    bias: Tensor | None = None
    """[n, s, t] or [b, n, s, t], added to the scaled scores."""
    keys: ProbabilityKeys | None = None
    """Read by kernels that set DRAWS_BY_KEY; others draw from torch's generators."""
    distances: Tensor | None = None
    """[n, 2 s - 1], a bias by the key's place minus the query's, from 1 - s: in place of `bias` for kernels that set
    READS_DISTANCES, whose memory is linear in s."""


AttentionKernel = Callable[[Tensor, Tensor, Tensor, AttentionCall], Tensor]
"""query [b, s, n, d], key and value [b, t, k, d], call -> [b, s, n, d]."""


def reads_distances(spec: AttentionSpec, kernel: AttentionKernel) -> bool:
    """Return whether calls bring `distances` instead of `bias`."""
    return spec.by_distance and bool(getattr(kernel, "READS_DISTANCES", False))


def same_sequence_mask(sequences: Sequences) -> Tensor:
    """Return [b, 1, s, t] bool, True if query and key belong to the same sequence (or both to padding)."""
    query_ids = sequences.ids[:, None, :, None]
    if sequences.key_ids is None:
        return query_ids == sequences.ids[:, None, None, :]
    mask = query_ids == sequences.key_ids[:, None, None, :]
    return mask | ~mask.any(-1, keepdim=True)


def first_sequence_mask(key_ids: Tensor) -> Tensor:
    """Return the keys [b, t] of rows with one sequence as [b, 1, 1, t] bool; all keys if the row is empty."""
    return (key_ids == key_ids[:, :1])[:, None, None, :]


def visible_keys(spec: AttentionSpec, sequences: Sequences) -> Tensor:
    """Return [b, 1, s, t] bool, True if the query sees the key."""
    mask = same_sequence_mask(sequences)
    if spec.ordered:
        mask = mask & place_mask(spec, mask.shape[-1], mask.device)
    if spec.ranked:
        assert sequences.ranks is not None
        mask = mask & (sequences.ranks[:, None, None] <= sequences.ranks[:, None, :, None])
    return mask


def place_mask(spec: AttentionSpec, length: int, device: torch.device) -> Tensor:
    """Return [s, s] bool, True if the key's place in the row is one that the query sees."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device)
    if spec.window is None:
        return mask.tril() if spec.causal else mask
    return mask.tril(0 if spec.causal else spec.window).triu(-spec.window)


_made: WeakIdKeyDictionary = WeakIdKeyDictionary()


def once(sequences: Sequences, name: str, spec: AttentionSpec, make: Callable[[], Made]) -> Made:
    """Return make(), which depends on the sequences and the spec only, made once for all layers of a micro-batch."""
    ids, others = sequences.ids, (sequences.key_ids, sequences.ranks)
    if torch.compiler.is_compiling() or ids.is_inference() or ids.device.type == "meta":
        return make()
    known: dict[tuple[object, ...], tuple[tuple[Tensor | None, ...], Made]] = _made.setdefault(ids, {})
    place = (name, spec, ids._version, *(None if other is None else other._version for other in others))
    if place not in known or any(old is not new for old, new in zip(known[place][0], others, strict=True)):
        known[place] = others, make()
    return known[place][1]
