"""ELECTRA's loss beside transformers' two models and their own losses, with the same sampled tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.export.base import export_of
from ctxlm_ds.export.hf_config import to_hf_config
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import LayerSequence, ModelBuild
from ctxlm_ds.models.program import build_program
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.random import DropoutStreams
from ctxlm_ds.training.engine.losses import TermLosses
from tests.parity.mapping import Ids, randomize
from tests.ragged import Rows
from tests.sections import model_section, objective_section

SEQ_LENGTH, MASK_ID = 24, 4
MODEL = model_section(
    family="electra", vocab_size=61, hidden_size=32, num_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=SEQ_LENGTH, embedding_size=24, generator_hidden_size=16, generator_num_layers=2,
    generator_num_attention_heads=2, generator_intermediate_size=32, hidden_dropout=0.0, attention_dropout=0.0,
    initializer_range=0.2,
)  # fmt: skip
OBJECTIVE = build_objective(objective_section(name="replaced_tokens"))
IDS = Ids(pad_id=0)


class Models:
    """Our model, and the two of transformers with its weights; what they share is one set of parameters."""

    def __init__(self) -> None:
        # With some weights padding's word is drawn, which has no gradient in transformers.
        torch.manual_seed(0)
        streams = DropoutStreams(5, enabled=True)
        build = ModelBuild(
            (*OBJECTIVE.outputs, "discriminator_ids"), KernelSet({}, "cpu", torch.float32),
            ParallelContext(dropout=streams),
        )  # fmt: skip
        layers = build_program(MODEL, ModelBuild(OBJECTIVE.outputs, build.kernels, build.parallel)).layers
        self.ours = LayerSequence(layers, build.outputs, streams)
        with torch.no_grad():
            for parameter in self.ours.parameters():
                nn.init.normal_(parameter, std=0.2)
        randomize(self.ours)
        self.export = export_of(MODEL.family).models()
        self.theirs: dict[str, nn.Module] = {}
        values = dict(self.ours.named_parameters())
        for part in self.export:
            outputs = part.shared_outputs(OBJECTIVE.outputs)
            key_map = part.key_map(MODEL, outputs, IDS.pad_id)
            config = to_hf_config(part, MODEL, key_map.hf_class, IDS, "fp32")
            model = getattr(transformers, key_map.hf_class)(config)
            parameters = dict(model.named_parameters())
            with torch.no_grad():
                for row in key_map.rows:
                    for name, value in zip(row.theirs, row.to_theirs(values[row.ours]), strict=True):
                        parameters[name].copy_(value)
            self.theirs[part.folder] = model
        self.theirs[""].electra.embeddings = self.theirs["generator"].electra.embeddings

    def their_loss(self, fields: dict[str, Tensor], drawn: dict[str, Tensor]) -> Tensor:
        """Transformers' own loss of each model, weighted as published."""
        discriminator, generator = self.export
        words = self.theirs["generator"](**generator.their_inputs(fields), **generator.their_labels(fields)).loss
        read = fields | drawn
        found = self.theirs[""](**discriminator.their_inputs(read), **discriminator.their_labels(read)).loss
        return words + 50.0 * found


def rows_of(lengths: list[int]) -> dict[str, Tensor]:
    fields = Batch.example(OBJECTIVE.fields(Rows(SEQ_LENGTH)), len(lengths), np.random.default_rng(0), 61).fields
    inside = torch.arange(SEQ_LENGTH)[None] < torch.tensor(lengths)[:, None]
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(len(lengths), SEQ_LENGTH, generator=generator).masked_fill(~inside, 2.0).argsort(dim=1)
    slots = fields["prediction_positions"].shape[1]
    used = torch.arange(slots)[None] < torch.tensor(lengths)[:, None] // 6
    ids = torch.randint(1, MODEL.vocab_size, inside.shape, generator=generator) * inside
    chosen = order[:, :slots]
    labels = ids.gather(1, chosen)
    fields |= {
        "prediction_positions": chosen * used, "masked_lm_labels": labels.where(used, IGNORE_LABEL),
        "input_ids": ids.scatter(1, chosen, labels.masked_fill(used, MASK_ID)),
        "sequence_ids": inside.long(), "sequence_starts": torch.tensor([[0, length] for length in lengths]),
        "position_ids": torch.arange(SEQ_LENGTH)[None] * inside,
        "token_type_ids": (torch.arange(SEQ_LENGTH)[None] > 8) * inside.long(),
    }  # fmt: skip
    return fields


@pytest.fixture(scope="module")
def models() -> Models:
    return Models()


def test_loss_and_gradients_are_those_of_the_two_models(models: Models) -> None:
    fields = rows_of([24, 24, 17, 12])
    models.ours.streams.begin(3, 0, torch.device("cpu"))
    outputs = models.ours.run(fields)
    counts = [int((fields["masked_lm_labels"] != IGNORE_LABEL).sum()), int((fields["sequence_ids"] > 0).sum())]
    factors = torch.tensor([term.weight / count for term, count in zip(OBJECTIVE.terms, counts, strict=True)])
    losses = TermLosses(OBJECTIVE.terms, OBJECTIVE.outputs, ParallelContext())
    loss, _ = losses(outputs, {"masked_lm_labels": fields["masked_lm_labels"]}, factors)
    drawn = {name: outputs[name] for name in ("discriminator_ids", "replaced_labels")}
    wanted = models.their_loss(fields, drawn)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert int((drawn["replaced_labels"] == 1).sum()) > 0
    loss.backward()
    wanted.backward()
    parameters = {name: dict(model.named_parameters()) for name, model in models.theirs.items()}
    ours = {name: parameter.grad for name, parameter in models.ours.named_parameters()}
    for part in models.export:
        for row in part.key_map(MODEL, part.shared_outputs(OBJECTIVE.outputs), IDS.pad_id).rows:
            theirs = row.to_ours(lambda name, held=parameters[part.folder]: held[name].grad)
            difference = (ours[row.ours] - theirs).abs().max() / theirs.abs().max()
            assert difference < 1e-4, row.ours
