"""From a task, its files and a model folder, which another program may have written, to checked features."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ctxlm_ds.apps.downstream.examples import Example, Parts, read_files
from ctxlm_ds.apps.downstream.kinds.base import Features, Kind
from ctxlm_ds.apps.downstream.kinds.entries import TASKS
from ctxlm_ds.apps.downstream.task import TaskDescription
from ctxlm_ds.console import logger
from ctxlm_ds.errors import ConfigError, DataError, TokenizerError
from ctxlm_ds.registry import load_object
from ctxlm_ds.tokenizers.base import check_not_random, special_names, split_names
from ctxlm_ds.untrusted_json import read_json_object

MAX_SIZE = 1 << 24
MAX_LAYERS = 4096
"""Largest number in a config, and under a key that counts layers, each of which transformers builds one by one."""


def read_parts(task: TaskDescription, data: Path, limit: int | None = None) -> Parts:
    """Read all files of a task (DataError names file, line, remedy); `limit` keeps the first training examples."""
    parts = read_files(task, data)
    return replace(parts, train=parts.train[:limit], labels=kind_class(task).find_labels(task, parts.train))


def kind_class(task: TaskDescription, variant: str | None = None) -> type[Kind]:
    """Return the class of a task's kind or of another form (`TaskKind.forms`), which it must have (ConfigError)."""
    entry = task.entry
    if variant is not None and variant not in entry.forms:
        known = ", ".join(name for name in TASKS.names() if variant in TASKS.get(name).forms)
        option = variant.replace("_", "-")
        raise ConfigError(f"--{option}: for tasks of kind {known}; this one is of kind {task.kind}")
    return load_object(entry.runs if variant is None else entry.forms[variant], f"task kind {task.kind}")


def make_kind(
    task: TaskDescription, model_folder: Path, parts: Parts, variant: str | None = None, **options: Any
) -> Kind:
    """Return the kind of a task with the labels of the training file, and a tokenizer that pads as the model expects.

    `variant` is another form of the kind (`TaskKind.forms`), `options` are of the class. Raises ConfigError if the kind
    has no such variant, or transformers no such model, TokenizerError if the folder has no fast tokenizer.
    """
    kind = kind_class(task, variant)
    tokenizer = load_tokenizer(model_folder, task.entry.reads_words, task.split_special_tokens)
    made = kind(task, tokenizer, parts.labels, longest_input(model_folder, tokenizer, task.max_length), **options)
    config = check_class(model_folder, task, kind)
    made.configure(config)
    made.reads_end = config.is_encoder_decoder and kind.auto == AutoModelForSequenceClassification.__name__
    # A model that sums up a row by its last position (XLNet) is padded in front; offsets need padding behind.
    reads_last = hasattr(config, "mem_len") and getattr(config, "summary_type", None) == "last"
    tokenizer.padding_side = "left" if kind.reads_whole and reads_last else "right"
    names = list(tokenizer.model_input_names)
    if "token_type_ids" not in names and (reads_last or getattr(config, "type_vocab_size", 0) > 1):
        tokenizer.model_input_names = [*names, "token_type_ids"]
    if task.stride > made.max_length and "stride" in task.model_fields_set:
        logger.warning("stride %d: rows have %d tokens and overlap by half of them", task.stride, made.max_length)
    return made


