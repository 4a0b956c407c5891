"""Training steps beside transformers' own, as a ratio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ctxlm_ds.benchmark.timing import Comparison, in_turn
from ctxlm_ds.data.sample import IGNORE_LABEL, Batch
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.export.key_maps import build_key_map
from ctxlm_ds.kernels.dispatch import DTYPES, choose_kernels
from ctxlm_ds.models.build import build_model
from ctxlm_ds.objectives.build import build_objective, objective_terms
from ctxlm_ds.recipe.schema import ModelConfig, RunConfig
from ctxlm_ds.training.passes import model_inputs


def compare_steps(config: RunConfig, rounds: int = 5) -> Comparison:
    """Training steps (forward, backward, AdamW) of our model and of transformers' with SDPA, on full random rows.

    Both have the same shape, data type, dropout and number of predictions; ours computes the head on the predicted
    positions, transformers' on all.

    Raises:
        ConfigError: the recipe has no model.vocab_size.
    """
    if config.model.vocab_size is None:
        raise ConfigError("model.vocab_size is not set; add --set model.vocab_size=30522")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = DTYPES[config.training.precision]
    terms = objective_terms(config.objective)
    kernels = choose_kernels(
        config.kernels, device, dtype, False, config.model.attention_dropout,
        config.model.hidden_size // config.model.num_attention_heads, causal=config.model.is_decoder,
    )  # fmt: skip
    ours = build_model(config.model, terms, kernels, config.training.seed).to(device, dtype).train()
    theirs = _hugging_face_model(config, terms).to(device, dtype).train()
    batch = _random_batch(config, device)
    fields = batch.fields
    labels, tokens = _dense_labels(fields), fields["input_ids"].numel()
    wanted_labels = [fields[term.labels[0]] for term in build_objective(config.objective).terms]

    def our_loss() -> Tensor:
        pairs = zip(ours(model_inputs(batch)), wanted_labels, strict=True)
        return torch.stack([_mean_loss(logits, wanted) for logits, wanted in pairs]).sum()

    def their_loss() -> Tensor:
        inputs: dict[str, Tensor] = {"input_ids": fields["input_ids"], "attention_mask": fields["sequence_ids"]}
        return theirs(**inputs, **labels).loss

    return in_turn(_step(ours, our_loss, tokens), _step(theirs, their_loss, tokens), rounds, "tokens/s")


def _step(model: nn.Module, loss: Callable[[], Tensor], tokens: int) -> Callable[[], int]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def work() -> int:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        return tokens

    return work


def _mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE_LABEL)


def _hugging_face_model(config: RunConfig, terms: tuple[str, ...]) -> nn.Module:
    import transformers

    model = config.model
    if model.is_decoder:
        return _hugging_face_decoder(model, terms)
    roberta = model.family == "roberta"
    settings: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.intermediate_size,
        "max_position_embeddings": model.max_position_embeddings + (2 if roberta else 0),
        "type_vocab_size": 1 if roberta else model.type_vocab_size,
        "hidden_dropout_prob": model.hidden_dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
    }
    hf_config = (transformers.RobertaConfig if roberta else transformers.BertConfig)(**settings)
    hf_config._attn_implementation = "sdpa"
    name = build_key_map(model, terms, 1 if roberta else 0).hf_class
    return getattr(transformers, name)(hf_config)


def _hugging_face_decoder(model: ModelConfig, terms: tuple[str, ...]) -> nn.Module:
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "n_positions": model.max_position_embeddings,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if model.family == "gpt2":
        hf_config = transformers.GPT2Config(n_inner=model.intermediate_size, **settings)
    else:
        hf_config = transformers.OpenAIGPTConfig(**settings)
    return getattr(transformers, build_key_map(model, terms, 0).hf_class)(hf_config)


def _random_batch(config: RunConfig, device: str) -> Batch:
    """Make full rows of any words, every prediction slot used."""
    assert config.model.vocab_size is not None
    fields = build_objective(config.objective).fields(config.data)
    rng = np.random.default_rng(config.training.seed)
    batch = Batch.example(fields, config.training.micro_batch_size, rng, config.model.vocab_size)
    return Batch({name: tensor.to(device) for name, tensor in batch.fields.items()})


def _dense_labels(fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the same predictions as transformers takes them: a label at every position, a decoder's its own inputs."""
    if "prediction_positions" not in fields:
        return {"labels": fields["input_ids"]}
    labels = torch.full_like(fields["input_ids"], IGNORE_LABEL)
    labels.scatter_(1, fields["prediction_positions"], fields["masked_lm_labels"])
    pairs = {"next_sentence_label": fields["next_sentence_labels"][:, 0]} if "next_sentence_labels" in fields else {}
    return {"labels": labels} | pairs
