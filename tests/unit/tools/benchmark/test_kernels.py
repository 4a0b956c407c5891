"""The kernels' part of the GPU benchmark, on small shapes in Triton's interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ctxlm_ds.kernels.triton import rows
from tests.unit.kernels.triton.interpreter import in_interpreter

pytestmark = pytest.mark.long

FOREIGN = ("deepspeed", "transformers", "pydantic", "datasets", "yaml")


def small_cases() -> list[Any]:
    from tools.benchmark.kernels import CASES

    first = {case.operation: case for case in CASES}
    shapes = {"dropout": (3, 700), "cross_entropy": (6, 900), "add_norm": (3, 96), "bias_gelu": (3, 64)}
    shapes |= {"rotary": (2, 5, 6, 16), "attention": (2, 40, 1, 64)}
    return [replace(case, shape=shapes[name]) for name, case in first.items()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@in_interpreter
def test_every_kernel_is_right_and_repeats(dtype: torch.dtype) -> None:
    from tools.benchmark.kernels import check, checks_table

    found = [check(case, dtype, "cpu") for case in small_cases()]
    assert all(one.is_right and one.repeats and one.in_graph is None for one in found), str(found)
    assert {row[3] for row in checks_table(found).rows} == {"yes"}


def test_every_triton_row_is_measured() -> None:
    from ctxlm_ds.kernels.triton.rows import ROWS
    from tools.benchmark.kernels import CASES

    assert {case.operation for case in CASES} == set(ROWS)


@in_interpreter
def test_a_wrong_kernel_is_seen() -> None:
    from tools.benchmark.kernels import check

    case = small_cases()[0]
    wrong = replace(case, run=lambda kernel, inputs: [x + 1e-5 * x.numel() for x in case.run(kernel, inputs)])
    exact = replace(case, run=lambda kernel, inputs: case.run(kernel, inputs))
    assert check(exact, torch.float32, "cpu").is_right
    other = replace(wrong, run=lambda kernel, inputs: (torch.rand(3), *case.run(kernel, inputs)[1:]))
    assert not check(other, torch.float32, "cpu").is_right and not check(other, torch.float32, "cpu").repeats


@in_interpreter
def test_times_become_figures_that_replace_older_ones() -> None:
    import tempfile

    from tools.benchmark.kernels import add_figures, time_of, times_table

    def timer(function: Any) -> float:
        function()
        return 2.0

    found = [time_of(case, torch.float32, "cpu", timer) for case in small_cases()]
    assert [row[-1] for row in times_table(found).rows] == ["1.00"] * len(found)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        path.write_text("[]", encoding="utf-8")
        add_figures(found, path)
        add_figures([found[0]._replace(microseconds=1.0)], path)
        kept = json.loads(path.read_text(encoding="utf-8"))
        assert len(kept) == len(found) == len(rows.measured(path))
        assert sorted(one["microseconds"] for one in kept) == [1.0, *[2.0] * (len(found) - 1)]


def test_it_needs_torch_triton_and_numpy_only() -> None:
    lines = ["import sys", *(f"sys.modules[{name!r}] = None" for name in FOREIGN), "import tools.benchmark.kernels"]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
