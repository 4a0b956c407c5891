"""The commands of a pipeline's steps: the project's own tools, as a user would type them.

In: settings and places. Out: lines of shell. Not here: what runs them (pipeline_step.py).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from ctxlm_ds.recipe.pipeline_rules import appends_eod, splits_sentences, tokenizer_type
from ctxlm_ds.recipe.pipeline_schema import PipelineConfig
from ctxlm_ds.recipe.schema import RunConfig

CHECKOUT = Path(__file__).resolve().parent.parent.parent
HF_SCHEME = "hf://"


def from_checkout(*parts: str) -> str:
    """A file of the checkout, relative where this is the working directory."""
    path = CHECKOUT.joinpath(*parts)
    return os.path.join(*parts) if Path.cwd() == CHECKOUT else str(path)


def absolute(pattern: str) -> str:
    """A path or glob that means the same from anywhere."""
    return pattern if pattern.startswith(HF_SCHEME) else os.path.abspath(os.path.expanduser(pattern))


def quoted(text: object) -> str:
    """A word of shell."""
    return shlex.quote(str(text))


def _tool(name: str, *words: object) -> str:
    return " ".join(["python", quoted(from_checkout("tools", name)), *map(quoted, words)])


def _reading(pipeline: PipelineConfig, patterns: Sequence[str]) -> list[object]:
    words: list[object] = ["--input", *patterns, "--json-keys", *pipeline.json_keys]
    if pipeline.input_format != "auto":
        words += ["--input-format", pipeline.input_format]
    if pipeline.max_bad_records:
        words += ["--max-bad-records", pipeline.max_bad_records]
    return words


def train_tokenizer(config: RunConfig, pipeline: PipelineConfig, patterns: Sequence[str], folder: str) -> str:
    """tools/train_tokenizer.py."""
    wanted = pipeline.tokenizer
    assert wanted is not None
    words = [*_reading(pipeline, patterns), "--type", tokenizer_type(config, wanted)]
    if wanted.vocab_size is not None:
        words += ["--vocab-size", wanted.vocab_size]
    if not wanted.lowercase:
        words += ["--cased"]
    if wanted.max_sample_bytes is not None:
        words += ["--max-sample-bytes", wanted.max_sample_bytes]
    return _tool("train_tokenizer.py", *words, *wanted.options, "--output-dir", folder)


def preprocess(
    config: RunConfig, pipeline: PipelineConfig, patterns: Sequence[str], tokenizer: str, folder: Path, name: str,
    shards: int,
) -> str:  # fmt: skip
    """tools/preprocess_data.py, of one shard where there are several."""
    words = [*_reading(pipeline, patterns), "--tokenizer", tokenizer]
    words += ["--split-sentences"] if splits_sentences(config, pipeline) else []
    words += ["--append-eod"] if appends_eod(config, pipeline) else []
    prefix = folder / "shards" / name if shards > 1 else folder / name
    line = _tool("preprocess_data.py", *words, "--workers", pipeline.workers, "--output-prefix", prefix)
    return f'{line} --shard "$SLURM_ARRAY_TASK_ID/{shards}"' if shards > 1 else line


def merge(parts: Sequence[str], whole: str) -> str:
    """tools/merge_datasets.py; every shard by name, so that a missing one is an error."""
    return _tool("merge_datasets.py", "--input", *parts, "--output-prefix", whole)


def build_samples(recipe: Path, threads: int | None) -> str:
    """tools/build_samples.py."""
    return _tool("build_samples.py", "--config", recipe, *(["--workers", threads] if threads else []))


def export(run_dir: str, folder: str, dtype: str) -> str:
    """tools/convert_checkpoint.py to-hf."""
    return _tool("convert_checkpoint.py", "to-hf", "--checkpoint", run_dir, "--output", folder, "--dtype", dtype)
