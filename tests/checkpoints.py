"""Small checkpoints, Hugging Face folders and tokenizers for tests, written through the project's own writers."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ctxlm_ds.checkpoint.chunk_index import ChunkWriter, merge_index
from ctxlm_ds.checkpoint.manifest import hash_files, list_files, write_manifest
from ctxlm_ds.models.program import plain_program
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.load import dump_config
from ctxlm_ds.recipe.schema import RunConfig, TokenizerConfig
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.sections import data_section, model_section, objective_section

WORDS = ["river", "mountain", "the", "a", "walked", "slowly", "reading", "books", "unhappy", "times", "worst", "best",
         "was"]  # fmt: skip
SIZES = {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def make_tokenizer(kind: str, folder: Path) -> Path:
    """Train a tokenizer (`wordpiece`, `byte_bpe` or `gpt2`) on made-up sentences."""
    rng = random.Random(7)
    texts = [" ".join(rng.choices(WORDS, k=9)) + ". It was 1 of 2 things, = 4;" for _ in range(300)]
    train_tokenizer("bpe" if kind == "byte_bpe" else kind, iter(texts), 300, folder)
    return folder


def make_config(
    kind: str, tokenizer: Path, vocab_size: int | None = None, model_settings: dict | None = None, **settings: object
) -> RunConfig:
    """A recipe: `bert_nsp` (BertForPreTraining), `bert` (BertForMaskedLM), `spanbert`, or a family.

    The vocabulary is as large as the tokenizer's where no size is given.
    """
    vocab_size = vocab_size or load_tokenizer(tokenizer).vocab_size
    family = "bert" if kind in ("bert_nsp", "spanbert") else kind
    eps = 1e-12 if family in ("bert", "albert", "electra") else 1e-5
    model = {"family": family, "vocab_size": vocab_size, "max_position_embeddings": 40, "layer_norm_eps": eps, **SIZES}
    if family in ("gpt2", "gpt1"):
        model |= {"hidden_activation": "gelu_tanh", "intermediate_size": 128}
        objective, sample_format = "causal_lm", "blocks"
    elif kind == "bert_nsp":
        objective, sample_format = "masked_lm_nsp", "segment_pair"
    elif kind == "albert":
        model |= {"embedding_size": 16, "num_groups": 2, "layers_per_group": 2, "num_layers": 40}
        objective, sample_format = "masked_lm_sop", "sentence_order"
    elif kind == "electra":
        model |= {"embedding_size": 24, "generator_hidden_size": 16, "generator_num_layers": 2}
        model |= {"generator_num_attention_heads": 2, "generator_intermediate_size": 24}
        objective, sample_format = "replaced_tokens", "doc_sentences"
    elif kind == "modernbert":
        # One dropout there is both of ours.
        model |= {"num_layers": 4, "local_attention": 8, "hidden_dropout": 0.1, "attention_dropout": 0.1}
        objective, sample_format = "masked_lm", "doc_sentences"
    else:
        objective, sample_format = "masked_lm", "full_sentences"
    return RunConfig(
        name=f"{kind}-test",
        model=model_section(**{**model, **(model_settings or {})}),
        tokenizer=TokenizerConfig(path=str(tokenizer)),
        objective=objective_section(name=objective, **({"boundary_weight": 1.0} if kind == "spanbert" else {})),
        data=data_section(sample_format=sample_format, seq_length=32),
        **settings,
    )


def outputs_of(config: RunConfig) -> tuple[str, ...]:
    """Return what the recipe's objective needs from the model."""
    return build_objective(config.objective).outputs


def random_weights(config: RunConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Values that make every parameter matter: no zero bias, no LayerNorm weight of 1."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in plain_program(config.model, outputs_of(config)).shapes.items():
        value = torch.randn(shape, generator=generator) * 0.2
        weights[name] = value + 1.0 if name.endswith("layer_norm.weight") else value
    return weights


def write_checkpoint(folder: Path, config: RunConfig, weights: dict[str, torch.Tensor], step: int = 100) -> Path:
    """A complete checkpoint as two ranks under ZeRO would write it: each parameter in two pieces, with moments."""
    folder.mkdir(parents=True)
    pieces = []
    for rank in range(2):
        writer = ChunkWriter(folder, rank)
        for name, value in weights.items():
            flat = value.flatten()
            cut = flat.numel() // 3
            start, part = (0, flat[:cut]) if rank == 0 else (cut, flat[cut:])
            for kind in ("weight", "exp_avg"):
                writer.add(name, kind, value.shape, start, part)
        pieces.append(writer.write().value)
    merge_index(folder, pieces, {"optimizer_updates": step})
    state = {"train_state": {"step": step, "rows_consumed": 800, "tokens": 25600, "seconds": 75.0}}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "config.yaml").write_text(dump_config(config))
    shutil.copytree(str(config.tokenizer.path), folder / "tokenizer")
    write_manifest(folder, step, hash_files(folder, list_files(folder)))
    return folder


def write_run(run: Path, config: RunConfig, weights: dict[str, torch.Tensor], steps: tuple[int, ...] = (100,)) -> Path:
    """A run's folder with complete checkpoints, `latest` and a metrics.jsonl; the newest holds `weights`."""
    for step in steps:
        scale = 1.0 if step == max(steps) else 0.5
        scaled = {name: value * scale for name, value in weights.items()}
        write_checkpoint(run / "checkpoints" / f"step-{step:08d}", config, scaled, step)
    (run / "checkpoints" / "latest").write_text(f"step-{max(steps):08d}\n")
    lines = [
        {"step": step, "eval/wiki_dev/masked_lm_loss": 10.0 / step, "eval/wiki_dev/masked_lm_accuracy": step / 1000}
        for step in (50, 100, 400)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 1, "eval/cut')
    return run


def write_random_run(run: Path, kind: str, tokenizer: Path, model_settings: dict | None = None) -> Path:
    """A run of `make_config` with random weights."""
    config = make_config(kind, tokenizer, model_settings=model_settings)
    return write_run(run, config, random_weights(config))


def change_json(path: Path, **values: object) -> None:
    """Set values of a JSON file, such as a Hugging Face config.json."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a Hugging Face folder."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
