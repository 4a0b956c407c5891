"""Toy families, each the smallest that needs one kind of room, and what they learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ctxlm_ds.kernels.attention_spec import AttentionSpec
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import LayerDescription
from ctxlm_ds.models.parts.distillation import tap, teacher_layers
from ctxlm_ds.models.parts.transformer import BlockSettings, transformer_blocks
from ctxlm_ds.models.program import Program
from ctxlm_ds.models.spec import ModelBuild
from ctxlm_ds.parallel.parameters import Normal, initial_value
from tests.families.toy_layers import (
    HEADS,
    INIT,
    WIDTH,
    Attend,
    ChunkedWords,
    DecoderBlock,
    Exchange,
    Facts,
    Gated,
    Recurrent,
    RelativeBias,
    Sampler,
    ScaledWords,
    Score,
    ToySection,
    word_table,
)


def parts(build: ModelBuild) -> dict[str, Any]:
    return {"kernels": build.kernels, "parallel": build.parallel}


def encoder_decoder(section: ToySection, build: ModelBuild) -> list[LayerDescription]:
    """Two lengths; the encoder's output is read on later stages, the bias is made anew before each layer."""
    table = word_table(build)
    kwargs = parts(build)

    def bias(kind: str, ids: str) -> LayerDescription:
        return LayerDescription(
            f"{kind}_bias", RelativeBias, (ids,), ("bias",), {"parallel": build.parallel}, f"{kind}_bias", block=True
        )

    encoder = [
        layer
        for index in range(2)
        for layer in (
            bias("encoder", "input_ids"),
            LayerDescription(
                f"encoder.{index}", Attend, ("memory", "memory", "bias"), ("memory",), kwargs, recompute=build.recompute
            ),
        )
    ]
    decoder = [
        layer
        for index in range(2)
        for layer in (
            bias("decoder", "decoder_ids"),
            LayerDescription(
                f"decoder.{index}",
                DecoderBlock,
                ("hidden", "bias", "memory"),
                ("hidden",),
                kwargs,
                recompute=build.recompute,
            ),  # fmt: skip
        )
    ]
    first, second, last = table.look_up(into="memory"), table.look_up("decoder_ids"), table.decode("hidden", "logits")
    return [first, *encoder, second, *decoder, last]


def shared_layer(section: ToySection, build: ModelBuild) -> list[LayerDescription]:
    """All blocks are one module (ALBERT), under several names."""
    table = word_table(build)
    blocks = [
        LayerDescription(
            f"block.{index}",
            Attend,
            ("hidden", "hidden"),
            ("hidden",),
            parts(build),
            "shared",
            block=True,
            recompute=build.recompute,
        )  # fmt: skip
        for index in range(4)
    ]
    return [table.look_up(), *blocks, table.decode("hidden", "logits")]


def half_used(section: ToySection, build: ModelBuild) -> list[LayerDescription]:
    """The first stage holds a tensor of a tie that only the last one uses."""
    table = word_table(build, layer=ScaledWords)
    return [table.look_up(), *attend_blocks(build), table.decode("hidden", "logits")]


def attend_blocks(build: ModelBuild, count: int = 4, name: str = "block") -> list[LayerDescription]:
    return [
        LayerDescription(
            f"{name}.{index}",
            Attend,
            ("hidden", "hidden"),
            ("hidden",),
            parts(build),
            block=True,
            recompute=build.recompute,
        )  # fmt: skip
        for index in range(count)
    ]


def two_streams(section: ToySection, build: ModelBuild) -> list[LayerDescription]:
    table = word_table(build)
    blocks = [
        LayerDescription(
            f"block.{index}",
            Exchange,
            ("left", "right"),
            ("left", "right"),
            {**parts(build), "label": str(index)},
            block=True,
            recompute=build.recompute,
        )  # fmt: skip
        for index in range(4)
    ]
    return [
        table.look_up(into="left"), table.look_up("decoder_ids", "right"), *blocks,
        table.decode("left", "logits"), table.decode("right", "decoder_logits"),
    ]  # fmt: skip


