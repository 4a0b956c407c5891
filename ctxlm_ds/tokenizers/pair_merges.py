"""The greedy merges of WordPiece as a compiled loop: exact at each step, whichever score ranks the pairs.

In: the different words as rows of symbols, with their counts. Out: the merges in order.
A tree of winners over all pairs gives the best pair at once; a merge changes the counts of the pairs in the words
that hold it, and with the likelihood score the scores of every pair that shares a symbol with it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

compiled: Any = numba.njit(cache=True, nogil=True, error_model="numpy")
_PAIRS, _NODES, _TOKENS, _GIVEN, _ROUND, _TOUCHED = range(6)
_FIRST_CAPACITY = 1 << 16
_DONE = -1


class MergeCorpus(NamedTuple):
    """The words to learn from."""

    symbols: NDArray[np.int32]
    """[total] symbols of all words, one after another."""
    starts: NDArray[np.int64]
    """[words + 1]"""
    counts: NDArray[np.int64]
    """[words] occurrences."""
    names: list[str]
    """Symbol by number; a symbol inside a word begins with the continuation mark."""


_WORD = np.dtype([("start", np.int64), ("length", np.int64), ("count", np.int64)])
_TOKEN = np.dtype([("count", np.int64), ("start", np.int64), ("first_left", np.int64), ("first_right", np.int64)])
"""A symbol: its occurrences, where its spelling starts, the newest pair with it on the left and on the right."""
_PAIR = np.dtype(
    [(name, np.int64) for name in ("left", "right", "count", "same_left", "same_right", "head", "round", "touched")]
    + [("score", np.float64)]
)
"""`same_left`, `same_right`: the next pair with the same symbol there; `head`: its newest node; `round`: the merge that
changed it last. `touched` is a list of its own: the pairs that this merge changed."""
_NODE = np.dtype([("word", np.int64), ("next", np.int64)])


class _State(NamedTuple):
    symbols: Any
    words: Any
    tokens: Any
    characters: Any
    spellings: Any
    """Hash table from spelling to symbol."""
    merges: Any
    sizes: Any
    pairs: Any
    nodes: Any
    table: Any
    """Hash table from (left, right) to pair."""
    tree: Any
    """Winners: node i is the better pair of nodes 2i and 2i + 1; the leaves are the pairs."""


def learn_merges(
    corpus: MergeCorpus, num_new: int, min_frequency: int, likelihood: bool, mark: str = "##"
) -> NDArray[np.int32]:
    """[new symbols, 2] the (left, right) of each new symbol, numbered on from the given ones; at most `num_new`.

    The score of a pair is its count n_ab, or n_ab / (n_a n_b) with `likelihood`, both over the words as they are split
    by then; ties go to the greater n_ab, then to the lower numbers. Pairs below `min_frequency` are left alone. Two
    pairs that spell the same share one symbol. Memory grows with the number of symbols of the different words.
    """
    state = _first_state(corpus, num_new, mark)
    word = 0
    while (word := _count_words(state, word)) < len(corpus.counts):
        state = _grown(state, 0)
    state.sizes[_ROUND] = 1
    _index(state, min_frequency, likelihood)
    while (need := _merge_until_full(state, min_frequency, likelihood)) != _DONE:
        state = _grown(state, need)
        _index(state, min_frequency, likelihood)
    return state.merges[: state.sizes[_TOKENS] - state.sizes[_GIVEN]].copy()


def _first_state(corpus: MergeCorpus, num_new: int, mark: str) -> _State:
    spelled = [_spelling(name, mark) for name in corpus.names]
    num_characters = sum(map(len, spelled))
    words = np.zeros(len(corpus.counts), dtype=_WORD)
    words["start"], words["length"], words["count"] = corpus.starts[:-1], np.diff(corpus.starts), corpus.counts
    # One more than there will be, for the one that is tried.
    tokens = np.zeros(len(spelled) + num_new + 2, dtype=_TOKEN)
    tokens["start"][1 : len(spelled) + 1] = np.cumsum([len(text) for text in spelled])
    tokens["first_left"] = tokens["first_right"] = -1
    longest = int(words["length"].max(initial=0)) + 1
    characters = np.zeros(num_characters + (num_new + 1) * longest, dtype=np.int32)
    characters[:num_characters] = [character for text in spelled for character in text]
    sizes = np.zeros(6, dtype=np.int64)
    sizes[_GIVEN] = sizes[_TOKENS] = len(spelled)
    state = _State(
        corpus.symbols.astype(np.int32), words, tokens, characters,
        np.full(_power_of_two(4 * len(tokens)), -1, dtype=np.int64), np.zeros((num_new, 2), dtype=np.int32), sizes,
        np.zeros(_FIRST_CAPACITY, dtype=_PAIR), np.zeros(_FIRST_CAPACITY, dtype=_NODE), *_indices(_FIRST_CAPACITY),
    )  # fmt: skip
    _enter_given_tokens(state)
    return state


def _spelling(name: str, mark: str) -> list[int]:
    """Code points, after a -1 where the symbol continues a word."""
    if name.startswith(mark) and name != mark:
        return [-1, *map(ord, name[len(mark) :])]
    return [ord(character) for character in name]


def _indices(capacity: int) -> tuple[Any, Any]:
    return np.full(2 * capacity, -1, dtype=np.int64), np.full(2 * capacity, -1, dtype=np.int64)


def _power_of_two(least: int) -> int:
    return 1 << max(1, int(least - 1).bit_length())


def _grown(state: _State, need: int) -> _State:
    """The same with room for so many more pairs and nodes, twice that of before where it was nearly full."""
    pairs, nodes = state.pairs, state.nodes
    if state.sizes[_PAIRS] + max(need, len(pairs) // 4) > len(pairs):
        capacity = _power_of_two(max(2 * len(pairs), int(state.sizes[_PAIRS]) + need))
        pairs = _copied(pairs, capacity)
    if state.sizes[_NODES] + max(need, len(nodes) // 4) > len(nodes):
        nodes = _copied(nodes, max(2 * len(nodes), int(state.sizes[_NODES]) + need))
    table, tree = _indices(len(pairs))
    state = state._replace(pairs=pairs, nodes=nodes, table=table, tree=tree)
    _fill_table(state)
    return state


def _copied(array: NDArray[Any], length: int) -> NDArray[Any]:
    larger = np.zeros(length, dtype=array.dtype)
    larger[: len(array)] = array
    return larger


@compiled
def _mixed(word: np.uint64) -> np.uint64:
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return word ^ (word >> np.uint64(31))


@compiled
def _place_of_pair(state: _State, left: int, right: int) -> int:
    """Where the table holds the pair, or would."""
    mask = np.uint64(len(state.table) - 1)
    place = _mixed((np.uint64(left) << np.uint64(32)) | np.uint64(right)) & mask
    while True:
        slot = state.table[place]
        if slot < 0 or (state.pairs[slot].left == left and state.pairs[slot].right == right):
            return place
        place = (place + np.uint64(1)) & mask


@compiled
def _fill_table(state: _State) -> None:
    for slot in range(state.sizes[_PAIRS]):
        state.table[_place_of_pair(state, state.pairs[slot].left, state.pairs[slot].right)] = slot


@compiled
def _change_pair(state: _State, left: int, right: int, amount: int, word: int) -> None:
    """Add to a pair's count; a `word` not below 0 is noted as one that holds it."""
    place = _place_of_pair(state, left, right)
    slot = state.table[place]
    if slot < 0:
        slot = state.sizes[_PAIRS]
        state.sizes[_PAIRS] += 1
        state.table[place] = slot
        pair = state.pairs[slot]
        pair.left, pair.right, pair.count, pair.score, pair.head, pair.round = left, right, 0, -1.0, -1, -1
        pair.same_left, pair.same_right = state.tokens[left].first_left, state.tokens[right].first_right
        state.tokens[left].first_left = state.tokens[right].first_right = slot
    pair = state.pairs[slot]
    pair.count += amount
    if word >= 0:
        node = state.sizes[_NODES]
        state.sizes[_NODES] += 1
        state.nodes[node].word, state.nodes[node].next = word, pair.head
        pair.head = node
    if pair.round != state.sizes[_ROUND]:
        pair.round = state.sizes[_ROUND]
        state.pairs[state.sizes[_TOUCHED]].touched = slot
        state.sizes[_TOUCHED] += 1


