"""BERT and its variants as classes of transformers, and the common part of all encoders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.base import (
    COMMON_SETTINGS,
    CardText,
    FamilyExport,
    Fields,
    Rows,
    TokenIds,
    at_positions,
    check_special_ids,
)
from ctxlm_ds.export.key_maps import KeyMap, Row, expand
from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.families.bert.config import (
    CLASSES,
    LAST_HIDDEN,
    PROJECTED,
    UNILM_TOKEN_TYPES,
    BertSection,
    MegatronBertSection,
    TinyBertSection,
    UnilmSection,
)
from ctxlm_ds.tokenizers.base import Tokenizer

MASKED_LM = frozenset({"predicted_logits"})
WITH_SENTENCES = frozenset({"predicted_logits", "sentence_logits"})
OLD_ENDINGS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Names in files converted from TensorFlow (google-bert/bert-base-uncased)."""
MASKED_SHARE = 7
"""One token in so many is masked in the text that proves a conversion."""


BERT_NORMS = ("attention.output.LayerNorm", "output.LayerNorm")
"""Names of a layer's two LayerNorms."""


def block_rows(ours: str, theirs: str, qkv: Iterable[str], rest: Sequence[str]) -> tuple[Row, ...]:
    """List the rows of a block; `qkv` and `rest` are their names of its layers, in the order of ours."""
    names = ("attention.qkv", "attention.output", "attention_layer_norm", "mlp.up", "mlp.down", "mlp_layer_norm")
    parts = [tuple(f"{theirs}.{part}.{{p}}" for part in row) for row in (qkv, *([part] for part in rest))]
    return tuple(Row(f"{ours}.{name}.{{p}}", row) for name, row in zip(names, parts, strict=True))


def layer_rows(prefix: str, blocks: str = "encoder", norms: tuple[str, str] = BERT_NORMS) -> tuple[Row, ...]:
    """List the rows of an encoder's layers: ours are `blocks`, and their tensors begin with `prefix`."""
    qkv = [f"attention.self.{part}" for part in ("query", "key", "value")]
    rest = "attention.output.dense", norms[0], "intermediate.dense", "output.dense", norms[1]
    return block_rows(f"{blocks}.{{i}}", f"{prefix}.encoder.layer.{{i}}", qkv, rest)


def table_rows(prefix: str) -> tuple[Row, ...]:
    """List the rows of the tables of words, positions and token types."""
    return (
        Row("word_embeddings.weight", (f"{prefix}.embeddings.word_embeddings.weight",)),
        Row("embeddings.position_embeddings.weight", (f"{prefix}.embeddings.position_embeddings.weight",)),
        Row("embeddings.token_type_embeddings.weight", (f"{prefix}.embeddings.token_type_embeddings.weight",)),
    )


HEAD_ROWS = (
    Row("heads.mlm_transform.{p}", ("cls.predictions.transform.dense.{p}",)),
    Row("heads.mlm_layer_norm.{p}", ("cls.predictions.transform.LayerNorm.{p}",)),
    Row("mlm_bias.bias", ("cls.predictions.bias",)),
)
ROWS = (
    *table_rows("bert"),
    Row("embeddings.layer_norm.{p}", ("bert.embeddings.LayerNorm.{p}",)),
    *layer_rows("bert"),
    *HEAD_ROWS,
)
SENTENCE_ROWS = (
    Row("heads.pooler.{p}", ("bert.pooler.dense.{p}",)),
    Row("heads.nsp_classifier.{p}", ("cls.seq_relationship.{p}",)),
)
TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
BUFFERS = (r"bert\.embeddings\.(position_ids|token_type_ids)",)
SENTENCE_TENSORS = (r"bert\.pooler\.dense\.(weight|bias)", r"cls\.seq_relationship\.(weight|bias)")


