"""How much of a model is trained: everything, the last layers, the head, gradually more, slower below, or LoRA."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from ctxlm_ds.errors import ConfigError

NO_DECAY = re.compile(r"bias$|norm", re.IGNORECASE)


@dataclass(frozen=True)
class Tuning:
    """Which parameters are trained, and how fast."""

    layers: int | None = None
    """Last blocks that are trained with the head (0: only the head); None trains everything."""
    gradual: bool = False
    """Unfreeze one more block each epoch, from the last (Howard and Ruder 2018)."""
    layer_decay: float = 1.0
    """Factor of the learning rate from each block to the one below it."""
    lora_rank: int = 0
    """Rank of LoRA's matrices (Hu et al. 2021) in all linear layers of the blocks; 0 uses none."""

    def __post_init__(self) -> None:
        chosen = [self.layers is not None, self.gradual, self.lora_rank > 0]
        if sum(chosen) > 1:
            raise ConfigError("--train-layers, --gradual and --lora exclude each other; give one")
        if self.lora_rank and self.layer_decay < 1:
            raise ConfigError("--lora and --layer-decay exclude each other: LoRA trains few weights, all at one rate")
        if not 0.0 < self.layer_decay <= 1.0:
            raise ConfigError(f"--layer-decay {self.layer_decay}: a factor above 0 and up to 1 (1: one rate)")

    def frozen_by(self) -> str | None:
        """Return the option that keeps the embeddings as they are, if one is given."""
        options = {"--train-layers": self.layers is not None, "--gradual": self.gradual, "--lora": self.lora_rank > 0}
        return next((name for name, given in options.items() if given), None)


def find_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated layers of a model from below, those of each stack that is not inside another one.

    A model that shares one layer (ALBERT) has one block; an encoder-decoder has the encoder's, then the decoder's.
    """
    lists = [module for module in model.base_model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    inner = {id(child) for one in lists for block in one for child in block.modules()}
    blocks = [block for one in lists if id(one) not in inner for block in one]
    if not blocks:
        raise ConfigError(f"{type(model).__name__} has no list of layers: train everything")
    return blocks


def depths(model: PreTrainedModel) -> dict[str, int]:
    """Return each parameter's depth: 0 for embeddings, 1 to N for the blocks, N + 1 for the head.

    A pooler counts as head: a model without next-sentence prediction has none, so its values are new.
    """
    blocks = find_blocks(model)
    of_block = {id(parameter): at for at, block in enumerate(blocks, 1) for parameter in block.parameters()}
    heads = {id(parameter) for head in _heads(model).values() for parameter in head.parameters()}
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = of_block.get(id(parameter), len(blocks) + 1 if id(parameter) in heads else 0)
    return found


def apply_tuning(model: PreTrainedModel, tuning: Tuning) -> Any:
    """Freeze what is not trained, or wrap the model with LoRA; returns the model to train.

    Raises:
        ConfigError: the model has fewer layers, or no head to start with.
    """
    if (tuning.layers == 0 or tuning.gradual) and not _heads(model):
        option = "--gradual" if tuning.gradual else "--train-layers 0"
        raise ConfigError(f"{option}: {type(model).__name__} has no separate head (its output layer is its "
                          "embeddings); use --train-layers 1 or more")  # fmt: skip
    if tuning.lora_rank:
        return _with_lora(model, tuning.lora_rank)
    if tuning.layers is not None:
        places, num_blocks = depths(model), len(find_blocks(model))
        if tuning.layers > num_blocks:
            raise ConfigError(f"--train-layers {tuning.layers}: the model has {num_blocks} layers")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(places[name] > num_blocks - tuning.layers)
    return model


def _with_lora(model: PreTrainedModel, rank: int) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ConfigError("--lora needs the package peft: pip install 'ctxlm_ds[downstream]'") from None
    blocks = {id(child) for block in find_blocks(model) for child in block.modules()}
    linear = [name for name, module in model.named_modules() if id(module) in blocks and _is_linear(module)]
    heads = list(_heads(model))
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linear, modules_to_save=heads))


def _heads(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules with weights that a task adds to a pretrained model."""
    if model.base_model is model:  # T5 for questions: the stacks are its own children
        added = {name: module for name, module in model.named_children() if isinstance(module, nn.Linear)}
    else:
        base = {id(module) for module in model.base_model.modules()}
        added = {name: module for name, module in model.named_children() if id(module) not in base}
    pooler = getattr(model.base_model, "pooler", None)
    if isinstance(pooler, nn.Module):
        added["pooler"] = pooler
    embeddings = model.get_input_embeddings()
    tied = {id(parameter) for parameter in embeddings.parameters()} if embeddings is not None else set()
    return {name: module for name, module in added.items() if {id(one) for one in module.parameters()} - tied}


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def parameter_groups(
    model: PreTrainedModel, learning_rate: float, weight_decay: float, layer_decay: float
) -> list[dict[str, Any]]:
    """Return groups for an optimizer: a learning rate per depth, weight decay for matrices only."""
    places = depths(model)
    top = max(places.values())
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = not NO_DECAY.search(name)
        settings = {"lr": learning_rate * layer_decay ** (top - places[name]), "weight_decay": weight_decay * decays}
        groups.setdefault((places[name], decays), {"params": [], **settings})["params"].append(parameter)
    return list(groups.values())


def layered_optimizer(model: PreTrainedModel, arguments: Any, layer_decay: float) -> torch.optim.Optimizer:
    """Return AdamW with the learning rates of `parameter_groups`."""
    groups = parameter_groups(model, arguments.learning_rate, arguments.weight_decay, layer_decay)
    betas = (arguments.adam_beta1, arguments.adam_beta2)
    return torch.optim.AdamW(groups, lr=arguments.learning_rate, betas=betas, eps=arguments.adam_epsilon)


class GradualUnfreezing(TrainerCallback):
    """Trains the head in the first epoch, and one more block from above in each further one; embeddings last."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        lowest = len(find_blocks(model)) + 1 - round(state.epoch or 0)
        for parameter, depth in _with_depth(model):
            parameter.requires_grad_(depth >= lowest)
            if depth < lowest:
                parameter.grad = None


def _with_depth(model: PreTrainedModel) -> Iterator[tuple[nn.Parameter, int]]:
    places = depths(model)
    for name, parameter in model.named_parameters():
        yield parameter, places[name]
