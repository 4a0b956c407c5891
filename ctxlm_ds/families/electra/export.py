"""ELECTRA as ElectraForPreTraining (the discriminator) and ElectraForMaskedLM (the generator)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ctxlm_ds.export.base import CardText, FamilyExport, Fields, same
from ctxlm_ds.export.key_maps import KeyMap, Row, expand
from ctxlm_ds.families.bert.export import EncoderExport, fill_mask_card, layer_rows, table_rows
from ctxlm_ds.families.electra.config import GENERATOR, ElectraSection

TABLES = "electra.embeddings"
TABLE_ROWS = (*table_rows("electra"), Row("embeddings.layer_norm.{p}", (f"{TABLES}.LayerNorm.{{p}}",)))
PROJECTION = "electra.embeddings_project.{p}"
BUFFERS = (r"electra\.embeddings\.(position_ids|token_type_ids)",)


class ElectraExport(EncoderExport):
    """The common part of both models."""

    section = ElectraSection
    model_type = "electra"
    config_class = "ElectraConfig"
    settings = EncoderExport.settings | same("type_vocab_size", "embedding_size")
    extra_outputs = frozenset()
    kept_settings = ("classifier_dropout",)
    projection: ClassVar[str]
    """Our layer between tables and blocks."""
    blocks: ClassVar[str]
    """Our name of the blocks."""
    head_rows: ClassVar[tuple[Row, ...]]
    tied: ClassVar[Mapping[str, str]] = {}
    prefix: ClassVar[str] = ""
    """Beginning of our settings of the sizes."""

    def models(self) -> tuple[FamilyExport, ...]:
        return DISCRIMINATOR, GENERATOR_MODEL

    def shared_outputs(self, outputs: Sequence[str]) -> tuple[str, ...]:
        (own,) = self.hf_classes
        return tuple(name for name in outputs if name in own)

    def key_map(self, model: ElectraSection, outputs: Sequence[str], pad_id: int) -> KeyMap:
        self.check(model, outputs)
        width = getattr(model, self.prefix + "hidden_size")
        projection = () if model.embedding_size == width else (Row(self.projection + ".{p}", (PROJECTION,)),)
        rows = (*TABLE_ROWS, *projection, *layer_rows("electra", self.blocks), *self.head_rows)
        (hf_class,) = self.hf_classes.values()
        return KeyMap(hf_class, expand(rows, self.num_blocks(model)), self.tied, BUFFERS, optional_prefix="electra.")

    def num_blocks(self, model: ElectraSection) -> int:
        return int(getattr(model, self.prefix + "num_layers"))


class DiscriminatorExport(ElectraExport):
    """The discriminator, in the folder of the export."""

    hf_classes = {frozenset({"replaced_logits"}): "ElectraForPreTraining"}
    position_outputs = frozenset({"replaced_logits"})
    projection, blocks = "embedding_projection", "encoder"
    head_rows = (
        Row("discriminator_head.dense.{p}", ("discriminator_predictions.dense.{p}",)),
        Row("discriminator_head.score.{p}", ("discriminator_predictions.dense_prediction.{p}",)),
    )

    def outputs_in(self, file_names: Sequence[str]) -> tuple[str, ...]:
        """Return the logits, and the labels that the generator's samples decide."""
        return "replaced_logits", "replaced_labels"

    def their_inputs(self, fields: Fields) -> Fields:
        """Return the arguments of transformers' forward, with the generator's samples if the fields have them."""
        inputs = super().their_inputs(fields)
        return inputs | {"input_ids": fields.get("discriminator_ids", fields["input_ids"])}

    def their_outputs(self, result: Any, fields: Fields) -> Fields:
        """Return the logits of all positions [b, s]."""
        return {"replaced_logits": result.logits}

    def card(self, outputs: Sequence[str], mask_token: str) -> CardText:
        usage = (
            "import torch\n\n"
            'inputs = tokenizer("The quick brown fox fake over the lazy dog.", return_tensors="pt")\n'
            "with torch.no_grad():\n"
            "    print(model(**inputs).logits.sigmoid())  # probability that each token was replaced\n"
        )
        return CardText(
            "ELECTRA discriminator", "It predicts which tokens were replaced; its generator is in `generator/`.",
            "feature-extraction", "replaced-token-detection", usage, "masked",
        )  # fmt: skip


class GeneratorExport(ElectraExport):
    """The generator, in the folder `generator` of the export."""

    folder = "generator"
    hf_classes = {frozenset({"generator_logits"}): "ElectraForMaskedLM"}
    settings = {
        (GENERATOR if GENERATOR + ours in ElectraSection.model_fields else "") + ours: theirs
        for ours, theirs in ElectraExport.settings.items()
    }
    projection, blocks = "generator_embedding_projection", "generator"
    head_rows = (
        Row("generator_heads.mlm_transform.{p}", ("generator_predictions.dense.{p}",)),
        Row("generator_heads.mlm_layer_norm.{p}", ("generator_predictions.LayerNorm.{p}",)),
        Row("generator_bias.bias", ("generator_lm_head.bias",)),
    )
    tied = {"generator_lm_head.weight": f"{TABLES}.word_embeddings.weight"}
    prefix = GENERATOR
    exact_gelu = True

    def their_outputs(self, result: Any, fields: Fields) -> Fields:
        """Return the predicted positions' logits [b, p, v]."""
        (logits,) = super().their_outputs(result, fields).values()
        return {"generator_logits": logits}

    def card(self, outputs: Sequence[str], mask_token: str) -> CardText:
        heads = "It has a masked-language-modelling head; its discriminator is in the folder above."
        return fill_mask_card("ELECTRA generator", heads, mask_token)


DISCRIMINATOR, GENERATOR_MODEL = DiscriminatorExport(), GeneratorExport()
EXPORT = DISCRIMINATOR
