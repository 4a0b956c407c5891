"""XLNet as XLNetLMHeadModel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.export.base import ENDS, CardText, FamilyExport, Fields, Rows, TokenIds, check_special_ids, same
from ctxlm_ds.export.key_maps import Change, KeyMap, Row, expand
from ctxlm_ds.families.xlnet.config import XlnetSection
from ctxlm_ds.tokenizers.base import Tokenizer

if TYPE_CHECKING:
    import torch

WORDS, HEAD = "transformer.word_embedding.weight", "lm_loss.weight"
THEIRS = "transformer.layer.{i}"
CLS_TYPE = 2


def heads(num_heads: int) -> Change:
    """Return the change for their matrices [h, n, d], which are ours [n·d, h] transposed, one below the other."""

    def split(value: torch.Tensor, count: int) -> list[torch.Tensor]:
        return [part.t().contiguous().unflatten(1, (num_heads, -1)) for part in value.chunk(count)]

    def join(values: list[torch.Tensor]) -> torch.Tensor:
        import torch

        _require_heads(values, num_heads)
        return torch.cat([value.flatten(1).t() for value in values]).contiguous()

    return Change(split, join)


def flat_heads(num_heads: int) -> Change:
    """Return the change for their tensors [x, n, d], which are ours [x, n·d]."""

    def join(values: list[torch.Tensor]) -> torch.Tensor:
        _require_heads(values, num_heads)
        return values[0].flatten(1)

    return Change(lambda value, _: [value.unflatten(1, (num_heads, -1))], join)


def _require_heads(values: Sequence[torch.Tensor], num_heads: int) -> None:
    for value in values:
        if value.dim() != 3 or value.shape[1] != num_heads:
            raise ValueError(f"a tensor of shape {list(value.shape)} is not of the config's {num_heads} heads")


ONE_ROW = Change(lambda value, _: [value.view(1, 1, -1)], lambda values: values[0].reshape(1, -1))


def _rows(model: XlnetSection) -> tuple[Row, ...]:
    attention, mlp, split = f"{THEIRS}.rel_attn", f"{THEIRS}.ff", heads(model.num_attention_heads)
    flat = flat_heads(model.num_attention_heads)
    return (
        Row("layer.{i}.attention.query.weight", (f"{attention}.q",), split),
        Row("layer.{i}.attention.key_value.weight", (f"{attention}.k", f"{attention}.v"), split),
        Row("layer.{i}.attention.distance.weight", (f"{attention}.r",), split),
        Row("layer.{i}.attention.output.weight", (f"{attention}.o",), flat),
        Row("layer.{i}.attention.content_bias", (f"{attention}.r_w_bias",)),
        Row("layer.{i}.attention.distance_bias", (f"{attention}.r_r_bias",)),
        Row("layer.{i}.attention.segment_bias", (f"{attention}.r_s_bias",)),
        Row("layer.{i}.attention.segments", (f"{attention}.seg_embed",), flat),
        Row("layer.{i}.attention_layer_norm.{p}", (f"{attention}.layer_norm.{{p}}",)),
        Row("layer.{i}.mlp.up.{p}", (f"{mlp}.layer_1.{{p}}",)),
        Row("layer.{i}.mlp.down.{p}", (f"{mlp}.layer_2.{{p}}",)),
        Row("layer.{i}.mlp_layer_norm.{p}", (f"{mlp}.layer_norm.{{p}}",)),
    )


class XlnetExport(FamilyExport):
    """XLNet with its language-modelling head."""

    section = XlnetSection
    model_type = "xlnet"
    config_class = "XLNetConfig"
    hf_classes = {frozenset({"permuted_logits"}): "XLNetLMHeadModel"}
    settings = {
        **same("vocab_size", "layer_norm_eps", "initializer_range"),
        "hidden_size": "d_model",
        "num_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "d_inner",
        "hidden_dropout": "dropout",
    }
    activation_key = "ff_activation"
    activations = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}
    special_ids = ENDS
    plain_settings = {
        "attn_type": "bi", "clamp_len": -1, "same_length": False, "bi_data": False, "tie_word_embeddings": True,
    }  # fmt: skip
    tokenizer_settings = {"padding_side": "left"}  # the classes for tasks read the last position
    kept_settings = (
        "reuse_len", "summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout", "start_n_top",
        "end_n_top",
    )  # fmt: skip

    def key_map(self, model: XlnetSection, outputs: Sequence[str], pad_id: int) -> KeyMap:
        self.check(model, outputs)
        rows = (
            Row("word_embeddings.weight", (WORDS,)),
            Row("stream_inputs.query", ("transformer.mask_emb",), ONE_ROW),
            *expand(_rows(model), model.num_layers),
            Row("lm_bias.bias", ("lm_loss.bias",)),
        )
        return KeyMap("XLNetLMHeadModel", rows, {HEAD: WORDS}, optional_prefix="transformer.")

    def num_token_types(self, model: XlnetSection) -> int:
        return 2

    def their_settings(self, model: XlnetSection, ids: TokenIds) -> dict[str, Any]:
        return super().their_settings(model, ids) | {"mem_len": model.mem_len or None}

    def our_settings(self, config: Any, folder: Path) -> dict[str, Any]:
        # A memory needs rows that continue; a recipe that has them sets it.
        return super().our_settings(config, folder) | {
            "attention_dropout": config.dropout, "mem_len": config.mem_len or 0
        }  # fmt: skip

    def text_rows(self, loaded: Any, model: Any, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> Rows:
        """Encode each pair as A <sep> B <sep> <cls>."""
        check_special_ids(loaded, tokenizer, pad="pad", sep="sep", cls="cls")
        rows, types = [], []
        for pair in pairs:
            first, second = tokenizer.encode_batch(list(pair))
            rows.append([*first, tokenizer.sep_id, *second, tokenizer.sep_id, tokenizer.cls_id])
            types.append([0] * (len(first) + 1) + [1] * (len(second) + 1) + [CLS_TYPE])
        return Rows(rows, types)

    def further_fields(self, fields: Fields) -> Fields:
        """Predict the chosen positions but the first in their order, each after those before it.

        The first one is seen by all. A prediction that sees nothing would attend to padding, whose states differ.
        """
        import torch

        positions, ids = fields["prediction_positions"], fields["input_ids"]
        count, length = positions.shape[1], ids.shape[1]
        ranks = torch.zeros_like(ids).scatter(1, positions, torch.arange(count).expand_as(positions))
        empty = torch.full_like(positions[:, :1], length)
        return {
            "ranks": ranks.where(fields["sequence_ids"] > 0, count),
            "target_positions": torch.cat([positions[:, 1:], empty], dim=1),
            "directions": torch.zeros(len(ids), 1, dtype=torch.int64),
        }

    def their_inputs(self, fields: Fields) -> Fields:
        import torch

        ranks, slots = fields["ranks"], fields["target_positions"]
        # Theirs adds to a mask of both streams that a position of the content stream sees itself.
        targets = torch.nn.functional.one_hot(slots, ranks.shape[1] + 1)[..., :-1].float()
        of_queries = ranks - targets.any(dim=1).long()
        return super().their_inputs(fields) | {
            "token_type_ids": fields["token_type_ids"],
            "perm_mask": (ranks[:, None] > of_queries[..., None]).float(),
            "target_mapping": targets,
        }

    def card(self, outputs: Sequence[str], mask_token: str) -> CardText:
        usage = (
            "import torch\n"
            'text = tokenizer("The capital of the country is a large", add_special_tokens=False)["input_ids"]\n'
            "ids = torch.tensor([[*text, tokenizer.mask_token_id]])\n"
            "hidden = torch.zeros(1, ids.shape[1], ids.shape[1])\n"
            "hidden[:, :, -1] = 1.0  # no position sees the word to predict\n"
            "target = torch.zeros(1, 1, ids.shape[1])\n"
            "target[0, 0, -1] = 1.0\n"
            "logits = model(ids, perm_mask=hidden, target_mapping=target).logits\n"
            "print(tokenizer.decode(logits[0, 0].argmax().item()))\n"
        )
        return CardText(
            "XLNet encoder", "It has XLNet's language-modelling head, which predicts words in any order.",
            "feature-extraction",
            "permutation-lm", usage, "permutation",
        )  # fmt: skip


EXPORT = XlnetExport()
