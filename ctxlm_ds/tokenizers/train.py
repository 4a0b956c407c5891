"""Train a tokenizer from text, or from a sample of a huge corpus, and write its folder.

A sample is drawn in one pass: (seed, document number) alone decide which documents are in it. The report counts words:
white space and punctuation separate them, and each punctuation mark is one (BERT's rule). Chinese, Japanese and Thai
write no spaces: compare characters per token there.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import tempfile
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import islice
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import is_full_disk, is_same
from ctxlm_ds.console import logger
from ctxlm_ds.errors import ConfigError, TokenizerError
from ctxlm_ds.tokenizers.base import MAX_ID, Tokenizer, TokenizerType
from ctxlm_ds.tokenizers.load import load_tokenizer, tokenizer_kinds, training_record

MOST_OCCURRENCES = 10**12
MOST_UNKNOWN = 0.01
"""Share of unknown tokens above which training warns."""
MOST_MARKED = 0.05
"""Share of words with accents or vowel signs above which training warns that they are stripped."""
ALL_LANGUAGES = "all"
_BATCH_DOCUMENTS = 64
_MOST_LETTERS = 2000
"""Different letters that are looked up for the cause of unknown tokens."""
_IN_MEMORY_BYTES = 32 << 20
_REPORT_BYTES = 2_000_000
"""Training text for the report in the folder."""
_REMEDY = "choose another --output-dir, or remove it first"
_LIMITS = {
    "min_frequency": (1, MOST_OCCURRENCES), "limit_alphabet": (1, MAX_ID), "extra_ids": (0, MAX_ID),
    "input_words": (0, MAX_ID),
}  # fmt: skip


_RESERVED = frozenset(
    ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<pad>", "<unk>", "<s>", "</s>", "<mask>", "<|endoftext|>", "</w>"]
)
"""Names that kinds have for their own tokens."""


class KeyedSample:
    """The added documents with the smallest keys that fit into `max_bytes` (at least one), in their order.

    Every document has the same chance. Memory: about 100 bytes per document kept; the texts are in a
    temporary file of at most max_bytes * (1 + ln(corpus / max_bytes)).
    """

    def __init__(self, max_bytes: int, seed: int = 0) -> None:
        self.num_seen = 0
        self.bytes_seen = 0
        self.bytes_kept = 0
        self._max_bytes = max_bytes
        self._seed = seed
        self._limit: int | None = None
        self._kept: list[tuple[int, int, int]] = []
        """Heap of (-key, offset, length in the spool)."""
        self._spool = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)  # noqa: SIM115 (as long as the object)

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, fields: Sequence[str]) -> None:
        """Add the next document: one or several texts."""
        key = int.from_bytes(hashlib.blake2b(f"{self._seed}:{self.num_seen}".encode(), digest_size=8).digest(), "big")
        self.num_seen += 1
        record = json.dumps(list(fields)).encode()
        self.bytes_seen += len(record)
        if self._limit is not None and key >= self._limit:
            return
        heapq.heappush(self._kept, (-key, self._spool.tell(), len(record)))
        self._spool.write(record)
        self.bytes_kept += len(record)
        while self.bytes_kept > self._max_bytes and len(self._kept) > 1:
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
        len(sample), sample.num_seen, sample.bytes_kept / 1e6, sample.bytes_seen / 1e6,
    )  # fmt: skip
    for (text,) in sample:
        yield text


def tokenizer_types() -> dict[str, TokenizerType]:
    """Return every type that can be trained, by name, of all kinds; default sizes are those of the released models."""
    return {name: entry for kind in tokenizer_kinds() for name, entry in kind.types.items()}


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

    The texts are iterated once. A corpus too small for `vocab_size` (None takes the type's own) gives a smaller
    vocabulary and a warning. The folder must not exist, or with `source`, which says in its record what the texts are,
    be made from the same with the same settings. `settings` are those of the type's settings class.

    Raises ConfigError for an impossible setting; TokenizerError if there is no text, the folder was made otherwise (the
    message names the differences), or the disk is full.
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
        trained = _train(tokenizer_types()[type], texts, chosen)
        trained.facts.training.update(record)
        trained.save(output_dir, replace=False)
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
    recorded = training_record(folder).get("made_of")
    if recorded and recorded.get("merge_score") == "frequency":  # recorded by earlier versions
        recorded = {name: value for name, value in recorded.items() if name != "merge_score"}
    is_same(folder, recorded, record["made_of"], _REMEDY, TokenizerError)
    return load_tokenizer(folder)


def _checked_settings(type: str, vocab_size: int | None, settings: dict[str, Any]) -> Any:
    types = tokenizer_types()
    if type not in types:
        raise ConfigError(f"tokenizer type {type!r} is not known; choose one of {', '.join(types)}")
    kind = types[type]
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
    size = vocab_size or kind.default_vocab_size + settings.get("extra_ids", 0)
    least = kind.least_vocab_size + len(settings.get("special_tokens", ()))
    most = MAX_ID - (settings.get("input_words") or 0)  # which have ids behind those of the output
    if not least <= size <= most:
        raise ConfigError(f"--vocab-size {size}: {type} needs at least {least} tokens, at most {most:,}")
    names = {
        name: _checked_names(name, settings[name]) for name in ("special_tokens", "language_codes") if name in settings
    }
    return kind.settings(vocab_size=size, **kind.defaults | kind.fixed | settings | names)


def _checked_names(setting: str, names: Iterable[str]) -> tuple[str, ...]:
    checked = tuple(names)
    for name in checked:
        if len(name) < 2 or name.split() != [name] or checked.count(name) > 1 or name in _RESERVED:
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
        _log_stripped_marks((text for (text,) in sample), hasattr(settings, "lowercase"))
    rate = float(report[ALL_LANGUAGES]["unknown_rate"])
    if rate > MOST_UNKNOWN and kind.against_unknown:
        text = "%.1f %% of the tokens of the training text are unknown; %s"
        logger.warning(text, 100 * rate, kind.against_unknown)
    return trained


def _log_stripped_marks(texts: Iterable[str], can_keep: bool) -> None:
    """Say that accents are stripped; warn if many words between blanks have a letter with a mark."""
    words = Counter(word for text in texts for word in text.split())
    marked = [word for word in words if "Mn" in map(unicodedata.category, unicodedata.normalize("NFD", word))]
    share = sum(words[word] for word in marked) / max(1, words.total())
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


def tokenizer_report(tokenizer: Tokenizer, documents: Iterable[tuple[str, str]]) -> dict[str, dict[str, float | int]]:
    """Return rates by language, and of `all` if there are several, for documents as (language, text).

    The rates are `fertility` (tokens per word), `characters_per_token`, `unknown_rate` (share of the tokens) and
    `whole_words` (share of words with one token), next to the counts of documents, words and tokens. Memory grows with
    the number of different words.
    """
    from tokenizers import pre_tokenizers

    cut = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    words: defaultdict[str, Counter[str]] = defaultdict(Counter)
    remaining = iter(documents)
    while batch := list(islice(remaining, _BATCH_DOCUMENTS)):
        for (language, text), ids in zip(batch, tokenizer.encode_batch([text for _, text in batch]), strict=True):
            unknown = ids.count(tokenizer.unk_id)
            counts[language].update(documents=1, characters=len(text), tokens=len(ids), unknown=unknown)
            words[language].update(word for word, _ in cut(text))
    for language, counted in words.items():
        counts[language].update(words=counted.total(), whole_words=_count_whole_words(counted, tokenizer))
    report = {language: _rates(counts[language]) for language in sorted(counts)}
    if len(counts) != 1:
        report[ALL_LANGUAGES] = _rates(sum(counts.values(), Counter()))
    return report


def strips_marks(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer takes accents and vowel signs off its text."""
    normalizer = tokenizer.backend.normalizer
    if normalizer is None:
        return False
    kept = unicodedata.normalize("NFC", normalizer.normalize_str("é").lower())
    return "e" in kept and "é" not in kept


