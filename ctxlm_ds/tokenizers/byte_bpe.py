"""Byte-level BPE (Radford 2019), with RoBERTa's special tokens or with GPT-2's.

RoBERTa: <s> <pad> </s> <unk> as ids 0 to 3 and <mask> the last id. GPT-2: <|endoftext|> alone, the last id.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.tokenizers.base import DECODER_ROLES, FastTokenizer, TokenizerFacts

FIRST_SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
MASK_TOKEN = "<mask>"
ROLES = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": MASK_TOKEN}
END_OF_TEXT = "<|endoftext|>"
GPT2_ROLES = dict.fromkeys(DECODER_ROLES, END_OF_TEXT)
DEFAULT_VOCAB_SIZE = 50_265
GPT2_DEFAULT_VOCAB_SIZE = 50_257
NORMALIZATIONS = ("none", "nfc", "nfd", "nfkc", "nfkd")
MAX_WORD_CHARACTERS = 1000
_LONG_RUN = re.compile(rf"\S{{{MAX_WORD_CHARACTERS}}}|\s{{{MAX_WORD_CHARACTERS}}}")
_MARKS = r"!-/:-@\[-`{-~。，、！？；：「」『』（）…"  # what separates words in text without spaces, too
_LONG_WORD = re.compile(rf"[^\s{_MARKS}]{{{MAX_WORD_CHARACTERS}}}|[{_MARKS}]{{{MAX_WORD_CHARACTERS}}}")
_LONG_SPACE = re.compile(rf"(\s{{{MAX_WORD_CHARACTERS}}})\s+")
logger = logging.getLogger("ctxlm_ds")


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


@dataclass(frozen=True, slots=True)
class ByteBpeSettings:
    """Settings of a byte-level BPE vocabulary."""

    vocab_size: int = DEFAULT_VOCAB_SIZE
    add_prefix_space: bool = False
    """Put a space before each text, so that its first word is like any other (RoBERTa: no)."""
    min_frequency: int = 2
    """Least number of occurrences of a pair to be merged."""
    normalization: str = "none"
    """`none`, or a Unicode form: `nfc`, `nfd`, `nfkc`, `nfkd`."""
    special_tokens: tuple[str, ...] = ()
    """Further special tokens. RoBERTa: after <unk>; GPT-2: before <|endoftext|>."""


def train_byte_bpe(texts: Iterable[str], settings: ByteBpeSettings) -> FastTokenizer:
    """Train RoBERTa's on `texts` (iterated once)."""
    vocab, merges = _learn(texts, settings, (*FIRST_SPECIAL_TOKENS, *settings.special_tokens))
    backend = _roberta_backend(vocab | {MASK_TOKEN: len(vocab)}, merges, settings)
    return FastTokenizer(backend, TokenizerFacts("byte_bpe", dict(ROLES), training=_record(settings)))


def train_gpt2_bpe(texts: Iterable[str], settings: ByteBpeSettings) -> FastTokenizer:
    """Train GPT-2's on `texts` (iterated once): 256 bytes, the merges, <|endoftext|>."""
    from tokenizers import AddedToken, decoders, models, processors

    last = (*settings.special_tokens, END_OF_TEXT)
    vocab, merges = _learn(texts, settings, (), len(last))
    backend = _empty_backend(settings)
    vocab |= {token: len(vocab) + number for number, token in enumerate(last)}
    backend.model = models.BPE(vocab=vocab, merges=merges)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=True, special=True) for token in last])
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return FastTokenizer(backend, TokenizerFacts("byte_bpe", dict(GPT2_ROLES), training=_record(settings)))


def _learn(
    texts: Iterable[str], settings: ByteBpeSettings, first_tokens: tuple[str, ...], num_last: int = 1
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return vocabulary and merges, with room for the `num_last` special tokens that come last."""
    if settings.normalization not in NORMALIZATIONS:
        raise ConfigError(
            f"normalization {settings.normalization!r} is not known to byte-level BPE; choose one of "
            + ", ".join(NORMALIZATIONS)
        )
    from tokenizers import pre_tokenizers, trainers

    draft = _empty_backend(settings)
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size - num_last,
        min_frequency=settings.min_frequency,
        special_tokens=list(first_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    draft.train_from_iterator(cut_long_words(texts), trainer)
    model = json.loads(draft.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def _record(settings: ByteBpeSettings) -> dict[str, Any]:
    return {
        "merge_score": "frequency",
        "add_prefix_space": settings.add_prefix_space,
        "min_frequency": settings.min_frequency,
        "normalization": settings.normalization,
        "special_tokens": list(settings.special_tokens),
        "requested_vocab_size": settings.vocab_size,
    }


def _empty_backend(settings: ByteBpeSettings) -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    backend = Tokenizer(models.BPE())
    if settings.normalization != "none":
        backend.normalizer = getattr(normalizers, settings.normalization.upper())()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=settings.add_prefix_space)
    return backend


def _roberta_backend(vocab: dict[str, int], merges: list[tuple[str, str]], settings: ByteBpeSettings) -> Any:
    from tokenizers import AddedToken, decoders, models, processors

    backend = _empty_backend(settings)
    backend.model = models.BPE(vocab=vocab, merges=merges)
    backend.decoder = decoders.ByteLevel()
    names = (*FIRST_SPECIAL_TOKENS, *settings.special_tokens)
    tokens = [AddedToken(token, normalized=True, special=True) for token in names]
    # As in the released model, <mask> includes the space before it: "a <mask>" is "a", "<mask>".
    backend.add_special_tokens([*tokens, AddedToken(MASK_TOKEN, lstrip=True, normalized=False, special=True)])
    backend.post_processor = processors.RobertaProcessing(
        ("</s>", vocab["</s>"]), ("<s>", vocab["<s>"]), trim_offsets=True, add_prefix_space=settings.add_prefix_space
    )
    return backend
