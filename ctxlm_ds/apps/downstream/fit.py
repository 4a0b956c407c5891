"""One fine-tuning run: transformers' Trainer on one task, one model and one point of the grid.

Trained are everything, the last layers, the head, gradually more, slower below, or LoRA.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments, set_seed
from transformers.pytorch_utils import Conv1D
from transformers.trainer_callback import EarlyStoppingCallback, PrinterCallback

from ctxlm_ds.apps.downstream.kinds.base import Features, Kind, quiet_transformers
from ctxlm_ds.apps.downstream.prepare import read_config
from ctxlm_ds.apps.downstream.results import PARTS, FitSettings, Point, Tuning, prediction_rows, write_point
from ctxlm_ds.atomic import output_folder
from ctxlm_ds.console import PLAIN_INTERVAL_S, logger
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.installed import check_extra
from ctxlm_ds.recipe.deepspeed import deepspeed_for_trainer

SHOWN_EPOCHS = 10
HIDDEN_FIGURES = {"epoch", "runtime", "samples_per_second", "steps_per_second"}
Sets = Mapping[str, Features]
"""Features of the task's parts: train, dev and, if there is one, test."""
NO_DECAY = re.compile(r"bias$|norm", re.IGNORECASE)
PROBLEM_TYPES = {"number": "regression", "label": "single_label_classification"}


def rows_of_a_device(point: Point) -> int:
    """Return each device's share of a point's batch. Raises ConfigError if the devices cannot divide it."""
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    devices = max(1, torch.cuda.device_count()) if devices == 1 else devices
    if point.batch_size % devices:
        raise ConfigError(f"--batch-sizes {point.batch_size}: not a multiple of the {devices} devices")
    return point.batch_size // devices


def training_arguments(
    folder: Path, point: Point, settings: FitSettings, metric: str, make: Callable[..., Any] = TrainingArguments
) -> Any:
    """Return transformers' TrainingArguments of a point, whose batch is that of all ranks together.

    `metric` chooses the best epoch; `make` returns the arguments, a kind's own. Raises ConfigError if the batch cannot
    be divided by the ranks, or DeepSpeed's JSON says something else.
    """
    best = {"load_best_model_at_end": True, "metric_for_best_model": metric, "greater_is_better": metric != "mse",
            "save_strategy": "epoch", "save_total_limit": 1}  # fmt: skip
    arguments = make(
        output_dir=str(folder), per_device_train_batch_size=rows_of_a_device(point), per_device_eval_batch_size=32,
        learning_rate=point.learning_rate, num_train_epochs=point.epochs, seed=point.seed,
        weight_decay=settings.weight_decay, warmup_steps=settings.warmup_share, lr_scheduler_type="linear",
        eval_strategy="epoch", logging_strategy="epoch", report_to=[], disable_tqdm=True,
        deepspeed=None if settings.deepspeed is None else deepspeed_for_trainer(settings.deepspeed),
        bf16=settings.bf16, use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        **(best if settings.early_stopping else {"save_strategy": "no"}),
    )  # fmt: skip
    if settings.deepspeed is not None and (found := arguments.hf_deepspeed_config.mismatches):
        differences = "; ".join(one.removeprefix("- ds ").replace(" vs hf ", ", the command has ") for one in found)
        raise ConfigError(f'--deepspeed {settings.deepspeed}: {differences}; write "auto" or leave it out')
    return arguments


def load_config(folder: Path, kind: Kind) -> Any:
    """Return the model's configuration with the task's labels and a padding id; None if the kind reads vectors."""
    if kind.tokenizer is None:
        return None
    names = dict(enumerate(kind.labels)) if kind.labels else {0: "LABEL_0", 1: "LABEL_1"}
    label2id = {name: at for at, name in names.items()}
    config = read_config(folder, num_labels=len(names), id2label=names, label2id=label2id)
    config.problem_type = PROBLEM_TYPES.get(kind.task.entry.answer, config.problem_type)
    kind.configure(config)
    config.pad_token_id = kind.tokenizer.pad_token_id  # several classes find a row's last token by it
    return config


