"""What the compiler makes of each kernel for GPUs that are not here: spills, wide accesses, integer products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ctxlm_ds.kernels.attention_spec import AttentionCall, AttentionSpec, ProbabilityKeys, Sequences
from ctxlm_ds.kernels.norm import Drop
from ctxlm_ds.kernels.triton.launch import Launch, recorded
from ctxlm_ds.kernels.triton.machine_code import MachineCode, compiled

pytestmark = pytest.mark.long
CAPABILITIES = (75, 80, 86, 89, 90, 100)
Launches = Callable[[torch.dtype], list[Launch]]
KEY = torch.empty((), dtype=torch.int64, device="meta")


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def codes(launches: Launches) -> list[MachineCode]:
    """Compile for each capability, in fp16 where there is no bf16."""
    of_type = {dtype: launches(dtype) for dtype in (torch.float16, torch.bfloat16)}
    return [compiled(one, to) for to in CAPABILITIES for one in of_type[torch.float16 if to < 80 else torch.bfloat16]]


def dropout_launches(dtype: torch.dtype) -> list[Launch]:
    from ctxlm_ds.kernels.triton.dropout import keyed_dropout as triton_dropout

    with recorded() as launches:
        triton_dropout(empty(32, 512, 1024, dtype=dtype), 0.1, KEY)
    return launches


def cross_entropy_launches(dtype: torch.dtype) -> list[Launch]:
    from ctxlm_ds.kernels.triton.cross_entropy import KERNEL

    logits = empty(512, 30592, dtype=dtype)
    labels, numbers = empty(512, dtype=torch.int64), empty(512, dtype=torch.float32)
    with recorded() as launches:
        KERNEL.statistics(logits, labels)
        KERNEL.gradient(logits, labels, numbers, numbers)
    return launches


def norm_launches(dtype: torch.dtype, width: int = 1024, layer: bool = True) -> list[Launch]:
    """LayerNorm as after a part of a layer, RMSNorm as before one: the sum has a gradient as well."""
    from ctxlm_ds.kernels.triton.norm import triton_add_norm

    parameters = [empty(width, dtype=dtype).requires_grad_() for _ in range(1 + layer)]
    x, residual = (empty(32, 512, width, dtype=dtype).requires_grad_() for _ in range(2))
    with recorded() as launches:
        results = triton_add_norm(x, residual, tuple(parameters), 1e-5, Drop(0.1, KEY))[layer:]
        torch.autograd.backward(results, [torch.empty_like(result) for result in results])
    return launches


def gated_launches(dtype: torch.dtype) -> list[Launch]:
    from ctxlm_ds.kernels.triton.activation import triton_gated

    x = empty(32, 512, 2 * 2624, dtype=dtype).requires_grad_()
    with recorded() as launches:
        triton_gated(x, "gelu").sum().backward()
    return launches


def rotary_launches(dtype: torch.dtype) -> list[Launch]:
    from ctxlm_ds.kernels.rotary import Angles
    from ctxlm_ds.kernels.triton.rotary import triton_rotary

    table, rows = empty(1024, 64, dtype=torch.float32), empty(32, 512, dtype=torch.int64)
    with recorded() as launches:
        triton_rotary(empty(32, 512, 20, 64, dtype=dtype), (12, 4, 4), Angles(table, rows))
    return launches


@pytest.mark.parametrize("launches", [gated_launches, rotary_launches])
def test_eight_neighbours_of_a_thread_move_at_once(launches: Launches) -> None:
    """A gate and a value, or the two elements of a pair, 16 bytes of each; a mask of whole rows keeps that width."""
    accesses = {"gated_kernel": (2, 1), "gated_gradient_kernel": (3, 2), "rotary_kernel": (2, 2)}
    for code in codes(launches):
        assert code.spills == 0 and code.registers <= 64, code
        assert (code.count("LDG.E.128"), code.count("STG.E.128")) == accesses[code.name], code.instructions
        assert code.count("STG") == code.count("STG.E.128"), code.instructions


def attention_launches(head_size: int, dtype: torch.dtype = torch.bfloat16, length: int = 512) -> list[Launch]:
    """T5's encoder with shared rows and dropout of probabilities."""
    from ctxlm_ds.kernels.triton.attention import TritonAttention

    heads = empty(32, length, 36, head_size, dtype=dtype).requires_grad_().split(12, 2)
    bias = empty(12, length, length, dtype=dtype).requires_grad_()
    ids, starts = empty(32, length, dtype=torch.int64), empty(32, 9, dtype=torch.int64)
    call = AttentionCall(Sequences(ids, starts), 0.1, bias, ProbabilityKeys(KEY, 12, 48))
    with recorded() as launches:
        TritonAttention(AttentionSpec(head_size, shares_rows=True, bias=True))(*heads, call).sum().backward()
    return launches


