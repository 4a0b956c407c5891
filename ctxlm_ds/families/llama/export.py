"""LLaMA as LlamaForCausalLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.base import COMMON_SETTINGS, TokenIds, same
from ctxlm_ds.export.key_maps import KeyMap, Row, expand, stacked
from ctxlm_ds.families.gpt.export import LOGITS, CausalExport
from ctxlm_ds.families.llama.config import LlamaSection

WORDS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER = "model.layers.{i}"
ROWS = (
    Row("word_embeddings.weight", (WORDS,)),
    Row("decoder.{i}.attention_layer_norm.weight", (f"{LAYER}.input_layernorm.weight",)),
    Row("decoder.{i}.attention.output.weight", (f"{LAYER}.self_attn.o_proj.weight",)),
    Row("decoder.{i}.mlp_layer_norm.weight", (f"{LAYER}.post_attention_layernorm.weight",)),
    Row("decoder.{i}.mlp.up.weight", (f"{LAYER}.mlp.gate_proj.weight", f"{LAYER}.mlp.up_proj.weight")),
    Row("decoder.{i}.mlp.down.weight", (f"{LAYER}.mlp.down_proj.weight",)),
    Row("final_layer_norm.weight", ("model.norm.weight",)),
)
UNUSED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
PLAIN, LINEAR, LLAMA3 = "default", "linear", "llama3"
"""Their names of the scalings of rotary positions."""
SCALING = {
    "rotary_scaling_factor": "factor",
    "rotary_low_turns": "low_freq_factor",
    "rotary_high_turns": "high_freq_factor",
    "rotary_original_length": "original_max_position_embeddings",
}
"""Our setting -> theirs in rope_parameters; `linear` has the first only."""


class LlamaExport(CausalExport):
    """LLaMA; Llama 2 and 3 are of the same class."""

    section = LlamaSection
    title = "LLaMA-shaped"
    model_type = "llama"
    config_class = "LlamaConfig"
    hf_classes = {LOGITS: "LlamaForCausalLM"}
    settings = COMMON_SETTINGS | same("attention_dropout", "tie_word_embeddings") | {"layer_norm_eps": "rms_norm_eps"}
    activation_key = "hidden_act"
    activations = {"silu": "silu", **CausalExport.activations}
    further_activations = {"swish": "silu", **CausalExport.further_activations}
    plain_settings = {"attention_bias": False, "mlp_bias": False}

    def check(self, model: LlamaSection, outputs: Sequence[str]) -> None:
        super().check(model, outputs)
        if model.hidden_dropout > 0.0:
            raise ExportError(
                f"model.hidden_dropout is {model.hidden_dropout}: LlamaForCausalLM has attention_dropout only; train "
                "with model.hidden_dropout: 0 to export"
            )

    def key_map(self, model: LlamaSection, outputs: Sequence[str], pad_id: int) -> KeyMap:
        self.check(model, outputs)
        width = model.hidden_size // model.num_attention_heads * model.key_value_heads
        names = tuple(f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkv")
        qkv = Row("decoder.{i}.attention.qkv.weight", names, stacked((model.hidden_size, width, width)))
        head = () if model.tie_word_embeddings else (Row("lm_head.weight", (HEAD,)),)
        tied = {HEAD: WORDS} if model.tie_word_embeddings else {}
        rows = expand((*ROWS, qkv, *head), model.num_layers)
        return KeyMap("LlamaForCausalLM", rows, tied, UNUSED, optional_prefix="model.")

    def their_settings(self, model: LlamaSection, ids: TokenIds) -> dict[str, Any]:
        kind = PLAIN if model.rotary_scaling == "none" else model.rotary_scaling
        names = {PLAIN: (), LINEAR: ("rotary_scaling_factor",), LLAMA3: tuple(SCALING)}[kind]
        scaling = {SCALING[name]: getattr(model, name) for name in names}
        return super().their_settings(model, ids) | {
            "num_key_value_heads": model.key_value_heads,
            "head_dim": model.hidden_size // model.num_attention_heads,
            "rope_parameters": {"rope_type": kind, "rope_theta": model.rotary_base, **scaling},
            # The class gives the padding token's vector no gradient: the end of a document is not to be one.
            "pad_token_id": None if ids.pad_id == ids.sep_id else ids.pad_id,
        }

    def our_settings(self, config: Any, folder: Path) -> dict[str, Any]:
        heads, size = config.num_attention_heads, getattr(config, "head_dim", None)
        if size is not None and size * heads != config.hidden_size:
            raise ExportError(
                f"{folder}/config.json: head_dim is {size}, and hidden_size {config.hidden_size} / num_attention_heads "
                f"{heads} is not; only models whose heads together are hidden_size wide can be imported"
            )
        return super().our_settings(config, folder) | {
            "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
            "hidden_dropout": 0.0,
            **_our_rotary(config, folder),
        }

    def pad_id(self, config: Any) -> int:
        return max(0, config.pad_token_id or 0)


def _our_rotary(config: Any, folder: Path) -> dict[str, Any]:
    """Return our settings of rope_parameters, or of rope_theta and rope_scaling as older files have them."""
    older = {"rope_theta": getattr(config, "rope_theta", None), **(getattr(config, "rope_scaling", None) or {})}
    values: Mapping[str, Any] = getattr(config, "rope_parameters", None) or older
    kind = values.get("rope_type") or values.get("type") or PLAIN
    base = {"rotary_base": float(values.get("rope_theta") or LlamaSection.model_fields["rotary_base"].default)}
    if kind == PLAIN:
        return base
    if kind not in (LINEAR, LLAMA3):
        changing = " changes the angles with the length of a text, but a row of training has one length;"
        raise ExportError(
            f"{folder}/config.json: rope_type {kind!r}{changing if kind == 'dynamic' else ' is not supported;'} only "
            f"{PLAIN}, {LINEAR} and {LLAMA3} can be imported"
        )
    wanted = {ours: theirs for ours, theirs in SCALING.items() if kind == LLAMA3 or theirs == "factor"}
    missing = [theirs for theirs in wanted.values() if theirs not in values]
    if missing:
        raise ExportError(f"{folder}/config.json: {', '.join(missing)} of rope_type {kind!r} is missing")
    return base | {"rotary_scaling": kind} | {ours: values[theirs] for ours, theirs in wanted.items()}


EXPORT = LlamaExport()
