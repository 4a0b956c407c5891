"""Where each parameter's fp32 weight and moments lie on this rank, under every ZeRO stage.

In: DeepSpeed's optimizer wrapper (stage 1/2, bf16, stage 3) or the plain optimizer (stage 0).
Out: one list of fragments, each a flat range of one parameter, as views that may be read and written.
Saving, loading, initialisation and LAMB's trust ratios all go through this list, so none of them knows
the stage. The attribute names are those of DeepSpeed 0.19 (`link_hp_params`, `grad_position`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ctxlm_ds.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Fragment:
    """A contiguous piece of one parameter's row-major elements, held by this rank."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    start: int
    """First element of the piece within the flattened parameter."""
    length: int
    """Elements in the piece."""
    owner: torch.Tensor
    """The tensor that the inner optimizer steps (fp32)."""
    offset: int
    """First element of the piece within the flattened owner."""
    replicated: bool
    """True where every data-parallel rank holds this same piece (stage 0)."""

    def weight(self) -> torch.Tensor:
        """View of the fp32 weights, [length]."""
        return self.owner.detach().view(-1).narrow(0, self.offset, self.length)

    def moment(self, state: Mapping[str, Any], kind: str) -> torch.Tensor:
        """View of one optimizer moment, [length]; `state` is the optimizer's state of the owner."""
        return state[kind].view(-1).narrow(0, self.offset, self.length)


def list_fragments(zero_optimizer: Any, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> list[Fragment]:
    """Every fragment of this rank, in the order of the parameters.

    Raises:
        ConfigError: the optimizer's states are swapped to NVMe and cannot be viewed, or a part of them belongs to
            DeepSpeed's second optimizer.
    """
    if getattr(zero_optimizer, "partial_offload", 1.0) != 1.0:
        raise ConfigError(
            f"zero_optimization.offload_optimizer.ratio is {zero_optimizer.partial_offload}, where DeepSpeed steps the "
            "rest with an optimizer of its own that neither the schedule nor a checkpoint reaches; set it to 1.0"
        )
    fragments: list[Fragment] = []
    for name, parameter in named_parameters:
        if hasattr(parameter, "ds_id"):
            fragment = _stage3_fragment(zero_optimizer, name, parameter)
        elif hasattr(parameter, "_hp_mapping"):
            fragment = _flat_partition_fragment(zero_optimizer, name, parameter)
        else:
            fragment = Fragment(name, tuple(parameter.shape), 0, parameter.numel(), parameter, 0, replicated=True)
        if fragment is not None:
            fragments.append(fragment)
    return fragments


def _flat_partition_fragment(zero_optimizer: Any, name: str, parameter: torch.nn.Parameter) -> Fragment | None:
    """Stages 1 and 2: this rank's flat fp32 partition holds a range of some parameters and none of others."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    partitions = getattr(zero_optimizer, "single_partition_of_fp32_groups", None)
    if partitions is None:
        partitions = zero_optimizer.fp32_groups_flat_partition
    lp, hp = mapping.lp_fragment_address, mapping.hp_fragment_address
    owner = partitions[mapping.param_group_index]
    return Fragment(name, tuple(parameter.shape), lp.start, lp.numel, owner, hp.start, replicated=False)


def _stage3_fragment(zero_optimizer: Any, name: str, parameter: Any) -> Fragment | None:
    """Stage 3: each parameter is cut into equal pieces, the last one padded."""
    group_index, offset, padded_length = zero_optimizer.grad_position[zero_optimizer.get_param_id(parameter)]
    if zero_optimizer._swappable_optimizer_subgroup(group_index):
        raise ConfigError(
            "zero_optimization.offload_optimizer.device is nvme, whose optimizer states cannot be saved by this "
            "version; use device cpu"
        )
    start = zero_optimizer._get_param_partition_rank(parameter) * padded_length
    length = min(padded_length, parameter.ds_numel - start)
    if length <= 0:
        return None
    owner = zero_optimizer.fp32_partitioned_groups_flat[group_index]
    return Fragment(name, tuple(parameter.ds_shape), start, length, owner, int(offset), replicated=False)


def refresh_model_weights(zero_optimizer: Any) -> None:
    """Copy the fp32 weights into the parameters the model computes with, on every rank together."""
    if hasattr(zero_optimizer, "fp32_partitioned_groups_flat"):
        # Small parameters stay gathered between steps; what is not released would not be gathered anew.
        zero_optimizer._partition_all_parameters()
        for index in range(len(zero_optimizer.fp16_groups)):
            zero_optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if zero_optimizer.persistent_parameters:
            zero_optimizer.persistent_parameters[0].all_gather(zero_optimizer.persistent_parameters)
    elif hasattr(zero_optimizer, "update_lp_params"):
        with torch.no_grad():
            zero_optimizer.update_lp_params()
