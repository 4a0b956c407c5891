"""What ranks of many send in a step: the engine in a process group that sends nothing, against the planner."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ctxlm_ds.apps.plan.states import Message
from ctxlm_ds.apps.plan.timing import StageLoad
from ctxlm_ds.apps.verify import parts
from ctxlm_ds.parallel.context import CONTEXT
from ctxlm_ds.recipe.json_source import load_deepspeed_json
from ctxlm_ds.recipe.load import load_config

WORDS = "model.vocab_size=512"


def counted(recipe: str, json: str, num_ranks: int, *settings: str) -> Any:
    config = load_config(recipe, [WORDS, f"training.global_batch_size={4 * num_ranks}", *settings], num_ranks)
    given = {"recipe": config.model_dump(mode="json"), "deepspeed": load_deepspeed_json(json), "num_ranks": num_ranks}
    return parts.run_apart("ranks", given)


@pytest.mark.long
def test_ranks_send_what_the_planner_counts() -> None:
    """Stage 3 of ZeRO; test_command.py has a pipeline."""
    stage, *others = counted(
        "bert-tiny", "zero3", 64, "training.micro_batch_size=4", "parallel.tensor_parallel_size=2", "phases=[]"
    )
    assert not others and stage["sent"] == stage["planned"]
    logged, of_tensor = stage["sent"]
    assert logged["all_gather"] > 0 and logged["reduce_scatter"] > 0 and of_tensor["all_reduce"] > 0


def test_a_stage_receives_what_the_one_before_sent() -> None:
    from ctxlm_ds.apps.verify.ranks import Wire

    wire = Wire(lambda tensor, stage: None)
    wire.begin(0)
    wire.send(torch.arange(3), 1)
    gradient = torch.ones(3)
    wire.receive(gradient, 1)
    assert not gradient.any()
    wire.begin(1)
    wire.send(torch.ones(3), 0)
    received = torch.zeros(3, dtype=torch.int64)
    wire.receive(received, 0)
    assert received.tolist() == [0, 1, 2]
    wire.begin(2)
    assert not wire.arriving


def test_the_plan_of_a_stage_is_what_its_rank_sends() -> None:
    from ctxlm_ds.apps.verify.ranks import planned

    def load(forward: int, backward: int) -> StageLoad:
        messages = [
            Message("data", "all_reduce", 100, 2, "gradients"), Message("data", "all_reduce", 8, 2, "gradient norm"),
            Message("tensor", "all_gather", 5, 2), Message("context", "all_to_all", 9, 2),
            Message("pipeline", "send", forward, 2, "tensors"),
            Message("pipeline", "send", backward, 2, "gradients"),
        ]  # fmt: skip
        return StageLoad({}, 0, None, messages)  # type: ignore[arg-type]

    loads = [load(30, 20), load(7, 6), load(7, 6)]
    assert planned(loads, 0) == ({"all_reduce": 100, "send": 30}, {"all_gather": 5, CONTEXT + "all_to_all": 9})
    assert planned(loads, 1)[0]["send"] == 7 + 20 and planned(loads, 2)[0]["send"] == 6
    assert planned(loads[:1], 0)[0] == {"all_reduce": 108}
