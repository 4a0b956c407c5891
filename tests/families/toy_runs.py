"""What the toys learn, and runs of them: under a layout through the engine, and in plain torch.

Shape letters: b rows, s positions, v vocabulary of this rank, n heads of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import ctxlm_ds.parallel.megatron  # noqa: F401 (imported before the ranks are forked: it takes seconds)
from ctxlm_ds import run as run_builder
from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.families.base import Family
from ctxlm_ds.kernels.dispatch import DTYPES, KernelSet
from ctxlm_ds.models.program import build_program
from ctxlm_ds.models.spec import ModelBuild
from ctxlm_ds.objectives.base import Field, LossTerm, Objective
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.cross_entropy import Sums
from ctxlm_ds.parallel.mappings import reduce_from_ranks
from ctxlm_ds.parallel.parameters import collect_facts
from ctxlm_ds.parallel.placement import shard_of
from ctxlm_ds.parallel.random import DropoutStreams
from ctxlm_ds.parallel.topology import build_topology
from ctxlm_ds.process.library_noise import quiet_libraries
from ctxlm_ds.recipe import choices
from ctxlm_ds.recipe.deepspeed import build_deepspeed_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.registry import FAMILIES, load_object
from ctxlm_ds.training.engine.engine import Engine
from ctxlm_ds.training.engine.model_setup import gathered
from ctxlm_ds.training.engine.runtime import init_process_group
from ctxlm_ds.training.optimizers.build import parameter_groups
from tests.dist.states import Layout, gather_moments
from tests.dist.training import GLOBAL_BATCH
from tests.families.toy_layers import FORWARDS, VOCAB, ToySection

LONG, SHORT, STEPS = 6, 4, 3
OPTIMIZER = choices.OPTIMIZER.make(learning_rate=0.01, weight_decay=0.1, gradient_clipping=0.0)
Named = Mapping[str, Tensor]
Figures = tuple[Tensor, Tensor]
"""A term's sum and count."""


# Reductions of terms.


def squared_sums(outputs: Sequence[Tensor], labels: Sequence[Tensor], parallel: ParallelContext) -> Sums:
    """Sum squared differences of two outputs [b, s, v] over this rank's words, at labelled positions [b, s]."""
    counted = labels[0] != IGNORE_LABEL
    loss = ((outputs[0] - outputs[1]).float().square().sum(-1) * counted).sum()
    return Sums(reduce_from_ranks(loss, parallel), None, counted.sum(dtype=torch.float32))


def score_sums(outputs: Sequence[Tensor], labels: Sequence[Tensor], parallel: ParallelContext) -> Sums:
    """Sum squared differences of attention scores [b, n, s, s] over this rank's heads."""
    loss = (outputs[0] - outputs[1]).float().square().sum()
    return Sums(reduce_from_ranks(loss, parallel), None, torch.full((), float(len(labels[0]))).to(loss))


def whole_sums(outputs: Sequence[Tensor], labels: Sequence[Tensor], parallel: ParallelContext) -> Sums:
    """Sum squared differences of two outputs [b, s, h] that every rank holds whole, at labelled positions."""
    counted = labels[0] != IGNORE_LABEL
    loss = ((outputs[0] - outputs[1]).float().square().sum(-1) * counted).sum()
    return Sums(loss, None, counted.sum(dtype=torch.float32))


def binary_sums(outputs: Sequence[Tensor], labels: Sequence[Tensor], parallel: ParallelContext) -> Sums:
    """Sum the binary cross entropy of logits [b, s] with labels [b, s], inside sequences."""
    (logits,), (label, ids) = outputs, labels
    inside = ids != 0
    losses = F.binary_cross_entropy_with_logits(logits.float(), label.float(), reduction="none")
    correct = (((logits > 0) == (label > 0)) & inside).sum(dtype=torch.float32)
    return Sums((losses * inside).sum(), correct, inside.sum(dtype=torch.float32))


def given_sums(outputs: Sequence[Tensor], labels: Sequence[Tensor], parallel: ParallelContext) -> Sums:
    """Add up what a layer has compared already: losses and hits [b, s]."""
    return Sums(outputs[0].sum(), outputs[1].sum(), (labels[0] != IGNORE_LABEL).sum(dtype=torch.float32))


