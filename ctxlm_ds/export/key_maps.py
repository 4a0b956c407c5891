"""Two-way tables between our parameters and those of the plain Hugging Face classes, one table a family.

A row of a table names one parameter of ours and the tensors it becomes there. `{i}` stands for the number of a layer,
`{p}` for `weight` and `bias`. Every parameter of either side is in exactly one row; what a Hugging Face file may hold
besides (a buffer, the second name of a tied tensor) is listed too, so that nothing is dropped unseen.

Shape letters: V vocabulary, H hidden size, P rows of a position table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ctxlm_ds.errors import ExportError
from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.families.roberta.config import RobertaSection

Kind = Literal["same", "stacked", "offset_positions", "transposed"]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One parameter of ours and its tensors in the Hugging Face class."""

    ours: str
    theirs: tuple[str, ...]
    kind: Kind = "same"
    """`same`: equal; `stacked`: ours is theirs one below the other; `offset_positions`: KeyMap.position_offset;
    `transposed`: a matrix theirs has as [inputs, outputs] (GPT's Conv1D), a bias equal."""


@dataclass(frozen=True)
class KeyMap:
    """The rows of one Hugging Face class with everything else that its files may hold."""

    hf_class: str
    rows: tuple[Row, ...]
    tied: dict[str, str]
    """Second name of a tensor -> the name under which it is written."""
    unused: tuple[str, ...] = ()
    """Patterns of tensors that files hold although the class has no such parameter."""
    position_offset: int = RobertaSection.position_offset
    """RoBERTa: rows before position 0 in their position table (their pad_token_id + 1)."""
    optional_prefix: str = ""
    """Beginning of their names that a file saved from the bare model leaves out (openai-community/gpt2)."""


def _layer_rows(prefix: str) -> tuple[Row, ...]:
    theirs = f"{prefix}.encoder.layer.{{i}}"
    return (
        Row("encoder.{i}.attention.qkv.{p}",
            tuple(f"{theirs}.attention.self.{part}.{{p}}" for part in ("query", "key", "value")), "stacked"),
        Row("encoder.{i}.attention.output.{p}", (f"{theirs}.attention.output.dense.{{p}}",)),
        Row("encoder.{i}.attention_layer_norm.{p}", (f"{theirs}.attention.output.LayerNorm.{{p}}",)),
        Row("encoder.{i}.mlp.up.{p}", (f"{theirs}.intermediate.dense.{{p}}",)),
        Row("encoder.{i}.mlp.down.{p}", (f"{theirs}.output.dense.{{p}}",)),
        Row("encoder.{i}.mlp_layer_norm.{p}", (f"{theirs}.output.LayerNorm.{{p}}",)),
    )  # fmt: skip


BERT_ROWS = (
    Row("word_embeddings.weight", ("bert.embeddings.word_embeddings.weight",)),
    Row("embeddings.position_embeddings.weight", ("bert.embeddings.position_embeddings.weight",)),
    Row("embeddings.token_type_embeddings.weight", ("bert.embeddings.token_type_embeddings.weight",)),
    Row("embeddings.layer_norm.{p}", ("bert.embeddings.LayerNorm.{p}",)),
    *_layer_rows("bert"),
    Row("heads.mlm_transform.{p}", ("cls.predictions.transform.dense.{p}",)),
    Row("heads.mlm_layer_norm.{p}", ("cls.predictions.transform.LayerNorm.{p}",)),
    Row("mlm_bias.bias", ("cls.predictions.bias",)),
)
BERT_NEXT_SENTENCE_ROWS = (
    Row("heads.pooler.{p}", ("bert.pooler.dense.{p}",)),
    Row("heads.nsp_classifier.{p}", ("cls.seq_relationship.{p}",)),
)
BERT_TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
BERT_BUFFERS = (r"bert\.embeddings\.(position_ids|token_type_ids)",)
BERT_NEXT_SENTENCE_TENSORS = (r"bert\.pooler\.dense\.(weight|bias)", r"cls\.seq_relationship\.(weight|bias)")