@compiled
def _count_words(state: _State, first: int) -> int:
    """Count symbols and pairs of the words from `first` on; returns the word at which the room ends."""
    for word in range(first, len(state.words)):
        start, length, count = state.words[word].start, state.words[word].length, state.words[word].count
        room = min(len(state.pairs) - state.sizes[_PAIRS], len(state.nodes) - state.sizes[_NODES])
        if room < length:
            return word
        for place in range(start, start + length):
            state.tokens[state.symbols[place]].count += count
            if place > start:
                _change_pair(state, state.symbols[place - 1], state.symbols[place], count, word)
    state.sizes[_TOUCHED] = 0
    return len(state.words)


@compiled
def _score(state: _State, slot: int, min_frequency: int, likelihood: bool) -> float:
    pair = state.pairs[slot]
    count = pair.count
    if count < min_frequency or count <= 0:
        return -1.0
    if not likelihood:
        return float(count)
    return count / (float(state.tokens[pair.left].count) * float(state.tokens[pair.right].count))


@compiled
def _better(state: _State, one: int, other: int) -> bool:
    if one < 0 or other < 0:
        return one >= 0
    first, second = state.pairs[one], state.pairs[other]
    if first.score != second.score:
        return first.score > second.score
    if first.count != second.count:
        return first.count > second.count
    if first.left != second.left:
        return first.left < second.left
    return first.right < second.right