class EncoderExport(FamilyExport):
    """The common part of BERT and the encoders like it."""

    settings = {
        **COMMON_SETTINGS,
        "layer_norm_eps": "layer_norm_eps",
        "hidden_dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
    }
    extra_outputs = frozenset({"boundary_logits"})
    activation_key = "hidden_act"
    plain_settings = {
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
        "position_embedding_type": "absolute",
    }

    pre_layer_norm: ClassVar[bool] = False
    """The classes put LayerNorm before each block."""
    title: ClassVar[str]
    """Name in the model card."""
    pair_output: ClassVar[str] = "seq_relationship_logits"
    """Their name of the logits of pairs."""

    def check(self, model: Any, outputs: Sequence[str]) -> None:
        if getattr(model, "pre_layer_norm", self.pre_layer_norm) != self.pre_layer_norm:
            raise ExportError(
                f"model.pre_layer_norm is true: {' and '.join(self.hf_classes.values())} put LayerNorm after each "
                "block, so this model cannot be computed there; train with model.pre_layer_norm: false to export"
            )
        super().check(model, outputs)

    def tokenizer_problem(self, pad_id: int, tokenizer: Tokenizer) -> str | None:
        missing = "the tokenizer has no mask token, which the model needs; name one in tokenizer_config.json"
        return None if tokenizer.has_mask else missing

    def text_rows(
        self, loaded: Any, model: TransformerSection, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]
    ) -> Rows:
        """Encode each pair as one row and mask some of its tokens."""
        check_special_ids(loaded, tokenizer, pad="pad", mask="mask")
        encoded = loaded(
            [first for first, _ in pairs], [second for _, second in pairs],
            truncation="longest_first", max_length=model.max_position_embeddings, return_token_type_ids=True,
        )  # fmt: skip
        rows = [
            [tokenizer.mask_id if place % MASKED_SHARE == 3 else token for place, token in enumerate(row)]
            for row in encoded["input_ids"]
        ]
        one_type = self.num_token_types(model) == 1
        return Rows(rows, [[0] * len(row) for row in rows] if one_type else encoded["token_type_ids"])

    def num_token_types(self, model: Any) -> int:
        return int(model.type_vocab_size) if "type_vocab_size" in self.settings else 1

    def their_inputs(self, fields: Fields) -> Fields:
        types = {"token_type_ids": fields["token_type_ids"]} if "type_vocab_size" in self.settings else {}
        return super().their_inputs(fields) | types

    def their_outputs(self, result: Any, fields: Fields) -> Fields:
        """Return the predicted positions' logits [b, p, v] and, if there are any, those of sentences [b, 1, 2]."""
        with_pairs = self.pair_output in result
        logits = result.prediction_logits if with_pairs else result.logits
        found = {"predicted_logits": at_positions(logits, fields["prediction_positions"])}
        return found | ({"sentence_logits": result[self.pair_output][:, None]} if with_pairs else {})

    def card(self, outputs: Sequence[str], mask_token: str) -> CardText:
        heads = f"It has {self.title}'s masked-language-modelling head."
        return fill_mask_card(f"{self.title} encoder", heads, mask_token)


def fill_mask_card(kind: str, heads: str, mask_token: str) -> CardText:
    """Describe a masked language model."""
    usage = (
        'fill = pipeline("fill-mask", model=folder)\n'
        f'print(fill("The capital of the country is a large {mask_token}."))\n'
    )
    return CardText(kind, heads, "fill-mask", "masked-lm", usage, "masked")


class BertExport(EncoderExport):
    """BERT: two classes, one with the next-sentence head."""

    section = BertSection
    model_type = "bert"
    config_class = "BertConfig"
    hf_classes = {WITH_SENTENCES: "BertForPreTraining", MASKED_LM: "BertForMaskedLM"}
    settings = EncoderExport.settings | {"type_vocab_size": "type_vocab_size"}
    title = "BERT"
    pair_task: ClassVar[str] = "next-sentence prediction"
    sentence_rows: ClassVar[tuple[Row, ...]] = SENTENCE_ROWS
    """Tensors of the sentence head."""
    rows: ClassVar[tuple[Row, ...]] = ROWS
    """All others."""

    def key_map(self, model: BertSection, outputs: Sequence[str], pad_id: int) -> KeyMap:
        self.check(model, outputs)
        with_sentences = "sentence_logits" in outputs
        rows = self.rows + SENTENCE_ROWS if with_sentences else self.rows
        unused = BUFFERS if with_sentences else BUFFERS + SENTENCE_TENSORS
        table, hf_class = expand(rows, model.num_layers), self.hf_classes[frozenset(outputs)]
        return KeyMap(hf_class, table, TIED, unused, OLD_ENDINGS, optional_prefix="bert.")

    def outputs_in(self, file_names: Sequence[str]) -> tuple[str, ...]:
        """Look for the next-sentence head: bert-base-uncased has it and declares BertForMaskedLM."""
        wanted = {name for row in expand(self.sentence_rows, 0) for name in row.theirs}
        return ("predicted_logits", "sentence_logits") if wanted <= set(file_names) else ("predicted_logits",)

    def card(self, outputs: Sequence[str], mask_token: str) -> CardText:
        heads = f"It has {self.title}'s masked-language-modelling head; it was trained without {self.pair_task}."
        if "sentence_logits" in outputs:
            heads = f"It has {self.title}'s two heads: masked language modelling and {self.pair_task}."
        return fill_mask_card(f"{self.title} encoder", heads, mask_token)


