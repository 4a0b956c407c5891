"""Each rank holds exactly its share of parameters, gradients and optimizer states, counted by element."""

from __future__ import annotations

import math

import pytest

import ctxlm_ds.parallel.megatron  # noqa: F401 (imported before the ranks are forked: it takes seconds)
from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.training.engine.engine import Engine
from tests.dist.runner import run_ranks
from tests.dist.states import Layout
from tests.dist.training import build_engine, step_of

pytestmark = pytest.mark.dist
LAYERS = 2


def elements_by_formula(model: TransformerSection, tensor: int) -> dict[str, int]:
    """Elements of a tensor-parallel rank's embeddings, one layer, and heads (BERT with next-sentence prediction)."""
    h, f, words = model.hidden_size, model.intermediate_size, math.ceil(model.vocab_size / tensor)
    table = words * h
    positions = (model.max_position_embeddings + model.type_vocab_size) * h + 2 * h
    split = (3 * h * h + 3 * h + h * h + f * h + f + h * f) // tensor
    heads = (h * h + h) + 2 * h + (h * h + h) + (2 * h + 2)
    return {"table": table, "positions": positions, "layer": split + 2 * h + 4 * h, "heads": heads + words}


def expected_parameters(layout: Layout, stage: int) -> int:
    parts = elements_by_formula(layout.config().model, layout.tensor)
    first, last = stage == 0, stage == layout.pipeline - 1
    embeddings = parts["table"] + parts["positions"] if first else 0
    # The last of several stages holds a copy of the table for the decoder.
    tied = parts["table"] if last and not first else 0
    return embeddings + parts["layer"] * LAYERS // layout.pipeline + tied + (parts["heads"] if last else 0)


def count_elements(rank: int, world_size: int, layout: Layout) -> dict[str, int]:
    """Parameters, gradients as the update finds them, and elements of fp32 weights and moments after it."""
    engine = build_engine(layout.config(), layout.user_json())
    own = [parameter for _, parameter in engine.named_parameters]
    gradients: list[int] = []
    end_step = engine._updater.end_step
    engine._updater.end_step = lambda *read: (gradients.append(count_gradients(engine)), end_step(*read))[1]
    engine.train_step(step_of(engine, 0), 0, 0.01)
    owners = {id(fragment.owner): fragment.owner for fragment in engine.fragments()}.values()
    moments = [engine.optimizer_state(owner)[kind] for owner in owners for kind in ("exp_avg", "exp_avg_sq")]
    return {
        "stage": engine.topology.pipeline_parallel_rank,
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in own),
        "resident": sum(p.ds_tensor.numel() if hasattr(p, "ds_tensor") else p.numel() for p in own),
        "gradients": gradients[0],
        "master": sum(owner.numel() for owner in owners),
        "moments": sum(moment.numel() for moment in moments),
        "padding": padding_bound(engine),
    }


def count_gradients(engine: Engine) -> int:
    """Elements of the averaged gradients that wait for the update."""
    kept = getattr(engine._deepspeed.optimizer, "averaged_gradients", None)
    if kept is None:
        return sum(p.grad.numel() for _, p in engine.named_parameters if p.grad is not None)
    return sum(gradient.numel() for group in kept.values() if group is not None for gradient in group)


def padding_bound(engine: Engine) -> int:
    """Elements that ZeRO adds at most to come out even: 2 a rank and group (stages 1, 2), 1 a parameter (stage 3)."""
    return len(engine.named_parameters) if engine.zero_stage == 3 else 2 * 2


LAYOUTS = [
    Layout(1, 0), Layout(2, 0, tensor=2), Layout(2, 0, pipeline=2), Layout(4, 0, tensor=2, pipeline=2),
    Layout(2, 1), Layout(4, 1), Layout(4, 1, tensor=2), Layout(4, 1, pipeline=2), Layout(8, 1, tensor=2, pipeline=2),
    Layout(4, 2, tensor=2), Layout(2, 3), Layout(4, 3, tensor=2, sequence_parallel=True),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_rank_holds_its_share(layout: Layout) -> None:
    data = layout.world_size // (layout.tensor * layout.pipeline)
    for counted in run_ranks(count_elements, layout.world_size, layout, timeout_s=120):
        parameters = expected_parameters(layout, counted["stage"])
        assert counted["parameters"] == parameters
        share = parameters if layout.stage == 0 else math.ceil(parameters / data)
        assert share <= counted["master"] <= share + counted["padding"]
        assert counted["moments"] == 2 * counted["master"]
        resident = math.ceil(parameters / data) if layout.stage == 3 else parameters
        assert resident <= counted["resident"] <= resident + (counted["padding"] if layout.stage == 3 else 0)
        assert share <= counted["gradients"] <= share + counted["padding"]


def test_a_split_layer_is_a_half() -> None:
    """The formula itself: two ranks halve a layer's matrices and their biases, not its six replicated vectors."""
    model = Layout(1, 0).config().model
    h, f = model.hidden_size, model.intermediate_size
    whole, half = elements_by_formula(model, 1)["layer"], elements_by_formula(model, 2)["layer"]
    assert whole == 4 * h * h + 2 * h * f + 9 * h + f
    assert 2 * half - whole == 6 * h