@compiled
def _index(state: _State, min_frequency: int, likelihood: bool) -> None:
    """Score every pair and fill the tree."""
    capacity = len(state.pairs)
    for slot in range(state.sizes[_PAIRS]):
        state.pairs[slot].score = _score(state, slot, min_frequency, likelihood)
        state.tree[capacity + slot] = slot
    for node in range(capacity - 1, 0, -1):
        one, other = state.tree[2 * node], state.tree[2 * node + 1]
        state.tree[node] = one if _better(state, one, other) else other


@compiled
def _rescore(state: _State, slot: int, min_frequency: int, likelihood: bool) -> None:
    state.pairs[slot].score = _score(state, slot, min_frequency, likelihood)
    node = len(state.pairs) + slot
    state.tree[node] = slot
    while node > 1:
        node >>= 1
        one, other = state.tree[2 * node], state.tree[2 * node + 1]
        winner = one if _better(state, one, other) else other
        if winner == state.tree[node] and winner != slot:
            return
        state.tree[node] = winner


@compiled
def _merge_until_full(state: _State, min_frequency: int, likelihood: bool) -> int:
    """Merge until all is done (-1), or until the next merge needs room for the number of pairs that is returned."""
    given = state.sizes[_GIVEN]
    while state.sizes[_TOKENS] < given + len(state.merges):
        best = state.tree[1]
        if best < 0 or state.pairs[best].score < 0:
            return _DONE
        need = 2 * _occurrences(state, best)
        room = min(len(state.pairs) - state.sizes[_PAIRS], len(state.nodes) - state.sizes[_NODES])
        if need > room:
            return need
        left, right = state.pairs[best].left, state.pairs[best].right
        result = _merged_token(state, left, right)
        if result == state.sizes[_TOKENS]:
            state.sizes[_TOKENS] += 1
            state.merges[result - given, 0], state.merges[result - given, 1] = left, right
        node = state.pairs[best].head
        state.pairs[best].head = -1  # those words hold it no longer
        while node >= 0:
            _merge_in_word(state, state.nodes[node].word, left, right, result)
            node = state.nodes[node].next
        _rescore_after(state, left, right, result, min_frequency, likelihood)
        state.sizes[_ROUND] += 1
    return _DONE


