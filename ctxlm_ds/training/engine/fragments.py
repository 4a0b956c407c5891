"""Fragments: the flat ranges of each parameter whose fp32 weight and moments this rank holds, under every ZeRO stage.

Saving, loading, initialisation, LAMB and Muon use this list, so none of them depends on the stage. Rows that pad the
vocabulary belong to no fragment. Attribute names are those of DeepSpeed 0.19 (`link_hp_params`, `grad_position`,
runtime/swap_tensor/optimizer_utils.py).

With offload_optimizer.device nvme, ZeRO-3 writes each tensor of a sub-group to a file of fp32 numbers, bypassing the
page cache, and empties it. Fragments are mapped from the file, or DeepSpeed loads a complete sub-group. Sub-groups
below 1 MiB per rank stay in memory.
"""

from __future__ import annotations

import atexit
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.parallel.placement import Shard

FLAT_TENSORS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
"""Of stage 3, of stages 1 and 2, and of the BF16_Optimizer."""


@dataclass(frozen=True, slots=True)
class Holding:
    """This rank's shard of one parameter."""

    shard: Shard
    tensor_duplicate: bool = False
    """True if the first tensor-parallel rank holds the same and reports it."""
    stage_duplicate: bool = False
    """True if an earlier pipeline stage holds the same (a tied weight) and reports it."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A contiguous range of a parameter's shard, in its local order, held by this rank."""

    name: str
    start: int
    """First element within the shard's local order."""
    length: int
    """Number of elements; 0 if the range is only padding."""
    owner: torch.Tensor
    """The fp32 tensor that the inner optimizer steps."""
    offset: int
    """First element within the flattened owner."""
    replicated: bool
    """True if every data-parallel rank holds the same range (stage 0)."""
    holding: Holding

    @property
    def shard(self) -> Shard:
        return self.holding.shard

    @property
    def duplicate(self) -> bool:
        """Return whether another rank of the same model holds the same range and reports it."""
        return self.holding.tensor_duplicate or self.holding.stage_duplicate

    def weight(self) -> torch.Tensor:
        """Return a view of the fp32 weights, [length]."""
        return view(self.owner, self.owner, self.offset, self.length)

    def moment(self, state: Mapping[str, Any], kind: str) -> torch.Tensor:
        """Return a view of one moment, [length]; `state` is the optimizer's state of the owner."""
        return view(self.owner, state[kind], self.offset, self.length)


def list_fragments(
    zero_optimizer: Any, named_parameters: Iterable[tuple[str, torch.nn.Parameter]], holdings: Mapping[str, Holding]
) -> list[Fragment]:
    """List the fragments of this rank in the order of the parameters.

    Raises ConfigError if a part of the optimizer's states belongs to DeepSpeed's second optimizer.
    """
    if getattr(zero_optimizer, "partial_offload", 1.0) != 1.0:
        raise ConfigError(
            f"zero_optimization.offload_optimizer.ratio is {zero_optimizer.partial_offload}: DeepSpeed then steps "
            "the rest with a second optimizer that neither the schedule nor a checkpoint reaches; set it to 1.0"
        )
    found = (_find(zero_optimizer, name, parameter, holdings[name]) for name, parameter in named_parameters)
    return [fragment for fragment in found if fragment is not None]


def flat_tensors(zero_optimizer: Any) -> list[torch.Tensor]:
    """Return the flat tensors that the inner optimizer steps, one for each group (stage 3: sub-group); none in stage 0.

    They are as many on every rank, and hold parts of the same parameters.
    """
    found = (getattr(zero_optimizer, name, None) for name in FLAT_TENSORS)
    return next((list(tensors) for tensors in found if tensors is not None), [])


def _find(zero_optimizer: Any, name: str, parameter: Any, holding: Holding) -> Fragment | None:
    """Find this rank's range of a parameter in the optimizer's tensors; None if it has none."""
    if hasattr(parameter, "ds_id"):
        # Stage 3 cuts each parameter into equal ranges, the last one padded.
        group_index, offset, padded_length = zero_optimizer.grad_position[zero_optimizer.get_param_id(parameter)]
        start = zero_optimizer._get_param_partition_rank(parameter) * padded_length
        length = min(padded_length, parameter.ds_numel - start)
        if length <= 0:
            return None
        owner = mark_if_swapped(zero_optimizer, group_index)
        return _fragment(name, holding, start, length, owner, int(offset))
    if not hasattr(parameter, "_hp_mapping"):
        return _fragment(name, holding, 0, parameter.numel(), parameter, 0, replicated=True)
    # Under stages 1 and 2 a rank's flat fp32 partition holds ranges of some parameters.
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    owner = flat_tensors(zero_optimizer)[mapping.param_group_index]
    lp, hp = mapping.lp_fragment_address, mapping.hp_fragment_address
    return _fragment(name, holding, lp.start, lp.numel, owner, hp.start)


def _fragment(
    name: str, holding: Holding, start: int, length: int, owner: torch.Tensor, offset: int, replicated: bool = False
) -> Fragment:
    """Return elements start to start + length without padding rows, which come after the shard's elements."""
    first, end = (min(place, holding.shard.num_elements) for place in (start, start + length))
    return Fragment(name, first, end - first, owner, offset, replicated, holding)


