"""Pairs of single sentences (SENTENCE-PAIR + NSP of Liu 2019, section 4.2).

A is one natural sentence; B is the sentence after it, or with probability 0.5 (always after a document's last) one from
another document, and then the sentence after A begins the next pair. A pair beyond the room is shortened as BERT does.
These samples are short: the paper enlarges the batch to keep its tokens, packing does the same here.
"""

from __future__ import annotations

from typing import Any

from ctxlm_ds.data.formats.loops.pairs import PairSettings, choose_segment, write_choice
from ctxlm_ds.data.index.sentence_table import SentenceTable, end_of, start_of
from ctxlm_ds.data.numba_random import compiled, stream, uniform, word_at

ONE_SENTENCE = 1


@compiled
def choose_sentence_pairs(
    table: SentenceTable, settings: PairSettings, first: int, after: int, records: Any, a_sentences: Any, choices: Any
) -> tuple[int, int]:
    """Choose the pairs of documents `first` to `after` - 1, and note the number of the first sentence of each A.

    Returns:
        How many there are (at most one a sentence), and how many of them have a random next segment.
    """
    count = num_random = 0
    for document in range(first, after):
        state, drawn = stream(settings.key, settings.duplicate, document, 0), 0
        sentence, end = table.documents[document], table.documents[document + 1]
        while sentence < end:
            is_random = sentence == end - 1
            if not is_random:
                is_random = uniform(word_at(state, drawn)) < 0.5
                drawn += 1
            start, a_end = start_of(table, sentence), end_of(table, sentence, document)
            a_sentences[count] = sentence
            b_end = a_end
            if is_random:
                choice = choices[num_random]
                choice.pair, choice.target = count, ONE_SENTENCE
                drawn = choose_segment(choice, table, document, state, drawn)
                num_random += 1
                sentence += 1
            else:
                b_end = end_of(table, sentence + 1, document)
                sentence += 2
            write_choice(records[count], start, a_end, a_end, b_end, is_random)
            count += 1
    return count, num_random
