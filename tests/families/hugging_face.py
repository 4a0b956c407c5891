"""A family beside its classes in transformers: the models that the family's export writes, on the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ctxlm_ds.export.base import FamilyExport, Fields, Tensors, export_of
from ctxlm_ds.export.hf_config import to_hf_config
from ctxlm_ds.export.key_maps import KeyMap, Row
from ctxlm_ds.export.safetensors_files import write_model
from ctxlm_ds.export.weights import HuggingFaceWeights
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import LayerSequence, ModelBuild, run_layer
from ctxlm_ds.models.program import build_program
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.parallel.context import DropoutStreams, ParallelContext
from ctxlm_ds.parallel.parameters import collect_facts
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.training.engine.losses import TermLosses
from tests.families import runs
from tests.families.runs import LEARNING_RATE, Run

PARITY_STEPS = 10
NOISE = 0.1


class Part(NamedTuple):
    """One model of transformers."""

    export: FamilyExport
    model: nn.Module
    key_map: KeyMap

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by every name: a tied one has several, and a class decides which comes first."""
        return dict(self.model.named_parameters(remove_duplicate=False))


class Pair(NamedTuple):
    """Our model and theirs with the same weights."""

    ours: LayerSequence
    theirs: list[Part]
    """In the order of FamilyExport.models. What several have are the same parameters: those of the last one."""

    @property
    def constants(self) -> set[str]:
        """Tensors of theirs that our model does not have: the export writes zeros whatever our weights are."""
        shapes = {name: parameter.shape for name, parameter in self.ours.named_parameters()}
        rows = [row for part in self.theirs for row in part.key_map.rows]
        written = {row: row.to_theirs(torch.ones(shapes[row.ours])) for row in rows}
        pairs = [pair for row, values in written.items() for pair in zip(row.theirs, values, strict=True)]
        return {name for name, value in pairs if not value.any()}

    def rows(self) -> dict[str, tuple[Row, dict[str, nn.Parameter]]]:
        """The row of each of our parameters, and the parameters of the model that has it."""
        named = [(part.key_map.rows, part.parameters()) for part in self.theirs]
        return {row.ours: (row, parameters) for rows, parameters in named for row in rows}

    def losses(self, fields: Fields, counts: Mapping[str, int], config: RunConfig, step: int) -> tuple[Fields, Tensor]:
        """Their outputs under our names, and the objective's loss of them."""
        outputs: Fields = {}
        for export, model, _ in reversed(self.theirs):
            read = fields | self.drawn(fields | outputs, step)
            outputs |= export.their_outputs(model(**export.their_inputs(read)), read)
        outputs |= self.drawn(fields | outputs, step)
        names = build_objective(config.objective).outputs
        outputs = {name: outputs[name] for name in names}
        return outputs, loss_of(outputs, fields, counts, config)

    def drawn(self, tensors: Fields, step: int) -> Fields:
        """What our layers without parameters draw from these tensors, if they are all there."""
        drawn: Fields = {}
        self.ours.streams.begin(step, 0, torch.device("cpu"))
        for index, (description, module, _) in enumerate(self.ours._steps):
            is_draw = description.no_gradient and set(description.writes) == description.no_gradient
            if is_draw and set(description.reads) <= tensors.keys():
                found = dict(tensors)
                run_layer(description, module, found, index, self.ours.streams, self.ours.carried)
                drawn |= {name: found[name] for name in description.writes}
        return drawn


def loss_of(outputs: Fields, fields: Fields, counts: Mapping[str, int], config: RunConfig) -> Tensor:
    """The objective's loss over a global batch."""
    objective = build_objective(config.objective)
    factors = torch.tensor([term.weight / counts[term.name] for term in objective.terms])
    return TermLosses(objective.terms, objective.outputs, ParallelContext())(outputs, fields, factors)[0]


def built(config: RunConfig, seed: int) -> LayerSequence:
    """Our model in fp32 on the CPU with its initial weights."""
    outputs = build_objective(config.objective).outputs
    kernels = KernelSet(dict(config.kernels), "cpu", torch.float32)
    parallel = ParallelContext(dropout=DropoutStreams(config.training.seed, enabled=config.model.drops))
    build = ModelBuild(outputs, kernels, parallel, shares_rows=config.data.shares_rows)
    return build_program(config.model, build).module(seed)


def noisy(config: RunConfig, seed: int, noise: float, least_dims: int = 1) -> LayerSequence:
    """Our model with `noise` on every initial weight of at least so many dimensions."""
    ours, generator = built(config, seed), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.dim() >= least_dims:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)
    return ours