@compiled
def _occurrences(state: _State, slot: int) -> int:
    """In how many places of the different words the pair stands, words noted twice counted twice."""
    total = 0
    node = state.pairs[slot].head
    while node >= 0:
        word = state.words[state.nodes[node].word]
        symbols = state.symbols[word.start : word.start + word.length]
        total += _places(symbols, state.pairs[slot].left, state.pairs[slot].right)
        node = state.nodes[node].next
    return total


@compiled
def _places(symbols: Any, left: int, right: int) -> int:
    total = 0
    for place in range(len(symbols) - 1):
        total += symbols[place] == left and symbols[place + 1] == right
    return total


@compiled
def _merge_in_word(state: _State, word: int, left: int, right: int, result: int) -> None:
    start, length, count = state.words[word].start, state.words[word].length, state.words[word].count
    symbols = state.symbols[start : start + length]
    if _places(symbols, left, right) == 0:
        return
    for place in range(length - 1):
        _change_pair(state, symbols[place], symbols[place + 1], -count, -1)
    kept = place = 0
    while place < length:
        if place + 1 < length and symbols[place] == left and symbols[place + 1] == right:
            symbols[kept] = result
            state.tokens[left].count -= count
            state.tokens[right].count -= count
            state.tokens[result].count += count
            place += 2
        else:
            symbols[kept] = symbols[place]
            place += 1
        kept += 1
    state.words[word].length = kept
    for place in range(kept - 1):
        is_new = symbols[place] == result or symbols[place + 1] == result
        _change_pair(state, symbols[place], symbols[place + 1], count, word if is_new else -1)


@compiled
def _rescore_after(state: _State, left: int, right: int, result: int, min_frequency: int, likelihood: bool) -> None:
    for number in range(state.sizes[_TOUCHED]):
        _rescore(state, state.pairs[number].touched, min_frequency, likelihood)
    state.sizes[_TOUCHED] = 0
    if not likelihood:
        return
    for token in (left, right, result):
        slot = state.tokens[token].first_left
        while slot >= 0:
            if state.pairs[slot].count >= min_frequency:
                _rescore(state, slot, min_frequency, likelihood)
            slot = state.pairs[slot].same_left
        slot = state.tokens[token].first_right
        while slot >= 0:
            if state.pairs[slot].count >= min_frequency:
                _rescore(state, slot, min_frequency, likelihood)
            slot = state.pairs[slot].same_right


@compiled
def _place_of_token(state: _State, token: int) -> int:
    """Where the table of spellings holds a token that is spelled like this one, or would."""
    start, end = state.tokens[token].start, state.tokens[token + 1].start
    mask = np.uint64(len(state.spellings) - 1)
    code = np.uint64(end - start)
    for index in range(start, end):
        code = _mixed(code * np.uint64(0x9E3779B97F4A7C15) + np.uint64(state.characters[index] + 1))
    place = code & mask
    while True:
        other = state.spellings[place]
        if other < 0:
            return int(place)
        other_start = state.tokens[other].start
        same = state.tokens[other + 1].start - other_start == end - start
        for offset in range(end - start):
            if not same:
                break
            same = state.characters[start + offset] == state.characters[other_start + offset]
        if same:
            return int(place)
        place = (place + np.uint64(1)) & mask


@compiled
def _enter_given_tokens(state: _State) -> None:
    for token in range(state.sizes[_GIVEN]):
        state.spellings[_place_of_token(state, token)] = token


@compiled
def _merged_token(state: _State, left: int, right: int) -> int:
    """The token spelled left then right; the next number where there is none."""
    token = state.sizes[_TOKENS]
    end = state.tokens[token].start
    for place in range(state.tokens[left].start, state.tokens[left + 1].start):
        state.characters[end] = state.characters[place]
        end += 1
    # What stands on the right continues a word, so its first entry is the mark.
    for place in range(state.tokens[right].start + 1, state.tokens[right + 1].start):
        state.characters[end] = state.characters[place]
        end += 1
    state.tokens[token + 1].start = end
    place = _place_of_token(state, token)
    if state.spellings[place] < 0:
        state.spellings[place] = token
    return state.spellings[place]
