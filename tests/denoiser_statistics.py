"""Inputs and targets of a dataset against preprocessors.py (text-to-text-transfer-transformer), as slow loops.

`python -m tests.objective_statistics` prints these figures for recipes of T5.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.numba_random import stream_key
from ctxlm_ds.data.stream.loader import TRAIN_MASKS
from ctxlm_ds.objectives.span_corruption import Denoiser
from ctxlm_ds.recipe.schema import RunConfig
from tests.objective_statistics import FEWEST, LONGEST_SHOWN, Figure, share, two_shares
from tests.ragged import one_sample

QUARTERS = ("first", "second", "third", "fourth")


class Denoised(NamedTuple):
    """What became of a text."""

    mode: int
    """First token of the input if it names a denoiser, else 0."""
    inputs: int
    """Tokens of the input, with mode, sentinels and end."""
    targets: int
    spans: tuple[int, ...]
    """Lengths of the replaced spans."""
    in_order: bool
    """Sentinels are those of the vocabulary in order, the same in input and target."""

    @property
    def replaced(self) -> int:
        return sum(self.spans) or self.targets - 1

    @property
    def text(self) -> int:
        return self.inputs + self.targets - 2 - 2 * len(self.spans) - (self.mode > 0)

    @property
    def quarter(self) -> int:
        """Quarter of a text in which its continuation begins."""
        return min(3, 4 * (self.text - self.replaced - 1) // max(1, self.text - 1))


RATIOS: tuple[tuple[str, Callable[[Denoised], float], Callable[[Denoised], float]], ...] = (
    ("predicted share of the tokens", lambda one: one.replaced, lambda one: one.text),
    ("tokens of a span (mean)", lambda one: sum(one.spans), lambda one: len(one.spans)),
    ("spans of a text (mean)", lambda one: len(one.spans), lambda one: bool(one.spans)),
    ("tokens in (mean)", lambda one: one.inputs, lambda one: 1),
    ("tokens out (mean)", lambda one: one.targets, lambda one: 1),
)


def denoised_rows(rows: RowSource, config: RunConfig, objective: Any, count: int) -> tuple[list[Denoised], list[int]]:
    """Corrupt `count` rows as training does; what became of each, and the tokens of each text."""
    epochs, numbers = np.divmod(np.arange(count), len(rows))
    samples, _ = rows.samples(numbers, epochs)
    budgets, key = objective.budgets(samples.lengths, config.data), stream_key(config.training.seed, TRAIN_MASKS)
    examples, tables = objective.corrupt_batch(samples, key, budgets), objective._tables_for(config.data.seq_length)
    found = []
    for number in range(count):
        ids, target = examples.example(number).input_ids, examples.example(number).target_ids
        assert ids[-1] == target[-1] == tables.end_id
        mode = int(ids[0]) if ids[0] in tables.mode_ids else 0
        ends = np.flatnonzero(np.isin(np.append(target[:-1], tables.sentinels[:1]), tables.sentinels))
        orders = [part[np.isin(part, tables.sentinels)].tolist() for part in (ids, target)]
        wanted = tables.sentinels[: len(orders[0])].tolist()
        spans = tuple((np.diff(ends) - 1).tolist())
        found.append(Denoised(mode, len(ids), len(target), spans, orders == [wanted, wanted]))
    kept = [int((~one_sample(samples, number).special_mask.astype(bool)).sum()) for number in range(count)]
    return found, kept


def published(length: int, denoiser: Denoiser, mode: int, input_length: int, rng: np.random.Generator) -> Denoised:
    """`random_spans_noise_mask` and `random_prefix_noise_mask` of a text, cut to the room of an input."""
    length = min(length, denoiser.text_length(input_length))
    first = 1 + (mode > 0)
    if denoiser.mean_span_length is None:
        fewest = max(1, int(np.rint((1.0 - 2.0 * denoiser.noise_density) * (length - 1))))
        prefix = int(rng.integers(fewest, length))
        return Denoised(mode, prefix + first, length - prefix + 1, (), True)
    noise = min(max(int(np.rint(np.float32(length * denoiser.noise_density))), 1), length - 1)
    spans = max(int(np.rint(noise / denoiser.mean_span_length)), 1)
    starts = np.concatenate([[0], rng.permutation((np.arange(noise - 1) < spans - 1).astype(np.int64))])
    lengths = np.bincount(np.cumsum(starts), minlength=spans)
    return Denoised(mode, length - noise + spans + first, noise + spans + 1, tuple(lengths.tolist()), True)


def denoising_figures(
    rows: RowSource, config: RunConfig, objective: Any, count: int, seed: int = 8
) -> Iterator[Figure]:
    """Every figure of an objective of denoisers over `count` rows."""
    rng, length = np.random.default_rng(seed), config.data.seq_length
    ours, texts = denoised_rows(rows, config, objective, count)
    modes = [max(0, int(mode)) for mode in objective._tables_for(length).mode_ids]
    kinds = objective.config.denoisers()
    drawn = rng.choice(len(kinds), count, p=np.array([kind.share for kind in kinds]) / sum(k.share for k in kinds))
    rule = [published(text, kinds[k], modes[k], length, rng) for text, k in zip(texts, drawn.tolist(), strict=True)]
    for name, value, of in RATIOS:
        if any(of(one) for one in ours):
            yield ratio(name, *([(value(one), of(one)) for one in found] for found in (ours, rule)))
    yield share("sentinels in order", sum(one.in_order for one in ours), count, 1.0)
    for mode in sorted(set(modes)) if any(modes) else ():
        chance = sum(kind.share for kind, of_kind in zip(kinds, modes, strict=True) if of_kind == mode)
        yield share(
            f"mode {objective._tokenizer.id_to_token(mode)}", sum(one.mode == mode for one in ours), count, chance
        )
    for size in range(1, LONGEST_SHOWN + 1):
        pairs = [[(one.spans.count(size), len(one.spans)) for one in found] for found in (ours, rule)]
        if sum(found for found, _ in pairs[0]) >= FEWEST:
            yield ratio(f"spans of {size} token{'s' * (size > 1)}", *pairs)
    cuts = [Counter(one.quarter for one in found if not one.spans) for found in (ours, rule)]
    for number, name in enumerate(QUARTERS):
        if cuts[0][number] >= FEWEST // 10:
            yield two_shares(f"cut in the {name} quarter", *(n for cut in cuts for n in (cut[number], cut.total())))


def ratio(name: str, ours: Sequence[tuple[float, float]], rule: Sequence[tuple[float, float]]) -> Figure:
    """A ratio of sums over samples; values of one sample depend on each other."""
    ratios, errors = [], []
    for found in (ours, rule):
        values, weights = np.array(found, dtype=float).T
        ratios.append(float(values.sum() / weights.sum()))
        error = math.sqrt(((values - ratios[-1] * weights) ** 2).sum()) / weights.sum()
        errors.append(error if error > 1e-9 else 0.0)
    return Figure(name, *ratios, math.hypot(*errors))
