"""Train a tokenizer from text, or from a sample of a huge corpus, and write its folder.

The sample is drawn in one pass: which documents are in it depends on (seed, document number) alone.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import is_full_disk, is_same
from ctxlm_ds.errors import ConfigError, TokenizerError
from ctxlm_ds.tokenizers import byte_bpe, characters, gpt1, sentence_piece, wordpiece
from ctxlm_ds.tokenizers.base import FastTokenizer, Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer, training_record
from ctxlm_ds.tokenizers.report import ALL_LANGUAGES, tokenizer_report
from ctxlm_ds.tokenizers.save import save_tokenizer

logger = logging.getLogger("ctxlm_ds")

_REPORT_BYTES = 2_000_000
"""Training text for the report in the folder."""


MOST_TOKENS = 10_000_000
MOST_OCCURRENCES = 10**12
MOST_UNKNOWN = 0.01
"""Share of unknown tokens above which training warns."""
_IN_MEMORY_BYTES = 32 << 20
_REMEDY = "choose another --output-dir, or remove it first"


@dataclass(frozen=True, slots=True)
class TokenizerType:
    """A kind of vocabulary."""

    train: Callable[[Iterable[str], Any], FastTokenizer]
    settings: type
    default_vocab_size: int
    least_vocab_size: int
    fixed: dict[str, Any] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Return the settings that a user can give."""
        return [setting.name for setting in fields(self.settings) if setting.name not in ("vocab_size", *self.fixed)]


_SENTENCEPIECE = (sentence_piece.train_sentencepiece, sentence_piece.SentencePieceSettings, 32_000, 8)
TOKENIZER_TYPES = {
    "wordpiece": TokenizerType(
        wordpiece.train_wordpiece, wordpiece.WordPieceSettings, wordpiece.DEFAULT_VOCAB_SIZE, 5 + 2
    ),
    "bpe": TokenizerType(byte_bpe.train_byte_bpe, byte_bpe.ByteBpeSettings, byte_bpe.DEFAULT_VOCAB_SIZE, 5 + 256),
    "gpt2": TokenizerType(byte_bpe.train_gpt2_bpe, byte_bpe.ByteBpeSettings, byte_bpe.GPT2_DEFAULT_VOCAB_SIZE, 1 + 256),
    "gpt1": TokenizerType(gpt1.train_gpt1, gpt1.Gpt1Settings, gpt1.DEFAULT_VOCAB_SIZE, 2 + 2),
    "unigram": TokenizerType(*_SENTENCEPIECE, fixed={"model_type": "unigram"}),
    "sentencepiece-bpe": TokenizerType(*_SENTENCEPIECE, fixed={"model_type": "bpe"}),
    "elmo": TokenizerType(
        characters.train_characters, characters.CharacterSettings, characters.DEFAULT_VOCAB_SIZE, 3 + 1
    ),
}


