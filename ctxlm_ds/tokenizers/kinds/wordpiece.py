"""BERT's WordPiece: its normalizer and pre-tokenizer, `##` continuations, [PAD] [UNK] [CLS] [SEP] [MASK] as ids 0 to 4.

Two merge scores. `frequency` is the pair's count, as the `tokenizers` library has it. `likelihood` is n_ab / (n_a n_b):
the merge gains a unigram model log(N n_ab / (n_a n_b)) an occurrence, the criterion of Schuster & Nakajima (2012),
"Japanese and Korean voice search", in the form in which it is usually written down. It is exact at each step: a merge
changes the scores of every pair that shares a symbol with it, so each step looks at all pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.errors import TokenizerError
from ctxlm_ds.tokenizers.base import Tokenizer, TokenizerFacts, TokenizerKind, TokenizerType, check_tokens, write_lines
from ctxlm_ds.tokenizers.training_words import (
    ALPHABET_ADVICE,
    count_words,
    frequent_characters,
    learn_from_counts,
    settings_record,
)
from ctxlm_ds.untrusted_json import read_text

SPECIAL_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
MERGE_SCORES = ("frequency", "likelihood")
MARK = "##"
_FIRST_CAPACITY = 1 << 16
_LONGEST_WORD = 100
"""Characters; WordPiece encodes longer words as [UNK]."""


class WordPieceTokenizer(Tokenizer):
    """BERT's tokenizer; transformers has it as BertTokenizer."""

    kind = "wordpiece"

    def shown(self, token_id: int) -> tuple[str, str]:
        return " ", self.id_to_token(token_id)

    def class_settings(self, content: dict[str, Any], special: dict[str, Any]) -> dict[str, Any]:
        normalizer = content["normalizer"]
        return {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": normalizer["lowercase"],
            "strip_accents": normalizer["strip_accents"],
            "tokenize_chinese_chars": normalizer["handle_chinese_chars"],
            **special,
        }

    def write_vocabulary(self, folder: Path, model: dict[str, Any]) -> None:
        write_lines(folder / "vocab.txt", sorted(model["vocab"], key=model["vocab"].get))


@dataclass(frozen=True, slots=True)
class WordPieceSettings:
    """Settings of a WordPiece vocabulary."""

    vocab_size: int
    lowercase: bool = True
    """Lower-case the text and strip accents (the uncased models)."""
    min_frequency: int = 2
    """Least number of occurrences of a pair to be merged."""
    limit_alphabet: int = 1000
    """Largest number of different characters; rarer ones become [UNK]."""
    merge_score: str = "frequency"
    special_tokens: tuple[str, ...] = ()
    """Further special tokens, after [MASK]."""


def train_wordpiece(texts: Iterable[str], settings: WordPieceSettings) -> Tokenizer:
    """Train on `texts` (iterated once); memory grows with the number of different words."""
    from tokenizers import normalizers, pre_tokenizers

    normalizer = normalizers.BertNormalizer(lowercase=settings.lowercase)
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special_tokens = [*SPECIAL_TOKENS.values(), *settings.special_tokens]
    tokens = learn_tokens(count_words(texts, pre_tokenizer, normalizer), special_tokens, settings)
    backend = build_backend({token: number for number, token in enumerate(tokens)}, special_tokens, normalizer)
    training = settings_record(settings, settings.merge_score)
    return WordPieceTokenizer(backend, TokenizerFacts(dict(SPECIAL_TOKENS), training=training))


def _recognizes(content: dict[str, Any], training: dict[str, Any]) -> bool:
    layers = [(content.get(layer) or {}).get("type") for layer in ("model", "normalizer", "pre_tokenizer")]
    is_bert = layers == ["WordPiece", "BertNormalizer", "BertPreTokenizer"]
    return is_bert and content["model"].get("continuing_subword_prefix") == "##"


def _read(file: Path, config: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of a vocab.txt.

    Without a tokenizer_config.json it lower-cases, and strips accents, if that changes no token of the vocabulary.
    """
    from tokenizers import normalizers

    # Lines end with a newline only: a vocabulary may have tokens that are other separators of lines.
    tokens = read_text(file, TokenizerError).removesuffix("\n").split("\n")
    vocab = {token.removesuffix("\r"): number for number, token in enumerate(tokens)}
    check_tokens(file, SPECIAL_TOKENS.values(), vocab)
    words = [token.removeprefix(MARK) for token in vocab if not token.startswith("[")]

    def suits(**settings: Any) -> bool:
        plain = normalizers.BertNormalizer(handle_chinese_chars=False, **settings)
        return all(plain.normalize_str(word) == word for word in words)

    lowercase, strip_accents = config.get("do_lower_case"), config.get("strip_accents")
    if lowercase is None:
        lowercase = suits(lowercase=True, strip_accents=False)
        if strip_accents is None and not suits(lowercase=lowercase):
            strip_accents = False
    normalizer = normalizers.BertNormalizer(
        lowercase=lowercase,
        strip_accents=strip_accents,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
    )
    backend = build_backend(vocab, SPECIAL_TOKENS.values(), normalizer)
    return WordPieceTokenizer(backend, TokenizerFacts(dict(SPECIAL_TOKENS)))


def build_backend(vocab: dict[str, int], special_tokens: Iterable[str], normalizer: Any) -> Any:
    """Return BERT's `tokenizers.Tokenizer` of a vocabulary, with a BertNormalizer."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.WordPiece(vocab=vocab, unk_token=SPECIAL_TOKENS["unk"]))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special_tokens])
    cls, sep = SPECIAL_TOKENS["cls"], SPECIAL_TOKENS["sep"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(token, vocab[token]) for token in (cls, sep)],
    )
    return backend


