"""The order of factorisation and the targets of permutation language modelling: compiled loops over samples.

Source: zihangdai/xlnet data_utils.py (`_sample_mask`, `_local_perm`). Each half of a row has its own targets and order.
The second half sees all of the first, the first nothing of the second.

A rank is the place of a token in the order. In a half, tokens that are no targets come first and have one rank; targets
and special tokens follow in a random order, which is the same in each block of `perm_size` tokens. A position sees the
tokens whose rank is not above its own; a prediction sees those whose rank is below that of its token.

The words of a sample's stream (data/numba_random.py): of each half, from HALF_WORDS times its number on, word 2j draws
length and place of span j, word 2j + 1 a further target, word ORDER_WORDS + j the j-th exchange of the order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ctxlm_ds.data.numba_random import below, compiled, inlined, stream, word_at
from ctxlm_ds.data.sample import Ids, Marks, Places, Samples, Shares
from ctxlm_ds.objectives.corruption.spans import draw_length

HALF_WORDS = 1 << 40
ORDER_WORDS = 1 << 39


class PermutationRules(NamedTuple):
    """The rules of an objective."""

    shares: Shares
    """Shares of spans of 1 to n tokens."""
    context: int
    """Tokens among which about `predicted` are targets."""
    predicted: int
    perm_size: int
    """Tokens of a block of the order; at least the length of any half for one block."""
    begins_word: Marks
    """[vocabulary], tokens with which a span may begin."""


@compiled
def permute_samples(
    samples: Samples,
    key: np.uint64,
    goals: Places,
    backward: Marks,
    rules: PermutationRules,
    ranks: Ids,
    is_target: Marks,
) -> None:
    """Draw the ranks [t] and targets [t], True at one, of all samples.

    `goals` [c] are the targets of each, special tokens included; `backward` [c] is True if the tokens are in the
    reverse order of the text, in which targets are chosen.
    """
    longest = 0
    for number in range(len(goals)):
        longest = max(longest, samples.starts[number + 1] - samples.starts[number])
    order = np.empty(longest, dtype=np.int64)
    for number in range(len(goals)):
        state = stream(key, samples.keys[number, 0], samples.keys[number, 1], samples.keys[number, 2])
        begin, end = samples.starts[number], samples.starts[number + 1]
        step, above = -1 if backward[number] else 1, 0
        bounds = (begin, begin + (end - begin) // 2, end)
        for half in range(2):
            first, after, first_word = bounds[half], bounds[half + 1], half * HALF_WORDS
            goal = (goals[number] + 1 - half) // 2
            ids, marks = samples.input_ids[first:after][::step], is_target[first:after][::step]
            choose_targets(ids, goal, state, first_word, rules, marks)
            draw_order(order[: after - first], rules.perm_size, state, first_word + ORDER_WORDS)
            rank_tokens(order, samples.special_mask[first:after], is_target[first:after], above, ranks[first:after])
            above = 1 + blocks_of(after - first, rules.perm_size)


@compiled
def choose_targets(
    ids: Ids, goal: int, state: np.uint64, first_word: int, rules: PermutationRules,
    chosen: Marks,
) -> None:  # fmt: skip
    """Mark `goal` tokens of a half, or all if it has no more: spans from left to right, then single tokens.

    A span of n tokens is in a context of n * context / predicted ones, at a random place, moved right to the next
    beginning of a word. What spans leave of the goal is drawn from all tokens that are not marked.
    """
    chosen[:] = False
    length = len(ids)
    goal = min(goal, length)
    count, position, draw = np.int64(0), np.int64(0), first_word
    while position < length and count < goal:
        word = word_at(state, draw)
        draw += 2
        size = min(draw_length(word, rules.shares, len(rules.shares)), goal - count)
        context = size * rules.context // rules.predicted
        before = below(word, context)
        begin = position + before
        while begin < length and not rules.begins_word[ids[begin]]:
            begin += 1
        # A span that reaches the end of the half ends the search, as in the original.
        if begin + size >= length:
            break
        chosen[begin : begin + size] = True
        count += size
        position = begin + size + context - before
    draw = first_word + 1
    while count < goal:
        place = below(word_at(state, draw), length)
        draw += 2
        if not chosen[place]:
            chosen[place] = True
            count += 1


@inlined
def blocks_of(length: int, perm_size: int) -> int:
    """Return the length of a half rounded up to complete blocks, above every place in its order."""
    size = max(1, min(perm_size, length))
    return (length + size - 1) // size * size


@compiled
def draw_order(order: Places, perm_size: int, state: np.uint64, first_word: int) -> None:
    """Draw a random order of a half: blocks of `perm_size` one after another, the same permutation in each."""
    size = min(perm_size, len(order))
    for place in range(size):
        order[place] = place
    for place in range(size - 1, 0, -1):
        other = below(word_at(state, first_word + place), place + 1)
        order[place], order[other] = order[other], order[place]
    for place in range(size, len(order)):
        order[place] = order[place - size] + size


@inlined
def rank_tokens(
    order: Places, is_special: Marks, chosen: Marks, above: int,
    ranks: Ids,
) -> None:  # fmt: skip
    """Write the ranks of a half, `above` those of another one: `above` for tokens that all see, from there by order.

    Marked special tokens are no targets: their mark is removed, and they are ranked like other special tokens.
    """
    for place in range(len(ranks)):
        if chosen[place] or is_special[place]:
            ranks[place] = above + 1 + order[place]
        else:
            ranks[place] = above
        chosen[place] = chosen[place] and not is_special[place]