def read_config(folder: Path, **settings: Any) -> Any:
    """Return transformers' configuration of a local folder, with `settings` in place of those of its config.json.

    Raises ConfigError if the file is missing, damaged, has a size that no model has, names code of the Hub, or is of a
    type that transformers does not have.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder}: no config.json; give a folder in Hugging Face's form "
                          "(ctxlm convert to-hf writes one)")  # fmt: skip
    values = read_json_object(path, ConfigError)
    for key, value in _settings(values):
        most = MAX_LAYERS if "layer" in key or "group" in key else MAX_SIZE
        if isinstance(value, int) and value > most:
            raise ConfigError(f"{path}: {key} is more than {most:,}; correct the file")
        if key.endswith("_implementation") and "/" in str(value):
            raise ConfigError(f"{path}: {key} {str(value)[:60]!r} is code of the Hub, which is never run; remove it")
    kind = str(values.get("model_type"))[:60]
    if kind not in CONFIG_MAPPING:
        code = "; code of the model's own (auto_map) is never run" if "auto_map" in values else ""
        raise ConfigError(f"{path}: transformers has no model of type {kind!r}{code}")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **settings)
    except Exception as error:  # values of wrong types raise any exception
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{path}: transformers cannot read it: {reason}") from error


def _settings(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        yield key, value
        if isinstance(value, dict):
            yield from _settings(value)


def check_class(folder: Path, task: TaskDescription, kind: type[Kind]) -> Any:
    """Return the configuration of a folder; ConfigError if transformers has no such model for a kind of tasks."""
    config = read_config(folder)
    if type(config) not in getattr(transformers, kind.auto)._model_mapping:
        raise ConfigError(f"--model {folder}: transformers has no model of type {config.model_type} for tasks of kind "
                          f"{task.kind} ({kind.auto.removeprefix('AutoModel')})")  # fmt: skip
    return config


def load_tokenizer(folder: Path, splits_words: bool, split_special_tokens: bool | None = None) -> Any:
    """Return the tokenizer of a model folder, with a token for padding; for `split_special_tokens` see the task."""
    read_config(folder)
    try:
        path = folder / "tokenizer.json"
        is_byte_level = path.is_file() and '"ByteLevel"' in path.read_text(encoding="utf-8", errors="replace")
        options = {"add_prefix_space": True} if splits_words and is_byte_level else {}
        options |= {} if split_special_tokens is None else {"split_special_tokens": split_special_tokens}
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{folder}: its tokenizer cannot be loaded: {str(error).splitlines()[0]}") from None
    if len(tokenizer) <= len(set(tokenizer.all_special_tokens)):  # transformers makes an empty one without files
        raise TokenizerError(f"{folder}: no tokenizer; copy the model's tokenizer.json and tokenizer_config.json")
    if not tokenizer.is_fast:
        raise TokenizerError(f"{folder}: {type(tokenizer).__name__} knows no offsets; a fast tokenizer is needed")
    check_not_random(tokenizer.backend_tokenizer, folder)
    if tokenizer.split_special_tokens:
        split_names(tokenizer.backend_tokenizer)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token is None:
        raise TokenizerError(f"{folder}: the tokenizer has no token for padding, end or unknown words; name one")
    return tokenizer


def longest_input(folder: Path, tokenizer: Any, limit: int) -> int:
    """Return the longest row in tokens that a model reads, at most `limit`."""
    config = read_config(folder)
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if positions is None or positions < 1:  # XLNet has no limit and says -1
        return int(min(limit, tokenizer.model_max_length))
    try:
        with torch.device("meta"):
            model = AutoModel.from_config(config)
    except Exception as error:  # sizes that do not fit each other raise any exception
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{folder / 'config.json'} describes no model: {reason}") from error
    tables = (getattr(module, "position_embeddings", None) for module in model.modules())
    padding_ids = [getattr(table, "padding_idx", None) for table in tables]
    # RoBERTa's positions begin after the padding id: rows before are never read.
    positions -= max((padding_id + 1 for padding_id in padding_ids if padding_id is not None), default=0)
    return int(min(limit, tokenizer.model_max_length, positions))


def check_names(tokenizer: Any, texts: Iterable[tuple[str, str]], reads_end: bool = False) -> bool:
    """Return whether texts, with their places, name special tokens (a warning); DataError if the head reads one."""
    if tokenizer is None or tokenizer.split_special_tokens:
        return False
    pattern = special_names(tokenizer.backend_tokenizer)
    found = [(origin, match[0]) for origin, text in texts for match in pattern.finditer(text)]
    choice = "--split-special-tokens (or split_special_tokens: true of the task) reads such names as text"
    for origin, name in found:
        if reads_end and name == tokenizer.eos_token:
            raise DataError(f"{origin}: the text has {name}, the token whose vector the model's head reads; {choice}")
    if found:
        logger.warning("%s: the text has %s, which is read as that special token (%d such names here); %s",
                       *found[0], len(found), choice)  # fmt: skip
    return bool(found)


def check_examples(kind: Kind, examples: Sequence[Example]) -> None:
    """Check some examples and their texts; DataError for what the kind cannot read."""
    kind.check(examples)
    check_names(kind.tokenizer, ((one.origin, "\0".join(one.texts())) for one in examples), kind.reads_end)


def make_sets(kind: Kind, parts: Parts) -> dict[str, Features]:
    """Check all examples, then make the features of all parts."""
    found = {name: getattr(parts, name) for name in ("train", "dev", "test") if getattr(parts, name) is not None}
    for examples in found.values():
        check_examples(kind, examples)
    return {name: kind.features(examples) for name, examples in found.items()}
