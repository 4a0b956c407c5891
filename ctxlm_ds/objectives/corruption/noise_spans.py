"""Inputs and targets of denoisers: compiled loops over the samples of a micro-batch.

Source: google-research/text-to-text-transfer-transformer t5/data/preprocessors.py (`random_spans_noise_mask`,
`noise_span_to_unique_sentinel`, `nonnoise_span_to_unique_sentinel`, `random_prefix_noise_mask`).

Kept spans and replaced spans alternate, a kept one first; the lengths of both are compositions of their sums, all
equally likely. In the input the i-th sentinel is in the place of the i-th replaced span; in the target it is before the
tokens of this span. Both end with the end-of-text token.

The words of a sample's stream (data/numba_random.py): word 0 chooses the denoiser, word 1 the length of a prefix; word
2 + i decides whether replaced token i + 1 begins a span, and word 2 + n + i whether kept token i + 1 does, for n
replaced tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ctxlm_ds.data.numba_random import below, compiled, put, stream, uniform, word_at
from ctxlm_ds.data.sample import Ids, Marks, Places, Samples, Shares, TargetExamples, starts_of
from ctxlm_ds.objectives.encoder_decoder import END_TOKENS

if TYPE_CHECKING:
    from ctxlm_ds.objectives.span_corruption import Denoiser

FIRST_TOKEN_WORD = 2


class DenoiserTables(NamedTuple):
    """The denoisers of an objective, k of them, for texts of up to n - 1 tokens."""

    ends: Shares  # [k], cumulative shares
    is_prefix: Marks  # [k]
    limits: Places  # [k], most tokens of a text; the rest is left out
    noise: Places  # [k, n], replaced tokens of a text of each length; of a prefix denoiser the fewest inputs
    spans: Places  # [k, n]; of a prefix denoiser the most inputs
    mode_ids: Ids  # [k], token before the input, or NO_MODE
    sentinels: Ids
    end_id: int


NO_MODE = -1


def denoiser_tables(
    denoisers: Sequence[Denoiser], input_length: int, mode_ids: Sequence[int], sentinels: Ids, end_id: int
) -> DenoiserTables:
    """Return the tables of k denoisers for inputs of at most `input_length` tokens.

    `mode_ids` [k] are the ids of their mode tokens, or NO_MODE, `sentinels` those of as many spans as a text can need.
    """
    limits = [denoiser.text_length(input_length) for denoiser in denoisers]
    lengths = range(max(limits) + 1)
    shares = np.array([denoiser.share for denoiser in denoisers])
    counted = np.array(
        [[d.prefix_bounds(n) if d.is_prefix else d.counts(n) for n in lengths] for d in denoisers], dtype=np.int64
    )
    return DenoiserTables(
        ends=np.cumsum(shares / shares.sum()),
        is_prefix=np.array([denoiser.is_prefix for denoiser in denoisers]),
        limits=np.array(limits, dtype=np.int64),
        noise=np.ascontiguousarray(counted[:, :, 0]),
        spans=np.ascontiguousarray(counted[:, :, 1]),
        mode_ids=np.array(mode_ids, dtype=np.int32),
        sentinels=sentinels,
        end_id=end_id,
    )


def denoise(samples: Samples, key: np.uint64, tables: DenoiserTables) -> TargetExamples:
    """Make an input and a target of each sample; tokens that the sample format inserted are left out."""
    count = len(samples.keys)
    chosen, sizes = np.empty((count, 3), dtype=np.int64), np.empty((count, 2), dtype=np.int64)
    choose(samples, key, tables, chosen, sizes)
    starts, target_starts = starts_of(sizes[:, 0]), starts_of(sizes[:, 1])
    examples = TargetExamples(
        input_ids=np.empty(int(starts[-1]), dtype=np.int32), starts=starts,
        target_ids=np.empty(int(target_starts[-1]), dtype=np.int32), target_starts=target_starts,
    )  # fmt: skip
    write(samples, key, tables, chosen, examples)
    return examples


@compiled
def choose(samples: Samples, key: np.uint64, tables: DenoiserTables, chosen: Places, sizes: Places) -> None:
    """Choose the denoiser, the tokens of text and the prefix of each sample [c, 3], and its lengths [c, 2]."""
    for number in range(len(chosen)):
        state = stream(key, samples.keys[number, 0], samples.keys[number, 1], samples.keys[number, 2])
        kind, draw = 0, uniform(word_at(state, 0))
        while kind < len(tables.ends) - 1 and draw >= tables.ends[kind]:
            kind += 1
        length = np.int64(0)
        for position in range(samples.starts[number], samples.starts[number + 1]):
            length += not samples.special_mask[position]
        length = min(length, tables.limits[kind])
        first, second = tables.noise[kind, length], tables.spans[kind, length]
        extra = END_TOKENS + (tables.mode_ids[kind] != NO_MODE)
        prefix = np.int64(0)
        if tables.is_prefix[kind]:
            prefix = first + below(word_at(state, 1), second - first + 1)
            sizes[number, 0], sizes[number, 1] = prefix + extra, length - prefix + END_TOKENS
        else:
            sizes[number, 0] = length - first + second + extra
            sizes[number, 1] = first + max(second, min(length, 1)) + END_TOKENS
        chosen[number, 0], chosen[number, 1], chosen[number, 2] = kind, length, prefix


@compiled
def write(samples: Samples, key: np.uint64, tables: DenoiserTables, chosen: Places, examples: TargetExamples) -> None:
    """Write the inputs and targets of samples for which `choose` has chosen."""
    longest = tables.noise.shape[1]
    text = np.empty(longest, dtype=np.int32)
    replaced, kept = np.empty(longest, dtype=np.int64), np.empty(longest, dtype=np.int64)
    for number in range(len(chosen)):
        state = stream(key, samples.keys[number, 0], samples.keys[number, 1], samples.keys[number, 2])
        kind, length, prefix = chosen[number]
        filled = 0
        for position in range(samples.starts[number], samples.starts[number + 1]):
            if filled < length and not samples.special_mask[position]:
                text[filled] = samples.input_ids[position]
                filled += 1
        inputs = examples.input_ids[examples.starts[number] : examples.starts[number + 1]]
        targets = examples.target_ids[examples.target_starts[number] : examples.target_starts[number + 1]]
        inputs[-1] = targets[-1] = tables.end_id
        into, target = 0, 0
        if tables.mode_ids[kind] != NO_MODE:
            inputs[0] = tables.mode_ids[kind]
            into = 1
        if tables.is_prefix[kind]:
            put(inputs[into:], text[:prefix])
            put(targets, text[prefix:length])
            continue
        noise, spans = tables.noise[kind, length], tables.spans[kind, length]
        if spans == 0:
            put(inputs[into:], text[:length])
            targets[:-1] = tables.sentinels[0]
            continue
        compose(state, FIRST_TOKEN_WORD, noise, replaced[:spans])
        compose(state, FIRST_TOKEN_WORD + noise, length - noise, kept[:spans])
        begin = np.int64(0)
        for span in range(spans):
            end = begin + kept[span]
            put(inputs[into:], text[begin:end])
            into += kept[span] + 1
            inputs[into - 1] = targets[target] = tables.sentinels[span]
            begin = end + replaced[span]
            put(targets[target + 1 :], text[end:begin])
            target += 1 + replaced[span]


@compiled
def compose(state: np.uint64, first_word: int, total: int, parts: Places) -> None:
    """Divide `total` into positive parts, all divisions equally likely.

    Each place between two items begins a part with the probability that is left for it, so every choice of
    len(parts) - 1 places has the same one.
    """
    parts[:] = 0
    parts[0] = 1
    part, missing = 0, len(parts) - 1
    for item in range(1, total):
        if below(word_at(state, first_word + item - 1), total - item) < missing:
            part += 1
            missing -= 1
        parts[part] += 1
