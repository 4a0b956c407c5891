"""ELECTRA (Clark 2020) as a list of layers: the generator, its samples, the discriminator.

Shape letters: b rows, s positions, p prediction slots, h width of the discriminator, v vocabulary of this rank, t
tokens (b·s), n tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.families.electra.config import ElectraSection
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.kernels.dropout import SamplingKernel
from ctxlm_ds.models.layers import LayerDescription, ModelBuild
from ctxlm_ds.models.parts.embeddings import WordTable
from ctxlm_ds.models.parts.encoder import encoder_trunk, word_table
from ctxlm_ds.models.parts.heads import EncoderHeads, head_arguments
from ctxlm_ds.models.parts.transformer import initial_weights
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.cross_entropy import first_over_ranks
from ctxlm_ds.parallel.layers import ReplicatedLinear
from ctxlm_ds.parallel.mappings import all_slots, gather_tokens, own_positions, own_slots


def electra_layers(model: ElectraSection, build: ModelBuild) -> list[LayerDescription]:
    """List the layers that write generator_logits [b, p, v], replaced_logits and replaced_labels [b, s].

    Without a need for one of the first two, they are the other model alone; the discriminator then reads input_ids.
    """
    table = word_table(model, build)
    generator = _generator(model, build, table) if "generator_logits" in build.outputs else []
    if "replaced_logits" not in build.outputs:
        return generator
    if not generator:
        return _discriminator(model, build, "input_ids")
    reads = ("generator_logits", "input_ids", "sequence_ids", "prediction_positions", "masked_lm_labels")
    writes = ("discriminator_ids", "replaced_labels")
    samples = LayerDescription(
        "samples", Samples, reads, writes, {"kernels": build.kernels, "parallel": build.parallel},
        no_gradient=frozenset(writes),
    )  # fmt: skip
    return [*generator, samples, *_discriminator(model, build, "discriminator_ids")]


def _generator(model: ElectraSection, build: ModelBuild, table: WordTable) -> list[LayerDescription]:
    shape = model.generator
    heads = head_arguments(shape, build, predicted_width=table.width)
    reads = ("hidden", "sequence_ids", "prediction_positions")
    return [
        *_encoder(shape, build, "input_ids", "generator", "generator_"),
        LayerDescription("generator_heads", EncoderHeads, reads, ("generator_hidden",), heads),
        *table.decode_with_bias("generator_hidden", "generator_bias", "generator_logits"),
    ]


def _discriminator(model: ElectraSection, build: ModelBuild, ids: str) -> list[LayerDescription]:
    reads, head = ("hidden", "sequence_ids"), {"model": model, "build": build}
    return [
        *_encoder(model, build, ids, "encoder", ""),
        LayerDescription("discriminator_head", ReplacedTokenHead, reads, ("replaced_logits",), head),
    ]


def _encoder(model: ElectraSection, build: ModelBuild, ids: str, blocks: str, prefix: str) -> list[LayerDescription]:
    """List embeddings, which all encoders of the model share, and blocks of this name.

    `model` has the sizes of this encoder, which reads `ids`; `prefix` begins the names of the layers before and after
    the blocks.
    """
    words, embeddings, *others = encoder_trunk(model, build, model.num_layers)
    names = (layer.name.replace("encoder", blocks) if layer.block else prefix + layer.name for layer in others)
    return [
        replace(words, reads=(ids,)),
        replace(embeddings, tie_key=embeddings.name),
        *(replace(layer, name=name) for layer, name in zip(others, names, strict=True)),
    ]


class Samples(nn.Module):
    """Replaces the predicted tokens by words drawn from the generator's distribution (Clark 2020, section 2)."""

    def __init__(self, kernels: KernelSet, parallel: ParallelContext) -> None:
        super().__init__()
        self.kernel, self.parallel = kernels.sampling, parallel

    def forward(
        self, logits: Tensor, input_ids: Tensor, sequence_ids: Tensor, positions: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the discriminator's tokens and its labels [b, s]: 1 for a token that differs from the original one.

        Padding has IGNORE_LABEL. `logits` are [b, p, v] of the generator, `labels` [b, p] the original tokens,
        IGNORE_LABEL in slots without a prediction. With context parallelism logits, labels and tokens are a rank's
        share, sequence_ids and positions complete.
        """
        drawn = draw_words(logits.detach(), positions, self.kernel, self.parallel)
        length = input_ids.shape[1]
        if self.parallel.context_size > 1:
            drawn, labels = (all_slots(own, positions.shape, self.parallel) for own in (drawn, labels))
            sequence_ids = own_positions(sequence_ids, self.parallel)
            positions = positions - self.parallel.context_rank * length
        # Slots without a prediction here write behind the row.
        here = (labels != IGNORE_LABEL) & (positions >= 0) & (positions < length)
        places = positions.where(here, length)

        def with_predictions(values: Tensor, into: Tensor) -> Tensor:
            return nn.functional.pad(into, (0, 1)).scatter(1, places, values)[:, :length]

        ids = with_predictions(drawn, input_ids)
        replaced = with_predictions((drawn != labels).long(), torch.zeros_like(input_ids))
        return ids, replaced.where(sequence_ids > 0, IGNORE_LABEL)


class ReplacedTokenHead(nn.Module):
    """The discriminator's head, a layer with activation and one number a position; ranks compute their tokens."""

    def __init__(self, model: ElectraSection, build: ModelBuild) -> None:
        super().__init__()
        kernels, self.parallel, width, init = build.kernels, build.parallel, model.hidden_size, initial_weights(model)
        activation = model.hidden_activation
        self.dense = ReplicatedLinear(width, width, init, kernels, activation, self.parallel, optional=True)
        self.score = ReplicatedLinear(width, 1, init, kernels, parallel=self.parallel, optional=True)

    def forward(self, hidden: Tensor, sequence_ids: Tensor) -> Tensor:
        """Map hidden [b, s, h], or under sequence parallelism [t / n, h], to logits [b, s]."""
        logits = self.score(self.dense(hidden))
        if self.parallel.splits_tokens:
            logits = gather_tokens(logits, self.parallel)
        return logits.view(self.parallel.own_shape(sequence_ids))


@torch.no_grad()
def draw_words(logits: Tensor, positions: Tensor, kernel: SamplingKernel, parallel: ParallelContext) -> Tensor:
    """Draw a word from softmax(logits) for every slot, the same one in every layout; return their ids, shaped as slots.

    The word has the largest sum of logit and Gumbel noise. The noise is a hash of (seed, step, row of the global batch,
    position, word), and of equal sums the first word wins. `logits` are [b, p, v / n] of this rank's words, `positions`
    [b, p] those of the slots in their rows. With context parallelism logits and results are those of its slots.
    """
    num_words = logits.shape[-1]
    keys = parallel.dropout.row_keys(len(positions), logits)[:, None].expand_as(positions)
    if parallel.context_size > 1:
        positions, keys, logits = own_slots(positions, parallel, 0), own_slots(keys, parallel, 0), logits[None]
    largest, word = kernel(logits.flatten(0, 1), positions.flatten(), keys.flatten(), parallel.rank * num_words)
    return first_over_ranks(largest, word, num_words, parallel).view_as(positions)
