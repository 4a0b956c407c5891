"""Training steps beside transformers' own, as a ratio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ctxlm_ds.benchmark.timing import Comparison, in_turn
from ctxlm_ds.data.sample import IGNORE_LABEL, Batch
from ctxlm_ds.data.stream.collate import prediction_slots
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.export.key_maps import build_key_map
from ctxlm_ds.kernels.dispatch import DTYPES, choose_kernels
from ctxlm_ds.models.build import build_model
from ctxlm_ds.objectives.build import objective_terms
from ctxlm_ds.recipe.schema import ModelConfig, RunConfig


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
    batch = _random_batch(config, terms, device)
    labels, tokens = _dense_labels(batch), batch.input_ids.numel()

    def our_loss() -> Tensor:
        outputs = ours(batch.model_inputs())
        pairs = zip(outputs, batch.labels.values(), strict=True)
        return torch.stack([_mean_loss(logits, wanted) for logits, wanted in pairs]).sum()

    def their_loss() -> Tensor:
        inputs: dict[str, Tensor] = {"input_ids": batch.input_ids, "attention_mask": batch.sequence_ids}
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


def _random_batch(config: RunConfig, terms: tuple[str, ...], device: str) -> Batch:
    """Full rows of ordinary words, every prediction slot used."""
    rows, length = config.training.micro_batch_size, config.data.seq_length
    slots = prediction_slots(config.data, config.objective)
    generator = torch.Generator().manual_seed(config.training.seed)
    assert config.model.vocab_size is not None
    ids = torch.randint(5, config.model.vocab_size, (rows, length), generator=generator)
    positions = torch.stack([torch.randperm(length, generator=generator)[:slots].sort().values for _ in range(rows)])
    labels = {
        "masked_lm": ids.gather(1, positions),
        "next_sentence": torch.zeros(rows, 1, dtype=torch.long),
        "causal_lm": ids.roll(-1, dims=1),
    }
    batch = Batch(
        input_ids=ids,
        token_type_ids=torch.zeros_like(ids),
        position_ids=torch.arange(length).expand(rows, length).contiguous(),
        sequence_ids=torch.ones_like(ids),
        sequence_starts=torch.tensor([[0, length]]).repeat(rows, 1),
        prediction_positions=positions,
        cls_positions=torch.zeros(rows, 1, dtype=torch.long),
        labels={term: labels[term] for term in terms},
    )
    for name in Batch.__slots__:
        value = getattr(batch, name)
        moved = {k: v.to(device) for k, v in value.items()} if isinstance(value, dict) else value.to(device)
        setattr(batch, name, moved)
    return batch


def _dense_labels(batch: Batch) -> dict[str, Tensor]:
    """The same predictions as transformers takes them: a label at every position, a causal model's its own inputs."""
    if "causal_lm" in batch.labels:
        return {"labels": batch.input_ids}
    labels = torch.full_like(batch.input_ids, IGNORE_LABEL)
    labels.scatter_(1, batch.prediction_positions, batch.labels["masked_lm"])
    pairs = {"next_sentence_label": batch.labels["next_sentence"][:, 0]} if "next_sentence" in batch.labels else {}
    return {"labels": labels} | pairs
