"""Training steps beside transformers' own, as a ratio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ctxlm_ds.benchmark.timing import Comparison, in_turn
from ctxlm_ds.data.sample import IGNORE_LABEL, Batch
from ctxlm_ds.data.stream.collate import prediction_slots
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.export._interim import fields_of, section_of
from ctxlm_ds.export.base import export_of
from ctxlm_ds.export.hf_config import to_hf_config
from ctxlm_ds.kernels.dispatch import choose_kernels
from ctxlm_ds.models.build import build_model
from ctxlm_ds.objectives.build import objective_terms
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.sections import ModelSection
from ctxlm_ds.registry import OBJECTIVES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
    outputs = OBJECTIVES.get(config.objective.name).outputs
    theirs = _hugging_face_model(section_of(config.model), outputs).to(device, dtype).train()
    batch = _random_batch(config, terms, device)
    export, fields, tokens = export_of(config.model.family), fields_of(batch), batch.input_ids.numel()
    arguments = export.their_inputs(fields) | export.their_labels(fields)

    def our_loss() -> Tensor:
        outputs = ours(batch.model_inputs())
        pairs = zip(outputs, batch.labels.values(), strict=True)
        return torch.stack([_mean_loss(logits, wanted) for logits, wanted in pairs]).sum()

    def their_loss() -> Tensor:
        return theirs(**arguments).loss

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


class _Ids(NamedTuple):
    """Special tokens of the random rows, which hold none of them."""

    pad_id: int = 1
    cls_id: int = 0
    sep_id: int = 2


def _hugging_face_model(model: ModelSection, outputs: Sequence[str]) -> nn.Module:
    """Build the class that the model is exported as, with the kernels that transformers chooses."""
    import transformers

    export, ids = export_of(model.family), _Ids()
    name = export.key_map(model, outputs, ids.pad_id).hf_class
    return getattr(transformers, name)(to_hf_config(export, model, name, ids, "fp32"))


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