def learn_tokens(counts: dict[str, int], special_tokens: list[str], settings: WordPieceSettings) -> list[str]:
    """Return the tokens of counted words in the order of their ids: special tokens, characters, merges."""
    # Each character exists in both forms, as in the published vocabularies; a tiny vocabulary shrinks the alphabet.
    room = max(1, (settings.vocab_size - len(special_tokens)) // 2)
    alphabet = frequent_characters(counts, min(settings.limit_alphabet, room))
    first = [*special_tokens, *alphabet, *(f"{MARK}{character}" for character in alphabet)]
    # A word with a character outside the alphabet is [UNK] in any case.
    known = set(alphabet)
    counts = {word: count for word, count in counts.items() if len(word) <= _LONGEST_WORD and known.issuperset(word)}
    if settings.merge_score == "likelihood":
        return learn_merges(counts, first, settings.vocab_size, settings.min_frequency)
    vocab, _ = learn_from_counts(
        counts, first, alphabet, vocab_size=settings.vocab_size, min_frequency=settings.min_frequency,
        continuing_subword_prefix="##",
    )  # fmt: skip
    return sorted(vocab, key=lambda token: vocab[token])


class _Pairs:
    """Counts of neighbouring symbols, and the words that contain them."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, int], int] = {}
        self._words: list[set[int]] = []
        self._table = np.zeros((_FIRST_CAPACITY, 3), dtype=np.int64)
        """[slots] of left symbol, right symbol, count."""

    def change(self, symbols: Sequence[int], count: int, word: int) -> None:
        """Add `count` to every pair of a word."""
        for pair in zip(symbols, symbols[1:], strict=False):
            slot = self._slots.setdefault(pair, len(self._words))
            if slot == len(self._words):
                self._words.append(set())
                if slot == len(self._table):
                    self._table = np.concatenate((self._table, np.zeros_like(self._table)))
                self._table[slot, :2] = pair
            self._table[slot, 2] += count
            if count > 0:
                self._words[slot].add(word)

    def take_best(self, occurrences: NDArray[np.int64], min_frequency: int) -> tuple[tuple[int, int], set[int]] | None:
        """Return the pair with the best score and the words that contain it, or did; None if all pairs are rarer."""
        slot = _compiled_best_slot()(self._table[: len(self._words)], occurrences, max(1, min_frequency))
        if slot < 0:
            return None
        words, self._words[slot] = self._words[slot], set()
        return (int(self._table[slot, 0]), int(self._table[slot, 1])), words


@cache
def _compiled_best_slot() -> Any:
    """Compile _best_slot at its first use: who only loads a tokenizer need not import numba."""
    import numba

    return numba.njit(cache=True, nogil=True, error_model="numpy")(_best_slot)


def _best_slot(table: NDArray[np.int64], occurrences: NDArray[np.int64], min_frequency: int) -> int:
    """Return the slot of the best pair. Ties go to the greater count, then to the lower numbers."""
    best, best_score = -1, -1.0
    for slot in range(len(table)):
        left, right, count = table[slot]
        if count < min_frequency:
            continue
        score = count / (float(occurrences[left]) * float(occurrences[right]))
        if score < best_score:
            continue
        if score == best_score and (-count, left, right) > (-table[best, 2], table[best, 0], table[best, 1]):
            continue
        best, best_score = slot, score
    return best


def learn_merges(word_counts: dict[str, int], first: Sequence[str], vocab_size: int, min_frequency: int) -> list[str]:
    """Return all tokens: `first`, then those of the merges in order, up to `vocab_size`.

    `first` has every character of the words alone and after the mark of continuations. Two pairs with the same spelling
    have one token.
    """
    names = list(first)
    numbers = {name: number for number, name in enumerate(names)}
    counts = list(word_counts.values())
    symbols = [
        [numbers[MARK * (place > 0) + character] for place, character in enumerate(word)] for word in word_counts
    ]
    occurrences = np.zeros(max(len(names), vocab_size), dtype=np.int64)
    pairs = _Pairs()
    for word, count in enumerate(counts):
        np.add.at(occurrences, symbols[word], count)
        pairs.change(symbols[word], count, word)
    while len(names) < vocab_size and (found := pairs.take_best(occurrences, min_frequency)) is not None:
        best, words = found
        name = names[best[0]] + names[best[1]].removeprefix(MARK)
        number = numbers.setdefault(name, len(names))
        names += [name] if number == len(names) else []
        for word in words:
            before, after = symbols[word], _merged(symbols[word], best, number)
            if len(after) < len(before):
                pairs.change(before, -counts[word], word)
                pairs.change(after, counts[word], word)
                num_merged = (len(before) - len(after)) * counts[word]
                occurrences[best[0]] -= num_merged
                occurrences[best[1]] -= num_merged
                occurrences[number] += num_merged
                symbols[word] = after
    return names


def _merged(symbols: Sequence[int], pair: tuple[int, int], number: int) -> list[int]:
    merged: list[int] = []
    place = 0
    while place < len(symbols):
        is_pair = tuple(symbols[place : place + 2]) == pair
        merged.append(number if is_pair else symbols[place])
        place += 2 if is_pair else 1
    return merged


WORDPIECE = TokenizerKind(
    WordPieceTokenizer, _recognizes, vocabulary=".txt", read=_read,
    types={
        "wordpiece": TokenizerType(
            train_wordpiece, WordPieceSettings, 30_522, 5 + 2, ALPHABET_ADVICE, {"merge_score": MERGE_SCORES}
        )
    },
)  # fmt: skip