ROBERTA_ROWS = (
    Row("word_embeddings.weight", ("roberta.embeddings.word_embeddings.weight",)),
    # The class adds row 0 of token_type_embeddings everywhere: zeros going out, added to the positions coming in.
    Row("embeddings.position_embeddings.weight",
        ("roberta.embeddings.position_embeddings.weight", "roberta.embeddings.token_type_embeddings.weight"),
        "offset_positions"),
    Row("embeddings.layer_norm.{p}", ("roberta.embeddings.LayerNorm.{p}",)),
    *_layer_rows("roberta"),
    Row("heads.mlm_transform.{p}", ("lm_head.dense.{p}",)),
    Row("heads.mlm_layer_norm.{p}", ("lm_head.layer_norm.{p}",)),
    Row("mlm_bias.bias", ("lm_head.bias",)),
)  # fmt: skip
ROBERTA_TIED = {
    "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
    "lm_head.decoder.bias": "lm_head.bias",
}
ROBERTA_UNUSED = (r"roberta\.embeddings\.(position_ids|token_type_ids)", r"roberta\.pooler\.dense\.(weight|bias)")

GPT_PREFIX = "transformer."


def _gpt_rows(words: str, positions: str) -> tuple[Row, ...]:
    theirs = f"{GPT_PREFIX}h.{{i}}"
    return (
        Row("word_embeddings.weight", (f"{GPT_PREFIX}{words}.weight",)),
        Row("embeddings.position_embeddings.weight", (f"{GPT_PREFIX}{positions}.weight",)),
        Row("decoder.{i}.attention_layer_norm.{p}", (f"{theirs}.ln_1.{{p}}",)),
        Row("decoder.{i}.attention.qkv.{p}", (f"{theirs}.attn.c_attn.{{p}}",), "transposed"),
        Row("decoder.{i}.attention.output.{p}", (f"{theirs}.attn.c_proj.{{p}}",), "transposed"),
        Row("decoder.{i}.mlp_layer_norm.{p}", (f"{theirs}.ln_2.{{p}}",)),
        Row("decoder.{i}.mlp.up.{p}", (f"{theirs}.mlp.c_fc.{{p}}",), "transposed"),
        Row("decoder.{i}.mlp.down.{p}", (f"{theirs}.mlp.c_proj.{{p}}",), "transposed"),
    )


GPT2_ROWS = (*_gpt_rows("wte", "wpe"), Row("final_layer_norm.{p}", (f"{GPT_PREFIX}ln_f.{{p}}",)))
GPT1_ROWS = _gpt_rows("tokens_embed", "positions_embed")
GPT_UNUSED = (r"transformer\.h\.\d+\.attn\.(bias|masked_bias)", r"transformer\.position_ids")

LEGACY_NAMES = {".gamma": ".weight", ".beta": ".bias"}
"""Endings of LayerNorm parameters in files converted from TensorFlow (google-bert/bert-base-uncased)."""


def expand(rows: Sequence[Row], num_layers: int) -> tuple[Row, ...]:
    """The rows with `{i}` and `{p}` filled in: one a parameter."""
    expanded = []
    for row in rows:
        layers = range(num_layers) if "{i}" in row.ours else (0,)
        leaves = ("weight", "bias") if "{p}" in row.ours else ("",)
        for layer in layers:
            for leaf in leaves:
                names = tuple(name.format(i=layer, p=leaf) for name in (row.ours, *row.theirs))
                expanded.append(Row(names[0], names[1:], row.kind))
    return tuple(expanded)


def build_key_map(model: TransformerSection, terms: Sequence[str], pad_id: int) -> KeyMap:
    """The table for a model with these loss terms.

    `terms` decides the class: BertForPreTraining with `next_sentence`, BertForMaskedLM without; RobertaForMaskedLM;
    GPT2LMHeadModel or OpenAIGPTLMHeadModel.
    `pad_id` is the padding token, after which RoBERTa's class starts to count positions.

    Raises ExportError where no plain Hugging Face class computes the model.
    """
    check_exportable(model, terms)
    if model.is_decoder:
        return _decoder_key_map(model)
    if model.family == "roberta":
        rows = expand(ROBERTA_ROWS, model.num_layers)
        return KeyMap("RobertaForMaskedLM", rows, ROBERTA_TIED, ROBERTA_UNUSED, pad_id + 1)
    if "next_sentence" in terms:
        rows = expand(BERT_ROWS + BERT_NEXT_SENTENCE_ROWS, model.num_layers)
        return KeyMap("BertForPreTraining", rows, BERT_TIED, BERT_BUFFERS)
    rows = expand(BERT_ROWS, model.num_layers)
    return KeyMap("BertForMaskedLM", rows, BERT_TIED, BERT_BUFFERS + BERT_NEXT_SENTENCE_TENSORS)


