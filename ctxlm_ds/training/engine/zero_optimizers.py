"""DeepSpeed's optimizers of ZeRO stages 1 and 2 with less work; in bf16 gradients are added up and clipped in fp32.

DeepSpeed's BF16_Optimizer (stage 1) accumulates in fp32 but rounds the sums to bf16 for the all-reduce, even on one
rank, and copies and clears them several times per step. Written against deepspeed 0.19.8: runtime/bf16_optimizer.py,
runtime/zero/stage_1_and_2.py, and `buffered_allreduce_fallback` of runtime/engine.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer, engine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe import engine as pipeline_engine
from deepspeed.runtime.utils import (
    combine_grad_norm_groups,
    is_model_parallel_parameter,
    mask_nan_or_inf_with_val_inplace,
)
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.runtime.zero.utils import get_norm_dtype
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank

from ctxlm_ds.kernels.dispatch import DTYPES
from ctxlm_ds.process.patches import replaced


def _is_counted(parameter: torch.nn.Parameter, tensor_rank: int) -> bool:
    """Return whether no other model-parallel rank counts a parameter in the norm."""
    own = tensor_rank == 0 or is_model_parallel_parameter(parameter)
    return own and not getattr(parameter, "ds_pipe_replicated", False)


class ZeroOptimizer(DeepSpeedZeroOptimizer):
    """DeepSpeed's optimizer in fewer operators; every number is the same, bit for bit."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        types = {self.dtype, self.gradient_accumulation_dtype, self.communication_data_type}
        is_alone = comm.get_world_size(group=self.dp_process_group) == 1
        if is_alone and types == {torch.float32} and self.reduce_scatter and not self.cpu_offload:
            # Gradients are their averages, so none goes into a bucket.
            for hook in self._grad_acc_hooks:
                hook.remove()
            self.reduce_independent_p_g_buckets_and_remove_grads = self.reduce_ipg_grads = lambda *_: None
        # Under offload self.device is the CPU, which the process group may not know.
        most = torch.tensor(float(len(self.bit16_groups)), device=get_accelerator().current_device_name())
        self._model_parallel_all_reduce(most, comm.ReduceOp.MAX)
        self._num_missing_groups = int(most.item()) - len(self.bit16_groups)

    def scaled_global_norm(self, norm_type: float = 2) -> Any:
        """Return the L2 norm of all gradients, the same bits on every stage of a pipeline.

        DeepSpeed sums over the stages once for each parameter group. A stage with fewer groups than another one (no
        table, no final norm) would leave the others waiting.
        """
        if not self._num_missing_groups:
            return super().scaled_global_norm(norm_type)
        groups = [*self.params_in_partition, *[()] * self._num_missing_groups]
        if self.cpu_offload:
            return combine_grad_norm_groups(map(self.complete_grad_norm_calculation_for_cpu_offload, groups))
        gradients = [self.averaged_gradients[number] for number in range(len(self.bit16_groups))]
        return combine_grad_norm_groups(
            map(self.get_grad_norm_direct, [*gradients, *[()] * self._num_missing_groups], groups)
        )

    def get_grad_norm_direct(self, gradients: Any, params: Any, norm_type: float = 2) -> torch.Tensor:
        """Return the L2 norm of a group's gradients over all ranks, -1 if it is not finite."""
        present = [gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False)]
        pairs = zip(present, params, strict=False)  # the last may be padding
        counted = [gradient for gradient, parameter in pairs if _is_counted(parameter, self.model_parallel_rank)]
        norms = torch._foreach_norm(counted, norm_type, dtype=get_norm_dtype()) if counted else ()
        square = torch.stack(norms).square().sum().float() if norms else torch.zeros((), device=self.device)
        comm.all_reduce(square, group=self.dp_process_group)
        self._model_parallel_all_reduce(square, comm.ReduceOp.SUM)
        norm = square.sqrt()
        mask_nan_or_inf_with_val_inplace(norm, device=self.device)
        return norm

    def _update_model_bit16_weights(self, group_index: int) -> None:
        """Make the parameters views of the flat weights, unless they are since the first call."""
        flat = self.bit16_groups_flat[group_index]
        begin, end = flat.data_ptr(), flat.data_ptr() + flat.nbytes
        if not all(begin <= parameter.data_ptr() < end for parameter in self.bit16_groups[group_index]):
            super()._update_model_bit16_weights(group_index)


