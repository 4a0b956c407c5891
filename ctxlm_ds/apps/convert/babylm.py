"""The folders of a BabyLM submission: `chck_1M`, ... and `main`, each a Hugging Face folder with a card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ctxlm_ds.atomic import write_text
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, find_verified, list_checkpoints
from ctxlm_ds.checkpoint.saved_state import reached_words, read_saved_state
from ctxlm_ds.console import logger
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.stream.run_datasets import train_parts
from ctxlm_ds.data.stream.run_plan import words_of
from ctxlm_ds.errors import ConfigError, DataError, ExportError
from ctxlm_ds.export.base import own_format_of
from ctxlm_ds.export.huggingface import is_exported, to_hf
from ctxlm_ds.export.safetensors_files import DEFAULT_SHARD_BYTES
from ctxlm_ds.recipe.load import load_saved_config
from ctxlm_ds.recipe.sections import DataSection
from ctxlm_ds.recipe.words import short_words
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.training.measure import useful_flops_per_row

FEWEST_POSITIONS = 512
"""Longest input of the challenge's own fine-tuning."""
HOW = ("fp32", DEFAULT_SHARD_BYTES)
UNKNOWN = "not recorded"


def export_babylm(run: Path, output: Path) -> list[str]:
    """Export the checkpoints of checkpoint.at_words as chck_WORDS and the newest one as main; return lines to print.

    A folder that is complete already is left as it is.

    Raises:
        ConfigError: the run has no such checkpoints, or its model cannot be judged by the challenge.
        CheckpointError, ExportError: as `to_hf`.
    """
    found = {reached_words(path) or 0: path for path in list_checkpoints(run / CHECKPOINTS_DIR).values()}
    folders = {f"chck_{short_words(words)}": path for words, path in sorted(found.items()) if words}
    if not folders:
        raise ConfigError(
            f"{run}: no checkpoint was saved at a number of words; give a run whose recipe has checkpoint.at_words, "
            "such as [1M..10M by 1M]"
        )
    folders["main"] = find_verified(run)[0]
    config = load_saved_config(folders["main"] / "config.yaml")
    family = config.model.family
    longest = config.model.longest_sequence or max(FEWEST_POSITIONS, config.data.seq_length)
    if own_format_of(family) is not None:
        raise ConfigError(f"model.family {family}: transformers has no class for it, which the challenge needs")
    if longest < FEWEST_POSITIONS:
        raise ConfigError(
            f"model.max_position_embeddings: {longest}, but the challenge reads up to {FEWEST_POSITIONS} tokens; train "
            f"a model with {FEWEST_POSITIONS}"
        )
    rows = {
        name: _facts(checkpoint, config.data, load_tokenizer(checkpoint / "tokenizer"))
        for name, checkpoint in folders.items()
    }
    flops = useful_flops_per_row(config)
    lines = []
    for name, checkpoint in folders.items():
        folder, state = output / name, read_saved_state(checkpoint)["train_state"]
        largest = "complete already"
        if not is_exported(checkpoint, folder, *HOW):
            proof = max(comparison.relative for comparison in to_hf(checkpoint, folder, *HOW).comparisons)
            largest = f"largest difference of the logits {proof:.1e} of their scale"
        _complete(folder, rows[name] | {"FLOPs of training": f"{flops * state['rows_consumed']:.4g}"}, longest)
        lines.append(f"{folder}: step {state['step']:,}, {state['words']:,} words, {largest}")
    return lines


def _facts(checkpoint: Path, data: DataSection, tokenizer: Tokenizer) -> dict[str, str]:
    """Return what a submission declares of a checkpoint."""
    read, record = read_saved_state(checkpoint)["train_state"].get("words", 0), tokenizer.facts.training
    signatures, words = set(), 0.0
    try:
        for part in train_parts(data, copies=False):
            dataset = IndexedDataset(part.prefix)
            words += words_of(dataset, part.documents or (0, dataset.num_documents)) or 0.0
            signatures.add((dataset.metadata or {}).get("source_signature"))
    except DataError as error:
        logger.warning("the card lacks figures of the training text: %s", error)
    text = record.get("made_of", {}).get("input")
    origin = "the training text" if signatures == {text} else f"text with the signature {str(text)[:12]}"
    return {
        "white-space words read": f"{read:,}",
        "words of the training text": f"{words:,.0f}" if words else UNKNOWN,
        "epochs": f"{read / words:.2f}" if words else UNKNOWN,
        "tokenizer": f"{tokenizer.kind}, {tokenizer.vocab_size:,} tokens",
        "tokenizer was trained on": origin if text else UNKNOWN,
    }


def _complete(folder: Path, rows: Mapping[str, str], longest: int) -> None:
    """Let the tokenizer read `longest` tokens, and add the facts to the card; raise ExportError if unfit."""
    import transformers

    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["model_max_length"] = longest
    write_text(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if not tokenizer.is_fast or tokenizer.pad_token is None:
        raise ExportError(f"{folder}: the challenge needs a fast tokenizer with a pad token; train another one")
    card = (folder / "README.md").read_text(encoding="utf-8").partition("\n## BabyLM\n")[0].rstrip("\n")
    table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
    write_text(folder / "README.md", f"{card}\n\n## BabyLM\n\n{table}\n")
