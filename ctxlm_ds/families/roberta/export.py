"""RoBERTa as RobertaForMaskedLM, XLM-R as XLMRobertaForMaskedLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.export.base import ENDS, TokenIds
from ctxlm_ds.export.key_maps import Change, KeyMap, Row, expand
from ctxlm_ds.families.bert.export import MASKED_LM, OLD_ENDINGS, EncoderExport, layer_rows
from ctxlm_ds.families.roberta.config import RobertaSection, XlmRobertaSection
from ctxlm_ds.tokenizers.base import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_TYPES = "roberta.embeddings.token_type_embeddings.weight"


def offset_positions(offset: int) -> Change:
    """Convert the position table, and row 0 of their token types, which they add to every position.

    `offset` is the number of rows before position 0 in their table [offset + n, h]: their pad_token_id + 1.
    """

    def to_theirs(value: Tensor, _: int) -> list[Tensor]:
        return [_moved(value, RobertaSection.position_offset, offset), value.new_zeros(1, value.shape[1])]

    def to_ours(values: list[Tensor]) -> Tensor:
        import torch

        positions, token_types = values
        # Adding 0.0 would turn -0.0 into 0.0; adding -0.0 keeps every bit.
        addend = torch.where(token_types[0] == 0, -0.0, token_types[0])
        return _moved(positions, offset, RobertaSection.position_offset) + addend

    return Change(to_theirs, to_ours)


def _moved(table: Tensor, offset: int, new_offset: int) -> Tensor:
    """Move position 0 of a table [offset + n, h] to row `new_offset`; the rows before it are never used."""
    from torch.nn import functional as F

    return F.pad(table, (0, 0, new_offset - offset, 0))


def _rows(pad_id: int) -> tuple[Row, ...]:
    embeddings = "roberta.embeddings"
    return (
        Row("word_embeddings.weight", (f"{embeddings}.word_embeddings.weight",)),
        Row("embeddings.position_embeddings.weight", (f"{embeddings}.position_embeddings.weight", TOKEN_TYPES),
            offset_positions(pad_id + 1)),
        Row("embeddings.layer_norm.{p}", (f"{embeddings}.LayerNorm.{{p}}",)),
        *layer_rows("roberta"),
        Row("heads.mlm_transform.{p}", ("lm_head.dense.{p}",)),
        Row("heads.mlm_layer_norm.{p}", ("lm_head.layer_norm.{p}",)),
        Row("mlm_bias.bias", ("lm_head.bias",)),
    )  # fmt: skip


TIED = {"lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight", "lm_head.decoder.bias": "lm_head.bias"}
UNUSED = (r"roberta\.embeddings\.(position_ids|token_type_ids)", r"roberta\.pooler\.dense\.(weight|bias)")


class RobertaExport(EncoderExport):
    """RoBERTa, and the model types with its tensors."""

    section = RobertaSection
    model_type = "roberta"
    config_class = "RobertaConfig"
    hf_classes = {MASKED_LM: "RobertaForMaskedLM"}
    special_ids = ENDS
    default_pad_id = 1
    exact_gelu = True
    title = "RoBERTa"

    def key_map(self, model: RobertaSection, outputs: Sequence[str], pad_id: int) -> KeyMap:
        self.check(model, outputs)
        rows = expand(_rows(pad_id), model.num_layers)
        return KeyMap(self.hf_classes[MASKED_LM], rows, TIED, UNUSED, OLD_ENDINGS, optional_prefix="roberta.")

    def their_settings(self, model: RobertaSection, ids: TokenIds) -> dict[str, Any]:
        return super().their_settings(model, ids) | {
            "max_position_embeddings": model.max_position_embeddings + ids.pad_id + 1,
            "type_vocab_size": 1,
        }

    def our_settings(self, config: Any, folder: Path) -> dict[str, Any]:
        positions = config.max_position_embeddings - self.pad_id(config) - 1
        return super().our_settings(config, folder) | {"max_position_embeddings": positions}

    def import_warnings(self, read: Callable[[str], Tensor]) -> Iterator[str]:
        first, *others = read(TOKEN_TYPES)
        if bool(first.any()):
            yield (
                f"row 0 of {TOKEN_TYPES} is added to every position of the position table: the model computes the same "
                "function, but an export has other tensors than this folder"
            )
        if any(bool(row.any()) for row in others):
            (hf_class,) = self.hf_classes.values()
            yield f"{TOKEN_TYPES} has more than one row; only row 0, the default of {hf_class}, is kept"

    def tokenizer_problem(self, pad_id: int, tokenizer: Tokenizer) -> str | None:
        if tokenizer.pad_id == pad_id:
            return super().tokenizer_problem(pad_id, tokenizer)
        return (
            f"config.json has pad_token_id {pad_id}, after which RoBERTa counts positions, but the tokenizer pads "
            f"with {tokenizer.pad_id}; make them equal"
        )


EXPORT = RobertaExport()


class XlmRobertaExport(RobertaExport):
    """XLM-R."""

    section = XlmRobertaSection
    model_type = "xlm-roberta"
    config_class = "XLMRobertaConfig"
    hf_classes = {MASKED_LM: "XLMRobertaForMaskedLM"}
    title = "XLM-R"


XLM_ROBERTA_EXPORT = XlmRobertaExport()
