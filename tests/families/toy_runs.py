"""What the toys learn, and runs of them: under a layout through the engine, and in plain torch.

Shape letters: b rows, s positions, v vocabulary of this rank, n heads of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ctxlm_ds import run as run_builder
from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.families.base import Family
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import ModelBuild
from ctxlm_ds.models.program import build_program
from ctxlm_ds.objectives.base import Field, LossTerm, Objective
from ctxlm_ds.parallel.context import DropoutStreams, ParallelContext
from ctxlm_ds.parallel.parameters import collect_facts
from ctxlm_ds.parallel.topology import build_topology
from ctxlm_ds.process.launch import quiet_libraries
from ctxlm_ds.recipe import choices
from ctxlm_ds.recipe.deepspeed import build_deepspeed_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.registry import FAMILIES
from ctxlm_ds.training.engine.engine import Engine
from ctxlm_ds.training.engine.runtime import gathered, init_process_group
from ctxlm_ds.training.optimizers.build import parameter_groups
from tests.dist.states import Layout, gather_moments
from tests.dist.training import GLOBAL_BATCH
from tests.families.toy_layers import FORWARDS, VOCAB, ToySection

LONG, SHORT, STEPS = 6, 4, 3
OPTIMIZER = choices.OPTIMIZER.make(learning_rate=0.01, weight_decay=0.1, gradient_clipping=0.0)
Named = Mapping[str, Tensor]
Figures = tuple[Tensor, Tensor]
"""A term's sum and count."""


def cross_entropy(logits: str = "logits", labels: str = "labels") -> Callable[[Named, Named], Figures]:
    def figures(outputs: Named, fields: Named) -> Figures:
        picked = fields[labels] != IGNORE_LABEL
        return F.cross_entropy(outputs[logits][picked], fields[labels][picked], reduction="sum"), picked.sum()

    return figures


@dataclass(frozen=True)
class Toy:
    """A family, its objective, and how plain torch computes the terms."""

    layers: str
    outputs: tuple[str, ...]
    terms: tuple[LossTerm, ...]
    plain: tuple[Callable[[Named, Named], Figures], ...]
    taps: tuple[str, ...] = ()
    teacher_outputs: tuple[str, ...] = ()
    z_loss: float = 0.0

    word_labels = Objective.word_labels

    @property
    def tensors(self) -> tuple[str, ...]:
        """Return the tensors that terms read, as Objective.tensors."""
        return self.outputs

    def comparisons(self, model: object, teacher: object) -> tuple[()]:
        """Return what layers compare, as Objective.comparisons."""
        return ()

    def fields(self, data: object) -> tuple[Field, ...]:
        """Return the fields of a micro-batch, as Objective.fields."""
        return tuple(Field(name, field.shape[1], shared="complete") for name, field in global_fields(0).items())


LM = LossTerm("lm", ("logits",), ("labels",))
TWO = (
    LossTerm("left", ("logits",), ("labels",)),
    LossTerm("right", ("decoder_logits",), ("decoder_labels",), weight=0.5),
)
LAYERS = "tests.families.toy_layers"
TOYS = {name: Toy(f"{LAYERS}:{name}", ("logits",), (LM,), (cross_entropy(),))
        for name in ("half_used", "without_gradient", "lanes")}  # fmt: skip
TOYS["two_streams"] = Toy(
    f"{LAYERS}:two_streams", ("logits", "decoder_logits"), TWO,
    (cross_entropy(), cross_entropy("decoder_logits", "decoder_labels")),
)  # fmt: skip


def register_toys() -> None:
    """Register every toy in this process: in a rank, or in a test that takes them back."""
    for name, toy in TOYS.items():
        family = Family(
            name=f"toy_{name}", title="a toy", section=ToySection, layers=toy.layers, outputs=frozenset(toy.outputs),
            objective="", sample_format="", tokenizer="", tiny=dict,
        )  # fmt: skip
        FAMILIES.register(family.name, family)


# Batches.


def global_fields(step: int) -> dict[str, Tensor]:
    """Rows of two lengths, with uneven numbers of labels and of padding."""
    generator = torch.Generator().manual_seed(3000 + step)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def labels(length: int) -> Tensor:
        missing = torch.rand(GLOBAL_BATCH, length, generator=generator) < 0.4
        return integers(5, VOCAB, GLOBAL_BATCH, length).masked_fill(missing, IGNORE_LABEL)

    lengths = integers(2, LONG + 1, GLOBAL_BATCH, 1)
    return {
        "input_ids": integers(5, VOCAB, GLOBAL_BATCH, LONG),
        "decoder_ids": integers(5, VOCAB, GLOBAL_BATCH, SHORT),
        "labels": labels(LONG),
        "decoder_labels": labels(SHORT),
        "sequence_ids": (torch.arange(LONG)[None, :] < lengths).long(),
        "sequence_starts": torch.cat([torch.zeros_like(lengths), lengths], dim=1),
    }