def without_gradient(section: ToySection, build: ModelBuild) -> list[LayerDescription]:
    table, names = word_table(build), ("share", "first", "large", "place")
    facts = LayerDescription("facts", Facts, ("input_ids", "hidden"), names, no_gradient=frozenset(names))
    blocks = [
        LayerDescription(
            f"block.{index}",
            Gated,
            ("hidden", *names),
            ("hidden",),
            parts(build),
            block=True,
            recompute=build.recompute,
        )  # fmt: skip
        for index in range(4)
    ]
    return [table.look_up(), facts, *blocks, table.decode("hidden", "logits")]


def student_and_teacher(section: ToySection, build: ModelBuild) -> list[LayerDescription]:
    """Both write logits, the hidden states after two layers, and one layer's attention scores."""
    settings = BlockSettings(
        hidden_size=WIDTH, num_heads=HEADS, intermediate_size=2 * WIDTH, activation="gelu", norm_eps=1e-5,
        hidden_dropout=0.0, attention=AttentionSpec(WIDTH // HEADS), pre_layer_norm=True, init=INIT,
        residual_init=INIT,
    )  # fmt: skip

    def model(num_layers: int) -> list[LayerDescription]:
        table = word_table(build)
        blocks = transformer_blocks("layer", num_layers, settings, build, scores={1: "scores"})
        return [
            table.look_up(), *blocks[:2], tap("hidden", "middle"), *blocks[2:], table.decode("hidden", "logits")
        ]  # fmt: skip

    return [*teacher_layers(model(3)), *model(2)]


def teacher_values(section: ToySection) -> Callable[[str], Tensor]:
    """Values of the teacher, as of a trained model that was read from somewhere."""

    outputs = ("logits", "teacher.logits")
    build = ModelBuild(outputs, KernelSet({}, "cpu", torch.float32))
    shapes = Program(student_and_teacher(section, build), outputs).shapes
    return lambda name: initial_value(name, shapes[name], Normal(0.4), seed=77)


def generator_and_discriminator(section: ToySection, build: ModelBuild) -> list[LayerDescription]:
    table = word_table(build)
    replaced = ("new_ids", "replaced")
    return [
        table.look_up(),
        *attend_blocks(build, 1, "generator"),
        table.decode("hidden", "generator_logits"),
        LayerDescription(
            "sampler",
            Sampler,
            ("generator_logits", "input_ids", "labels"),
            replaced,
            {"parallel": build.parallel},
            no_gradient=frozenset(replaced),
        ),  # fmt: skip
        table.look_up("new_ids"),
        *attend_blocks(build, 3, "discriminator"),
        LayerDescription("score", Score, ("hidden",), ("replaced_logits",), {"kernels": build.kernels}),
    ]


def lanes(section: ToySection, build: ModelBuild) -> list[LayerDescription]:
    table = word_table(build)
    blocks = [
        LayerDescription(
            f"block.{index}",
            Recurrent,
            ("hidden", f"state.{index}"),
            ("hidden", f"state.{index}"),
            parts(build),
            carries=frozenset({f"state.{index}"}),
            block=True,
            recompute=build.recompute,
        )  # fmt: skip
        for index in range(4)
    ]
    return [table.look_up(), *blocks, table.decode("hidden", "logits")]


def chunked(section: ToySection, build: ModelBuild) -> list[LayerDescription]:
    """The table's layer compares with the labels; or, if logits are asked for, a term does."""
    table = word_table(build, layer=ChunkedWords)
    if "logits" in build.outputs:
        last = table.decode("hidden", "logits")
    else:
        compare = table.use(("hidden", "labels"), ("label_losses", "hits"))
        last = replace(compare, no_gradient=frozenset({"hits"}))
    return [table.look_up(), *attend_blocks(build), last]
