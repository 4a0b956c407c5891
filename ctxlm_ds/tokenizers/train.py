"""Train a tokenizer from text and write its folder."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from ctxlm_ds.errors import ConfigError, TokenizerError
from ctxlm_ds.tokenizers import byte_bpe, wordpiece
from ctxlm_ds.tokenizers.base import FastTokenizer, Tokenizer
from ctxlm_ds.tokenizers.byte_bpe import ByteBpeSettings, train_byte_bpe, train_gpt2_bpe
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.wordpiece import WordPieceSettings, train_wordpiece

logger = logging.getLogger("ctxlm_ds")

TOKENIZER_TYPES = ("wordpiece", "bpe", "gpt2")
_LEAST_VOCAB_SIZE = {"wordpiece": 5 + 2, "bpe": 5 + 256, "gpt2": 1 + 256}
_END_OF_TEXT = "\x00"


def train_tokenizer(
    type: str,
    texts: Iterable[str],
    vocab_size: int | None,
    output_dir: str | Path,
    *,
    lowercase: bool = True,
    add_prefix_space: bool = False,
    min_frequency: int = 2,
) -> Tokenizer:
    """Train on `texts`, write `output_dir` (refused where it exists) and return the tokenizer as loaded from there.

    `type` is `wordpiece`, `bpe` (byte-level, RoBERTa's special tokens) or `gpt2` (byte-level, <|endoftext|> alone);
    `vocab_size` None takes BERT's 30,522, RoBERTa's 50,265 or GPT-2's 50,257.
    A corpus too small for `vocab_size` gives a smaller vocabulary and a warning.
    Raises ConfigError for an impossible setting, TokenizerError where there is no text or the folder exists.
    """
    output_dir = Path(output_dir)
    _check_settings(type, vocab_size, output_dir)
    if iter(texts) is texts:
        with tempfile.TemporaryFile("w+", encoding="utf-8", newline="") as spool:
            trained = _train(type, _Spooled(texts, spool), vocab_size, lowercase, add_prefix_space, min_frequency)
    else:
        trained = _train(type, texts, vocab_size, lowercase, add_prefix_space, min_frequency)
    wanted = trained.facts.training["requested_vocab_size"]
    if trained.vocab_size < wanted:
        logger.warning(
            "the text is too small for a vocabulary of %d: it gave %d tokens (a pair must occur %d times to be merged)",
            wanted,
            trained.vocab_size,
            min_frequency,
        )
    trained.save(output_dir)
    return load_tokenizer(output_dir)


def _check_settings(type: str, vocab_size: int | None, output_dir: Path) -> None:
    if type not in TOKENIZER_TYPES:
        raise ConfigError(f"tokenizer type {type!r} is not known; choose one of {', '.join(TOKENIZER_TYPES)}")
    least = _LEAST_VOCAB_SIZE[type]
    if vocab_size is not None and vocab_size < least:
        raise ConfigError(f"a vocabulary of {vocab_size} is too small for {type}; it needs at least {least} tokens")
    if output_dir.exists():
        raise TokenizerError(f"{output_dir} exists already; choose another --output-dir, or remove it first")


def _train(
    type: str,
    texts: Iterable[str],
    vocab_size: int | None,
    lowercase: bool,
    add_prefix_space: bool,
    min_frequency: int,
) -> FastTokenizer:
    watched = _Watched(texts)
    if type == "wordpiece":
        size = vocab_size or wordpiece.DEFAULT_VOCAB_SIZE
        tokenizer = train_wordpiece(watched, WordPieceSettings(size, lowercase, min_frequency))
    elif type == "gpt2":
        size = vocab_size or byte_bpe.GPT2_DEFAULT_VOCAB_SIZE
        tokenizer = train_gpt2_bpe(watched, ByteBpeSettings(size, add_prefix_space, min_frequency))
    else:
        size = vocab_size or byte_bpe.DEFAULT_VOCAB_SIZE
        tokenizer = train_byte_bpe(watched, ByteBpeSettings(size, add_prefix_space, min_frequency))
    if watched.error is not None:
        raise watched.error
    if not watched.has_text:
        raise TokenizerError("there is no text to train a tokenizer on; check --input and --json-keys")
    return tokenizer


class _Watched:
    """Passes texts on and keeps the first error, which the Rust library would otherwise wrap or swallow."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.has_text = False
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[str]:
        if self.error is not None:
            return
        try:
            for text in self._texts:
                self.has_text = self.has_text or bool(text.strip())
                yield text
        except BaseException as error:
            self.error = error
            raise


class _Spooled:
    """A one-shot iterator made repeatable through a file."""

    def __init__(self, texts: Iterable[str], spool: IO[str]) -> None:
        self._spool = spool
        for text in texts:
            spool.write(text.replace(_END_OF_TEXT, " ") + _END_OF_TEXT)

    def __iter__(self) -> Iterator[str]:
        self._spool.seek(0)
        rest = ""
        while block := self._spool.read(1 << 20):
            *whole, rest = (rest + block).split(_END_OF_TEXT)
            yield from whole