def _decoder_key_map(model: TransformerSection) -> KeyMap:
    hf_class, rows = ("GPT2LMHeadModel", GPT2_ROWS) if model.family == "gpt2" else ("OpenAIGPTLMHeadModel", GPT1_ROWS)
    tied = {"lm_head.weight": rows[0].theirs[0]}
    return KeyMap(hf_class, expand(rows, model.num_layers), tied, GPT_UNUSED, optional_prefix=GPT_PREFIX)


def _check_decoder(model: TransformerSection) -> None:
    if model.pre_layer_norm != (model.family == "gpt2"):
        raise ExportError(
            f"model.pre_layer_norm is {model.pre_layer_norm} with model.family {model.family}: GPT2LMHeadModel puts "
            "LayerNorm before each block, OpenAIGPTLMHeadModel after it; set the family that goes with it"
        )
    if model.family == "gpt1" and model.hidden_activation == "gelu":
        raise ExportError(
            "model.hidden_activation is gelu: OpenAIGPTLMHeadModel computes gelu's tanh form under that name; "
            "train with model.hidden_activation: gelu_tanh to export"
        )
    if model.family == "gpt1" and model.intermediate_size != 4 * model.hidden_size:
        raise ExportError(
            f"model.intermediate_size is {model.intermediate_size}: OpenAIGPTLMHeadModel's is always 4 times "
            f"hidden_size, {4 * model.hidden_size}; train with that to export"
        )


def check_exportable(model: TransformerSection, terms: Sequence[str]) -> None:
    """Raise ExportError with the reason where no plain Hugging Face class computes this model."""
    if model.is_decoder:
        _check_decoder(model)
        return
    if model.pre_layer_norm:
        raise ExportError(
            "model.pre_layer_norm is true: BertForPreTraining, BertForMaskedLM and RobertaForMaskedLM put LayerNorm "
            "after each block, so none of them can compute this model; train with model.pre_layer_norm: false to export"
        )
    if model.family == "roberta" and "next_sentence" in terms:
        raise ExportError(
            "model.family is roberta with objective masked_lm_nsp: RobertaForMaskedLM has no next-sentence head; "
            "use objective masked_lm, or family bert"
        )
    if model.family == "roberta" and model.hidden_activation != "gelu":
        raise ExportError(
            f"model.hidden_activation is {model.hidden_activation}: RobertaForMaskedLM's head always computes the "
            "exact gelu; train with model.hidden_activation: gelu to export"
        )