# The same in plain torch, on whole tensors.


def cross_entropy(logits: str = "logits", labels: str = "labels") -> Callable[[Named, Named], Figures]:
    def figures(outputs: Named, fields: Named) -> Figures:
        picked = fields[labels] != IGNORE_LABEL
        return F.cross_entropy(outputs[logits][picked], fields[labels][picked], reduction="sum"), picked.sum()

    return figures


def plain_squares(left: str, right: str) -> Callable[[Named, Named], Figures]:
    def figures(outputs: Named, fields: Named) -> Figures:
        picked = fields["labels"] != IGNORE_LABEL
        return (outputs[left] - outputs[right])[picked].pow(2).sum(), picked.sum()

    return figures


def plain_scores(outputs: Named, fields: Named) -> Figures:
    difference = outputs["scores"] - outputs["teacher.scores"]
    return difference.pow(2).sum(), torch.tensor(len(difference))


def plain_binary(outputs: Named, fields: Named) -> Figures:
    inside = fields["sequence_ids"] != 0
    logits, label = outputs["replaced_logits"][inside], outputs["replaced"][inside].float()
    return -(label * F.logsigmoid(logits) + (1 - label) * F.logsigmoid(-logits)).sum(), inside.sum()


@dataclass(frozen=True)
class Toy:
    """A family, its objective, and how plain torch computes the terms."""

    layers: str
    outputs: tuple[str, ...]
    terms: tuple[LossTerm, ...]
    plain: tuple[Callable[[Named, Named], Figures], ...]
    frozen: str | None = None
    taps: tuple[str, ...] = ()
    teacher_outputs: tuple[str, ...] = ()

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
        return tuple(Field(name, field.shape[1]) for name, field in global_fields(0).items())


HERE, LAYERS = "tests.families.toy_runs", "tests.families.toys"


def one_term(layers: str, *terms: LossTerm, **more: Any) -> Toy:
    terms = terms or (LossTerm("lm", ("logits",), ("labels",)),)
    outputs = tuple(dict.fromkeys(name for term in terms for name in term.outputs))
    return Toy(f"{LAYERS}:{layers}", outputs, terms, **{"plain": (cross_entropy(),), **more})


SQUARES = f"{HERE}:squared_sums"
TOYS = {
    "encoder_decoder": one_term(
        "encoder_decoder", LossTerm("lm", ("logits",), ("decoder_labels",)),
        plain=(cross_entropy("logits", "decoder_labels"),),
    ),
    "shared_layer": one_term("shared_layer"),
    "half_used": one_term("half_used"),
    "two_streams": one_term(
        "two_streams", LossTerm("left", ("logits",), ("labels",)),
        LossTerm("right", ("decoder_logits",), ("decoder_labels",), weight=0.5),
        plain=(cross_entropy(), cross_entropy("decoder_logits", "decoder_labels")),
    ),
    "without_gradient": one_term("without_gradient"),
    "distillation": one_term(
        "student_and_teacher", LossTerm("lm", ("logits",), ("labels",)),
        LossTerm("match", ("logits", "teacher.logits"), ("labels",), SQUARES, 0.1, has_accuracy=False),
        LossTerm("middle", ("middle", "teacher.middle"), ("labels",), f"{HERE}:whole_sums", 0.3, has_accuracy=False),
        LossTerm(
            "scores", ("scores", "teacher.scores"), ("sequence_ids",), f"{HERE}:score_sums", 0.2,
            lambda fields: len(fields["sequence_ids"]), has_accuracy=False,
        ),
        plain=(
            cross_entropy(), plain_squares("logits", "teacher.logits"), plain_squares("middle", "teacher.middle"),
            plain_scores,
        ),
        frozen=f"{LAYERS}:teacher_values",
    ),
    "generator": Toy(
        f"{LAYERS}:generator_and_discriminator", ("generator_logits", "replaced_logits", "replaced"),
        (
            LossTerm("generator", ("generator_logits",), ("labels",)),
            LossTerm(
                "discriminator", ("replaced_logits",), ("replaced", "sequence_ids"), f"{HERE}:binary_sums", 50.0,
                lambda fields: int((fields["sequence_ids"] != 0).sum()),
            ),
        ),
        (cross_entropy("generator_logits"), plain_binary),
    ),
    "lanes": one_term("lanes"),
    "usual": one_term("chunked"),
    "chunked": Toy(
        f"{LAYERS}:chunked", ("label_losses", "hits"),
        (LossTerm("lm", ("label_losses", "hits"), ("labels",), f"{HERE}:given_sums"),),
        (lambda outputs, fields: (outputs["label_losses"].sum(), (fields["labels"] != IGNORE_LABEL).sum()),),
    ),
}  # fmt: skip


