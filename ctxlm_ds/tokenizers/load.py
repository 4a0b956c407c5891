"""Load any local Hugging Face tokenizer folder that holds a tokenizer.json, or a bare vocabulary file.

tokenizer.json is read by the `tokenizers` library, not by transformers' AutoTokenizer, which rebuilds some classes from
the vocabulary and so changes fingerprints, reads gigabytes for a hostile id, and takes seconds to import. No code from
the folder is ever run. Bare vocabularies, as Megatron-LM and older releases have them: vocab.txt (WordPiece),
vocab.json with merges.txt, also as gpt2-vocab.json with gpt2-merges.txt (byte-level BPE), and *.model (sentencepiece).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import PARTIAL_MARK
from ctxlm_ds.errors import ConfigError, CtxlmError, TokenizerError
from ctxlm_ds.registry import TOKENIZERS
from ctxlm_ds.tokenizers.base import (
    DECODER_ROLES,
    MAX_ID,
    SPECIAL_ROLES,
    TRAINING_FILE,
    Tokenizer,
    TokenizerFacts,
    TokenizerKind,
    check_not_random,
    missing_role,
)
from ctxlm_ds.untrusted_json import read_json_object

_CONFIG_FILE = "tokenizer_config.json"
_MAX_BYTES = 1 << 28  # MAX_ID words of ELMo's have a tokenizer.json of half of it
_VOCABULARIES = ("vocab.txt", "vocab.json", "*-vocab.json", "*.model")
_WHOLE = ("tokenizer.json", TRAINING_FILE)
"""Files of a complete tokenizer; a folder that has lost one of them is not a bare vocabulary."""
_USUAL_NAMES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>", "<cls>"),
    "sep": ("[SEP]", "</s>", "<sep>"),
    "mask": ("[MASK]", "<mask>"),
}
_STAND_INS = {"cls": "bos", "sep": "eos"}
_PROBE = "a " + "".join(map(chr, range(0x20, 0xD800)))
"""Text that every tokenizer must encode; a damaged normalizer fails at some of its characters."""
_USUAL_ENDS = ("<|endoftext|>", "\n</w>")
"""GPT-2's and GPT-1's end of a document."""


def load_tokenizer(path: str | Path, split_special_tokens: bool | None = None) -> Tokenizer:
    """Return the tokenizer in a local folder, or of a bare vocabulary file there.

    A tokenizer without a mask token (GPT) only needs an end-of-document token, which replaces the others.
    `split_special_tokens` as in transformers: encode the name of a special token inside a text as ordinary text, not
    as that token. None takes the folder's own setting (False if it has none).

    Raises TokenizerError if the folder, its tokenizer.json or one of the pad, unk, cls and sep tokens is missing, a
    file in it cannot be read, or the folder was never finished.
    """
    try:
        tokenizer = _load(Path(path), split_special_tokens)
        has_table = "Precompiled" in repr(tokenizer.backend.normalizer)
        tokenizer.encode_batch([_PROBE if has_table else _PROBE[::97]])
        return tokenizer
    except (CtxlmError, OSError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the libraries raise other classes, also for a panic
        raise TokenizerError(f"{path}: a file of the tokenizer is damaged ({str(error)[:200]}); restore it") from error


def _load(folder: Path, split_special_tokens: bool | None) -> Tokenizer:
    vocabulary = find_vocabulary(folder)
    if vocabulary is not None:
        return _load_vocabulary(vocabulary, split_special_tokens)
    if not folder.is_dir():
        raise TokenizerError(
            f"{folder}: no such tokenizer folder; make one with ctxlm tokenizer --output-dir {folder}, "
            "or download a Hugging Face tokenizer there first (names on the Hub are not looked up)"
        )
    if PARTIAL_MARK in folder.resolve().name:
        finished = folder.resolve().name.split(PARTIAL_MARK)[0]
        raise TokenizerError(
            f"{folder}: not finished (what is being written, or was left when its writer was killed); make {finished} "
            "again, and remove this folder if nothing is writing it"
        )
    backend = _load_backend(folder)
    config = _read_json(folder / _CONFIG_FILE)
    if split_special_tokens is not None:
        config["split_special_tokens"] = split_special_tokens
    special_map = _read_json(folder / "special_tokens_map.json")
    training = training_record(folder)
    kind = next((kind for kind in tokenizer_kinds() if kind.recognizes(json.loads(backend.to_str()), training)), None)
    files = {}
    for name in kind.files if kind else ():
        if not (folder / name).is_file():
            raise TokenizerError(f"{folder}: holds no {name}, with which its texts are encoded; restore the folder")
        files[name] = (folder / name).read_bytes()
    roles = _special_tokens(folder, (config, special_map), backend)
    tokenizer = (kind.tokenizer if kind else Tokenizer)(
        backend, TokenizerFacts(roles, config, training, source=str(folder), files=files)
    )
    recorded = training.get("fingerprint")
    if recorded is not None and recorded != tokenizer.fingerprint:
        raise TokenizerError(
            f"{folder}: tokenizer.json is not the one that {TRAINING_FILE} describes (fingerprint "
            f"{tokenizer.fingerprint[:12]}, recorded {recorded!s:.12}); restore it, or delete {TRAINING_FILE} to "
            "accept the change as a new tokenizer"
        )
    return tokenizer


def open_tokenizer(path: str | None, vocab_size: int | None) -> tuple[Tokenizer, int]:
    """Return the tokenizer of a recipe and the size of the model's vocabulary, by default the tokenizer's.

    Raises ConfigError if no path is set or the size is too small for the tokenizer's ids.
    """
    if path is None:
        raise ConfigError(
            "tokenizer.path is not set: name the folder that made the dataset, e.g. --set tokenizer.path=tok "
            "(ctxlm tokenizer makes one)"
        )
    tokenizer = load_tokenizer(path)
    size, least = vocab_size or tokenizer.output_size, tokenizer.output_size
    if size < least:
        raise ConfigError(
            f"model.vocab_size is {size}, but the tokenizer {path} has ids up to "
            f"{least - 1}; set model.vocab_size to at least {least}, or null"
        )
    return tokenizer, size


def tokenizer_kinds() -> Iterator[TokenizerKind]:
    return map(TOKENIZERS.get, TOKENIZERS.names())


def find_vocabulary(path: Path) -> Path | None:
    """Return the vocabulary file that a path names or that its folder holds; None if the folder has more than that.

    Raises TokenizerError if the folder has several of them.
    """
    if path.is_file():
        is_merges = path.name.endswith("merges.txt")
        return path.with_name(path.name.removesuffix("merges.txt") + "vocab.json") if is_merges else path
    if not path.is_dir() or PARTIAL_MARK in path.resolve().name or any((path / name).exists() for name in _WHOLE):
        return None
    found = [file for pattern in _VOCABULARIES for file in sorted(path.glob(pattern)) if file.is_file()]
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise TokenizerError(f"{path}: holds several vocabularies ({names}) and no tokenizer.json; name one of them")
    return found[0] if found else None


def _load_vocabulary(file: Path, split_special_tokens: bool | None) -> Tokenizer:
    """Return the tokenizer of a vocabulary file, which gives the ids that its original gives.

    A tokenizer_config.json next to it counts. Raises TokenizerError if the file is of no known kind or damaged, or its
    neighbour is missing.
    """
    read = next((kind.read for kind in tokenizer_kinds() if kind.vocabulary == file.suffix and kind.read), None)
    if read is None:
        raise TokenizerError(f"{file}: no tokenizer; give a folder, a vocab.txt, vocab.json or *.model (sentencepiece)")
    config = _read_json(file.with_name(_CONFIG_FILE))
    try:
        found = read(file, config)
    except TypeError as error:
        raise TokenizerError(f"{file.with_name(_CONFIG_FILE)}: a value has a wrong type ({error})") from error
    split = config.get("split_special_tokens", False) if split_special_tokens is None else split_special_tokens
    kept = found.facts.config | ({"split_special_tokens": True} if split else {})
    return type(found)(found.backend, replace(found.facts, config=kept, source=str(file)))


def training_record(folder: Path) -> dict[str, Any]:
    """Return the content of ctxlm_tokenizer.json; empty for a tokenizer made by other programs."""
    return _read_json(folder / TRAINING_FILE)


def _load_backend(folder: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(
            f"{folder}: holds no tokenizer.json (the fast form); with transformers, "
            f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}') writes it"
        )
    _check_ids(folder)
    try:
        backend = Backend.from_file(str(file))
    except BaseException as error:  # the Rust library raises plain Exception, and for a damaged charsmap a panic
        if isinstance(error, KeyboardInterrupt):
            raise
        raise TokenizerError(f"{file}: not a readable tokenizer.json ({error}); save the tokenizer again") from error
    check_not_random(backend, folder)
    return backend


def _read_json(file: Path) -> dict[str, Any]:
    return read_json_object(file, TokenizerError, _MAX_BYTES) if file.exists() else {}


def _check_ids(folder: Path) -> None:
    """Raise TokenizerError for an id that no vocabulary has; the library would take memory for all ids below it."""
    content = _read_json(folder / "tokenizer.json")
    model, added = content.get("model"), content.get("added_tokens")
    vocabularies = (
        model.get("vocab") if isinstance(model, dict) else None,
        _read_json(folder / "vocab.json"),
        _read_json(folder / "added_tokens.json"),
    )
    ids = [item for vocabulary in vocabularies if isinstance(vocabulary, dict) for item in vocabulary.items()]
    if isinstance(added, list):
        ids += [(token.get("content"), token.get("id")) for token in added if isinstance(token, dict)]
    for token, number in ids:
        if isinstance(number, (int, float)) and number > MAX_ID:
            raise TokenizerError(f"{folder}: the token {token!r} has the id {number}, more than {MAX_ID:,}")


def _special_tokens(folder: Path, settings: Sequence[dict[str, Any]], backend: Any) -> dict[str, str]:
    """Return the token of each role; without a mask token, the end-of-document token replaces missing ones."""

    def configured(name: str) -> str | None:
        for value in (setting.get(f"{name}_token") for setting in settings):
            token = value.get("content") if isinstance(value, dict) else value  # written as text or as an object
            if isinstance(token, str) and token:
                return token
        return None

    def usual(role: str) -> str | None:
        return next((name for name in _USUAL_NAMES[role] if backend.token_to_id(name) is not None), None)

    if configured("mask") or usual("mask"):
        tokens = {}
        for role in SPECIAL_ROLES:
            token = configured(role) or usual(role) or configured(_STAND_INS.get(role, ""))
            if token is None:
                raise TokenizerError(missing_role(folder, role))
            tokens[role] = token
        return tokens
    found = {role: configured(role) or configured(_STAND_INS.get(role, "")) or usual(role) for role in DECODER_ROLES}
    end = found["sep"] or next((name for name in _USUAL_ENDS if backend.token_to_id(name) is not None), None)
    if end is None:
        raise TokenizerError(
            f"{folder}: the tokenizer has no mask token, which masked language models need, and no end-of-document "
            f"token, which causal ones need; name them as mask_token or eos_token in {folder / _CONFIG_FILE}"
        )
    return {role: token or end for role, token in found.items()}