def refresh_model_weights(zero_optimizer: Any) -> None:
    """Copy the fp32 weights into the model's parameters; all ranks call it."""
    if hasattr(zero_optimizer, "fp32_partitioned_groups_flat"):
        flush(zero_optimizer)
        # Small parameters stay gathered between steps; unless released they would not be gathered again.
        zero_optimizer._partition_all_parameters()
        for index in range(len(zero_optimizer.fp16_groups)):
            with in_memory(zero_optimizer, index):
                zero_optimizer._reassign_or_swap_out_partitioned_parameters(index)
        # hpZ's second copy of the weights is out of date.
        zero_optimizer.invalidate_secondary_tensor()
        if zero_optimizer.persistent_parameters:
            zero_optimizer.persistent_parameters[0].all_gather(zero_optimizer.persistent_parameters)
    elif hasattr(zero_optimizer, "update_lp_params"):
        with torch.no_grad():
            zero_optimizer.update_lp_params()


SWAP_FILE_SUFFIX = ".tensor.swp"
ATTRIBUTE = "ctxlm_swapped_to"
"""Of the owner of a sub-group that is not in memory: its folder, and the elements of the weights and each moment."""


def prepare_folders(paths: Mapping[str, str]) -> bool:
    """Make the run's folders (ZeroSettings.nvme_paths) until this process ends; return whether anything is swapped.

    Raises ConfigError if the disk is not mounted or not writable.
    """
    folders = {name: Path(path) for name, path in paths.items()}
    for name, folder in folders.items():
        where = f"zero_optimization.{name}.nvme_path {folder.parent}"
        if not folder.parent.is_dir():
            raise ConfigError(
                f"{where}: no such folder on this host; mount the disk there, or name another one (in "
                "ds_configs/infinity.json: export NVME_PATH=FOLDER)"
            )
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{where}: {error.strerror}; name a folder that you may write to") from error
    if folders:
        atexit.register(_remove_own_files, set(folders.values()))
    return bool(folders)


def _remove_own_files(folders: set[Path]) -> None:
    """Remove this rank's files, and the run's folder if no other rank has files in it."""
    rank = os.environ.get("RANK", "0")
    for folder in folders:
        for own in folder.glob(f"zero_stage_3/*/rank{rank}"):
            shutil.rmtree(own, ignore_errors=True)
        for path in [*folder.glob("zero_stage_3/*"), folder / "zero_stage_3", folder]:
            try:
                path.rmdir()
            except OSError:
                break


def is_swapped(zero_optimizer: Any, group_index: int) -> bool:
    """Return whether a sub-group is on disk between updates."""
    return bool(zero_optimizer._swappable_optimizer_subgroup(group_index))


def mark_if_swapped(zero_optimizer: Any, group_index: int) -> torch.Tensor:
    """Return a sub-group's owner tensor, with the file location attached if it is swapped."""
    owner: torch.Tensor = zero_optimizer.fp32_partitioned_groups_flat[group_index]
    if is_swapped(zero_optimizer, group_index) and not hasattr(owner, ATTRIBUTE):
        folder = Path(zero_optimizer.optimizer_swapper.swap_folder)
        num_elements = int(zero_optimizer.fp16_partitioned_groups_flat_numel[group_index])
        setattr(owner, ATTRIBUTE, (folder, num_elements))
    return owner


def view(owner: torch.Tensor, tensor: torch.Tensor, offset: int, length: int) -> torch.Tensor:
    """Return a view of an owner or one of its moments, in memory or in the file; `flush` makes writes visible."""
    folder, num_elements = getattr(owner, ATTRIBUTE, (None, tensor.numel()))
    if folder is None or tensor.numel() == num_elements:
        return tensor.detach().view(-1).narrow(0, offset, length)
    path = folder / f"{tensor.ds_id}{SWAP_FILE_SUFFIX}"
    mapped = torch.from_file(str(path), shared=True, size=num_elements, dtype=torch.float32)
    return mapped.narrow(0, offset, length)


def is_moment(owner: torch.Tensor, value: Any) -> bool:
    """Return whether an entry of the owner's optimizer state has one number per element."""
    if not torch.is_tensor(value):
        return False
    if hasattr(owner, ATTRIBUTE):
        # DeepSpeed gives an id to the tensors that it swaps.
        return hasattr(value, "ds_id")
    return value.numel() == owner.numel() > 1


def flush(zero_optimizer: Any) -> None:
    """Write changes made through views to the disk, where DeepSpeed reads them past the page cache."""
    swapper = getattr(zero_optimizer, "optimizer_swapper", None)
    if swapper is None:
        return
    for path in Path(swapper.swap_folder).glob(f"*{SWAP_FILE_SUFFIX}"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


@contextmanager
def in_memory(zero_optimizer: Any, group_index: int) -> Iterator[None]:
    """Load a swapped sub-group through DeepSpeed and write it back at the end."""
    swapped = is_swapped(zero_optimizer, group_index)
    if swapped:
        zero_optimizer._optimizer_states_and_gradient_swap_in(group_index)
    yield
    if swapped:
        zero_optimizer._optimizer_states_and_gradient_swap_out(group_index)


def loaded_owners(zero_optimizer: Any, owners: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield each owner in memory without moments; moments that the caller adds are written to NVMe."""
    flush(zero_optimizer)
    sub_groups = getattr(zero_optimizer, "fp32_partitioned_groups_flat", ())
    groups = {id(owner): index for index, owner in enumerate(sub_groups)}
    for owner in owners:
        if not hasattr(owner, ATTRIBUTE):
            yield owner
            continue
        info = zero_optimizer.optimizer_swapper.swap_params_info[owner.ds_id]
        info.tensors, info.has_state_tensors = info.tensors[:1], False
        with in_memory(zero_optimizer, groups[id(owner)]):
            yield owner