@pytest.mark.parametrize("launches", [dropout_launches, cross_entropy_launches])
def test_complete_blocks_move_16_bytes_at_once_and_nothing_spills(launches: Launches) -> None:
    for code in codes(launches):
        values = 4  # 2,048 elements of 128 threads, or 4,096 of 256
        assert code.spills == 0 and code.registers <= 64, code
        assert code.count("LDG.E.128") == values, code.instructions
        assert code.count("STG.E.128") == (0 if "statistics" in code.name else values), code.instructions


def test_rows_of_a_norm_move_16_bytes_at_once_and_nothing_spills() -> None:
    for code in codes(norm_launches):
        assert code.spills == 0 and code.registers <= (80 if "gradient" in code.name else 48), code
        # A thread has 8 elements, those of x, residual, weight and bias, or of the gradient, z and weight.
        assert code.count("LDG.E.128") == (3 if "gradient" in code.name else 4), code.instructions
        assert code.count("STG.E.128") >= 2 and not code.count("LDG.E.U", "STG.E.U"), code.instructions
        assert code.count("IMAD.WIDE", "IMAD.HI", "UIMAD.WIDE") <= 2 * 3 + 9, code.instructions


@pytest.mark.parametrize(("capability", "width", "layer"), [(90, 4096, False), (90, 8192, True), (100, 8192, True)])
def test_wide_norms_do_not_spill(capability: int, width: int, layer: bool) -> None:
    for launch in norm_launches(torch.bfloat16, width, layer):
        assert launch.num_warps == 16
        code = compiled(launch, capability)
        assert code.spills == 0 and not code.count("LDG.E.U", "STG.E.U"), code


SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227}


def of_devices(chosen: list[tuple[int, int]], others: list[tuple[int, int]]) -> pytest.MarkDecorator:
    """Head sizes and compute capabilities; `make soak` takes the others, too."""
    soaked = [pytest.param(*values, marks=pytest.mark.soak) for values in others]
    return pytest.mark.parametrize(("head_size", "capability"), [*chosen, *soaked])


@of_devices([(64, 80), (128, 90)], [(64, 89), (64, 90), (64, 100), (128, 86), (128, 100)])
def test_tiles_of_attention_fit_the_device(head_size: int, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers hold all of a tile, rows of a bias are read by 16 bytes, and a hash serves four probabilities."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: divmod(capability, 10))
    launches = attention_launches(head_size)
    assert len(launches) == 4
    for launch in launches:
        code, threads = compiled(launch, capability), 32 * launch.num_warps
        words = launch.arguments["M"] * launch.arguments["N"] / threads / 4
        assert code.spills == 0 and code.shared_bytes <= SHARED_KIB[capability] << 10, code
        assert not code.count("LDG.E.U", "LDGSTS.E.U", "STG.E.U"), code.instructions
        assert code.count("IMAD.WIDE", "IMAD.HI", "UIMAD.WIDE") <= words * 2 * 3 + 50, code.instructions


@of_devices([(128, 90)], [(64, 80)])
def test_tiles_of_attention_hold_lengths_that_are_not_multiples_of_16(
    head_size: int, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: divmod(capability, 10))
    for launch in attention_launches(head_size, length=114):
        code = compiled(launch, capability)
        assert code.spills == 0 and code.shared_bytes <= SHARED_KIB[capability] << 10, code


@of_devices([(128, 86)], [(64, 80), (128, 90)])
def test_tiles_of_attention_in_fp32(head_size: int, capability: int) -> None:
    for launch in attention_launches(head_size, torch.float32):
        code = compiled(launch, capability)
        spilling = code.name == "context_kernel" and capability < 90
        assert code.spills <= (9 if spilling else 0) and code.shared_bytes <= SHARED_KIB[86] << 10, code


def test_neighbours_share_one_hash() -> None:
    """Each hash of 64 bits takes three products of three instructions; a thread has 16 elements in four words."""
    for code in codes(dropout_launches):
        assert code.count("IMAD.WIDE", "IMAD.HI", "UIMAD.WIDE") <= 4 * 3 + 2, code.instructions


def test_the_statistics_take_little_more_than_one_exponential_a_logit() -> None:
    statistics = cross_entropy_launches(torch.bfloat16)[0]
    for capability in (80, 90, 100):
        # Of 16 logits a thread has, in the loop and once more after it; two for each group of 8, some at the end.
        assert compiled(statistics, capability).count("MUFU.EX2") <= 2 * (16 + 2) + 4
