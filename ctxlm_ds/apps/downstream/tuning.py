"""How much of a model is trained: everything, the last layers, the head, gradually more, slower below, or LoRA."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.pytorch_utils import Conv1D

from ctxlm_ds.apps.downstream.results import Tuning
from ctxlm_ds.errors import ConfigError

NO_DECAY = re.compile(r"bias$|norm", re.IGNORECASE)


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
    # A parameter that a head shares with a block is the block's.
    modules = [*((len(blocks) + 1, head) for head in _heads(model).values()), *enumerate(blocks, 1)]
    depth_of = {id(parameter): depth for depth, module in modules for parameter in module.parameters()}
    return {name: depth_of.get(id(parameter), 0) for name, parameter in model.named_parameters()}


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
    linear = [name for name, one in model.named_modules() if id(one) in blocks and isinstance(one, (nn.Linear, Conv1D))]
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
        places = depths(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(places[name] >= lowest)
            if places[name] < lowest:
                parameter.grad = None
