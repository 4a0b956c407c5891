"""Where each parameter's fp32 weight and moments lie on this rank, under every ZeRO stage.

In: DeepSpeed's optimizer wrapper (stage 1/2, bf16, stage 3) or the plain optimizer (stage 0), and which shard of each
parameter this rank holds. Out: one list of fragments, each a flat range of a shard, as views that may be read and
written. Rows that pad the vocabulary belong to no fragment.
Saving, loading, initialisation and LAMB's trust ratios all go through this list, so none of them knows
the stage. The attribute names are those of DeepSpeed 0.19 (`link_hp_params`, `grad_position`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.parallel.shards import Shard
from ctxlm_ds.training import nvme


@dataclass(frozen=True, slots=True)
class Holding:
    """What this rank's model holds of one parameter."""

    shard: Shard
    tensor_duplicate: bool = False
    """True where the first tensor-parallel rank holds the same and speaks for it."""
    stage_duplicate: bool = False
    """True where an earlier pipeline stage holds the same (a tied weight) and speaks for it."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A contiguous piece of a parameter's shard in its local order, held by this rank."""

    name: str
    start: int
    """First element of the piece within the shard's local order."""
    length: int
    """Elements in the piece; 0 where only padding lies in its range."""
    owner: torch.Tensor
    """The tensor that the inner optimizer steps (fp32)."""
    offset: int
    """First element of the piece within the flattened owner."""
    replicated: bool
    """True where every data-parallel rank holds this same piece (stage 0)."""
    holding: Holding

    @property
    def shard(self) -> Shard:
        """The part of the parameter that the piece is cut from."""
        return self.holding.shard

    @property
    def duplicate(self) -> bool:
        """Whether another rank of the same data-parallel rank holds this same piece and speaks for it."""
        return self.holding.tensor_duplicate or self.holding.stage_duplicate

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.shard.shape

    def weight(self) -> torch.Tensor:
        """View of the fp32 weights, [length]."""
        return nvme.view(self.owner, self.owner, self.offset, self.length)

    def moment(self, state: Mapping[str, Any], kind: str) -> torch.Tensor:
        """View of one optimizer moment, [length]; `state` is the optimizer's state of the owner."""
        return nvme.view(self.owner, state[kind], self.offset, self.length)


def list_fragments(
    zero_optimizer: Any, named_parameters: Iterable[tuple[str, torch.nn.Parameter]], holdings: Mapping[str, Holding]
) -> list[Fragment]:
    """Every fragment of this rank, in the order of the parameters.

    Raises:
        ConfigError: a part of the optimizer's states belongs to DeepSpeed's second optimizer.
    """
    if getattr(zero_optimizer, "partial_offload", 1.0) != 1.0:
        raise ConfigError(
            f"zero_optimization.offload_optimizer.ratio is {zero_optimizer.partial_offload}, where DeepSpeed steps the "
            "rest with an optimizer of its own that neither the schedule nor a checkpoint reaches; set it to 1.0"
        )
    fragments: list[Fragment] = []
    for name, parameter in named_parameters:
        place = _place(zero_optimizer, parameter)
        if place is not None:
            fragments.append(_fragment(name, holdings[name], place))
    return fragments


class _Place(NamedTuple):
    """Elements start..start+length of the local parameter lie at owner[offset..]."""

    start: int
    length: int
    owner: torch.Tensor
    offset: int
    replicated: bool


def _fragment(name: str, holding: Holding, place: _Place) -> Fragment:
    """The place without the rows of padding, which come after the shard's own elements."""
    start = min(place.start, holding.shard.num_elements)
    length = min(place.start + place.length, holding.shard.num_elements) - start
    return Fragment(name, start, length, place.owner, place.offset, place.replicated, holding)


def _place(zero_optimizer: Any, parameter: torch.nn.Parameter) -> _Place | None:
    if hasattr(parameter, "ds_id"):
        return _stage3_place(zero_optimizer, parameter)
    if hasattr(parameter, "_hp_mapping"):
        return _flat_partition_place(zero_optimizer, parameter)
    return _Place(0, parameter.numel(), parameter, 0, replicated=True)


def _flat_partition_place(zero_optimizer: Any, parameter: torch.nn.Parameter) -> _Place | None:
    """Stages 1 and 2: this rank's flat fp32 partition holds a range of some parameters and none of others."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    partitions = getattr(zero_optimizer, "single_partition_of_fp32_groups", None)
    if partitions is None:
        partitions = zero_optimizer.fp32_groups_flat_partition
    lp, hp = mapping.lp_fragment_address, mapping.hp_fragment_address
    return _Place(lp.start, lp.numel, partitions[mapping.param_group_index], hp.start, replicated=False)


def _stage3_place(zero_optimizer: Any, parameter: Any) -> _Place | None:
    """Stage 3: each parameter is cut into equal pieces, the last one padded."""
    group_index, offset, padded_length = zero_optimizer.grad_position[zero_optimizer.get_param_id(parameter)]
    start = zero_optimizer._get_param_partition_rank(parameter) * padded_length
    length = min(padded_length, parameter.ds_numel - start)
    if length <= 0:
        return None
    owner = nvme.mark_if_swapped(zero_optimizer, group_index)
    return _Place(start, length, owner, int(offset), replicated=False)


def refresh_model_weights(zero_optimizer: Any) -> None:
    """Copy the fp32 weights into the parameters the model computes with, on every rank together."""
    if hasattr(zero_optimizer, "fp32_partitioned_groups_flat"):
        nvme.flush(zero_optimizer)
        # Small parameters stay gathered between steps; what is not released would not be gathered anew.
        zero_optimizer._partition_all_parameters()
        for index in range(len(zero_optimizer.fp16_groups)):
            with nvme.in_memory(zero_optimizer, index):
                zero_optimizer._reassign_or_swap_out_partitioned_parameters(index)
        # hpZ's second copy of the weights is as old as they were.
        zero_optimizer.invalidate_secondary_tensor()
        if zero_optimizer.persistent_parameters:
            zero_optimizer.persistent_parameters[0].all_gather(zero_optimizer.persistent_parameters)
    elif hasattr(zero_optimizer, "update_lp_params"):
        with torch.no_grad():
            zero_optimizer.update_lp_params()
