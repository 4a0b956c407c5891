"""Words of the training text: counted, cut, and given to a trainer of the `tokenizers` library."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from ctxlm_ds.console import logger

_COPIES = 100_000
"""Copies of a word in one text for the library's trainer."""
MAX_WORD_CHARACTERS = 1000
_LONG_RUN = re.compile(rf"\S{{{MAX_WORD_CHARACTERS}}}|\s{{{MAX_WORD_CHARACTERS}}}")
_MARKS = r"!-/:-@\[-`{-~。，、！？；：「」『』（）…"  # what separates words in text without spaces, too
_LONG_WORD = re.compile(rf"[^\s{_MARKS}]{{{MAX_WORD_CHARACTERS}}}|[{_MARKS}]{{{MAX_WORD_CHARACTERS}}}")
_LONG_SPACE = re.compile(rf"(\s{{{MAX_WORD_CHARACTERS}}})\s+")
ALPHABET_ADVICE = "raise --vocab-size or --limit-alphabet, so that every character of the text has an id"


def cut_long_words(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts whose words and runs of white space have at most 1,000 characters.

    The library's trainer takes quadratic time in the length of a word. Logs a warning with the number of cuts.
    """
    cuts = 0
    for text in texts:
        if _LONG_RUN.search(text):
            text, words = _LONG_WORD.subn(r"\g<0>\n", text)
            text, spaces = _LONG_SPACE.subn(r"\1", text)
            cuts += words + spaces
        yield text
    if cuts:
        logger.warning("words of over %d characters were cut for the training, in %d places", MAX_WORD_CHARACTERS, cuts)


def cut_long_lines(texts: Iterable[str], most: int) -> Iterator[str]:
    """Yield the lines of texts, those of more than `most` characters cut at spaces: sentencepiece skips long ones."""
    for text in texts:
        for line in text.split("\n"):
            start = 0
            while start < len(line):
                end = start + most
                if end < len(line) and (space := line.rfind(" ", start + 1, end)) > 0:
                    end = space
                if part := line[start:end].strip():
                    yield part
                start = end


def learn(
    texts: Iterable[str], trainer: Any, pre_tokenizer: Any, normalizer: Any = None
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the vocabulary and the merges that a BPE trainer of the library learns."""
    from tokenizers import Tokenizer, models

    draft = Tokenizer(models.BPE())
    draft.normalizer, draft.pre_tokenizer = normalizer, pre_tokenizer
    draft.train_from_iterator(iter(texts), trainer)
    model = json.loads(draft.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def count_words(texts: Iterable[str], pre_tokenizer: Any, normalizer: Any = None) -> dict[str, int]:
    """Return occurrences by word, in code-point order; memory grows with the number of different words."""
    from tokenizers import trainers

    # A vocabulary of one learns nothing; the words that a trainer has counted are part of its state.
    trainer = trainers.BpeTrainer(vocab_size=1, special_tokens=["<unk>"], limit_alphabet=0, show_progress=False)
    learn(texts, trainer, pre_tokenizer, normalizer)
    return dict(sorted(json.loads(trainer.__getstate__())["BpeTrainer"]["words"].items()))


def learn_from_counts(
    counts: dict[str, int], symbols: list[str], alphabet: list[str], **settings: Any
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the vocabulary and the merges of counted words.

    The library gives ids to symbols in the order of a hash table, and cuts the alphabet in that order. So the caller
    names all `symbols` that the words begin with, as the first tokens, and the `alphabet`: other characters are left
    out. `settings` are further ones of the library's trainer.
    """
    from tokenizers import pre_tokenizers, trainers

    trainer = trainers.BpeTrainer(
        special_tokens=symbols, initial_alphabet=alphabet, limit_alphabet=len(alphabet), show_progress=False, **settings
    )
    copies = (
        f"{word} " * min(_COPIES, count - first) for word, count in counts.items() for first in range(0, count, _COPIES)
    )
    return learn(copies, trainer, pre_tokenizers.WhitespaceSplit())


def frequent_characters(counts: dict[str, int], limit: int) -> list[str]:
    """Return the `limit` most frequent characters of counted words, in code-point order."""
    characters: Counter[str] = Counter()
    for word, count in counts.items():
        for character in word:
            characters[character] += count
    ordered = sorted(characters, key=lambda character: (-characters[character], character))
    return sorted(ordered[:limit])


def settings_record(settings: Any, merge_score: str | None = None) -> dict[str, Any]:
    """Return the settings of a vocabulary, and what ranks its merges, as its folder records them."""
    record = ({"merge_score": merge_score} if merge_score else {}) | asdict(settings)
    return record | {"requested_vocab_size": record.pop("vocab_size")}