EXPORT = BertExport()


class MegatronBertExport(BertExport):
    """Megatron-LM's BERT: two classes, one with the next-sentence head."""

    section = MegatronBertSection
    model_type = "megatron-bert"
    config_class = "MegatronBertConfig"
    hf_classes = {WITH_SENTENCES: "MegatronBertForPreTraining", MASKED_LM: "MegatronBertForMaskedLM"}
    pre_layer_norm = True
    rows = (
        *table_rows("bert"),
        *layer_rows("bert", norms=("attention.ln", "ln")),
        Row("final_layer_norm.{p}", ("bert.encoder.ln.{p}",)),
        *HEAD_ROWS,
    )


MEGATRON_BERT_EXPORT = MegatronBertExport()


UNILM_KINDS = 4


class UnilmExport(BertExport):
    """UniLM: BERT's classes with six token types."""

    section = UnilmSection
    hf_classes = {
        frozenset({"ranked_logits", "sentence_logits"}): "BertForPreTraining",
        frozenset({"ranked_logits"}): "BertForMaskedLM",
    }

    def claims(self, values: Mapping[str, Any]) -> bool:
        return values.get("model_type") == self.model_type and values.get("type_vocab_size") == UNILM_TOKEN_TYPES

    def outputs_in(self, file_names: Sequence[str]) -> tuple[str, ...]:
        return ("ranked_logits", *super().outputs_in(file_names)[1:])

    def further_fields(self, fields: Fields) -> Fields:
        """Make the rows in turn left-to-right, right-to-left, a source and its target, and bidirectional."""
        import torch

        types = fields["token_type_ids"]
        kinds = (torch.arange(len(types)) % UNILM_KINDS)[:, None]
        places = torch.arange(types.shape[1]).expand_as(types)
        none = torch.zeros_like(types)
        ranks = torch.stack([places, places.flip(1), types.cumsum(1), none])
        of_kinds = torch.stack([none + 2, none + 3, types + 4, types])
        return {
            "ranks": ranks.gather(0, kinds.expand_as(types)[None])[0],
            "token_type_ids": of_kinds.gather(0, kinds.expand_as(types)[None])[0],
        }

    def their_inputs(self, fields: Fields) -> Fields:
        """Return the inputs with a mask [b, 1, s, s] of what each position sees."""
        ranks, ids = fields["ranks"], fields["sequence_ids"]
        visible = (ranks[:, None] <= ranks[..., None]) & (ids[:, None] == ids[..., None])
        return super().their_inputs(fields) | {"attention_mask": visible[:, None]}

    def their_outputs(self, result: Any, fields: Fields) -> Fields:
        found = super().their_outputs(result, fields)
        return {"ranked_logits": found.pop("predicted_logits"), **found}

    def card(self, outputs: Sequence[str], mask_token: str) -> CardText:
        heads = (
            "It has BERT's heads. Texts read in both directions have token types 0 and 1, from left to right 2, from "
            "right to left 3, a source and its target 4 and 5; a boolean mask [batch, 1, queries, keys] as "
            "attention_mask says what each position sees (True)."
        )
        return fill_mask_card("UniLM encoder", heads, mask_token)


UNILM_EXPORT = UnilmExport()