class Bf16Optimizer(BF16_Optimizer):
    """DeepSpeed's optimizer, whose fp32 sums take each bf16 gradient as soon as the backward pass has it.

    The first gradient of a step overwrites the sum of the last step, so nothing is cleared. After the reduction, only
    this rank's partition of the sums is valid.
    """

    settings: ClassVar[Mapping[str, Any]] = {}
    """DeepSpeed's; without communication_data_type, sums are sent in fp32."""

    def _setup_for_real_optimizer(self) -> None:
        # Makes DeepSpeed register accumulate_hp_grads_and_remove_lp as a hook of every parameter.
        self.immediate_grad_update = True
        assert self.grad_acc_dtype == torch.float32 and not self.has_moe_layers
        super()._setup_for_real_optimizer()
        self._first: dict[torch.Tensor, torch.Tensor] = {}  # a sum, and the bf16 gradient that it will get
        for parameters, sums in zip(self.bf16_groups, self.fp32_groups_gradients, strict=True):
            for parameter, total in zip(parameters, sums, strict=True):
                parameter._hp_grad = total

    @torch.no_grad()
    def accumulate_hp_grads_and_remove_lp(self, lp_param: torch.nn.Parameter, group_idx: int, param_idx: int) -> None:
        """Add a bf16 gradient to its sum, and drop it."""
        assert lp_param.grad is not None
        total, gradient = self.fp32_groups_gradients[group_idx][param_idx], lp_param.grad.reshape(-1)
        present = self.fp32_groups_has_gradients[group_idx]
        on_cpu = total.device.type == "cpu"
        if not present[param_idx]:
            present[param_idx] = True
            if on_cpu and self.settings["gradient_accumulation_steps"] > 1:
                # Kept in bf16 until the second comes: the sum is written once, not twice.
                self._first[total] = gradient
            else:
                total.copy_(gradient)
        elif on_cpu:
            _add_on_cpu(total, self._first.pop(total, None), gradient)
        else:
            total.add_(gradient)
        lp_param.grad = None

    def clear_hp_grads(self) -> None:
        """Mark all sums as absent."""
        self._first.clear()
        for group, sums in enumerate(self.fp32_groups_gradients):
            self.fp32_groups_has_gradients[group] = [False] * len(sums)

    @torch.no_grad()
    def complete_sums(self) -> None:
        """Set the sums of parameters that have one gradient to it, and of those without any to 0."""
        for total, gradient in self._first.items():
            total.copy_(gradient)
        self._first.clear()
        for present, sums in zip(self.fp32_groups_has_gradients, self.fp32_groups_gradients, strict=True):
            for index in [index for index, is_present in enumerate(present) if not is_present]:
                present[index] = True
                sums[index].zero_()

    @torch.no_grad()
    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Average this rank's partition of the sums over the data-parallel ranks; DeepSpeed's engine calls it."""
        self.complete_sums()
        num_ranks = comm.get_world_size(group=self.dp_process_group)
        if num_ranks == 1:
            return
        divisor = float(self.settings.get("gradient_predivide_factor", 1.0))
        if self.settings.get("prescale_gradients"):
            divisor = float(num_ranks)
        before, after = 1.0 / divisor, divisor / num_ranks
        flat = zip(self.fp32_groups_gradients_flat, self.fp32_groups_gradient_flat_partition, strict=True)
        for sums, own in flat:
            if before != 1.0:
                sums.mul_(before)
            self._add_up(sums, own)
            if after != 1.0:
                own.mul_(after)

    def _add_up(self, sums: torch.Tensor, own: torch.Tensor) -> None:
        """Add `own`, this rank's partition of `sums`, over the ranks; the rest of `sums` is undefined then."""
        sent = sums.to(DTYPES[self.settings.get("communication_data_type") or "fp32"])
        received = own if sent is sums else torch.empty_like(own, dtype=sent.dtype)
        comm.reduce_scatter_fn(received, sent, group=self.dp_process_group)
        if received is not own:
            own.copy_(received)

    @torch.no_grad()
    def get_grads_for_norm(self, for_clipping: bool = False) -> Any:
        """Return the sums to clip, or a tensor whose norm is that of this model-parallel rank's parameters.

        The second value, an empty dict, is in place of the gradients of experts.
        """
        if for_clipping:
            return self.fp32_groups_gradient_flat_partition
        norms = torch._foreach_norm(self._counted_sums) if self._counted_sums else ()
        square = torch.stack(norms).square().sum() if norms else self.fp32_groups_gradients_flat[0].new_zeros(())
        if comm.get_world_size(group=self.dp_process_group) > 1:
            comm.all_reduce(square, group=self.dp_process_group)
        return [square.sqrt()], {}

    @cached_property
    def _counted_sums(self) -> list[torch.Tensor]:
        """This rank's ranges of parameters that no other model-parallel rank counts."""
        rank = bwc_tensor_model_parallel_rank(mpu=self.mpu)
        counted = []
        for parameters, own in zip(self.bf16_groups, self.fp32_groups_gradient_flat_partition, strict=True):
            for parameter in parameters:
                mapping = parameter._hp_mapping
                if mapping is None or not _is_counted(parameter, rank):
                    continue
                address = mapping.get_hp_fragment_address()
                counted.append(own.narrow(0, address.start, address.numel))
        return counted

    @torch.no_grad()
    def update_lp_params(self) -> None:
        """Copy the fp32 weights into the bf16 ones of all ranks."""
        if comm.get_world_size(group=self.dp_process_group) > 1:
            super().update_lp_params()
            return
        for weights, masters in zip(self.bf16_groups_flat, self.fp32_groups_flat_partition, strict=True):
            weights.copy_(masters)


def _add_on_cpu(total: torch.Tensor, first: torch.Tensor | None, gradient: torch.Tensor) -> None:
    """Add a bf16 gradient to its fp32 sum, or write the sum of the first two gradients, in one pass over memory."""
    from ctxlm_ds.kernels.cpu_loops import array_of, in_threads, sum_loop

    sums, addend = array_of(total), array_of(gradient)
    start = sums if first is None else array_of(first)
    in_threads(len(sums), len(sums), lambda begin, end: sum_loop(sums, start, addend, begin, end))


@contextmanager
def used_by_deepspeed(settings: Mapping[str, Any]) -> Iterator[None]:
    """Make engines that are built inside use Bf16Optimizer, with DeepSpeed's `settings`, and ZeroOptimizer.

    The memory reports of BF16_Optimizer, each after a collection of garbage (0.2 s), are left out.
    """
    # The pipeline's engine compares the type itself.
    configured = type("Bf16Optimizer", (Bf16Optimizer,), {"settings": settings})
    with (
        replaced(engine, "BF16_Optimizer", configured),
        replaced(pipeline_engine, "BF16_Optimizer", configured),
        replaced(engine, "DeepSpeedZeroOptimizer", ZeroOptimizer),
        replaced(bf16_optimizer, "see_memory_usage", lambda *_, **__: None),
    ):
        yield
