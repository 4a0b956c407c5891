"""Byte-level BPE (Radford 2019), with RoBERTa's special tokens or with GPT-2's.

RoBERTa: <s> <pad> </s> <unk> as ids 0 to 3 and <mask> the last id. GPT-2: <|endoftext|> alone, the last id.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ctxlm_ds.tokenizers.base import DECODER_ROLES, Tokenizer, TokenizerFacts
from ctxlm_ds.tokenizers.training_words import cut_long_words, learn, settings_record

FIRST_SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
MASK_TOKEN = "<mask>"
ROLES = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": MASK_TOKEN}
END_OF_TEXT = "<|endoftext|>"
NORMALIZATIONS = ("none", "nfc", "nfd", "nfkc", "nfkd")


@dataclass(frozen=True, slots=True)
class ByteBpeSettings:
    """Settings of a byte-level BPE vocabulary."""

    vocab_size: int
    add_prefix_space: bool = False
    """Put a space before each text, so that its first word is like any other (RoBERTa: no)."""
    min_frequency: int = 2
    """Least number of occurrences of a pair to be merged."""
    normalization: str = "none"
    """`none`, or a Unicode form: `nfc`, `nfd`, `nfkc`, `nfkd`."""
    special_tokens: tuple[str, ...] = ()
    """Further special tokens. RoBERTa: after <unk>; GPT-2: before <|endoftext|>."""


def train_roberta_bpe(texts: Iterable[str], settings: ByteBpeSettings) -> Tokenizer:
    """Train RoBERTa's vocabulary on `texts` (iterated once)."""
    first, last = (*FIRST_SPECIAL_TOKENS, *settings.special_tokens), (MASK_TOKEN,)
    return roberta_tokenizer(_train(texts, settings, first, last), settings_record(settings, "frequency"))


def train_gpt2_bpe(texts: Iterable[str], settings: ByteBpeSettings) -> Tokenizer:
    """Train GPT-2's vocabulary on `texts` (iterated once): 256 bytes, the merges, <|endoftext|>."""
    last = (*settings.special_tokens, END_OF_TEXT)
    return gpt2_tokenizer(_train(texts, settings, (), last), settings_record(settings, "frequency"))


def roberta_tokenizer(backend: Any, training: dict[str, Any]) -> Tokenizer:
    """Return a tokenizer with RoBERTa's special tokens and template."""
    from tokenizers import processors

    tokenizer = Tokenizer(backend, TokenizerFacts("byte_bpe", dict(ROLES), training=training))
    backend.post_processor = processors.RobertaProcessing(
        ("</s>", tokenizer.sep_id), ("<s>", tokenizer.cls_id), trim_offsets=True,
        add_prefix_space=backend.pre_tokenizer.add_prefix_space,
    )  # fmt: skip
    return tokenizer


def gpt2_tokenizer(backend: Any, training: dict[str, Any]) -> Tokenizer:
    """Return a tokenizer whose only special role is GPT-2's end of a document."""
    from tokenizers import processors

    roles = dict.fromkeys(DECODER_ROLES, END_OF_TEXT)
    tokenizer = Tokenizer(backend, TokenizerFacts("byte_bpe", roles, training=training))
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _train(texts: Iterable[str], settings: ByteBpeSettings, first: tuple[str, ...], last: tuple[str, ...]) -> Any:
    """Train with special tokens before and after the bytes and merges."""
    from tokenizers import normalizers, pre_tokenizers, trainers

    normalizer = None
    if settings.normalization != "none":
        normalizer = getattr(normalizers, settings.normalization.upper())()
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=settings.add_prefix_space)
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size - len(last),
        min_frequency=settings.min_frequency,
        special_tokens=list(first),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    vocab, merges = learn(cut_long_words(texts), trainer, pre_tokenizer, normalizer)
    vocab |= {token: len(vocab) + number for number, token in enumerate(last)}
    return build_backend(vocab, merges, (*first, *last), settings.add_prefix_space, normalizer)


def build_backend(
    vocab: dict[str, int], merges: list[tuple[str, str]], special_tokens: Iterable[str], add_prefix_space: bool,
    normalizer: Any = None,
) -> Any:  # fmt: skip
    """Return the `tokenizers.Tokenizer` of a byte-level BPE without a template.

    Args:
        vocab: token to id, with the special tokens.
        merges: pairs of tokens, the first ones first.
        special_tokens: tokens that are no text.
        add_prefix_space: put a space before each text.
        normalizer: applied before; None for none.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    # As in the released model, <mask> includes the space before it: "a <mask>" is "a", "<mask>".
    backend.add_special_tokens([
        AddedToken(token, lstrip=token == MASK_TOKEN, normalized=token != MASK_TOKEN, special=True)
        for token in special_tokens
    ])  # fmt: skip
    return backend
