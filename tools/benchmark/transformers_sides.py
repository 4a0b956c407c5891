"""Training steps of transformers as sides of a benchmark: its model class in a plain loop, and its Trainer.

The class is the one that the recipe's model is exported as, with transformers' default kernels, the same dropout and
the same batches.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import cycle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from ctxlm_ds.process.launch import quiet_libraries
from ctxlm_ds.recipe.schema import RunConfig
from tools.benchmark.turns import StepDone

if TYPE_CHECKING:
    from torch import Tensor, nn

TOKEN_IDS = SimpleNamespace(pad_id=1, cls_id=0, sep_id=2)
"""Special tokens of the class's config; made-up rows give them no meaning."""
ENDLESS_STEPS = 10**9
REPETITIONS = 10**5
"""Of the micro-batches in the Trainer's dataset, more than a run takes."""


@dataclass(frozen=True)
class TransformersSteps:
    """A plain loop: forward, backward and AdamW."""

    config: RunConfig
    threads: int
    style: Literal["autocast", "bf16", "fp32"]
    """`autocast` keeps weights in fp32 and computes under torch.autocast in bf16; the others name the type of all."""

    def run(self, step_done: StepDone) -> None:
        """Take steps forever."""
        import torch

        from tools.benchmark.plain_loop import PlainLoop, on_device

        torch.set_num_threads(self.threads)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = build_class(self.config).to(device).train()
        if self.style == "bf16":
            model = model.to(torch.bfloat16)
        loop = PlainLoop(self.config, model)
        for micro_batches in cycle(their_steps(self.config)):
            for arguments in micro_batches:
                with self._context(device.type):
                    loss = model(**on_device(arguments, device)).loss
                (loss / len(micro_batches)).backward()
            loop.update()
            step_done()

    def _context(self, device_type: str) -> AbstractContextManager[Any]:
        import torch

        return torch.autocast(device_type, torch.bfloat16) if self.style == "autocast" else nullcontext()


@dataclass(frozen=True)
class TrainerSteps:
    """transformers.Trainer without logging, evaluation and saving."""

    config: RunConfig
    threads: int

    def run(self, step_done: StepDone) -> None:
        """Take steps forever."""
        quiet_libraries()
        import torch

        torch.set_num_threads(self.threads)
        from transformers import Trainer, TrainerCallback

        class EndOfStep(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                step_done()

        micro_batches = [arguments for step in their_steps(self.config) for arguments in step]
        with tempfile.TemporaryDirectory() as folder:
            Trainer(
                build_class(self.config),
                self._arguments(folder),
                train_dataset=micro_batches * REPETITIONS,
                # An item is a micro-batch already.
                data_collator=lambda items: dict(items[0]),
                callbacks=[EndOfStep()],
            ).train()

    def _arguments(self, folder: str) -> Any:
        import torch
        from transformers import TrainingArguments

        from tools.benchmark.plain_loop import adam_settings

        adam = adam_settings(self.config)
        betas = adam.get("betas", (0.9, 0.999))
        training = self.config.training
        return TrainingArguments(
            output_dir=folder,
            use_cpu=not torch.cuda.is_available(),
            bf16=training.precision == "bf16",
            per_device_train_batch_size=1,
            gradient_accumulation_steps=training.global_batch_size // training.micro_batch_size,
            max_steps=ENDLESS_STEPS,
            optim="adamw_torch_fused",
            learning_rate=self.config.optimizer.learning_rate,
            adam_beta1=betas[0],
            adam_beta2=betas[1],
            adam_epsilon=adam.get("eps", 1e-8),
            weight_decay=adam.get("weight_decay", 0.0),
            max_grad_norm=self.config.optimizer.gradient_clipping,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )


def class_name(config: RunConfig) -> str:
    """Return the name of the class that the recipe's model is exported as.

    Raises:
        ExportError: transformers has none.
    """
    from ctxlm_ds.export.base import export_of
    from ctxlm_ds.objectives.base import build_objective

    outputs = build_objective(config.objective).outputs
    return export_of(config.model.family).key_map(config.model, outputs, TOKEN_IDS.pad_id).hf_class


def build_class(config: RunConfig) -> nn.Module:
    """Return transformers' model with weights in fp32."""
    import transformers

    from ctxlm_ds.export.base import export_of
    from ctxlm_ds.export.hf_config import to_hf_config

    name = class_name(config)
    settings = to_hf_config(export_of(config.model.family), config.model, name, TOKEN_IDS, "fp32")
    model: nn.Module = getattr(transformers, name)(settings)
    return model


def their_steps(config: RunConfig) -> list[list[dict[str, Tensor]]]:
    """Return the arguments of their forward for each micro-batch of the steps that our sides repeat."""
    from ctxlm_ds.export.base import export_of
    from ctxlm_ds.objectives.base import build_objective
    from tools.benchmark.batches import full_rows, pinned

    export = export_of(config.model.family)
    return [
        [pinned(export.their_inputs(batch.fields) | their_labels(batch.fields)) for batch in step.micro_batches]
        for step in full_rows(config, build_objective(config.objective))
    ]


def their_labels(fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the labels with which transformers' forward computes our loss for a batch's fields."""
    import torch

    from ctxlm_ds.data.fields import IGNORE_LABEL

    for name in ("decoder_labels", "permutation_lm_labels"):  # transformers makes the decoder's inputs from the first
        if name in fields:
            return {"labels": fields[name]}
    if (replaced := fields.get("replaced_labels")) is not None:
        return {"labels": replaced.where(replaced != IGNORE_LABEL, 0)}  # the attention mask leaves padding out
    if "masked_lm_labels" not in fields:
        return {"labels": fields["input_ids"]}  # which transformers shifts
    labels = torch.full_like(fields["input_ids"], IGNORE_LABEL)
    rows, slots = (fields["masked_lm_labels"] != IGNORE_LABEL).nonzero(as_tuple=True)
    labels[rows, fields["prediction_positions"][rows, slots]] = fields["masked_lm_labels"][rows, slots]
    of_pairs = [name for name in ("next_sentence_label", "sentence_order_label") if f"{name}s" in fields]
    return {"labels": labels} | {name: fields[f"{name}s"][:, 0] for name in of_pairs}
