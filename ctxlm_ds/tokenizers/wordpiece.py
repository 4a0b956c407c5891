"""BERT's WordPiece: its normalizer and pre-tokenizer, `##` continuations, [PAD] [UNK] [CLS] [SEP] [MASK] as ids 0 to 4.

`tokenizers`' trainer merges the most frequent pair (the published WordPiece takes the highest likelihood ratio).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ctxlm_ds.tokenizers.base import FastTokenizer, TokenizerFacts

SPECIAL_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
DEFAULT_VOCAB_SIZE = 30_522


@dataclass(frozen=True, slots=True)
class WordPieceSettings:
    """How a WordPiece vocabulary is made."""

    vocab_size: int = DEFAULT_VOCAB_SIZE
    lowercase: bool = True
    """Lower-case the text and strip accents (the uncased models)."""
    min_frequency: int = 2
    """Least number of occurrences of a pair to be merged."""
    limit_alphabet: int = 1000
    """Most characters of the alphabet; rarer ones become [UNK]."""


def train_wordpiece(texts: Iterable[str], settings: WordPieceSettings) -> FastTokenizer:
    """Train on `texts`, which is iterated twice: the alphabet, then the merges."""
    from tokenizers import trainers

    specials = list(SPECIAL_TOKENS.values())
    alphabet = _alphabet(texts, settings)
    # The trainer numbers the ## characters in the order of a hash table; naming all characters first makes the
    # vocabulary a function of the text. Each character exists in both forms, as in the published vocabularies.
    fixed = specials + alphabet + [f"##{character}" for character in alphabet]
    draft = _backend({}, settings.lowercase)
    trainer = trainers.WordPieceTrainer(
        vocab_size=settings.vocab_size,
        min_frequency=settings.min_frequency,
        limit_alphabet=max(1, len(alphabet)),
        special_tokens=fixed,
        show_progress=False,
    )
    draft.train_from_iterator(iter(texts), trainer)
    backend = _backend(draft.get_vocab(with_added_tokens=False), settings.lowercase)
    _add_template(backend)
    training = {
        "merge_score": "frequency",
        "lowercase": settings.lowercase,
        "min_frequency": settings.min_frequency,
        "limit_alphabet": settings.limit_alphabet,
        "requested_vocab_size": settings.vocab_size,
    }
    return FastTokenizer(backend, TokenizerFacts("wordpiece", dict(SPECIAL_TOKENS), training=training))


def _alphabet(texts: Iterable[str], settings: WordPieceSettings) -> list[str]:
    """The characters of the normalized text, rare ones cut, in code-point order."""
    from tokenizers import trainers

    # Two ids are needed for each character beside the special tokens; a tiny vocabulary shrinks the alphabet.
    room = max(1, (settings.vocab_size - len(SPECIAL_TOKENS)) // 2)
    limit = min(settings.limit_alphabet, room)
    unk = SPECIAL_TOKENS["unk"]
    trainer = trainers.WordPieceTrainer(vocab_size=1, limit_alphabet=limit, special_tokens=[unk], show_progress=False)
    counter = _backend({}, settings.lowercase)
    counter.train_from_iterator(iter(texts), trainer)
    return sorted(token for token in counter.get_vocab(with_added_tokens=False) if len(token) == 1)


def _backend(vocab: dict[str, int], lowercase: bool) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    unk = SPECIAL_TOKENS["unk"]
    backend = Tokenizer(models.WordPiece(vocab=vocab, unk_token=unk) if vocab else models.WordPiece(unk_token=unk))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    if vocab:
        names = SPECIAL_TOKENS.values()
        backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in names])
    return backend


def _add_template(backend: Any) -> None:
    from tokenizers import processors

    cls, sep = SPECIAL_TOKENS["cls"], SPECIAL_TOKENS["sep"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(token, backend.token_to_id(token)) for token in (cls, sep)],
    )
