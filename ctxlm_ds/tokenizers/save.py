"""Write a tokenizer as a folder that this package and transformers' AutoTokenizer load with the same ids.

transformers 5 rebuilds BertTokenizer and RobertaTokenizer from the vocabulary and tokenizer_config.json and ignores
tokenizer.json's own normalizer and pre-tokenizer, so every setting that decides ids is written in both places.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import output_folder
from ctxlm_ds.tokenizers import characters, gpt1, sentence_piece
from ctxlm_ds.tokenizers.base import FastTokenizer
from ctxlm_ds.tokenizers.load import TRAINING_FILE

_NEVER_KEPT = ("auto_map", "name_or_path", "tokenizer_file", "special_tokens_map_file", "backend", "is_local")
_DECODER_NAMES = {"pad": "pad", "unk": "unk", "bos": "cls", "eos": "sep"}
_OTHER_FILES = ("vocab.txt", "vocab.json", "merges.txt", "added_tokens.json", "spiece.model", "sentencepiece.bpe.model")


def save_tokenizer(tokenizer: FastTokenizer, directory: Path, replace: bool = True) -> None:
    """Write `directory` atomically; an existing folder is replaced once the new one is complete.

    Raises FileExistsError if it exists and may not be replaced.
    """
    with output_folder(Path(directory), replace) as folder:
        (folder / "tokenizer.json").write_text(tokenizer.backend.to_str(pretty=True), encoding="utf-8")
        config = {key: value for key, value in tokenizer.facts.config.items() if key not in _NEVER_KEPT}
        special = _special_settings(tokenizer)
        content = json.loads(tokenizer.backend.to_str())
        if tokenizer.kind == "wordpiece":
            config.update(_bert_config(content), **special)
            _write_vocab_txt(folder / "vocab.txt", content["model"]["vocab"])
        elif tokenizer.kind == "byte_bpe":
            config.update(_byte_bpe_config(tokenizer, content), **special)
            _write_bpe_files(folder, content["model"])
        elif tokenizer.kind == gpt1.KIND:
            config.update({"tokenizer_class": "OpenAIGPTTokenizer"}, **special)
            _write_bpe_files(folder, content["model"])
        elif tokenizer.kind == sentence_piece.KIND:
            config.update(special)
        else:
            config.update(special)
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
            if tokenizer.kind == characters.KIND:
                _write_vocab_txt(folder / "vocab.txt", content["model"]["vocab"])
            elif tokenizer.facts.source:
                _copy_other_files(Path(tokenizer.facts.source), folder)
        for name, data in tokenizer.facts.files.items():
            (folder / name).write_bytes(data)
        added = {str(token.pop("id")): token for token in content["added_tokens"]}
        config["added_tokens_decoder"] = added
        if tokenizer.has_mask:
            mask = added.get(str(tokenizer.mask_id), _plain(special["mask_token"]))
            config["mask_token"] = {"__type": "AddedToken", **mask}
            special["mask_token"] = mask
        config.setdefault("model_max_length", 512)
        _write_json(folder / "tokenizer_config.json", config)
        _write_json(folder / "special_tokens_map.json", special)
        _write_json(folder / TRAINING_FILE, _training_record(tokenizer))


def _training_record(tokenizer: FastTokenizer) -> dict[str, Any]:
    record = {"format": "ctxlm_ds-tokenizer", "version": 1, "kind": tokenizer.kind, **tokenizer.facts.training}
    return record | {"vocab_size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint}


def _bert_config(content: dict[str, Any]) -> dict[str, Any]:
    normalizer = content["normalizer"]
    return {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": normalizer["lowercase"],
        "strip_accents": normalizer["strip_accents"],
        "tokenize_chinese_chars": normalizer["handle_chinese_chars"],
    }


def _special_settings(tokenizer: FastTokenizer) -> dict[str, Any]:
    """Return the special tokens under the names of transformers' classes."""
    tokens = tokenizer.facts.special_tokens
    if not tokenizer.has_mask:
        named = {f"{name}_token": tokens[role] for name, role in _DECODER_NAMES.items()}
        if tokenizer.kind == sentence_piece.KIND:
            del named["bos_token"]  # T5 has none
        return named
    special = {f"{role}_token": token for role, token in tokens.items()}
    if tokenizer.kind in ("byte_bpe", sentence_piece.KIND):
        special |= {"bos_token": tokens["cls"], "eos_token": tokens["sep"]}
    return special


def _byte_bpe_config(tokenizer: FastTokenizer, content: dict[str, Any]) -> dict[str, Any]:
    if not tokenizer.has_mask:
        prefix = content["pre_tokenizer"]["add_prefix_space"]
        name = "PreTrainedTokenizerFast" if content["normalizer"] else "GPT2Tokenizer"
        return {"tokenizer_class": name, "add_prefix_space": prefix, "errors": "replace"}
    post_processor = content.get("post_processor") or {}
    # One without RoBERTa's </s></s> template or with a normalizer keeps them through the generic class.
    is_roberta = post_processor.get("type", "RobertaProcessing") == "RobertaProcessing" and tokenizer.double_separator
    is_roberta = is_roberta and not content["normalizer"]
    return {
        "tokenizer_class": "RobertaTokenizer" if is_roberta else "PreTrainedTokenizerFast",
        "add_prefix_space": content["pre_tokenizer"]["add_prefix_space"],
        "trim_offsets": post_processor.get("trim_offsets", True),
        "errors": "replace",
    }


def _plain(token: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": token, **flags, "special": True}


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_vocab_txt(file: Path, vocab: dict[str, int]) -> None:
    with open(file, "w", encoding="utf-8", newline="\n") as handle:
        for token in sorted(vocab, key=lambda name: vocab[name]):
            handle.write(token + "\n")


def _write_bpe_files(folder: Path, model: dict[str, Any]) -> None:
    vocab = model["vocab"]
    ordered = {token: vocab[token] for token in sorted(vocab, key=lambda name: vocab[name])}
    (folder / "vocab.json").write_text(json.dumps(ordered, ensure_ascii=False), encoding="utf-8")
    with open(folder / "merges.txt", "w", encoding="utf-8", newline="\n") as handle:
        handle.write("#version: 0.2\n")
        for merge in model["merges"]:
            handle.write((merge if isinstance(merge, str) else " ".join(merge)) + "\n")


def _copy_other_files(source: Path, folder: Path) -> None:
    for name in _OTHER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
