"""Test the compiled CPU loops: dropout in every data type, several threads, and a forked process."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from ctxlm_ds.kernels import cpu_loops
from ctxlm_ds.kernels.cpu_loops import array_of, in_threads, sum_loop
from ctxlm_ds.kernels.dropout import loop_dropout


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_parts_cover_everything_once(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(cpu_loops, "SMALLEST_PART", 10)
    for count, most in ((1, 1), (7, 1), (25, 2), (1000, threads)):
        done: list[tuple[int, int]] = []
        in_threads(count, count, lambda *part, done=done: done.append(part))
        assert [number for part in sorted(done) for number in range(*part)] == list(range(count))
        assert len(done) <= max(1, min(threads, most))


def test_calls_of_other_sizes_keep_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    monkeypatch.setattr(cpu_loops, "SMALLEST_PART", 10)
    cpu_loops._pool.cache_clear()
    for count in (20, 30, 40, 50, 20):
        in_threads(count, count, lambda *part: None)
    assert cpu_loops._pool.cache_info().misses == 1


def test_an_error_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def fail(begin: int, end: int) -> None:
        if begin:
            raise RuntimeError("in a thread")

    with pytest.raises(RuntimeError, match="in a thread"):
        in_threads(2, 1 << 20, fail)


def _drop_in_child(queue: multiprocessing.Queue[float]) -> None:
    torch.set_num_threads(2)
    queue.put(loop_dropout(torch.ones(1 << 18), 0.1, torch.tensor(3)).sum().item())


def test_threads_after_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    expected = loop_dropout(torch.ones(1 << 18), 0.1, torch.tensor(3)).sum().item()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_drop_in_child, args=(queue,))
    child.start()
    try:
        assert queue.get(timeout=60) == expected
        child.join(timeout=60)
    finally:
        child.kill()


def test_arrays_share_the_memory_of_tensors() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.zeros(4, dtype=dtype)
        array_of(x)[2] = 1
        assert x[2] != 0 and x.count_nonzero() == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_are_those_of_torch_in_fp32(dtype: torch.dtype) -> None:
    x, addend, out = torch.randn(1000).to(dtype), torch.randn(1000).bfloat16(), torch.zeros(1000)
    sum_loop(array_of(out), array_of(x), array_of(addend), 3, 999)
    assert torch.equal(out[3:999], (x.float() + addend.float())[3:999]) and not out[:3].any() and out[999] == 0
    sum_loop(array_of(out), array_of(out), array_of(addend), 3, 999)
    assert torch.equal(out[3:999], (x.float() + addend.float() + addend.float())[3:999])
