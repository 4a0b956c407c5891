"""Training steps against transformers' own models."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn

from ctxlm_ds.benchmark.timing import compare
from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.export.base import export_of
from ctxlm_ds.export.hf_config import to_hf_config
from ctxlm_ds.kernels.dispatch import DTYPES, KernelSet
from ctxlm_ds.models.build import ModelBuild, build_model
from ctxlm_ds.objectives.build import build_objective
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.training.losses import TermLosses


def compare_steps(config: RunConfig, rounds: int = 5) -> list[str]:
    """Compare steps (forward, backward, AdamW) of our model and of transformers' with SDPA, on full random rows.

    Both have the same shape, data type, dropout and number of predictions. Ours computes the head on the predicted
    positions only. Raises ConfigError if the recipe has no model.vocab_size.
    """
    import transformers

    if config.model.vocab_size is None:
        raise ConfigError("model.vocab_size is not set; add --set model.vocab_size=30522")
    if build_objective(config.objective).teacher_outputs:
        raise ConfigError(
            f"objective.name is {config.objective.name}: a step with a teacher has no counterpart; set "
            "objective.name to masked_lm"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = DTYPES[config.training.precision]
    objective, parallel, export = build_objective(config.objective), ParallelContext(), export_of(config.model.family)
    build = ModelBuild(objective.outputs, KernelSet(config.kernels, device, dtype), parallel)
    ours = build_model(config.model, build, config.training.seed).to(device, dtype).train()
    # The class that the model is exported as, with transformers' kernels; no row holds one of these special tokens.
    ids = SimpleNamespace(pad_id=1, cls_id=0, sep_id=2)
    name = export.key_map(config.model, objective.outputs, ids.pad_id).hf_class
    theirs = getattr(transformers, name)(to_hf_config(export, config.model, name, ids, "fp32"))
    theirs = theirs.to(device, dtype).train()
    rows, generator = config.training.micro_batch_size, np.random.default_rng(config.training.seed)
    batch = Batch.example(objective.fields(config.data), rows, generator, config.model.vocab_size)
    fields = {name: tensor.to(device) for name, tensor in batch.fields.items()}
    losses = TermLosses(objective.terms, objective.outputs, parallel)
    counts = [int((fields[term.labels[0]] != IGNORE_LABEL).sum()) for term in objective.terms]
    factors = torch.tensor([1.0 / count for count in counts], device=device)
    arguments = export.their_inputs(fields) | export.their_labels(fields)
    tokens = fields["input_ids"].numel()

    def our_loss() -> Tensor:
        return losses(ours.run(fields), fields, factors)[0]

    def their_loss() -> Tensor:
        return theirs(**arguments).loss

    return compare(_step(ours, our_loss, tokens), _step(theirs, their_loss, tokens), rounds, "tokens/s")


def _step(model: nn.Module, loss: Callable[[], Tensor], tokens: int) -> Callable[[], int]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def work() -> int:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        return tokens

    return work
