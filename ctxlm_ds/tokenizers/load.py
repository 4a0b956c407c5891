"""Load any local Hugging Face tokenizer folder that holds a tokenizer.json (no code from the folder is ever run)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import PARTIAL_MARK
from ctxlm_ds.errors import ConfigError, TokenizerError
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers import byte_bpe, characters, gpt1, sentence_piece
from ctxlm_ds.tokenizers.base import DECODER_ROLES, MAX_ID, SPECIAL_ROLES, Tokenizer, TokenizerFacts, missing_role
from ctxlm_ds.tokenizers.vocabulary_files import find_vocabulary, load_vocabulary
from ctxlm_ds.untrusted_json import read_json_object

TRAINING_FILE = "ctxlm_tokenizer.json"
_CLASSES: dict[str, type[Tokenizer]] = {
    sentence_piece.KIND: sentence_piece.SentencePieceTokenizer,
    characters.KIND: characters.CharacterTokenizer,
}
_USUAL_NAMES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>", "<cls>"),
    "sep": ("[SEP]", "</s>", "<sep>"),
    "mask": ("[MASK]", "<mask>"),
}
_STAND_INS = {"cls": "bos", "sep": "eos"}


def load_tokenizer(path: str | Path, split_special_tokens: bool | None = None) -> Tokenizer:
    """Return the tokenizer in a local folder, or of a vocabulary file there (vocabulary_files.py).

    A tokenizer without a mask token (GPT) only needs an end-of-document token, which replaces the others.
    `split_special_tokens` as in transformers: encode the name of a special token inside a text as ordinary text, not
    as that token. None takes the folder's own setting (False if it has none).

    Raises TokenizerError if the folder, its tokenizer.json or one of the pad, unk, cls and sep tokens is missing, a
    file in it cannot be read, or the folder was never finished.
    """
    folder = Path(path)
    vocabulary = find_vocabulary(folder)
    if vocabulary is not None:
        return load_vocabulary(vocabulary, split_special_tokens)
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
    config = _read_json(folder / "tokenizer_config.json")
    if split_special_tokens is not None:
        config["split_special_tokens"] = split_special_tokens
    special_map = _read_json(folder / "special_tokens_map.json")
    content = json.loads(backend.to_str())
    training = training_record(folder)
    recorded_kind, files = str(training.get("kind")), {}
    if recorded_kind == sentence_piece.KIND:
        file = folder / sentence_piece.MODEL_FILE
        if not file.is_file():
            raise TokenizerError(
                f"{folder}: holds no {file.name}, with which its texts are encoded; restore the folder"
            )
        files = {file.name: file.read_bytes()}
    facts = TokenizerFacts(
        kind=recorded_kind if recorded_kind in _CLASSES else _detect_kind(content),
        special_tokens=_special_tokens(folder, (config, special_map), backend),
        config=config,
        training=training,
        source=str(folder),
        files=files,
    )
    tokenizer = _CLASSES.get(facts.kind, Tokenizer)(backend, facts)
    recorded = facts.training.get("fingerprint")
    if recorded is not None and recorded != tokenizer.fingerprint:
        raise TokenizerError(
            f"{folder}: tokenizer.json is not the one that {TRAINING_FILE} describes (fingerprint "
            f"{tokenizer.fingerprint[:12]}, recorded {recorded!s:.12}); restore it, or delete {TRAINING_FILE} to "
            "accept the change as a new tokenizer"
        )
    return tokenizer


def resolve(config: RunConfig) -> tuple[RunConfig, Tokenizer]:
    """Return the recipe with the size of the vocabulary, and its tokenizer.

    Raises:
        ConfigError: the recipe names no tokenizer, or the model has fewer embedding rows than the tokenizer has ids.
    """
    if config.tokenizer.path is None:
        raise ConfigError(
            "tokenizer.path is not set: name the folder that made the dataset, e.g. --set tokenizer.path=tok "
            "(ctxlm tokenizer makes one)"
        )
    tokenizer = load_tokenizer(config.tokenizer.path)
    size, least = config.model.vocab_size or tokenizer.output_size, tokenizer.output_size
    if size < least:
        raise ConfigError(
            f"model.vocab_size is {size}, but the tokenizer {config.tokenizer.path} has ids up to "
            f"{least - 1}; set model.vocab_size to at least {least}, or null"
        )
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": size})}), tokenizer


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
        return Backend.from_file(str(file))
    except Exception as error:  # the Rust library raises plain Exception
        raise TokenizerError(f"{file}: not a readable tokenizer.json ({error}); save the tokenizer again") from error


def _read_json(file: Path) -> dict[str, Any]:
    return read_json_object(file, TokenizerError) if file.exists() else {}


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
    known = (name for name in (byte_bpe.END_OF_TEXT, gpt1.LINE_END) if backend.token_to_id(name) is not None)
    end = found["sep"] or next(known, None)
    if end is None:
        raise TokenizerError(
            f"{folder}: the tokenizer has no mask token, which masked language models need, and no end-of-document "
            f"token, which causal ones need; name them as mask_token or eos_token in {folder / 'tokenizer_config.json'}"
        )
    return {role: token or end for role, token in found.items()}


def _detect_kind(content: dict[str, Any]) -> str:
    """Return the kind whose transformers class rebuilds tokenizer.json as it is, `huggingface` for any other."""
    model = content["model"]
    normalizer = (content.get("normalizer") or {}).get("type")
    pre_tokenizer = content.get("pre_tokenizer") or {}
    parts = (model["type"], normalizer, pre_tokenizer.get("type"))
    if parts == ("WordPiece", "BertNormalizer", "BertPreTokenizer"):
        return "wordpiece" if model.get("continuing_subword_prefix") == "##" else "huggingface"
    is_lower = normalizer == "Lowercase" or (normalizer == "BertNormalizer" and content["normalizer"]["lowercase"])
    if parts in gpt1.PIPELINES and is_lower:
        return gpt1.KIND if model.get("end_of_word_suffix") == gpt1.WORD_END else "huggingface"
    if parts[::2] == ("BPE", "ByteLevel") and normalizer in (None, "NFC", "NFD", "NFKC", "NFKD"):
        return "byte_bpe" if pre_tokenizer.get("use_regex", True) else "huggingface"
    return "huggingface"
