"""DeepSpeed's engine behind one small surface: train a step, evaluate a batch, reach the fp32 states.

In: a model (or its builder), an objective, steps of batches. Out: exact losses of whole steps.
Not here: the loop, checkpoints, logs. This module and checkpoint/reshape.py alone import deepspeed.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ctxlm_ds.config.schema import RunConfig
from ctxlm_ds.data.loader import Step
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.errors import ConfigError, KernelError, TrainingError
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.training.figures import add_into, format_terms, means
from ctxlm_ds.training.fragments import Fragment, list_fragments, refresh_model_weights
from ctxlm_ds.training.lamb import Lamb
from ctxlm_ds.training.optimizer import (
    MOMENTS,
    AdamFactory,
    OptimizerPlace,
    build_optimizer,
    completed_updates,
    parameter_groups,
    restore_state,
)
from ctxlm_ds.training.quiet import without_known_prints

LOSS_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class LossFunction(Protocol):
    """The torch half of an objective."""

    terms: tuple[str, ...]

    def loss(
        self, outputs: tuple[torch.Tensor, ...], labels: tuple[torch.Tensor, ...], factors: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]: ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """Figures of one optimizer step over the whole global batch."""

    loss: float
    terms: dict[str, float]
    """Mean loss of each term over its own predictions."""
    accuracy: dict[str, float]
    grad_norm: float
    num_tokens: int
    """Non-padding positions of the global batch."""
    skipped: bool
    """True where fp16 overflowed and nothing was updated."""
    loss_scale: float


def init_process_group() -> None:
    """Join the process group that the launcher's variables describe (nccl on CUDA, gloo on CPU)."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if device_type() == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Its shared-memory all-reduce serves inference only; building it would cost every first start on a CPU a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name(), verbose=False)


def device_type() -> str:
    """`cuda` or `cpu`, as DeepSpeed's accelerator sees it."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().device_name().split(":")[0]


def check_precision(config: RunConfig) -> None:
    """Refuse a precision this device lacks before anything is built.

    Raises:
        ConfigError: DeepSpeed does not support the data type on this device.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    supported = {"fp32": True, "bf16": accelerator.is_bf16_supported(), "fp16": accelerator.is_fp16_supported()}
    if not supported[config.training.precision]:
        raise ConfigError(
            f"training.precision is {config.training.precision}, which DeepSpeed does not support on this device "
            f"({accelerator.device_name()}); use bf16 or fp32"
        )


def deepspeed_adam(offloaded: bool) -> AdamFactory:
    """DeepSpeed's CPUAdam (offloaded) or FusedAdam class, built once a machine at first use.

    Raises:
        KernelError: the op cannot be built or does not exist for this device.
    """
    try:
        if offloaded:
            from deepspeed.ops.adam import DeepSpeedCPUAdam
            from deepspeed.ops.op_builder import CPUAdamBuilder

            CPUAdamBuilder().load(verbose=False)
            return DeepSpeedCPUAdam
        from deepspeed.ops.adam import FusedAdam
        from deepspeed.ops.op_builder import FusedAdamBuilder

        FusedAdamBuilder().load(verbose=False)
    except Exception as error:
        # A missing compiler, CUDA toolkit or header: each has an exception of its own, most of them plain ones.
        kind, remedy = ("CPU", "reference") if offloaded else ("fused", "auto or torch")
        raise KernelError(
            f"DeepSpeed's {kind} Adam cannot be built here ({error}); set kernels.optimizer: {remedy}"
        ) from error
    return FusedAdam


