"""Copies of a rank's states in CPU memory, which is kept from one save to the next.

In: tensors on any device. Out: fp32 copies that stay as they are while training goes on. On CUDA the memory is
page-locked and the copies run on a stream of their own; `wait_on_device` must come before the states change.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch

from ctxlm_ds.errors import CheckpointError

ELEMENT_BYTES = 4
PORTABLE = 1
"""cudaHostRegisterPortable"""


class HostCopies:
    """One flat buffer of CPU memory.

    Args:
        num_elements: fp32 numbers that it holds.
        devices: that the states are on, perhaps the CPU among them.

    Raises:
        CheckpointError: the memory cannot be had.
    """

    def __init__(self, num_elements: int, devices: Iterable[torch.device]) -> None:
        try:
            memory = mmap.mmap(-1, max(1, num_elements) * ELEMENT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"no memory for copies of {num_elements * ELEMENT_BYTES / 1e9:.1f} GB ({error})"
            ) from error
        # A forked data worker would make each page that is written to a second one.
        with contextlib.suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_DONTFORK)
        self._flat = torch.frombuffer(memory, dtype=torch.float32, count=max(1, num_elements))
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._device = next((device for device in devices if device.type == "cuda"), None)
        if self._device is not None:
            self._stream = torch.cuda.Stream(self._device)
            _page_lock(self._flat, self._device)

    def take(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of 1-D tensors, together at most `num_elements` long; what the buffer held before is gone.

        On CUDA they are complete once `wait` returns.
        """
        copies = []
        place = 0
        with self._beside_the_computation():
            for source in sources:
                copy = self._flat.narrow(0, place, source.numel())
                copy.copy_(source.detach(), non_blocking=True)
                copies.append(copy)
                place += source.numel()
        return copies

    @contextlib.contextmanager
    def _beside_the_computation(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)

    def wait(self) -> None:
        """Until the copies are complete; from any thread."""
        if self._copied is not None:
            self._copied.synchronize()

    def wait_on_device(self) -> None:
        """Have what the device is given from now on come after the copies."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)


def _page_lock(memory: torch.Tensor, device: torch.device) -> None:
    """Let the device copy into CPU memory by itself; where that is refused, copies are slower and waited for."""
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE)) == 0:
        weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
        return
    # The next launch of a kernel would take the refusal for its own failure.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