def run_point(
    model_folder: Path, kind: Kind, sets: Sets, point: Point, settings: FitSettings, output: Path, recorded: Any
) -> dict[str, Any]:
    """Fine-tune once, judge, and write predictions and metrics.json, which it returns, to `output`; all or nothing."""
    scratch = output.with_name(f"{output.name}.trainer")  # one for all ranks: they load the best epoch from it
    try:
        trainer = make_trainer(model_folder, kind, sets, point, settings, scratch)
        trainer.train()
        trainer.compute_metrics = None  # it judges the development examples only
        predicted, scores = {}, {}
        for part in [name for name in PARTS if name in sets]:
            features, examples = sets[part], sets[part].examples
            predictions = kind.predict(trainer.predict(features).predictions, features)
            predicted[part] = prediction_rows(kind, predictions, examples)
            if all(example.shown_label() or kind.task.unanswerable for example in examples):
                scores[part] = kind.score(predictions, examples)
        result = {"task": kind.task.title, "model": str(model_folder), "point": asdict(point), **scores,
                  "most_frequent": kind.most_frequent(sets["train"].examples, sets["dev"].examples),
                  **kind.facts(trainer.model), "log": trainer.state.log_history}  # fmt: skip
        if settings.save_model:
            _save_model(trainer, kind, scratch / "model")
        if trainer.is_world_process_zero():
            with output_folder(output) as partial:
                write_point(partial, recorded, result, predicted)
                if settings.save_model:
                    shutil.move(scratch / "model", partial / "model")
        return result
    finally:
        if int(os.environ.get("RANK", "0")) == 0:
            shutil.rmtree(scratch, ignore_errors=True)