def their_shapes(row: Row, shape: Shape, key_map: KeyMap) -> tuple[Shape, ...]:
    """Shapes of `row.theirs` for a parameter of ours of `shape`."""
    if row.kind == "stacked":
        part = (shape[0] // len(row.theirs), *shape[1:])
        return tuple(part for _ in row.theirs)
    if row.kind == "offset_positions":
        rows = shape[0] - RobertaSection.position_offset + key_map.position_offset
        return ((rows, shape[1]), (1, shape[1]))
    return (shape[::-1],) if row.kind == "transposed" else (shape,)


def our_shape(row: Row, shapes: Sequence[Shape], key_map: KeyMap) -> Shape:
    """Shape of our parameter for tensors of theirs; the inverse of `their_shapes`."""
    first = shapes[0]
    if row.kind == "stacked":
        return (sum(shape[0] for shape in shapes), *first[1:])
    if row.kind == "offset_positions":
        return (first[0] - key_map.position_offset + RobertaSection.position_offset, first[1])
    return first[::-1] if row.kind == "transposed" else first


def to_theirs(row: Row, value: torch.Tensor, key_map: KeyMap) -> tuple[torch.Tensor, ...]:
    """Our parameter as their tensors, in the order of `row.theirs`."""
    if row.kind == "stacked":
        return tuple(value.chunk(len(row.theirs), dim=0))
    if row.kind == "offset_positions":
        shifted = _move_positions(value, RobertaSection.position_offset, key_map.position_offset)
        return shifted, value.new_zeros(1, value.shape[1])
    return (_transposed(value),) if row.kind == "transposed" else (value,)


def to_ours(row: Row, values: Sequence[torch.Tensor], key_map: KeyMap) -> torch.Tensor:
    """Their tensors, in the order of `row.theirs`, as our parameter; the inverse of `to_theirs`."""
    if row.kind == "stacked":
        return torch.cat(list(values), dim=0)
    if row.kind == "offset_positions":
        positions, token_types = values
        moved = _move_positions(positions, key_map.position_offset, RobertaSection.position_offset)
        # Adding a row of zeros would turn -0.0 into 0.0: a round trip stays bitwise without it.
        return moved + token_types[0] if bool(token_types[0].any()) else moved
    return _transposed(values[0]) if row.kind == "transposed" else values[0]


def _transposed(value: torch.Tensor) -> torch.Tensor:
    return value.t().contiguous() if value.dim() == 2 else value


def _move_positions(table: torch.Tensor, offset: int, new_offset: int) -> torch.Tensor:
    """A position table [offset + n, H] with position 0 at `new_offset`; the rows before it are never used."""
    if offset == new_offset:
        return table
    moved = table.new_zeros(table.shape[0] - offset + new_offset, table.shape[1])
    kept = min(offset, new_offset)
    moved[new_offset - kept :] = table[offset - kept :]
    return moved


@dataclass(frozen=True)
class Assignment:
    """How the tensors of a Hugging Face file belong to a table."""

    stored: dict[str, str]
    """Name in the table -> name in the file that holds it."""
    doubles: dict[str, str]
    """Name in the file -> name in the file that must be equal to it (both names of a tied tensor were written)."""
    unused: tuple[str, ...]
    """Names in the file that the class does not use."""


def assign(key_map: KeyMap, file_names: Sequence[str], where: str) -> Assignment:
    """Find each tensor of the table among the names of a file, under its own, its tied or its legacy name.

    Raises ExportError naming every tensor that is missing and every one that is unknown.
    """
    names = {name: _modern_name(name) for name in file_names}
    prefix = key_map.optional_prefix
    if prefix and not any(name.startswith(prefix) for name in names.values()):
        names = {name: modern if modern in key_map.tied else prefix + modern for name, modern in names.items()}
    modern = {modern: name for name, modern in names.items()}
    stored: dict[str, str] = {}
    doubles: dict[str, str] = {}
    unused: list[str] = []
    unknown: list[str] = []
    wanted = {name for row in key_map.rows for name in row.theirs}
    aliases = []
    for name, file_name in modern.items():
        if name in wanted:
            stored[name] = file_name
        elif name in key_map.tied:
            aliases.append(name)
        elif any(re.fullmatch(pattern, name) for pattern in key_map.unused):
            unused.append(file_name)
        else:
            unknown.append(file_name)
    for alias in aliases:
        name = key_map.tied[alias]
        if name in stored:
            doubles[modern[alias]] = stored[name]
        else:
            stored[name] = modern[alias]
    missing = sorted(wanted - stored.keys())
    if missing or unknown:
        raise ExportError(_mismatch(key_map.hf_class, where, missing, sorted(unknown)))
    return Assignment(stored, doubles, tuple(sorted(unused)))


def _modern_name(name: str) -> str:
    for old, new in LEGACY_NAMES.items():
        if name.endswith(f"LayerNorm{old}"):
            return name.removesuffix(old) + new
    return name


def _mismatch(hf_class: str, where: str, missing: Sequence[str], unknown: Sequence[str]) -> str:
    parts = [f"{where} is not a {hf_class}"]
    if missing:
        parts.append(f"missing: {', '.join(missing)}")
    if unknown:
        parts.append(f"unknown: {', '.join(unknown)}")
    remedy = f"save it with {hf_class}.save_pretrained (a bare encoder or a fine-tuned head is not enough)"
    return "; ".join([*parts, remedy])


def convert(key_map: KeyMap, read: Callable[[str], torch.Tensor], row: Row) -> torch.Tensor:
    """Our parameter of `row`, read tensor by tensor with `read(name in the table)`."""
    return to_ours(row, [read(name) for name in row.theirs], key_map)
