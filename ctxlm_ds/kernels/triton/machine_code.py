"""Compile the kernels of recorded launches for a GPU that is not there, and read facts from their machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import triton
import triton.backends.nvidia
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ctxlm_ds.kernels.triton.launch import Launch

TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"
WARP = 32
ALIGNMENT = 16
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32",
    torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip


@dataclass(frozen=True)
class MachineCode:
    """The code of one kernel for one compute capability."""

    name: str
    capability: int
    """Such as 90."""
    registers: int
    """Of a thread, at most 255."""
    shared_bytes: int
    """Of a block."""
    cubin: bytes

    @cached_property
    def instructions(self) -> Counter[str]:
        """Count the instructions by their complete names, such as LDG.E.128."""
        lines = _ask("-sass", self.cubin).splitlines()
        matches = (re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", line) for line in lines)
        return Counter(match[1] for match in matches if match)

    @property
    def spills(self) -> int:
        """Count the instructions that move registers to the thread's memory and back."""
        return self.count("LDL", "STL")

    def count(self, *beginnings: str) -> int:
        """Count the instructions with these beginnings of a name."""
        return sum(count for name, count in self.instructions.items() if name.startswith(beginnings))


def compiled(launch: Launch, capability: int) -> MachineCode:
    """Compile a launch's kernel for a compute capability such as 90 (no device is needed; seconds, then cached).

    Raises:
        triton.CompilationError, triton.runtime.errors.PTXASError: the kernel does not compile.
    """
    source = _source(launch)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, WARP), options=options)
    cubin = kernel.asm["cubin"]
    registers = re.search(r"REG:(\d+)", _ask("-res-usage", cubin))
    assert registers is not None, "cuobjdump names the registers"
    return MachineCode(launch.kernel.__name__, capability, int(registers[1]), kernel.metadata.shared, cubin)


def signature_of(launch: Launch) -> str:
    """Return a text that launches of the same machine code share."""
    return f"{launch.num_warps} {_source(launch).hash()}"


def _source(launch: Launch) -> ASTSource:
    """Describe the arguments as Triton's own launcher does, with pointers to aligned memory."""
    signature, constants, attributes = {}, {}, {}
    for number, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        kind = "constexpr" if parameter.is_constexpr else _kind(value)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(number,)] = value
        elif not parameter.do_not_specialize and _is_aligned(value, parameter.do_not_specialize_on_alignment):
            attributes[(number,)] = [["tt.divisibility", ALIGNMENT]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    if value is None or (isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_aligned(value: Any, except_pointers: bool) -> bool:
    if isinstance(value, Tensor):
        return not except_pointers
    return isinstance(value, int) and value % ALIGNMENT == 0


def _ask(option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = TOOLS / "cuobjdump", option, file.name
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