class Engine:
    """One rank's share of training, over any ZeRO stage."""

    def __init__(
        self,
        config: RunConfig,
        deepspeed_config: dict[str, Any],
        build_model: Callable[[], nn.Module],
        objective: LossFunction,
        topology: Topology,
    ) -> None:
        check_precision(config)
        self.config = config
        self.objective = objective
        self.topology = topology
        self.zero_stage = int(deepspeed_config.get("zero_optimization", {}).get("stage", 0))
        if self.zero_stage == 0 and config.training.precision != "fp32":
            raise ConfigError(
                f"training.precision is {config.training.precision} with ZeRO stage 0, where DeepSpeed cannot "
                "accumulate gradients in fp32; use stage 1 (the same numbers, less memory) or precision fp32"
            )
        self._clip = config.optimizer.gradient_clipping
        model = self._build_model(deepspeed_config, build_model)
        self.parameter_names = [name for name, _ in model.named_parameters()]
        self._shapes = {n: tuple(getattr(p, "ds_shape", p.shape)) for n, p in model.named_parameters()}
        optimizer, self.optimizer_choice = self._build_optimizer(deepspeed_config, model)
        self._initialize(deepspeed_config, model, optimizer)

    def _build_model(self, deepspeed_config: dict[str, Any], build_model: Callable[[], nn.Module]) -> nn.Module:
        context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.zero_stage == 3:
            import deepspeed

            context = deepspeed.zero.Init(config_dict_or_path=deepspeed_config)
        with context:
            return build_model()

    def _build_optimizer(
        self, deepspeed_config: dict[str, Any], model: nn.Module
    ) -> tuple[torch.optim.Optimizer | None, str]:
        if self.config.optimizer.name == "from_ds_config":
            return None, f"optimizer={deepspeed_config['optimizer']['type']} (from the DeepSpeed JSON)"
        offload = deepspeed_config.get("zero_optimization", {}).get("offload_optimizer") or {}
        offloaded = offload.get("device", "none") != "none"
        place = OptimizerPlace("cpu" if offloaded else device_type(), self.zero_stage, offloaded)
        return build_optimizer(
            self.config.optimizer, self.config.kernels.optimizer, model.named_parameters(), place, deepspeed_adam
        )

    def _initialize(
        self, deepspeed_config: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> None:
        import deepspeed

        settings = dict(deepspeed_config)
        if settings.get("bf16", {}).get("enabled"):
            # A run stops at a NaN; without this DeepSpeed applies it under stage 2.
            settings["bf16"] = {**settings["bf16"], "check_grad_overflow": True}
        if self.zero_stage == 0:
            # DeepSpeed's fp32 path reports no norm; _clip_plain_gradients computes it and clips.
            settings["gradient_clipping"] = 0.0
        groups = parameter_groups(model.named_parameters(), self.config.optimizer.weight_decay)
        with without_known_prints():
            self._deepspeed, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                model_parameters=groups if optimizer is None else None,
                config=settings,
                dist_init_required=False,
            )
        self.device = self._deepspeed.device
        self._zero = self._deepspeed.optimizer
        self._inner = optimizer if optimizer is not None else getattr(self._zero, "optimizer", self._zero)
        if isinstance(self._inner, Lamb):
            self._inner.bind(self.fragments(), self.parameter_names, self._sum_for_lamb())

    def _sum_for_lamb(self) -> Callable[[torch.Tensor], None] | None:
        if self.zero_stage == 0 or self.topology.data_parallel_size == 1:
            return None
        from torch import distributed

        def add(tensor: torch.Tensor) -> None:
            # Offloaded weights lie in CPU memory, where nccl cannot add.
            distributed.all_reduce(tensor, group=self.topology.cpu_group if tensor.device.type == "cpu" else None)

        return add

    @property
    def module(self) -> nn.Module:
        """The model as built, its parameters in the layout of the ZeRO stage."""
        return self._deepspeed.module

    # States, for checkpoints and initialisation.

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of every parameter, by name."""
        return dict(self._shapes)

    def fragments(self) -> list[Fragment]:
        """This rank's pieces of every parameter's fp32 weights."""
        return list_fragments(self._zero, self._deepspeed.module.named_parameters())

    def optimizer_state(self, owner: torch.Tensor) -> Mapping[str, Any]:
        """The inner optimizer's state of one owner tensor; empty before the first update."""
        return self._inner.state.get(owner, {})

    def moment_kinds(self) -> tuple[str, ...]:
        """Names of the moments kept for each weight."""
        if self.config.optimizer.name != "from_ds_config":
            return MOMENTS
        owners = {id(fragment.owner): fragment.owner for fragment in self.fragments()}
        items = [(owner, item) for owner in owners.values() for item in self.optimizer_state(owner).items()]
        kinds = {name for owner, (name, v) in items if torch.is_tensor(v) and v.numel() == owner.numel() > 1}
        return tuple(sorted(kinds))

    def prepare_optimizer_state(self, updates: int, kinds: Sequence[str]) -> None:
        """Make zeroed moments of the given kinds for every owner, as after `updates` updates."""
        owners = {id(fragment.owner): fragment.owner for fragment in self.fragments()}
        restore_state(self._inner, owners.values(), updates, kinds)

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write whole fp32 parameters into this rank's fragments; every parameter must come exactly once."""
        pieces: dict[str, list[Fragment]] = {}
        for fragment in self.fragments():
            pieces.setdefault(fragment.name, []).append(fragment)
        missing = set(self.parameter_names)
        for name, tensor in named:
            missing.remove(name)
            flat = tensor.reshape(-1)
            for fragment in pieces.get(name, []):
                fragment.weight().copy_(flat.narrow(0, fragment.start, fragment.length))
        assert not missing, f"no values for {sorted(missing)}"
        self.weights_changed()

    def weights_changed(self) -> None:
        """Must be called on every rank after fragments' weights were written."""
        refresh_model_weights(self._zero)

    def scalars(self) -> dict[str, float]:
        """Counters that belong to the optimizer: updates applied and the loss scaler's state."""
        values: dict[str, float] = {"optimizer_updates": completed_updates(self._inner)}
        scaler = self._dynamic_loss_scaler()
        if scaler is not None:
            values.update({field: float(getattr(scaler, field)) for field in LOSS_SCALER_FIELDS})
        return values

    def restore_scalars(self, values: Mapping[str, float]) -> None:
        """Put the loss scaler back where it was; a run that is not, or was not, in fp16 has none."""
        scaler = self._dynamic_loss_scaler()
        for field in LOSS_SCALER_FIELDS:
            if scaler is not None and field in values:
                kind = type(getattr(scaler, field))
                setattr(scaler, field, kind(values[field]))

    def _dynamic_loss_scaler(self) -> Any | None:
        """DeepSpeed's scaler in fp16; its other precisions and a fixed fp16 scale have one that must stay as it is."""
        scaler = getattr(self._zero, "loss_scaler", None)
        return scaler if getattr(scaler, "dynamic", False) else None

    # Training.

    def train_step(self, step: Step, step_index: int, learning_rate: float) -> StepResult:
        """Forward, backward and update over one global batch.

        Raises:
            TrainingError: the loss or the gradient norm is not finite; nothing was updated.
        """
        counts, num_tokens = self._global_counts(step)
        factors = self._factors(counts, len(step.micro_batches))
        for group in self._inner.param_groups:
            group["lr"] = learning_rate
        self._deepspeed.train()
        sums: dict[str, torch.Tensor] = {}
        for index, batch in enumerate(step.micro_batches):
            self._seed_dropout(step_index, index)
            loss, stats = self._forward(batch, factors)
            self._deepspeed.backward(_overflowing(loss) if self.config.training.precision == "fp16" else loss)
            add_into(sums, stats)
            if index + 1 < len(step.micro_batches):
                self._deepspeed.step()
        figures = self._reduce(sums)
        terms, accuracy = means(self.objective.terms, figures)
        total = sum(terms.values())
        if not math.isfinite(total) and self.config.training.precision != "fp16":
            raise TrainingError(f"the loss of step {step_index + 1} is {total} ({format_terms(terms)})")
        return self._update(step_index, total, terms, accuracy, num_tokens)

    def _update(
        self, step_index: int, total: float, terms: dict[str, float], accuracy: dict[str, float], num_tokens: int
    ) -> StepResult:
        norm = self._clip_plain_gradients() if self.zero_stage == 0 else None
        if norm is not None and not math.isfinite(norm):
            raise TrainingError(f"the gradient norm of step {step_index + 1} is {norm}")
        self._apply_update()
        if norm is None:
            norm = float(self._deepspeed.get_global_grad_norm() or 0.0)
        skipped = bool(getattr(self._zero, "overflow", False))
        if (skipped or not math.isfinite(norm)) and self.config.training.precision != "fp16":
            raise TrainingError(f"the gradient norm of step {step_index + 1} is not finite; the update was not applied")
        scale = float(getattr(self._zero, "loss_scale", 1.0)) if self.config.training.precision == "fp16" else 1.0
        return StepResult(total, terms, accuracy, norm, num_tokens, skipped, scale)

    def _apply_update(self) -> None:
        try:
            self._deepspeed.step()
        except Exception as error:
            if "minimum" in str(error) and "scale" in str(error):
                raise TrainingError(
                    "fp16 overflowed at the smallest loss scale: the loss has diverged; use bf16, a lower learning "
                    "rate or gradient clipping"
                ) from error
            raise

    def _forward(self, batch: Batch, factors: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        inputs = tuple(tensor.to(self.device, non_blocking=True) for tensor in batch.model_inputs())
        labels = tuple(batch.labels[term].to(self.device, non_blocking=True) for term in self.objective.terms)
        outputs = self._deepspeed(inputs)
        return self.objective.loss(outputs, labels, factors)

    def _global_counts(self, step: Step) -> tuple[list[float], int]:
        """Predictions of each term and non-padding tokens, over all data-parallel ranks."""
        local = [float(step.counts[term]) for term in self.objective.terms] + [float(step.num_tokens)]
        summed = self.topology.all_reduce_sum(torch.tensor(local, dtype=torch.float64)).tolist()
        return summed[:-1], int(summed[-1])

    def _factors(self, counts: Sequence[float], num_micro_batches: int) -> torch.Tensor:
        """What each term's sum is multiplied by, so that DeepSpeed's averaging yields the exact global mean."""
        averaging = num_micro_batches * self.topology.data_parallel_size
        values = [averaging / count if count else 0.0 for count in counts]
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def _seed_dropout(self, step_index: int, micro_index: int) -> None:
        """Dropout depends on (seed, step, global micro-batch) alone, so a resume needs no generator state."""
        position = micro_index * self.topology.data_parallel_size + self.topology.data_parallel_rank
        key = f"dropout:{self.config.training.seed}:{step_index}:{position}".encode()
        torch.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1)

    def _clip_plain_gradients(self) -> float:
        """Stage 0: the global norm of the averaged gradients, clipped as DeepSpeed does in its other stages."""
        gradients = [p.grad for p in self._deepspeed.module.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if self._clip > 0.0 and norm > self._clip:
            torch._foreach_mul_(gradients, self._clip / (norm + 1e-6))
        return norm

    def _reduce(self, sums: dict[str, torch.Tensor]) -> dict[str, float]:
        """Add the objective's sums over the data-parallel ranks."""
        names = sorted(sums)
        local = torch.stack([sums[name].double() for name in names]).cpu()
        return dict(zip(names, self.topology.all_reduce_sum(local).tolist(), strict=True))

    # Evaluation.

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Mean loss and accuracy of each term over the batches of all ranks: `loss`, `TERM_loss`, `TERM_accuracy`."""
        self._deepspeed.eval()
        ones = torch.ones(len(self.objective.terms), dtype=torch.float32, device=self.device)
        sums: dict[str, torch.Tensor] = {}
        for batch in batches:
            add_into(sums, self._forward(batch, ones)[1])
        terms, accuracy = means(self.objective.terms, self._reduce(sums))
        self._deepspeed.train()
        figures = {"loss": sum(terms.values())}
        figures.update({f"{term}_loss": value for term, value in terms.items()})
        figures.update({f"{term}_accuracy": value for term, value in accuracy.items()})
        return figures


def _overflowing(loss: torch.Tensor) -> torch.Tensor:
    """The loss, its gradients not finite where it is not: fp16 may overflow to a loss of infinity over finite ones,
    and DeepSpeed, which looks at gradients alone, would apply them.
    """
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)