def train_tokenizer(
    type: str,
    texts: Iterable[str],
    vocab_size: int | None,
    output_dir: str | Path,
    *,
    max_sample_bytes: int | None = None,
    sample_seed: int = 0,
    source: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Tokenizer:
    """Train on `texts` and write a folder; return what loads from there.

    A corpus too small for `vocab_size` gives a smaller vocabulary and a warning.

    Args:
        type: a name in TOKENIZER_TYPES.
        texts: iterated once.
        vocab_size: every id; None takes the type's own (32,000 pieces and the sentinels for sentencepiece).
        output_dir: a folder that does not exist.
        max_sample_bytes: train on a sample of complete texts.
        sample_seed: decides the sample.
        source: what the texts are; `is_trained` then recognises the folder.
        settings: those of the type's settings class.

    Raises:
        ConfigError: an impossible setting.
        TokenizerError: there is no text, the folder exists, or the disk is full.
    """
    output_dir = Path(output_dir)
    chosen = _checked_settings(type, vocab_size, settings)
    exists = TokenizerError(f"{output_dir} exists already; {_REMEDY}")
    if output_dir.exists():
        raise exists
    if max_sample_bytes is not None and max_sample_bytes < 1:
        raise ConfigError(f"a sample of {max_sample_bytes} bytes is empty; name at least 1")
    record: dict[str, Any] = {"max_sample_bytes": max_sample_bytes, "sample_seed": sample_seed}
    if source is not None:
        record["made_of"] = _made_of(type, chosen, max_sample_bytes, sample_seed, source)
    try:
        if max_sample_bytes is not None:
            texts = sampled_texts(texts, max_sample_bytes, sample_seed)
        trained = _train(TOKENIZER_TYPES[type], _Watched(texts), chosen)
        trained.facts.training.update(record)
        _warn_of_bad_fit(type, trained, chosen.vocab_size)
        save_tokenizer(trained, output_dir, replace=False)
    except FileExistsError:
        # Another process was faster. The same tokenizer is as good.
        if source is None:
            raise exists from None
        is_same(output_dir, training_record(output_dir).get("made_of"), record["made_of"], _REMEDY, TokenizerError)
    except OSError as error:
        if not is_full_disk(error):
            raise
        place = error.filename or f"{output_dir.parent} or {tempfile.gettempdir()} (TMPDIR)"
        raise TokenizerError(f"{place}: {error.strerror}; nothing was kept, free some space") from error
    return load_tokenizer(output_dir)


def is_trained(
    type: str,
    vocab_size: int | None,
    output_dir: str | Path,
    source: Mapping[str, Any],
    *,
    max_sample_bytes: int | None = None,
    sample_seed: int = 0,
    **settings: Any,
) -> bool:
    """Return whether `train_tokenizer` has made the folder already, from this source with these settings.

    Raises:
        ConfigError: an impossible setting.
        TokenizerError: the folder exists and was made otherwise; the message names the differences.
    """
    chosen = _checked_settings(type, vocab_size, settings)
    if not Path(output_dir).exists():
        return False
    wanted = _made_of(type, chosen, max_sample_bytes, sample_seed, source)
    recorded = training_record(Path(output_dir)).get("made_of")
    return is_same(output_dir, recorded, wanted, _REMEDY, TokenizerError)


def _made_of(
    type: str, settings: Any, max_sample_bytes: int | None, sample_seed: int, source: Mapping[str, Any]
) -> dict[str, Any]:
    sample = {"max_sample_bytes": max_sample_bytes, "sample_seed": sample_seed}
    return {"type": type, **asdict(settings), **sample, **source}


def _checked_settings(type: str, vocab_size: int | None, settings: dict[str, Any]) -> Any:
    if type not in TOKENIZER_TYPES:
        raise ConfigError(f"tokenizer type {type!r} is not known; choose one of {', '.join(TOKENIZER_TYPES)}")
    kind = TOKENIZER_TYPES[type]
    for name in settings:
        if name not in kind.names():
            raise ConfigError(f"{name} is no setting of {type}, which has {', '.join(sorted(kind.names()))}")
    if vocab_size is not None and not kind.least_vocab_size <= vocab_size <= MOST_TOKENS:
        raise ConfigError(
            f"--vocab-size {vocab_size}: {type} needs at least {kind.least_vocab_size} tokens, at most {MOST_TOKENS:,}"
        )
    limits = {"min_frequency": (1, MOST_OCCURRENCES), "limit_alphabet": (1, MOST_TOKENS), "extra_ids": (0, MOST_TOKENS)}
    for name, (least, most) in limits.items():
        if not least <= settings.get(name, least) <= most:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {settings[name]}: a number from {least} to {most:,} is needed")
    for name in ("special_tokens", "language_codes"):
        if name in settings:
            settings[name] = _checked_names(name, settings[name])
    size = vocab_size or kind.default_vocab_size + settings.get("extra_ids", 0)
    return kind.settings(vocab_size=size, **kind.fixed, **settings)


def _warn_of_bad_fit(type: str, trained: FastTokenizer, wanted_size: int) -> None:
    """Warn of a text that is too small, and of unknown tokens, which a model cannot distinguish."""
    if trained.vocab_size < wanted_size:
        text = "the text is too small for a vocabulary of %d: it gave %d tokens"
        logger.warning(text, wanted_size, trained.vocab_size)
    rate = float(trained.facts.training["report"][ALL_LANGUAGES]["unknown_rate"])
    if rate <= MOST_UNKNOWN:
        return
    alphabet = "raise --vocab-size or --limit-alphabet, so that every character of the text has an id"
    remedies = {
        "wordpiece": alphabet,
        "gpt1": alphabet,
        "elmo": "raise --vocab-size or lower --min-frequency, so that more words have an id",
    }
    remedy = remedies.get(type, "raise --vocab-size or --character-coverage, or spell the rest with --byte-fallback")
    logger.warning("%.1f %% of the tokens of the training text are unknown; %s", 100 * rate, remedy)


def _checked_names(setting: str, names: Iterable[str]) -> tuple[str, ...]:
    checked = tuple(names)
    reserved = {*wordpiece.SPECIAL_TOKENS.values(), *byte_bpe.ROLES.values(), byte_bpe.END_OF_TEXT, gpt1.WORD_END}
    for name in checked:
        if len(name) < 2 or name.split() != [name] or checked.count(name) > 1 or name in reserved:
            raise ConfigError(
                f"{setting}: {name!r} cannot be one; name each once, two characters or more without white space, and "
                "none of the type's own"
            )
    return checked


def _train(kind: TokenizerType, watched: _Watched, settings: Any) -> FastTokenizer:
    error: Exception | None = None
    try:
        trained = kind.train(watched, settings)
    except Exception as raised:
        error = raised
    # What went wrong with the text comes first: the libraries wrap or swallow it, or fail because there is none.
    if watched.error is not None:
        raise watched.error
    if watched.was_read and not watched.has_text:
        raise TokenizerError("there is no text to train a tokenizer on; check --input and --json-keys")
    if error is not None:
        raise error
    trained.facts.training["report"] = tokenizer_report(trained, ((ALL_LANGUAGES, text) for (text,) in watched.sample))
    return trained


class _Watched:
    """Texts that remember a sample for the report, and their first error."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.sample = KeyedSample(_REPORT_BYTES)
        self.was_read = False
        self.has_text = False
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[str]:
        self.was_read = True
        if self.error is not None:
            return
        try:
            for text in self._texts:
                self.has_text = self.has_text or bool(text.strip())
                self.sample.add([text])
                yield text
        except GeneratorExit:
            raise
        except BaseException as error:
            self.error = error
            raise


class KeyedSample:
    """The added documents with the smallest keys that fit into `max_bytes` (at least one), in their order.

    Every document has the same chance. Memory: about 100 bytes per document kept; the texts are in a
    temporary file of at most max_bytes * (1 + ln(corpus / max_bytes)).
    """

    def __init__(self, max_bytes: int, seed: int = 0) -> None:
        self.max_bytes = max_bytes
        self.seed = seed
        self.num_seen = 0
        self.bytes_seen = 0
        self.bytes_kept = 0
        self._limit: int | None = None
        self._kept: list[tuple[int, int, int]] = []
        """Heap of (-key, offset, length in the spool)."""
        self._spool = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)  # noqa: SIM115 (as long as the object)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def add(self, fields: Sequence[str]) -> None:
        """Add the next document: one or several texts."""
        key = int.from_bytes(hashlib.blake2b(f"{self.seed}:{self.num_seen}".encode(), digest_size=8).digest(), "big")
        self.num_seen += 1
        record = json.dumps(list(fields)).encode()
        self.bytes_seen += len(record)
        if self._limit is not None and key >= self._limit:
            return
        heapq.heappush(self._kept, (-key, self._spool.tell(), len(record)))
        self._spool.write(record)
        self.bytes_kept += len(record)
        while self.bytes_kept > self.max_bytes and len(self._kept) > 1:
            dropped, _, length = heapq.heappop(self._kept)
            self._limit = -dropped
            self.bytes_kept -= length

    def __iter__(self) -> Iterator[list[str]]:
        end = self._spool.tell()
        for _, offset, length in sorted(self._kept, key=lambda entry: entry[1]):
            self._spool.seek(offset)
            yield json.loads(self._spool.read(length))
        self._spool.seek(end)


def sampled_texts(texts: Iterable[str], max_bytes: int, seed: int = 0) -> Iterator[str]:
    """Yield the texts of a KeyedSample, after all have been read."""
    sample = KeyedSample(max_bytes, seed)
    for text in texts:
        sample.add([text])
    logger.info(
        "sample: %d of %d documents, %.1f of %.1f MB",
        sample.num_kept, sample.num_seen, sample.bytes_kept / 1e6, sample.bytes_seen / 1e6,
    )  # fmt: skip
    for (text,) in sample:
        yield text
