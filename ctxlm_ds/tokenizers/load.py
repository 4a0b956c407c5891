"""Load any local Hugging Face tokenizer folder that holds a tokenizer.json (no code from the folder is ever run)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ctxlm_ds.errors import TokenizerError
from ctxlm_ds.tokenizers.base import SPECIAL_ROLES, FastTokenizer, Tokenizer, TokenizerFacts

TRAINING_FILE = "ctxlm_tokenizer.json"
_USUAL_NAMES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>", "<cls>"),
    "sep": ("[SEP]", "</s>", "<sep>"),
    "mask": ("[MASK]", "<mask>"),
}
_STAND_INS = {"cls": "bos", "sep": "eos"}


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a local folder.

    Raises TokenizerError where the folder, its tokenizer.json or one of the pad, unk, cls, sep and mask tokens is
    missing, or a file in it cannot be read.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise TokenizerError(
            f"{folder}: no such tokenizer folder; make one with tools/train_tokenizer.py --output-dir {folder}, "
            "or download a Hugging Face tokenizer there first (names on the Hub are not looked up)"
        )
    backend = _load_backend(folder)
    config = _read_json(folder / "tokenizer_config.json")
    special_map = _read_json(folder / "special_tokens_map.json")
    content = json.loads(backend.to_str())
    facts = TokenizerFacts(
        kind=detect_kind(content),
        special_tokens={role: _special_token(folder, role, (config, special_map), backend) for role in SPECIAL_ROLES},
        config=config,
        training=_read_json(folder / TRAINING_FILE),
        source=str(folder),
    )
    tokenizer = FastTokenizer(backend, facts)
    recorded = facts.training.get("fingerprint")
    if recorded is not None and recorded != tokenizer.fingerprint:
        raise TokenizerError(
            f"{folder}: tokenizer.json is not the one that {TRAINING_FILE} describes (fingerprint "
            f"{tokenizer.fingerprint[:12]}, recorded {recorded[:12]}); restore it, or delete {TRAINING_FILE} to accept "
            "the change as a new tokenizer"
        )
    return tokenizer


def _load_backend(folder: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(
            f"{folder}: holds no tokenizer.json (the fast form); with transformers, "
            f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}') writes it"
        )
    try:
        return Backend.from_file(str(file))
    except Exception as error:  # the Rust library raises plain Exception
        raise TokenizerError(f"{file}: not a readable tokenizer.json ({error}); save the tokenizer again") from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TokenizerError(f"{file}: not valid JSON ({error}); restore the file") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file}: holds a {type(content).__name__} where an object is expected; restore the file")
    return content


def _token_name(value: Any) -> str | None:
    """A special token is written as its text or as an object with a `content`."""
    name = value.get("content") if isinstance(value, dict) else value
    return name if isinstance(name, str) and name else None


def _special_token(folder: Path, role: str, settings: tuple[dict[str, Any], ...], backend: Any) -> str:
    """The token of a role: as configured, else the usual name that the vocabulary has, else the bos/eos stand-in."""
    for setting in settings:
        name = _token_name(setting.get(f"{role}_token"))
        if name is not None:
            return name
    for name in _USUAL_NAMES[role]:
        if backend.token_to_id(name) is not None:
            return name
    for setting in settings:
        name = _token_name(setting.get(f"{_STAND_INS.get(role, role)}_token"))
        if name is not None:
            return name
    raise TokenizerError(
        f"{folder}: the tokenizer has no {role} token, which masked language models need; "
        f"name one as {role}_token in {folder / 'tokenizer_config.json'}, "
        "or train a tokenizer with tools/train_tokenizer.py"
    )


def detect_kind(content: dict[str, Any]) -> str:
    """`wordpiece` or `byte_bpe` where tokenizer.json is what BERT's or RoBERTa's class rebuilds, else `huggingface`."""
    model = content["model"]
    normalizer = (content.get("normalizer") or {}).get("type")
    pre_tokenizer = content.get("pre_tokenizer") or {}
    parts = (model["type"], normalizer, pre_tokenizer.get("type"))
    if parts == ("WordPiece", "BertNormalizer", "BertPreTokenizer"):
        return "wordpiece" if model.get("continuing_subword_prefix") == "##" else "huggingface"
    if parts == ("BPE", None, "ByteLevel"):
        return "byte_bpe" if pre_tokenizer.get("use_regex", True) else "huggingface"
    return "huggingface"
