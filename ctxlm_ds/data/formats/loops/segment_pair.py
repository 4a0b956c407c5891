"""BERT's segment pairs (SEGMENT-PAIR + NSP), drawn as google-research/bert create_pretraining_data.py draws them.

For each document: the target length is drawn once (with short_seq_prob from 2..room); sentences are gathered until it
is reached; A is the first 1..n-1 of them; B is the rest, or with probability 0.5 (always, where the document has only
one sentence left) a run of sentences from another document, and then the unused sentences are put back. Last, the
longer side is shortened. So each pass uses every sentence. A label of 1 means random, 0 that B follows A.

Draws are keyed by (pass, document): the same whatever is built before, and other pairs in each of num_duplicates
passes.
"""

from __future__ import annotations

from typing import Any

from ctxlm_ds.data.formats.loops.pairs import PairSettings, choose_segment, write_choice
from ctxlm_ds.data.index.sentence_table import SentenceTable, end_of, reaching, start_of
from ctxlm_ds.data.numba_random import below, compiled, stream, uniform, word_at

SHORTEST_TARGET = 2


@compiled
def choose_segment_pairs(
    table: SentenceTable, settings: PairSettings, first: int, after: int, records: Any, a_sentences: Any, choices: Any
) -> tuple[int, int]:
    """Choose the pairs of documents `first` to `after` - 1, and note the number of the first sentence of each A.

    Returns:
        How many there are (at most one a sentence), and how many of them have a random next segment.
    """
    count = num_random = 0
    for document in range(first, after):
        state = stream(settings.key, settings.duplicate, document, 0)
        target, drawn = settings.room, 1
        if uniform(word_at(state, 0)) < settings.short_seq_prob:
            target = SHORTEST_TARGET + below(word_at(state, 1), settings.room - SHORTEST_TARGET + 1)
            drawn = 2
        sentence, end = table.documents[document], table.documents[document + 1]
        while sentence < end:
            start, a_sentences[count] = start_of(table, sentence), sentence
            last = reaching(table, sentence, document, start + target)
            a_last = sentence
            if last > sentence:
                a_last += below(word_at(state, drawn), last - sentence)
                drawn += 1
            is_random = last == sentence
            if not is_random:
                is_random = uniform(word_at(state, drawn)) < 0.5
                drawn += 1
            a_end, b_end = end_of(table, a_last, document), end_of(table, last, document)
            if is_random:
                choice = choices[num_random]
                choice.pair, choice.target = count, target - (a_end - start)
                drawn = choose_segment(choice, table, document, state, drawn)
                num_random += 1
                last = a_last
            write_choice(records[count], start, a_end, a_end, b_end, is_random)
            sentence = last + 1
            count += 1
    return count, num_random
