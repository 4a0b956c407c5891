"""BERT's WordPiece: its normalizer, pre-tokenizer and `##` continuations; [PAD] [UNK] [CLS] [SEP] [MASK] are 0 to 4."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
MARK = "##"
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
    training = settings_record(settings, "frequency")
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
    vocab, _ = learn_from_counts(
        counts, first, alphabet, vocab_size=settings.vocab_size, min_frequency=settings.min_frequency,
        continuing_subword_prefix="##",
    )  # fmt: skip
    return sorted(vocab, key=lambda token: vocab[token])


WORDPIECE = TokenizerKind(
    WordPieceTokenizer, _recognizes, vocabulary=".txt", read=_read,
    types={"wordpiece": TokenizerType(train_wordpiece, WordPieceSettings, 30_522, 5 + 2, ALPHABET_ADVICE)},
)  # fmt: skip