def register_toys() -> None:
    """Register every toy in this process: in a rank, or in a test that takes them back."""
    for name, toy in TOYS.items():
        family = Family(
            name=f"toy_{name}", title="a toy", section=ToySection, layers=toy.layers, outputs=frozenset(toy.outputs),
            objective="", sample_format="", tokenizer="", tiny=dict, frozen=toy.frozen,
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
    if term.count is not None:
        return term.count({name: field.numpy() for name, field in batch.fields.items()})
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
    engine = run_builder.build_engine(config, settings, TOYS[name], topology)
    run_builder.initialize_weights(config, engine)
    return engine


def frozen_of(engine: Engine) -> dict[str, Tensor]:
    """Return this rank's share of the parameters that no step changes."""
    return {name: whole_value(parameter) for name, parameter in engine._frozen.items()}


def train(rank: int, world_size: int, name: str, layout: Layout, recompute: bool = False) -> dict[str, Any]:
    """Losses, norms and the first step's gradients of the whole model, and what this rank holds."""
    config = config_of(name, layout, recompute)
    engine = build_engine(name, config, layout)
    before = frozen_of(engine)
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
    frozen = frozen_of(engine)
    tied = {key: whole_value(value) for key, value in engine.named_parameters if key.startswith("word_embeddings.")}
    return {
        "losses": losses, "norms": norms, "terms": terms, "gradients": gradients, "forwards": forwards,
        "evaluation": evaluation, "names": list(engine.program.trained_shapes), "tied": tied,
        "unchanged": all(torch.equal(value, before[key]) for key, value in frozen.items()),
        "frozen": {key: (value.flatten(), given_share(engine, key).flatten()) for key, value in frozen.items()},
        "tensor_rank": engine.topology.tensor_parallel_rank, "stage": engine.topology.pipeline_parallel_rank,
    }  # fmt: skip


def whole_value(parameter: torch.nn.Parameter) -> Tensor:
    with gathered(parameter):
        return parameter.detach().clone().float()


def given_share(engine: Engine, name: str) -> Tensor:
    """Cut this rank's share out of a frozen parameter as the family gives it."""
    whole, parallel = frozen_values(engine.config)(name), engine.parallel
    shard = shard_of(name, engine.program.facts[name].split, whole.shape, parallel.size, parallel.rank)
    return shard.extract(whole).to(DTYPES[engine.config.training.precision]).float()


def train_plain(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """The same steps in plain torch: one process, torch's AdamW, the loss as its definition says."""
    register_toys()
    toy, config = TOYS[name], config_of(name, Layout(1, 0))
    streams = DropoutStreams(config.training.seed, enabled=True)
    kernels = KernelSet({}, "cpu", torch.float32)
    build = ModelBuild(toy.outputs, kernels, ParallelContext(dropout=streams))
    model = build_program(config.model, build).module(config.training.seed).train()
    facts = collect_facts(model)
    given = frozen_values(config)
    for key, parameter in model.named_parameters():
        if not facts[key].trained:
            parameter.requires_grad_(False).copy_(given(key))
    named = [(key, parameter) for key, parameter in model.named_parameters() if facts[key].trained]
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


def frozen_values(config: RunConfig) -> Callable[[str], Tensor]:
    """Give a frozen parameter's value by its name."""
    family = FAMILIES.get(config.model.family)
    return load_object(family.frozen)(config.model) if family.frozen else lambda name: torch.empty(0)
