"""UniLM as BertForPreTraining and BertForMaskedLM, which take its masks of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctxlm_ds.export.base import CardText, Fields
from ctxlm_ds.families.bert.export import BertExport, fill_mask_card
from ctxlm_ds.families.unilm.config import TOKEN_TYPES, UnilmSection

KINDS = 4


class UnilmExport(BertExport):
    """UniLM: BERT's classes with six token types."""

    section = UnilmSection
    hf_classes = {
        frozenset({"ranked_logits", "sentence_logits"}): "BertForPreTraining",
        frozenset({"ranked_logits"}): "BertForMaskedLM",
    }

    def claims(self, values: Mapping[str, Any]) -> bool:
        return values.get("model_type") == self.model_type and values.get("type_vocab_size") == TOKEN_TYPES

    def outputs_in(self, file_names: Sequence[str]) -> tuple[str, ...]:
        return ("ranked_logits", *super().outputs_in(file_names)[1:])

    def further_fields(self, fields: Fields) -> Fields:
        """Make the rows in turn left-to-right, right-to-left, a source and its target, and bidirectional."""
        import torch

        types = fields["token_type_ids"]
        kinds = (torch.arange(len(types)) % KINDS)[:, None]
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


EXPORT = UnilmExport()
