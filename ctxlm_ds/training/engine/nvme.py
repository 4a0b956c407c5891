"""Access to fp32 weights and moments that ZeRO-3 keeps on NVMe (offload_optimizer.device nvme) between updates.

DeepSpeed writes each tensor of a sub-group to a file of fp32 numbers, bypassing the page cache, and empties it. Here
fragments are mapped from the file, or DeepSpeed loads a complete sub-group. Sub-groups below 1 MiB per rank stay in
memory. Attribute names are those of DeepSpeed 0.19 (runtime/swap_tensor/optimizer_utils.py).
"""

from __future__ import annotations

import atexit
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ctxlm_ds.errors import ConfigError

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