def micro_batches(step: int, rows: int) -> list[Batch]:
    fields = global_fields(step)
    return [
        Batch({name: field[start : start + rows] for name, field in fields.items()})
        for start in range(0, GLOBAL_BATCH, rows)
    ]


def count(term: LossTerm, batch: Batch) -> int:
    """Count as the loader does."""
    return int((batch.fields[term.labels[0]] != IGNORE_LABEL).sum())


def step_of(engine: Engine, step: int) -> Step:
    topology = engine.topology
    whole = micro_batches(step, engine.config.training.micro_batch_size)
    own = whole[topology.data_parallel_rank :: topology.data_parallel_size]
    counts = {term.name: sum(count(term, batch) for batch in own) for term in engine.terms}
    return Step(micro_batches=own, counts=counts, num_tokens=1, rows_consumed=GLOBAL_BATCH, epoch=0)


# Runs.


def config_of(name: str, layout: Layout, recompute: bool = False) -> RunConfig:
    # Its other sections are those of a causal model, which fit a toy that writes logits.
    config = replace(layout, family="gpt2").config()
    training = config.training.model_copy(update={"activation_checkpointing": recompute})
    section = ToySection(family=f"toy_{name}")
    return config.model_copy(update={"model": section, "training": training, "optimizer": OPTIMIZER})


def build_engine(name: str, config: RunConfig, layout: Layout) -> Engine:
    quiet_libraries()
    register_toys()
    init_process_group()
    topology = build_topology(0, 1, layout.tensor, layout.pipeline)
    settings = build_deepspeed_config(config, layout.user_json(), topology.world_size)
    engine = run_builder.engine_builder(config, settings, TOYS[name], topology)()
    run_builder.initialize_weights(engine)
    return engine


def train(rank: int, world_size: int, name: str, layout: Layout, recompute: bool = False) -> dict[str, Any]:
    """Losses, norms and the first step's gradients of the whole model, and what this rank holds."""
    config = config_of(name, layout, recompute)
    engine = build_engine(name, config, layout)
    FORWARDS.clear()
    losses, norms, terms, gradients, forwards = [], [], [], {}, {}
    for step in range(STEPS):
        result = engine.train_step(step_of(engine, step), step, OPTIMIZER.learning_rate)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        terms.append({**result.terms, **{f"{term}_accuracy": value for term, value in result.accuracy.items()}})
        if step == 0:
            forwards = dict(FORWARDS)
            moments = gather_moments(engine)
            # After one update AdamW's first moment is (1 - beta1) times the gradient.
            gradients = {
                key.removesuffix("#exp_avg"): value / (1 - OPTIMIZER.betas[0])
                for key, value in moments.items()
                if key.endswith("#exp_avg")
            }
    batches = step_of(engine, 9).micro_batches
    evaluation = engine.evaluate(batches)
    assert engine.evaluate(batches) == evaluation
    tied = {key: whole_value(value) for key, value in engine.named_parameters if key.startswith("word_embeddings.")}
    return {
        "losses": losses, "norms": norms, "terms": terms, "gradients": gradients, "forwards": forwards,
        "evaluation": evaluation, "tied": tied,
        "tensor_rank": engine.topology.tensor_parallel_rank,
    }  # fmt: skip


def whole_value(parameter: torch.nn.Parameter) -> Tensor:
    with gathered(parameter):
        return parameter.detach().clone().float()


def train_plain(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """The same steps in plain torch: one process, torch's AdamW, the loss as its definition says."""
    register_toys()
    toy, config = TOYS[name], config_of(name, Layout(1, 0))
    streams = DropoutStreams(config.training.seed, enabled=True)
    kernels = KernelSet({}, "cpu", torch.float32)
    build = ModelBuild(toy.outputs, kernels, ParallelContext(dropout=streams))
    model = build_program(config.model, build).module(config.training.seed).train()
    facts, named = collect_facts(model), list(model.named_parameters())
    groups = parameter_groups(named, facts, OPTIMIZER)
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.learning_rate, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        figures: list[list[Figures]] = []
        for number, batch in enumerate(micro_batches(step, config.training.micro_batch_size)):
            streams.begin(step, number, torch.device("cpu"))
            model.carried.begin(number)
            outputs = model.run(batch.fields)
            figures.append([compute(outputs, batch.fields) for compute in toy.plain])
        model.carried.end_step(keep=True)
        terms = [
            sum(total for total, _ in column) / sum(counted for _, counted in column)
            for column in zip(*figures, strict=True)
        ]
        loss = sum(term.weight * value for term, value in zip(toy.terms, terms, strict=True))
        optimizer.zero_grad()
        loss.backward()
        held = {key: parameter.grad.clone() for key, parameter in named if parameter.grad is not None}
        gradients = gradients or held
        losses.append(float(loss))
        norms.append(float(torch.stack([value.norm() for value in held.values()]).norm()))
        optimizer.step()
    return {"losses": losses, "norms": norms, "gradients": gradients}
