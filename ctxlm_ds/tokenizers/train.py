"""Train a tokenizer from text, or from a sample of a huge corpus, and write its folder."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import is_full_disk, is_same
from ctxlm_ds.errors import ConfigError, TokenizerError
from ctxlm_ds.tokenizers import byte_bpe, characters, gpt1, sentence_piece, wordpiece
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer, training_record
from ctxlm_ds.tokenizers.report import ALL_LANGUAGES, share_with_marks, strips_marks, tokenizer_report
from ctxlm_ds.tokenizers.sampling import KeyedSample, sampled_texts
from ctxlm_ds.tokenizers.save import save_tokenizer

logger = logging.getLogger("ctxlm_ds")

MOST_TOKENS = 10_000_000
MOST_OCCURRENCES = 10**12
MOST_UNKNOWN = 0.01
"""Share of unknown tokens above which training warns."""
MOST_MARKED = 0.05
"""Share of words with accents or vowel signs above which training warns that they are stripped."""
_REPORT_BYTES = 2_000_000
"""Training text for the report in the folder."""
_REMEDY = "choose another --output-dir, or remove it first"
_LIMITS = {
    "min_frequency": (1, MOST_OCCURRENCES), "limit_alphabet": (1, MOST_TOKENS), "extra_ids": (0, MOST_TOKENS),
    "input_words": (0, MOST_TOKENS),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenizerType:
    """A kind of vocabulary."""

    train: Callable[[Iterable[str], Any], Tokenizer]
    settings: type
    default_vocab_size: int
    least_vocab_size: int
    against_unknown: str = ""
    """Advice if many tokens are unknown."""
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Values of a setting."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Settings that a user cannot give."""