PREFIX, FIT_SIZE = "bert.", "fit_size"
ENCODER_ALONE = frozenset({LAST_HIDDEN})
ENCODER_ROWS = tuple(
    replace(row, theirs=tuple(name.removeprefix(PREFIX) for name in row.theirs))
    for row in ROWS
    if row.theirs[0].startswith(PREFIX)
)
CLASSIFIER = frozenset({CLASSES})
CLASSIFIER_ROWS = (
    *(row for row in ROWS if row.theirs[0].startswith(PREFIX)),
    Row("classifier_head.pooler.{p}", ("bert.pooler.dense.{p}",)),
    Row("classifier_head.classifier.{p}", ("classifier.{p}",)),
)
POOLER = (r"pooler\.dense\.(weight|bias)",)


class TinyBertExport(BertExport):
    """TinyBERT: the encoder alone, or with BERT's masked-LM head, or with the classifier of a task."""

    section = TinyBertSection
    hf_classes = {MASKED_LM: "BertForMaskedLM", ENCODER_ALONE: "BertModel", CLASSIFIER: "BertForSequenceClassification"}
    extra_outputs = frozenset({PROJECTED})
    position_outputs = frozenset({LAST_HIDDEN})
    proof_arguments = {"BertModel": {"add_pooling_layer": False}}

    def claims(self, values: Mapping[str, Any]) -> bool:
        declared = values.get("architectures") == [self.hf_classes[CLASSIFIER]]
        return values.get("model_type") == self.model_type and (declared or FIT_SIZE in values)

    def shared_outputs(self, outputs: Sequence[str]) -> tuple[str, ...]:
        return (CLASSES,) if CLASSES in outputs else super().shared_outputs(outputs)

    def their_settings(self, model: TinyBertSection, ids: TokenIds) -> dict[str, Any]:
        return super().their_settings(model, ids) | {FIT_SIZE: model.fit_size, "num_labels": model.num_classes}

    def our_settings(self, config: Any, folder: Path) -> dict[str, Any]:
        fields = self.section.model_fields
        labels = getattr(config, "id2label", None)
        return super().our_settings(config, folder) | {
            FIT_SIZE: getattr(config, FIT_SIZE, fields[FIT_SIZE].default),
            "num_classes": len(labels) if labels else fields["num_classes"].default,
        }

    def key_map(self, model: BertSection, outputs: Sequence[str], pad_id: int) -> KeyMap:
        if frozenset(outputs) == MASKED_LM:
            return super().key_map(model, outputs, pad_id)
        self.check(model, outputs)
        if frozenset(outputs) == CLASSIFIER:
            rows = expand(CLASSIFIER_ROWS, model.num_layers)
            return KeyMap(self.hf_classes[CLASSIFIER], rows, {}, BUFFERS, OLD_ENDINGS)
        buffers = tuple(pattern.replace(r"bert\.", "") for pattern in BUFFERS)
        return KeyMap("BertModel", expand(ENCODER_ROWS, model.num_layers), {}, buffers + POOLER, OLD_ENDINGS)

    def outputs_in(self, file_names: Sequence[str]) -> tuple[str, ...]:
        if "classifier.weight" in file_names:
            return (CLASSES,)
        has_head = any(name.startswith("cls.") for name in file_names)
        return ("predicted_logits",) if has_head else (LAST_HIDDEN,)

    def their_outputs(self, result: Any, fields: Fields) -> Fields:
        if "last_hidden_state" in result:
            return {LAST_HIDDEN: result.last_hidden_state}
        if result.logits.dim() == 2:
            return {CLASSES: result.logits[:, None]}
        return super().their_outputs(result, fields)

    def card(self, outputs: Sequence[str], mask_token: str) -> CardText:
        if frozenset(outputs) == CLASSIFIER:
            usage = 'classify = pipeline("text-classification", model=folder)\nprint(classify("What a fine day!"))\n'
            heads = "Its classifier learnt the predictions of a larger model that was fine-tuned for a task."
            return CardText("TinyBERT classifier", heads, "text-classification", "distillation", usage, "distilled")
        if frozenset(outputs) != ENCODER_ALONE:
            return super().card(outputs, mask_token)
        usage = (
            'features = pipeline("feature-extraction", model=folder)\n'
            'print(features("The capital of the country is a large city.")[0][0])\n'
        )
        heads = "It has no head and no pooler: it was distilled from a larger encoder, layer by layer, for fine-tuning."
        return CardText("TinyBERT encoder", heads, "feature-extraction", "distillation", usage, "distilled")


TINYBERT_EXPORT = TinyBertExport()
