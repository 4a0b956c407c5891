"""Write a tokenizer as a folder that this package and transformers' AutoTokenizer load with the same ids.

transformers 5 rebuilds BertTokenizer and RobertaTokenizer from the vocabulary and tokenizer_config.json and ignores
tokenizer.json's own normalizer and pre-tokenizer, so every setting that decides ids is written in both places.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import output_folder
from ctxlm_ds.tokenizers import characters, gpt1, sentence_piece
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import TRAINING_FILE

_NEVER_KEPT = ("auto_map", "name_or_path", "tokenizer_file", "special_tokens_map_file", "backend", "is_local")
_OTHER_FILES = ("vocab.txt", "vocab.json", "merges.txt", "added_tokens.json", "spiece.model", "sentencepiece.bpe.model")
_FALSE_BY_DEFAULT = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


def save_tokenizer(tokenizer: Tokenizer, directory: Path, replace: bool = True) -> None:
    """Write `directory` atomically; an existing folder is replaced once the new one is complete.

    Raises FileExistsError if it exists and may not be replaced.
    """
    content, facts = tokenizer.content, tokenizer.facts
    special = _special_settings(tokenizer)
    config = {key: value for key, value in facts.config.items() if key not in _NEVER_KEPT}
    config |= _class_settings(tokenizer, content, special)
    added = {str(token.pop("id")): token for token in content["added_tokens"]}
    config["added_tokens_decoder"] = added
    if tokenizer.has_mask:
        plain = {"content": special["mask_token"], **_FALSE_BY_DEFAULT, "special": True}
        mask = added.get(str(tokenizer.mask_id), plain)
        config["mask_token"] = {"__type": "AddedToken", **mask}
        special["mask_token"] = mask
    config.setdefault("model_max_length", 512)
    record = {"format": "ctxlm_ds-tokenizer", "version": 1, "kind": tokenizer.kind, **facts.training}
    record |= {"vocab_size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint}
    with output_folder(Path(directory), replace) as folder:
        (folder / "tokenizer.json").write_text(tokenizer.backend.to_str(pretty=True), encoding="utf-8")
        _write_vocabulary(folder, tokenizer, content["model"])
        for name, data in facts.files.items():
            (folder / name).write_bytes(data)
        _write_json(folder / "tokenizer_config.json", config)
        _write_json(folder / "special_tokens_map.json", special)
        _write_json(folder / TRAINING_FILE, record)


def _special_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the special tokens under the names of transformers' classes."""
    tokens = tokenizer.facts.special_tokens
    special = {f"{role}_token": token for role, token in tokens.items()}
    ends = {"bos_token": tokens["cls"], "eos_token": tokens["sep"]}
    if tokenizer.has_mask:
        return special | (ends if tokenizer.kind in ("byte_bpe", sentence_piece.KIND) else {})
    if tokenizer.kind == sentence_piece.KIND:
        del ends["bos_token"]  # T5 has none
    return {name: special[name] for name in ("pad_token", "unk_token")} | ends


def _class_settings(tokenizer: Tokenizer, content: dict[str, Any], special: dict[str, Any]) -> dict[str, Any]:
    """Return the class of transformers that gives the same ids, with its settings; the generic one keeps anything."""
    normalizer = content["normalizer"]
    generic = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if tokenizer.kind == "wordpiece":
        return {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": normalizer["lowercase"],
            "strip_accents": normalizer["strip_accents"],
            "tokenize_chinese_chars": normalizer["handle_chinese_chars"],
            **special,
        }
    if tokenizer.kind == gpt1.KIND:
        takes_text = content["pre_tokenizer"]["type"] == "BertPreTokenizer"
        return {"tokenizer_class": "OpenAIGPTTokenizer", **special} if takes_text else special | generic
    if tokenizer.kind == sentence_piece.KIND:
        return special
    if tokenizer.kind != "byte_bpe":
        return special | generic
    template = content.get("post_processor") or {}
    is_roberta = template.get("type", "RobertaProcessing") == "RobertaProcessing" and tokenizer.double_separator
    settings = {**generic, "add_prefix_space": content["pre_tokenizer"]["add_prefix_space"]}
    if tokenizer.has_mask:
        settings["trim_offsets"] = template.get("trim_offsets", True)
    if not normalizer and (is_roberta or not tokenizer.has_mask):
        settings["tokenizer_class"] = "RobertaTokenizer" if tokenizer.has_mask else "GPT2Tokenizer"
    return {**settings, "errors": "replace", **special}


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_vocabulary(folder: Path, tokenizer: Tokenizer, model: dict[str, Any]) -> None:
    """Write the vocabulary files of the class, which other programs read."""
    if tokenizer.kind in ("wordpiece", characters.KIND):
        _write_lines(folder / "vocab.txt", sorted(model["vocab"], key=model["vocab"].get)[: tokenizer.output_size])
    elif tokenizer.kind in ("byte_bpe", gpt1.KIND):
        vocab = {token: model["vocab"][token] for token in sorted(model["vocab"], key=model["vocab"].get)}
        (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
        merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"])
        _write_lines(folder / "merges.txt", ["#version: 0.2", *merges])
    elif tokenizer.kind != sentence_piece.KIND and tokenizer.facts.source:
        for file in (Path(tokenizer.facts.source) / name for name in _OTHER_FILES):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)


def _write_lines(file: Path, lines: Iterable[str]) -> None:
    with open(file, "w", encoding="utf-8", newline="\n") as handle:
        handle.writelines(line + "\n" for line in lines)