def make_pair(config: RunConfig, folder: Path, seed: int, noise: float, least_dims: int = 1) -> Pair:
    """Export a model, with `noise` on every weight so that no bias is 0 and no norm is 1, and load what was written."""
    import transformers

    ours, export = noisy(config, seed, noise, least_dims), export_of(config.model.family)
    tokenizer = load_tokenizer(config.tokenizer.path)
    weights = Tensors({name: parameter.detach() for name, parameter in ours.named_parameters()})
    outputs = build_objective(config.objective).outputs
    parts = []
    for part in export.models():
        place = folder / part.folder
        key_map = part.key_map(config.model, part.shared_outputs(outputs), tokenizer.pad_id)
        place.mkdir(parents=True)
        write_model(place, key_map, weights)
        to_hf_config(part, config.model, key_map.hf_class, tokenizer, "fp32").to_json_file(place / "config.json")
        their_config = transformers.AutoConfig.from_pretrained(place)
        # Heads of transformers may drop where the published model does not (classifier_dropout_prob).
        no_dropout = {name: 0.0 for name in their_config.to_dict() if "dropout" in name}
        theirs = getattr(transformers, key_map.hf_class).from_pretrained(place, **no_dropout).train()
        parts.append(Part(part, theirs, key_map))
    pair = Pair(ours, parts)
    rows = pair.rows()
    for part in parts:
        for row in part.key_map.rows:
            shared, parameters = rows[row.ours]
            for name, source in zip(row.theirs, shared.theirs, strict=True):
                owner, _, leaf = name.rpartition(".")
                setattr(part.model.get_submodule(owner), leaf, parameters[source])
    return pair


def whole_batch(run: Run, number: int) -> tuple[Fields, dict[str, int]]:
    """A global batch as one micro-batch, and the labels of each term in it."""
    step = runs.step_of(runs.recorded(run), number)
    names = step.micro_batches[0].fields
    return {name: torch.cat([batch.fields[name] for batch in step.micro_batches]) for name in names}, step.counts


def compare(rank: int, world_size: int, run: Run, folder: Path) -> dict[str, dict[str, Any]]:
    """Case: largest differences of outputs and of every gradient, relative to the largest value of each.

    And whether each parameter, and the model's section, comes back from the exported folder bit for bit.
    """
    config = run.config()
    pair = make_pair(config, folder, run.seed, NOISE)
    read = HuggingFaceWeights(folder)
    read_back = {name: torch.equal(read.read_full(name), value) for name, value in pair.ours.named_parameters()}
    read_back["model section"] = read.model == config.model
    assert set(read.names()) | {"model section"} == read_back.keys()
    assert set(read.outputs) == set(build_objective(config.objective).outputs)
    fields, counts = whole_batch(run, 0)
    wanted, their_loss = pair.losses(fields, counts, config, 0)
    pair.ours.streams.begin(0, 0, torch.device("cpu"))
    got = pair.ours.run(fields)
    loss_of(got, fields, counts, config).backward()
    their_loss.backward()
    stack = "decoder_" if export_of(config.model.family).encoder_decoder else ""
    inside = fields[f"{stack}sequence_ids"] > 0
    outputs = {name: [_inside(values[name], inside) for values in (got, wanted)] for name in wanted}
    constants, rows = pair.constants, pair.rows()

    def wanted_gradient(row: Row, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        return row.to_ours(
            lambda name: torch.zeros_like(parameters[name]) if name in constants else parameters[name].grad
        )

    gradients = {name: parameter.grad for name, parameter in pair.ours.named_parameters()}
    assert gradients.keys() == rows.keys()
    return {
        "outputs": {name: _difference(*values) for name, values in outputs.items()},
        "gradients": {name: _difference(gradients[name], wanted_gradient(*found)) for name, found in rows.items()},
        "read_back": read_back,
    }


def _inside(values: Tensor, inside: Tensor) -> Tensor:
    """Leave padding out of what has a value for every position."""
    return values[inside] if values.shape[:2] == inside.shape else values


def _difference(got: Tensor, wanted: Tensor) -> float:
    assert wanted.abs().max() > 0
    return float((got - wanted).abs().max() / wanted.abs().max())


def train_theirs(rank: int, world_size: int, run: Run, folder: Path) -> list[float]:
    """Case: the losses of transformers' class under torch's AdamW from our initial weights."""
    config = run.config()
    pair = make_pair(config, folder, run.seed, noise=0.0)
    facts, constants = collect_facts(pair.ours), pair.constants
    decays: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for ours, (row, parameters) in pair.rows().items():
        decays[facts[ours].decays] += [parameters[name] for name in row.theirs if name not in constants]
    settings = config.optimizer
    groups = [{"params": decays[key], "weight_decay": settings.weight_decay * key} for key in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=settings.betas, eps=settings.eps)
    losses = []
    for number in range(PARITY_STEPS):
        _, loss = pair.losses(*whole_batch(run, number), config, number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
