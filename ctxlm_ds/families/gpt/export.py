"""GPT as OpenAIGPTLMHeadModel and GPT-2 as GPT2LMHeadModel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from ctxlm_ds.console import logger
from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.base import ENDS, CardText, FamilyExport, Rows, TokenIds, check_special_ids, same
from ctxlm_ds.export.key_maps import TRANSPOSED, KeyMap, Row, expand
from ctxlm_ds.families.gpt.config import Gpt1Section, Gpt2Section, GptSection
from ctxlm_ds.tokenizers.base import Tokenizer

LOGITS = frozenset({"logits"})
PREFIX = "transformer."
UNUSED = (r"transformer\.h\.\d+\.attn\.(bias|masked_bias)", r"transformer\.position_ids")
FEED_FORWARD_FACTOR = 4
"""Width of the feed-forward layer in the published models, as a multiple of the model's width."""


def _rows(words: str, positions: str) -> tuple[Row, ...]:
    theirs = f"{PREFIX}h.{{i}}"
    return (
        Row("word_embeddings.weight", (f"{PREFIX}{words}.weight",)),
        Row("embeddings.position_embeddings.weight", (f"{PREFIX}{positions}.weight",)),
        Row("decoder.{i}.attention_layer_norm.{p}", (f"{theirs}.ln_1.{{p}}",)),
        Row("decoder.{i}.attention.qkv.{p}", (f"{theirs}.attn.c_attn.{{p}}",), TRANSPOSED),
        Row("decoder.{i}.attention.output.{p}", (f"{theirs}.attn.c_proj.{{p}}",), TRANSPOSED),
        Row("decoder.{i}.mlp_layer_norm.{p}", (f"{theirs}.ln_2.{{p}}",)),
        Row("decoder.{i}.mlp.up.{p}", (f"{theirs}.mlp.c_fc.{{p}}",), TRANSPOSED),
        Row("decoder.{i}.mlp.down.{p}", (f"{theirs}.mlp.c_proj.{{p}}",), TRANSPOSED),
    )


class CausalExport(FamilyExport):
    """The common part of decoders that predict the next token."""

    kept_settings: ClassVar[tuple[str, ...]] = ("pad_token_id", "bos_token_id", "eos_token_id")
    special_ids = ENDS
    next_token_output = "logits"
    title: ClassVar[str]
    """Begins the model card."""

    def text_rows(self, loaded: Any, model: Any, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> Rows:
        """Encode each pair as one text, cut to the model's length."""
        check_special_ids(loaded, tokenizer, eos="sep")
        encoded = tokenizer.encode_batch([" ".join(pair) for pair in pairs])
        rows = [list(ids[: model.max_position_embeddings]) for ids in encoded]
        return Rows(rows, [[0] * len(row) for row in rows])

    def card(self, outputs: Sequence[str], mask_token: str) -> CardText:
        usage = (
            'write = pipeline("text-generation", model=folder)\n'
            'print(write("The capital of the country is", max_new_tokens=20, do_sample=False))\n'
        )
        return CardText(self.title, "It predicts the next token.", "text-generation", "causal-lm", usage, "causal")


class GptExport(CausalExport):
    """The common part of GPT and GPT-2."""

    settings = {
        **same("vocab_size", "initializer_range"),
        "hidden_size": "n_embd",
        "num_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "layer_norm_eps": "layer_norm_epsilon",
        "hidden_dropout": "resid_pdrop",
        "attention_dropout": "attn_pdrop",
    }
    plain_settings = {
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    }
    rows: tuple[Row, ...]

    def key_map(self, model: GptSection, outputs: Sequence[str], pad_id: int) -> KeyMap:
        self.check(model, outputs)
        tied = {"lm_head.weight": self.rows[0].theirs[0]}
        rows = expand(self.rows, model.num_layers)
        return KeyMap(self.hf_classes[LOGITS], rows, tied, UNUSED, optional_prefix=PREFIX)

    def their_settings(self, model: GptSection, ids: TokenIds) -> dict[str, Any]:
        return super().their_settings(model, ids) | {"embd_pdrop": model.hidden_dropout}

    def our_settings(self, config: Any, folder: Path) -> dict[str, Any]:
        if config.embd_pdrop != config.resid_pdrop:
            logger.warning(
                "%s/config.json: embd_pdrop %s is not kept: model.hidden_dropout is resid_pdrop, %s, everywhere",
                folder, config.embd_pdrop, config.resid_pdrop,
            )  # fmt: skip
        return super().our_settings(config, folder) | {"intermediate_size": FEED_FORWARD_FACTOR * config.n_embd}

    def pad_id(self, config: Any) -> int:
        return 0


class Gpt1Export(GptExport):
    """GPT; its class fixes the width of the feed-forward layer and calls the tanh form `gelu`."""

    section = Gpt1Section
    title = "GPT"
    model_type = "openai-gpt"
    config_class = "OpenAIGPTConfig"
    hf_classes = {LOGITS: "OpenAIGPTLMHeadModel"}
    activation_key = "afn"
    activations = {"gelu_tanh": "gelu", "relu": "relu"}
    """transformers modeling_openai.py, ACT_FNS."""
    further_activations = {}
    rows = _rows("tokens_embed", "positions_embed")

    def check(self, model: GptSection, outputs: Sequence[str]) -> None:
        if model.hidden_activation == "gelu":
            raise ExportError(
                "model.hidden_activation is gelu: OpenAIGPTLMHeadModel computes gelu's tanh form under that name; "
                "train with model.hidden_activation: gelu_tanh to export"
            )
        width = FEED_FORWARD_FACTOR * model.hidden_size
        if model.intermediate_size != width:
            raise ExportError(
                f"model.intermediate_size is {model.intermediate_size}: OpenAIGPTLMHeadModel's is always 4 times "
                f"hidden_size, {width}; train with that to export"
            )
        super().check(model, outputs)


class Gpt2Export(GptExport):
    """GPT-2."""

    section = Gpt2Section
    title = "GPT-2"
    model_type = "gpt2"
    config_class = "GPT2Config"
    hf_classes = {LOGITS: "GPT2LMHeadModel"}
    activation_key = "activation_function"
    activations = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}
    kept_settings = (*GptExport.kept_settings, "n_inner")
    rows = (*_rows("wte", "wpe"), Row("final_layer_norm.{p}", (f"{PREFIX}ln_f.{{p}}",)))

    def their_settings(self, model: GptSection, ids: TokenIds) -> dict[str, Any]:
        is_default = model.intermediate_size == FEED_FORWARD_FACTOR * model.hidden_size
        return super().their_settings(model, ids) | {"n_inner": None if is_default else model.intermediate_size}

    def our_settings(self, config: Any, folder: Path) -> dict[str, Any]:
        inner = {"intermediate_size": config.n_inner} if config.n_inner else {}
        return super().our_settings(config, folder) | inner


GPT1_EXPORT, GPT2_EXPORT = Gpt1Export(), Gpt2Export()