def unknown_cause(tokenizer: Tokenizer, texts: Sequence[str]) -> str:
    """Return why tokens of texts are unknown, and what to do; empty if the texts do not show it."""

    def unknown(variants: Iterable[str]) -> int:
        return sum(ids.count(tokenizer.unk_id) for ids in tokenizer.encode_batch(list(variants)))

    if 2 * unknown(unicodedata.normalize("NFC", text) for text in texts) < unknown(texts):
        return 'decomposed accents (NFD): compose them with unicodedata.normalize("NFC", text)'
    letters = Counter(letter for text in texts for letter in text if not letter.isspace()).most_common(_MOST_LETTERS)
    lost = [letter for letter, _ in letters if unknown([letter])]
    shown = " ".join(lost[:8])
    if sum(tokenizer.token_to_id(letter) is not None for letter in lost) > len(lost) / 2:
        return f"the normalizer changes letters that the vocabulary has ({shown}): try do_lower_case: false"
    return f"the vocabulary lacks {shown}: train a tokenizer on such text" if lost else ""


def _count_whole_words(words: Counter[str], tokenizer: Tokenizer) -> int:
    # sentencepiece writes the space before a mark as a separate token if no piece contains both.
    encoded = tokenizer.encode_batch([tokenizer.sentence_prefix + word for word in words])
    return sum(
        count
        for count, ids in zip(words.values(), encoded, strict=True)
        if len(ids) == 1 and ids[0] != tokenizer.unk_id
    )


def _rates(counts: Counter[str]) -> dict[str, float | int]:
    tokens, words = max(1, counts["tokens"]), max(1, counts["words"])
    return {
        "documents": counts["documents"],
        "words": counts["words"],
        "tokens": counts["tokens"],
        "fertility": round(counts["tokens"] / words, 4),
        "characters_per_token": round(counts["characters"] / tokens, 4),
        "unknown_rate": round(counts["unknown"] / tokens, 6),
        "whole_words": round(counts["whole_words"] / words, 4),
    }