def make_trainer(model_folder: Path, kind: Kind, sets: Sets, point: Point, settings: FitSettings, folder: Path) -> Any:
    """Return transformers' Trainer, ready to train."""
    tuning = settings.tuning
    if kind.new_tokens and tuning.frozen_by:
        raise ConfigError(f"{tuning.frozen_by[0]}: the embeddings of the new tokens must be trained, which this option "
                          "freezes")  # fmt: skip
    if tuning.gradual and settings.deepspeed:
        raise ConfigError("--gradual: DeepSpeed's optimizer fixes what is trained at the start; drop --deepspeed")
    if settings.deepspeed:
        from ctxlm_ds.training.engine.runtime import init_process_group

        init_process_group()  # accelerate leaves DeepSpeed's own out on a CPU, and ZeRO-3 then takes the ranks for one
    quiet_transformers()
    arguments = training_arguments(folder, point, settings, kind.task.judged_by[0], kind.arguments)
    set_seed(point.seed)
    model = kind.model(model_folder, load_config(model_folder, kind), settings.random)
    # The losses of these classes are means. Trainer would multiply them by the number of ranks, because forward takes
    # further arguments, which it reads as "divides by the number of labels in the batch".
    model.accepts_loss_kwargs = False
    model = apply_tuning(model, tuning)
    callbacks: list[Any] = [ProgressLines()]
    if settings.early_stopping:
        callbacks.append(EarlyStoppingCallback(settings.early_stopping))
    if tuning.gradual:
        callbacks.append(GradualUnfreezing())
    optimizer = layered_optimizer(model, arguments, tuning.layer_decay) if tuning.layer_decay < 1 else None

    dev = sets["dev"]
    trainer = kind.trainer(
        model=model, args=arguments, train_dataset=sets["train"], eval_dataset=dev, callbacks=callbacks,
        data_collator=kind.collator(),
        compute_metrics=lambda outputs: kind.score(kind.predict(outputs.predictions, dev), dev.examples),
        optimizers=(optimizer, None), preprocess_logits_for_metrics=kind.keep_logits,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


class ProgressLines(TrainerCallback):
    """Logs up to SHOWN_EPOCHS epochs, also the last, and in between the step, ten seconds and a twentieth apart."""

    def __init__(self) -> None:
        self.shown_s, self.shown_step = time.monotonic(), 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        is_due = (state.global_step - self.shown_step) * 2 * SHOWN_EPOCHS >= state.max_steps
        if is_due and time.monotonic() - self.shown_s >= PLAIN_INTERVAL_S:
            self.shown_s, self.shown_step = time.monotonic(), state.global_step
            logger.info("step %d of %d", state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        shown = {name.removeprefix("eval_"): value for name, value in (logs or {}).items()}
        every = math.ceil(state.num_train_epochs / SHOWN_EPOCHS)
        is_due = math.ceil(state.epoch or 0) % every == 0 or state.global_step >= state.max_steps
        if "loss" in shown and is_due:
            self.shown_s, self.shown_step = time.monotonic(), state.global_step
            figures = [f"{name} {value:.4g}" for name, value in shown.items() if name not in HIDDEN_FIGURES]
            where = "dev" if "eval_loss" in logs else "train"
            logger.info("epoch %.4g, %s: %s", state.epoch or 0, where, ", ".join(figures))


def _save_model(trainer: Any, kind: Kind, folder: Path) -> None:
    """Write the model on rank 0; all ranks call it, because ZeRO-3 gathers the weights from all."""
    if hasattr(trainer.model, "merge_and_unload"):
        if trainer.is_world_process_zero():
            trainer.model.merge_and_unload().save_pretrained(folder)
    else:
        trainer.save_model(str(folder))
    if trainer.is_world_process_zero():
        kind.tokenizer.save_pretrained(folder)


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
    """Return the model to train: partly frozen or with LoRA; ConfigError if it has no such layers or no head."""
    if (tuning.layers == 0 or tuning.gradual) and not _heads(model):
        option = "--gradual" if tuning.gradual else "--train-layers 0"
        raise ConfigError(f"{option}: {type(model).__name__} has no separate head (its output layer is its "
                          "embeddings); use --train-layers 1 or more")  # fmt: skip
    if tuning.lora_rank:
        check_extra("downstream", ["peft"])
        from peft import LoraConfig, get_peft_model

        blocks = {id(child) for block in find_blocks(model) for child in block.modules()}
        linear = [name for name, one in model.named_modules()
                  if id(one) in blocks and isinstance(one, (nn.Linear, Conv1D))]  # fmt: skip
        config = LoraConfig(r=tuning.lora_rank, lora_alpha=2 * tuning.lora_rank, target_modules=linear,
                            modules_to_save=list(_heads(model)))  # fmt: skip
        return get_peft_model(model, config)
    if tuning.layers is not None:
        places, num_blocks = depths(model), len(find_blocks(model))
        if tuning.layers > num_blocks:
            raise ConfigError(f"--train-layers {tuning.layers}: the model has {num_blocks} layers")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(places[name] > num_blocks - tuning.layers)
    return model


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


def layered_optimizer(model: PreTrainedModel, arguments: Any, layer_decay: float) -> torch.optim.Optimizer:
    """Return AdamW with a learning rate for each depth, and weight decay for matrices only."""
    places = depths(model)
    top = max(places.values())
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = not NO_DECAY.search(name)
            rate = arguments.learning_rate * layer_decay ** (top - places[name])
            group = {"params": [], "lr": rate, "weight_decay": arguments.weight_decay * decays}
            groups.setdefault((places[name], decays), group)["params"].append(parameter)
    betas = (arguments.adam_beta1, arguments.adam_beta2)
    return torch.optim.AdamW(list(groups.values()), lr=arguments.learning_rate, betas=betas, eps=arguments.adam_epsilon)


class GradualUnfreezing(TrainerCallback):
    """Trains the head in the first epoch, and one more block from above in each further one; embeddings last."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        lowest = len(find_blocks(model)) + 1 - round(state.epoch or 0)
        places = depths(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(places[name] >= lowest)
            if places[name] < lowest:
                parameter.grad = None