_ALPHABET = "raise --vocab-size or --limit-alphabet, so that every character of the text has an id"
_WORDS = "raise --vocab-size or lower --min-frequency, so that more words have an id"
_PIECES = "raise --vocab-size or --character-coverage, or spell the rest with --byte-fallback"
_UNICODE = {"normalization": byte_bpe.NORMALIZATIONS}
_SENTENCEPIECE = (
    sentence_piece.train_sentencepiece, sentence_piece.SentencePieceSettings, 32_000, 8, _PIECES,
    {"normalization": sentence_piece.NORMALIZATIONS},
)  # fmt: skip
TOKENIZER_TYPES = {
    "wordpiece": TokenizerType(
        wordpiece.train_wordpiece, wordpiece.WordPieceSettings, 30_522, 5 + 2, _ALPHABET,
        {"merge_score": wordpiece.MERGE_SCORES},
    ),
    "bpe": TokenizerType(
        byte_bpe.train_roberta_bpe, byte_bpe.ByteBpeSettings, 50_265, 5 + 256, choices=_UNICODE
    ),
    "gpt2": TokenizerType(byte_bpe.train_gpt2_bpe, byte_bpe.ByteBpeSettings, 50_257, 1 + 256, choices=_UNICODE),
    "gpt1": TokenizerType(gpt1.train_gpt1, gpt1.Gpt1Settings, 40_478, 2 + 2, _ALPHABET),
    "gpt1-words": TokenizerType(gpt1.train_gpt1_words, gpt1.Gpt1Settings, 40_478, 2 + 2, _ALPHABET),
    "unigram": TokenizerType(*_SENTENCEPIECE, fixed={"model_type": "unigram"}),
    "albert": TokenizerType(
        sentence_piece.train_sentencepiece, sentence_piece.AlbertSettings, 30_000, 8, _PIECES,
        {"normalization": sentence_piece.NORMALIZATIONS},
        {"model_type": "unigram", "extra_ids": 0, "language_codes": ()},
    ),
    "xlnet": TokenizerType(
        sentence_piece.train_sentencepiece, sentence_piece.XlnetSettings, 32_000, 9 + 8 + 4, _PIECES,
        {"normalization": sentence_piece.NORMALIZATIONS},
        {"model_type": "unigram", "extra_ids": 0, "language_codes": ()},
    ),
    "t5": TokenizerType(
        sentence_piece.train_sentencepiece, sentence_piece.T5Settings, 32_100, 100 + 8, _PIECES,
        {"normalization": sentence_piece.NORMALIZATIONS}, {"model_type": "unigram", "language_codes": ()},
    ),
    "sentencepiece-bpe": TokenizerType(*_SENTENCEPIECE, fixed={"model_type": "bpe"}),
    "elmo": TokenizerType(
        characters.train_characters, characters.CharacterSettings, 793_471, 3 + 1, _WORDS,
        {"words": characters.WORD_RULES},
    ),
}  # fmt: skip
"""Types by name; default sizes are those of the released models."""


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
        output_dir: a folder that does not exist, or with `source` one made from it with the same settings.
        max_sample_bytes: train on a sample of complete texts.
        sample_seed: decides the sample.
        source: what the texts are, for the record in the folder.
        settings: those of the type's settings class.

    Raises:
        ConfigError: an impossible setting.
        TokenizerError: there is no text, the folder was made otherwise (the message names the differences), or the
            disk is full.
    """
    output_dir = Path(output_dir)
    chosen = _checked_settings(type, vocab_size, settings)
    if max_sample_bytes is not None and max_sample_bytes < 1:
        raise ConfigError(f"a sample of {max_sample_bytes} bytes is empty; name at least 1")
    record: dict[str, Any] = {"max_sample_bytes": max_sample_bytes, "sample_seed": sample_seed}
    if source is not None:
        record["made_of"] = {"type": type, **asdict(chosen), **record, **source}
    if output_dir.exists():
        return _load_existing(output_dir, record)
    try:
        if max_sample_bytes is not None:
            texts = sampled_texts(texts, max_sample_bytes, sample_seed)
        trained = _train(TOKENIZER_TYPES[type], texts, chosen)
        trained.facts.training.update(record)
        save_tokenizer(trained, output_dir, replace=False)
    except FileExistsError:  # another process was faster
        return _load_existing(output_dir, record)
    except OSError as error:
        if not is_full_disk(error):
            raise
        place = error.filename or f"{output_dir.parent} or {tempfile.gettempdir()} (TMPDIR)"
        raise TokenizerError(f"{place}: {error.strerror}; nothing was kept, free some space") from error
    return load_tokenizer(output_dir)


def _load_existing(folder: Path, record: dict[str, Any]) -> Tokenizer:
    if "made_of" not in record:
        raise TokenizerError(f"{folder} exists already; {_REMEDY}")
    is_same(folder, training_record(folder).get("made_of"), record["made_of"], _REMEDY, TokenizerError)
    return load_tokenizer(folder)


def _checked_settings(type: str, vocab_size: int | None, settings: dict[str, Any]) -> Any:
    if type not in TOKENIZER_TYPES:
        raise ConfigError(f"tokenizer type {type!r} is not known; choose one of {', '.join(TOKENIZER_TYPES)}")
    kind = TOKENIZER_TYPES[type]
    known = {setting.name for setting in fields(kind.settings)} - {"vocab_size", *kind.fixed}
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(f"{name} is no setting of {type}, which has {', '.join(sorted(known))}")
        choices = kind.choices.get(name, (value,))
        if value not in choices:
            raise ConfigError(f"{name} {value!r} is not known to {type}; choose one of {', '.join(choices)}")
        least, most = _LIMITS.get(name, (value, value))
        if not least <= value <= most:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: a number from {least} to {most:,} is needed")
    if vocab_size is not None and not kind.least_vocab_size <= vocab_size <= MOST_TOKENS:
        raise ConfigError(
            f"--vocab-size {vocab_size}: {type} needs at least {kind.least_vocab_size} tokens, at most {MOST_TOKENS:,}"
        )
    names = {
        name: _checked_names(name, settings[name]) for name in ("special_tokens", "language_codes") if name in settings
    }
    size = vocab_size or kind.default_vocab_size + settings.get("extra_ids", 0)
    return kind.settings(vocab_size=size, **kind.fixed, **(settings | names))


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


def _train(kind: TokenizerType, texts: Iterable[str], settings: Any) -> Tokenizer:
    """Train, add the report to the facts, and warn of a text that is too small and of many unknown tokens."""
    sample = KeyedSample(_REPORT_BYTES)
    errors: list[BaseException] = []
    try:
        trained = kind.train(_watched(texts, sample, errors), settings)
    except Exception as error:
        errors.append(error)
    if errors:  # what went wrong with the text comes first: the libraries wrap or swallow it
        raise errors[0]
    report = tokenizer_report(trained, ((ALL_LANGUAGES, text) for (text,) in sample))
    trained.facts.training["report"] = report
    if trained.vocab_size < settings.vocab_size:
        text = "the text is too small for a vocabulary of %d: it gave %d tokens"
        logger.warning(text, settings.vocab_size, trained.vocab_size)
    if strips_marks(trained):
        _log_stripped_marks(share_with_marks(text for (text,) in sample), hasattr(settings, "lowercase"))
    rate = float(report[ALL_LANGUAGES]["unknown_rate"])
    if rate > MOST_UNKNOWN and kind.against_unknown:
        text = "%.1f %% of the tokens of the training text are unknown; %s"
        logger.warning(text, 100 * rate, kind.against_unknown)
    return trained


def _log_stripped_marks(share: float, can_keep: bool) -> None:
    """Say that accents are stripped; warn if many words have such marks."""
    text = "the tokenizer lower-cases and strips accents" + ("; --cased keeps them" if can_keep else "")
    if share > MOST_MARKED:
        logger.warning("%s: %.0f %% of the words have accents or vowel signs, which are lost", text, 100 * share)
    else:
        logger.info("%s", text)


def _watched(texts: Iterable[str], sample: KeyedSample, errors: list[BaseException]) -> Iterator[str]:
    """Yield texts and add them to a sample; keep the first error, also that there is no text."""
    has_text = False
    try:
        for text in texts:
            has_text = has_text or bool(text.strip())
            sample.add([text])
            yield text
        if not has_text:
            raise TokenizerError("there is no text to train a tokenizer on; check --input and --json-keys")
    except GeneratorExit:
        raise
    except BaseException as error:
        errors.append(error)
        raise
