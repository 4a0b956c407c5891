"""create_instances_from_document of create_pretraining_data.py, on lists of tokens: google-research/bert and albert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Document = list[list[int]]


class Draws(Protocol):
    """What the original takes from a `random.Random`."""

    def random(self) -> float: ...

    def randint(self, low: int, high: int, /) -> int: ...


def create_instances(  # noqa: C901 - the original's shape, to be compared with it line by line
    documents: list[Document],
    number: int,
    max_num_tokens: int,
    short_seq_prob: float,
    rng: Draws,
    truncation_rng: Callable[[int], Draws] | None = None,
    random_next_sentence: bool = True,
) -> list[dict[str, Any]]:
    """`truncation_rng` gives other draws for shortening a pair, by the number of its A's first sentence.

    `random_next_sentence` is ALBERT's flag; False exchanges segments.
    """
    document = documents[number]
    target_seq_length = max_num_tokens
    if rng.random() < short_seq_prob:
        target_seq_length = rng.randint(2, max_num_tokens)
    instances = []
    current_chunk: list[list[int]] = []
    current_length = 0
    i = 0
    while i < len(document):
        segment = document[i]
        current_chunk.append(segment)
        current_length += len(segment)
        if i == len(document) - 1 or current_length >= target_seq_length:
            if current_chunk:
                a_first = i - len(current_chunk) + 1
                a_end = 1
                if len(current_chunk) >= 2:
                    a_end = rng.randint(1, len(current_chunk) - 1)
                tokens_a: list[int] = []
                for j in range(a_end):
                    tokens_a.extend(current_chunk[j])
                tokens_b: list[int] = []
                random_document_index = None
                if len(current_chunk) == 1 or (random_next_sentence and rng.random() < 0.5):
                    is_random_next = True
                    target_b_length = target_seq_length - len(tokens_a)
                    for _ in range(10):
                        random_document_index = rng.randint(0, len(documents) - 1)
                        if random_document_index != number:
                            break
                    random_document = documents[random_document_index]
                    random_start = rng.randint(0, len(random_document) - 1)
                    for j in range(random_start, len(random_document)):
                        tokens_b.extend(random_document[j])
                        if len(tokens_b) >= target_b_length:
                            break
                    num_unused_segments = len(current_chunk) - a_end
                    i -= num_unused_segments
                elif not random_next_sentence and rng.random() < 0.5:
                    is_random_next = True
                    for j in range(a_end, len(current_chunk)):
                        tokens_b.extend(current_chunk[j])
                    tokens_a, tokens_b = tokens_b, tokens_a
                else:
                    is_random_next = False
                    for j in range(a_end, len(current_chunk)):
                        tokens_b.extend(current_chunk[j])
                coins = truncation_rng(a_first) if truncation_rng else rng
                truncate_seq_pair(tokens_a, tokens_b, max_num_tokens, coins)
                instances.append({"a": tokens_a, "b": tokens_b, "is_random": is_random_next})
            current_chunk = []
            current_length = 0
        i += 1
    return instances


def truncate_seq_pair(tokens_a: list[int], tokens_b: list[int], max_num_tokens: int, rng: Draws) -> None:
    while True:
        total_length = len(tokens_a) + len(tokens_b)
        if total_length <= max_num_tokens:
            break
        trunc_tokens = tokens_a if len(tokens_a) > len(tokens_b) else tokens_b
        assert len(trunc_tokens) >= 1
        if rng.random() < 0.5:
            del trunc_tokens[0]
        else:
            trunc_tokens.pop()
