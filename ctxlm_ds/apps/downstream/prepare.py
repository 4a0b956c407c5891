"""From a task, its files and a model folder to checked features."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ctxlm_ds.apps.downstream.examples import Files, read_files
from ctxlm_ds.apps.downstream.fit import Sets
from ctxlm_ds.apps.downstream.kinds.base import Kind
from ctxlm_ds.apps.downstream.kinds.entries import TASKS
from ctxlm_ds.apps.downstream.task import TaskDescription
from ctxlm_ds.errors import ConfigError, TokenizerError
from ctxlm_ds.registry import load_object


@dataclass(frozen=True)
class Parts(Files):
    """Examples of a task's files, and their labels."""

    labels: list[str]
    """Labels of the complete training file."""


def read_parts(task: TaskDescription, data: Path, limit: int | None = None) -> Parts:
    """Read and check all files of a task; `limit` keeps only the first training examples.

    Raises:
        DataError: names file, line and remedy.
    """
    return make_parts(task, read_files(task, data), limit)


def make_parts(task: TaskDescription, files: Files, limit: int | None = None) -> Parts:
    """Find the labels of a task's files, and keep only the first `limit` training examples."""
    labels = kind_class(task).find_labels(task, files.train)
    return Parts(files.train[:limit], files.dev, files.test, labels)


def kind_class(task: TaskDescription, variant: str | None = None) -> type[Kind]:
    """Return the class of a task's kind, or of another form of it (`TaskKind.forms`).

    Raises:
        ConfigError: the kind has no such variant.
    """
    entry = task.entry
    if variant is not None and variant not in entry.forms:
        known = ", ".join(name for name in TASKS.names() if variant in TASKS.get(name).forms)
        option = variant.replace("_", "-")
        raise ConfigError(f"--{option}: for tasks of kind {known}; this one is of kind {task.kind}")
    found: type[Kind] = load_object(entry.runs if variant is None else entry.forms[variant])
    return found


def make_kind(
    task: TaskDescription, model_folder: Path, parts: Parts, variant: str | None = None, **options: Any
) -> Kind:
    """Return the kind of a task with the model's tokenizer and the labels of the training file.

    Args:
        task: the description.
        model_folder: in Hugging Face's form.
        parts: the examples.
        variant: other form of the kind (`TaskKind.forms`), or None.
        options: of the kind's class.

    Raises:
        ConfigError: the kind has no such variant, or transformers no such model.
        TokenizerError: the folder has no fast tokenizer.
    """
    kind = kind_class(task, variant)
    tokenizer = load_tokenizer(model_folder, task.entry.reads_words)
    made = kind(task, tokenizer, parts.labels, longest_input(task, model_folder, tokenizer), **options)
    fit_tokenizer(made, model_folder)
    return made


def fit_tokenizer(kind: Kind, folder: Path) -> None:
    """Make the tokenizer pad on the side that the model expects, and number segments if it has several.

    Raises:
        ConfigError: transformers has no class for this kind of task and model.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    auto_class = kind.auto_class()
    if type(config) not in auto_class._model_mapping:
        name = auto_class.__name__.removeprefix("AutoModel")
        raise ConfigError(f"--model {folder}: transformers has no model of type {config.model_type} for tasks of kind "
                          f"{kind.task.kind} ({name})")  # fmt: skip
    kind.configure(config)
    # A model that sums up a row by its last position (XLNet) is padded in front; offsets need padding behind.
    kind.tokenizer.padding_side = "left" if kind.reads_whole and _summary(config) == "last" else "right"
    names = list(kind.tokenizer.model_input_names)
    if "token_type_ids" not in names and (_summary(config) == "last" or getattr(config, "type_vocab_size", 0) > 1):
        kind.tokenizer.model_input_names = [*names, "token_type_ids"]


def _summary(config: Any) -> str | None:
    """Return which position sums up a row, for models whose heads read a `SequenceSummary`."""
    summary = getattr(config, "summary_type", None)
    return summary if hasattr(config, "mem_len") else None


def load_tokenizer(folder: Path, splits_words: bool) -> Any:
    """Return the tokenizer of a model folder, with a token for padding."""
    from transformers import AutoTokenizer

    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: no config.json; give a folder in Hugging Face's form "
                          "(ctxlm convert to-hf writes one)")  # fmt: skip
    try:
        options = {"add_prefix_space": True} if splits_words and _is_byte_level(folder) else {}
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{folder}: its tokenizer cannot be loaded: {str(error).splitlines()[0]}") from None
    if len(tokenizer) <= len(set(tokenizer.all_special_tokens)):  # transformers makes an empty one without files
        raise TokenizerError(f"{folder}: no tokenizer; copy the model's tokenizer.json and tokenizer_config.json")
    if not tokenizer.is_fast:
        raise TokenizerError(f"{folder}: {type(tokenizer).__name__} knows no offsets; a fast tokenizer is needed")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token is None:
        raise TokenizerError(f"{folder}: the tokenizer has no token for padding, end or unknown words; name one")
    return tokenizer


def _is_byte_level(folder: Path) -> bool:
    path = folder / "tokenizer.json"
    return path.is_file() and '"ByteLevel"' in path.read_text(encoding="utf-8", errors="replace")


def longest_input(task: TaskDescription, folder: Path, tokenizer: Any) -> int:
    """Return the longest input in tokens: the task's, or less if the model has fewer positions."""
    return longest_rows(folder, tokenizer, task.max_length)


def longest_rows(folder: Path, tokenizer: Any, limit: int) -> int:
    """Return the longest row in tokens that a model reads, at most `limit`."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if positions is None or positions < 1:  # XLNet has no limit and says -1
        return int(min(limit, tokenizer.model_max_length))
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    positions -= max((_first_position(module) for module in model.modules()), default=0)
    return int(min(limit, tokenizer.model_max_length, positions))


def _first_position(module: Any) -> int:
    """Return how many rows of an embedding of positions are never read: RoBERTa's begin after the padding id."""
    padding_id = getattr(getattr(module, "position_embeddings", None), "padding_idx", None)
    return 0 if padding_id is None else int(padding_id) + 1


def make_sets(kind: Kind, parts: Parts) -> Sets:
    """Check all examples, then make the features of all parts."""
    for examples in (parts.train, parts.dev, parts.test or []):
        if examples:
            kind.check(examples)
    test = None if parts.test is None else kind.features(parts.test)
    return Sets(kind.features(parts.train), kind.features(parts.dev), test)
