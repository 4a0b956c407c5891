"""The judgement of each part; tests of the command run them together on fake CUDA tensors."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ctxlm_ds.apps.plan.check_run import input_lines
from ctxlm_ds.apps.plan.layouts import Layout
from ctxlm_ds.apps.plan.plan import Planner
from ctxlm_ds.apps.verify import parts
from ctxlm_ds.apps.verify.fake_cuda import FakePass
from ctxlm_ds.apps.verify.parts import CHECKED, NOT_CHECKED, PROVED, WRONG
from ctxlm_ds.errors import VerifyError
from ctxlm_ds.kernels.triton.dropout import keyed_dropout as triton_dropout
from ctxlm_ds.kernels.triton.launch import recorded
from ctxlm_ds.recipe.hardware import GPUS, Cluster
from ctxlm_ds.recipe.load import load_config
from tests.unit.apps.run_inputs import config_of

PLACE = torch.bfloat16, torch.device("cuda", 0)


def test_inputs_are_opened(route: Path) -> None:
    for changes, state in (([], CHECKED), (["other"], WRONG), (["none"], NOT_CHECKED)):
        config = config_of(route, *(f"tokenizer.path={route / name}" for name in changes))
        assert parts.inputs(partial(input_lines, config)).state == state


@pytest.mark.parametrize(("rows", "state"), [(8, CHECKED), (4096, WRONG)])
def test_memory_is_compared_with_the_gpu_s(rows: int, state: str) -> None:
    settings = [f"training.micro_batch_size={rows}", f"training.global_batch_size={rows}", "model.vocab_size=30000"]
    planner = Planner(load_config("bert-base", settings), Cluster(GPUS[0], 1, 1))
    found = parts.memory(planner, Layout(1, 1, 1, micro_batch_size=rows))
    assert found.state == state and "GiB on the fullest GPU" in found.text


def test_a_parameter_without_gradient_is_wrong() -> None:
    complete = FakePass({"dropout": "torch"}, {}, {"a": PLACE}, {"a": PLACE}, Counter(x=2), Counter(y=3))
    assert parts._passed("model", complete).state == PROVED
    assert "1 gradients; 2 operators forward, 3 backward" in parts._passed("model", complete).text
    found = parts._passed("model", FakePass({}, {}, {"a": PLACE, "b": PLACE}, {"a": PLACE}, Counter(), Counter()))
    assert found.state == WRONG and found.text.startswith("no gradient: b")


def test_collectives_must_equal_the_plan() -> None:
    assert parts.collectives({"all_reduce": 2e6}, {"all_reduce": 2_000_000}, "rank 0").state == PROVED
    found = parts.collectives({"all_reduce": 2e6}, {"all_reduce": 1_000_000, "all_gather": 5}, "rank 1")
    told = "all_reduce 1.0 MB; the planner counts all_gather 0.0 MB, all_reduce 2.0 MB"
    assert found.state == WRONG and found.text.endswith(told)


def test_each_kernel_is_compiled_once_for_the_gpu() -> None:
    x, key = torch.empty(4096, dtype=torch.float16, device="meta"), torch.empty((), dtype=torch.int64, device="meta")
    with recorded() as launches:
        triton_dropout(x, 0.1, key)
        triton_dropout(x, 0.2, key)
    found = parts.kernels(launches, 75)
    assert found.state == PROVED
    first, *lines = found.text.splitlines()
    assert first == "compiled for sm_75" and len(lines) == 1 and lines[0].startswith("dropout_kernel: ")


def done(value: object) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(value) if isinstance(value, Exception) else future.set_result(value)
    return future


def test_what_ranks_send_must_equal_the_plan() -> None:
    right = {"stage": 0, "sent": [{"all_reduce": 8}, {}], "planned": [{"all_reduce": 8}, {}]}
    wrong = {"stage": 1, "sent": [{"all_reduce": 8}, {}], "planned": [{"all_reduce": 9}, {}]}
    assert parts.ranks(done([right]), 1024).state == PROVED
    found = parts.ranks(done([right, wrong]), 1024)
    assert found.state == WRONG and found.text.startswith("stage 1 sends") and found.part == "a step of 1,024 ranks"
    assert parts.ranks(done(VerifyError("no")), 8) == parts.Finding("a step of 8 ranks", NOT_CHECKED, "no")


def test_kernels_in_the_interpreter_are_judged() -> None:
    figures = {"triton": 2e-3, "torch": 2e-3}
    assert parts.interpreted(["rotary"], done({**figures, "right": True})).state == PROVED
    assert parts.interpreted(["rotary"], done({**figures, "right": False})).state == WRONG
    assert parts.interpreted(["rotary"], done(VerifyError("slow"))).state == NOT_CHECKED


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(VerifyError, match="No module named ctxlm_ds.apps.verify.nothing"):
        parts.run_apart("nothing", {})
