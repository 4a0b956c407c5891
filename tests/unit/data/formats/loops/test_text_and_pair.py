"""Segments of XLNet's rows beside its algorithm, written down here with the same draws."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ctxlm_ds.data.formats.loops.text_and_pair import RowSettings, TextStream, rows_of
from ctxlm_ds.data.index.sentence_table import UNALIGNED
from ctxlm_ds.data.numba_random import below, stream, stream_key, uniform, word_at

KEY = stream_key(3, "text_and_pair")


def sentences(count: int, longest: int, seed: int = 0) -> list[int]:
    """Lengths, a few of them 0."""
    return np.random.default_rng(seed).integers(0, longest, size=count).tolist()


def stream_of(lengths: list[int], backward: bool, skipped: int = 2) -> TextStream:
    """All sentences but the first and last `skipped`, in a dataset of tokens of two bytes."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    offsets = (2 * starts[:-1]).astype(np.int64).view(UNALIGNED)
    offsets.flags.writeable = False
    number = len(lengths) - 2 * skipped
    return TextStream(offsets, 1, skipped, number, int(starts[skipped]), int(starts[skipped + number]), backward)


def split_a_and_b(sent_ids: list[bool], begin: int, room: int, row: int, backward: bool) -> tuple[int, ...] | None:
    """_split_a_and_b without tokens: places of A and B."""
    length, state = len(sent_ids), np.uint64(stream(KEY, 0, row, backward))
    word = [np.uint64(word_at(state, number)) for number in range(3)]
    if begin + room >= length:
        return None
    end, cut_points = begin + 1, []
    while end < length:
        if sent_ids[end] != sent_ids[end - 1]:
            if end - begin >= room:
                break
            cut_points.append(end)
        end += 1
    if len(cut_points) == 0 or uniform(word[0]) < 0.5:
        a_end = cut_points[below(word[1], len(cut_points))] if cut_points else end
        b_size = max(1, room - (a_end - begin))
        b_begin = below(word[2], length - b_size)
        b_end = b_begin + b_size
        while b_begin > 0 and sent_ids[b_begin - 1] == sent_ids[b_begin]:
            b_begin -= 1
        while b_end < length - 1 and sent_ids[b_end - 1] == sent_ids[b_end]:
            b_end += 1
    else:
        a_end = cut_points[below(word[1], len(cut_points))]
        b_begin, b_end = a_end, end
    while a_end - begin + b_end - b_begin > room:
        if a_end - begin > b_end - b_begin:
            a_end -= 1
        else:
            b_end -= 1
    if a_end >= length or b_end >= length:
        return None
    return begin, a_end, b_begin, b_end


def expected(lengths: list[int], half: int, room: int, backward: bool) -> Iterator[tuple[int, ...]]:
    filled = [size for size in lengths[:: -1 if backward else 1] if size]
    sent_ids = [number % 2 == 0 for number, size in enumerate(filled) for _ in range(size)]
    row = 0
    while (found := split_a_and_b(sent_ids, (row + 1) * half, room, row, backward)) is not None:
        yield found
        row += 1


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("half", "room", "longest"), [(16, 13, 9), (16, 13, 60), (5, 2, 4), (256, 253, 40)])
def test_same_draws_give_the_originals_segments(half: int, room: int, longest: int, backward: bool) -> None:
    lengths = sentences(400, longest, seed=half)
    text = stream_of(lengths, backward)
    records = np.concatenate(list(rows_of(text, RowSettings(half, room, KEY, 0))))
    wanted = list(expected(lengths[2:-2], half, room, backward))
    assert len(records) == len(wanted) > 10
    for record, (a_begin, a_end, b_begin, b_end) in zip(records, wanted, strict=True):
        places = [a_begin, a_end, b_begin, b_end]
        if backward:
            places = [text.after - place for place in (a_end, a_begin, b_end, b_begin)]
        else:
            places = [text.first + place for place in places]
        assert [int(record[name]) for name in ("a_start", "a_end", "b_start", "b_end")] == places
        assert record["num_tokens"] == half + room + 3 and record["is_random"] == backward
        assert record["a_end"] - record["a_start"] + record["b_end"] - record["b_start"] == room


def test_records_do_not_depend_on_how_many_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text, settings = stream_of(sentences(300, 20), backward=False), RowSettings(16, 13, KEY, 1)
    whole = np.concatenate(list(rows_of(text, settings)))
    monkeypatch.setattr("ctxlm_ds.data.formats.loops.text_and_pair.RECORDS_AT_ONCE", 7)
    assert np.array_equal(np.concatenate(list(rows_of(text, settings))), whole)
