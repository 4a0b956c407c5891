"""BERT's WordPiece: its normalizer and pre-tokenizer, `##` continuations, [PAD] [UNK] [CLS] [SEP] [MASK] as ids 0 to 4.

Two merge scores. `frequency` is the pair's count, as the `tokenizers` library has it. `likelihood` is n_ab / (n_a n_b):
the merge gains a unigram model log(N n_ab / (n_a n_b)) an occurrence, the criterion of Schuster & Nakajima (2012),
"Japanese and Korean voice search", in the form in which it is usually written down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.tokenizers.base import FastTokenizer, TokenizerFacts, count_words

SPECIAL_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
DEFAULT_VOCAB_SIZE = 30_522
MERGE_SCORES = ("frequency", "likelihood")
_COPIES = 100_000
"""Copies of a word in one text for the library's trainer."""
_LONGEST_WORD = 100
"""Characters; WordPiece encodes longer words as [UNK]."""


@dataclass(frozen=True, slots=True)
class WordPieceSettings:
    """Settings of a WordPiece vocabulary."""

    vocab_size: int = DEFAULT_VOCAB_SIZE
    lowercase: bool = True
    """Lower-case the text and strip accents (the uncased models)."""
    min_frequency: int = 2
    """Least number of occurrences of a pair to be merged."""
    limit_alphabet: int = 1000
    """Largest number of different characters; rarer ones become [UNK]."""
    merge_score: str = "frequency"
    special_tokens: tuple[str, ...] = ()
    """Further special tokens, after [MASK]."""


def train_wordpiece(texts: Iterable[str], settings: WordPieceSettings) -> FastTokenizer:
    """Train on `texts` (iterated once); memory grows with the number of different words."""
    if settings.merge_score not in MERGE_SCORES:
        raise ConfigError(f"merge_score {settings.merge_score!r} is not known; choose one of {', '.join(MERGE_SCORES)}")
    layers = _backend({}, settings)
    counts = count_words(texts, layers.normalizer, layers.pre_tokenizer)
    specials = [*SPECIAL_TOKENS.values(), *settings.special_tokens]
    # Each character exists in both forms, as in the published vocabularies.
    alphabet = _alphabet(counts, settings, len(specials))
    names = specials + alphabet + [f"##{character}" for character in alphabet]
    # A word with a character outside the alphabet is [UNK] in any case.
    known = set(alphabet)
    counts = {word: count for word, count in counts.items() if len(word) <= _LONGEST_WORD and known.issuperset(word)}
    learn = _frequent_tokens if settings.merge_score == "frequency" else _likely_tokens
    names = learn(counts, names, settings)
    backend = _backend({name: number for number, name in enumerate(names)}, settings)
    _add_template(backend)
    training = {
        "merge_score": settings.merge_score,
        "lowercase": settings.lowercase,
        "min_frequency": settings.min_frequency,
        "limit_alphabet": settings.limit_alphabet,
        "special_tokens": list(settings.special_tokens),
        "requested_vocab_size": settings.vocab_size,
    }
    return FastTokenizer(backend, TokenizerFacts("wordpiece", dict(SPECIAL_TOKENS), training=training))


def _alphabet(counts: dict[str, int], settings: WordPieceSettings, num_specials: int) -> list[str]:
    """Return the most frequent characters of the normalized text, in code-point order."""
    characters: Counter[str] = Counter()
    for word, count in counts.items():
        for character in word:
            characters[character] += count
    # Each character needs two ids; a tiny vocabulary shrinks the alphabet.
    room = max(1, (settings.vocab_size - num_specials) // 2)
    ordered = sorted(characters, key=lambda character: (-characters[character], character))
    return sorted(ordered[: min(settings.limit_alphabet, room)])


def _frequent_tokens(counts: dict[str, int], names: list[str], settings: WordPieceSettings) -> list[str]:
    """Return `names` and the tokens of the library's merges."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    draft = Tokenizer(models.WordPiece(unk_token=SPECIAL_TOKENS["unk"]))
    draft.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(
        vocab_size=settings.vocab_size,
        min_frequency=settings.min_frequency,
        special_tokens=names,
        limit_alphabet=settings.limit_alphabet,
        show_progress=False,
    )
    copies = (min(_COPIES, count - first) for count in counts.values() for first in range(0, count, _COPIES))
    words = (word for word, count in counts.items() for _ in range(0, count, _COPIES))
    draft.train_from_iterator((f"{word} " * number for word, number in zip(words, copies, strict=True)), trainer)
    vocab = draft.get_vocab(with_added_tokens=False)
    return sorted(vocab, key=lambda token: vocab[token])


def _likely_tokens(counts: dict[str, int], names: list[str], settings: WordPieceSettings) -> list[str]:
    """Return `names` and the tokens of the merges by likelihood."""
    from ctxlm_ds.tokenizers.likelihood_merges import learn_merges

    return learn_merges(list(counts), list(counts.values()), names, settings.vocab_size, settings.min_frequency)


def _backend(vocab: dict[str, int], settings: WordPieceSettings) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    unk = SPECIAL_TOKENS["unk"]
    backend = Tokenizer(models.WordPiece(vocab=vocab, unk_token=unk) if vocab else models.WordPiece(unk_token=unk))
    backend.normalizer = normalizers.BertNormalizer(lowercase=settings.lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    if vocab:
        tokens = [*SPECIAL_TOKENS.values(), *settings.special_tokens]
        backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in tokens])
    return backend


def _add_template(backend: Any) -> None:
    from tokenizers import processors

    cls, sep = SPECIAL_TOKENS["cls"], SPECIAL_TOKENS["sep"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(token, backend.token_to_id(token)) for token in (cls, sep)],
    )
