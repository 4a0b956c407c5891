"""Decoders and encoder-decoders to Hugging Face folders, which generate() and pipelines read, and back."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BartConfig,
    BartModel,
    GPT2Config,
    GPT2LMHeadModel,
    MBartConfig,
    MBartModel,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PretrainedConfig,
    PreTrainedModel,
    T5Config,
    T5EncoderModel,
    T5Model,
    pipeline,
)

from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.huggingface import from_hf, to_hf
from ctxlm_ds.export.verify import verify_folder
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.tokenizers.load import load_tokenizer
from tests.checkpoints import change_json, change_weights, make_tokenizer, write_random_run

CLASSES = {"gpt2": GPT2LMHeadModel, "gpt1": OpenAIGPTLMHeadModel}
OUTPUTS = ("logits",)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer("gpt2", tmp_path_factory.mktemp("tokenizers") / "gpt2")


@pytest.fixture(params=list(CLASSES))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def hf_folder(kind: str, tokenizer_folder: Path, folder: Path, **settings: object) -> Path:
    """A model of transformers' own with random weights, saved by transformers, its tokenizer beside it."""
    torch.manual_seed(3)
    end = load_tokenizer(tokenizer_folder).sep_id
    values = {"vocab_size": 300, "n_positions": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3,
              "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}  # fmt: skip
    config = (GPT2Config if kind == "gpt2" else OpenAIGPTConfig)(**{**values, **settings})
    model = CLASSES[kind](config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)
    return folder


def test_the_export_is_a_pipeline_with_a_card(kind: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    to_hf(write_random_run(tmp_path / "run", kind, tokenizer_folder), tmp_path / "hf")
    model, info = CLASSES[kind].from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.generation_config.eos_token_id == load_tokenizer(tokenizer_folder).sep_id == 299
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "hf")) is CLASSES[kind]
    write = pipeline("text-generation", model=str(tmp_path / "hf"))
    (result,) = write("the river was", max_new_tokens=5, do_sample=False)
    assert result["generated_text"].startswith("the river was")
    card = (tmp_path / "hf" / "README.md").read_text()
    header = yaml.safe_load(card.split("---\n")[1])
    assert header["pipeline_tag"] == "text-generation" and "causal-lm" in header["tags"]
    assert f"{CLASSES[kind].__name__}.from_pretrained" in card and 'pipeline("text-generation"' in card
    assert "fill-mask" not in card and "mask_prob" not in card and "objective.name | causal_lm" in card


def test_a_file_as_openais_own_is_imported(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Names without prefix, the masks among the tensors, and a config.json without the newer settings."""
    original = hf_folder("gpt2", tokenizer_folder, tmp_path / "original")
    tensors = {
        name.removeprefix("transformer."): value for name, value in load_file(original / "model.safetensors").items()
    }
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(40, 40).tril().view(1, 1, 40, 40)
    tensors["h.1.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, original / "model.safetensors", metadata={"format": "pt"})
    kept = ("model_type", "vocab_size", "n_embd", "n_head", "n_layer", "n_positions", "activation_function")
    config = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps({key: config[key] for key in kept} | {"n_ctx": 40}))
    imported = from_hf(original, tmp_path / "ours")
    assert all(c.holds for c in imported.comparisons)


def test_a_dropout_of_its_own_on_embeddings_is_said_to_be_lost(
    tokenizer_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    original = hf_folder("gpt2", tokenizer_folder, tmp_path / "original", embd_pdrop=0.3)
    with caplog.at_level(logging.WARNING, logger="ctxlm_ds"):
        from_hf(original, tmp_path / "ours")
    assert "embd_pdrop 0.3 is not kept" in caplog.text


@pytest.mark.parametrize("name", ["transformer.h.1.attn.c_attn.weight", "transformer.ln_f.bias"])
def test_a_wrong_export_is_noticed(name: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    run = write_random_run(tmp_path / "run", "gpt2", tokenizer_folder)
    to_hf(run, tmp_path / "hf")
    change_weights(tmp_path / "hf", lambda tensors: tensors.update({name: tensors[name].roll(1, -1).contiguous()}))
    step = run / "checkpoints" / "step-00000100"
    config = load_config(step / "config.yaml")
    with pytest.raises(ExportError, match="text/logits"):
        verify_folder(tmp_path / "hf", CheckpointReader(step), config.model, OUTPUTS, load_tokenizer(tokenizer_folder))


def encoder_decoder(model: PreTrainedModel, folder: Path, tokenizer_folder: Path) -> Path:
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)
    return folder


def config_of(kind: type[PretrainedConfig], tokenizer_folder: Path, **settings: object) -> PretrainedConfig:
    ids = load_tokenizer(tokenizer_folder)
    sizes = {name: 2 for name in ("encoder_layers", "decoder_layers", "num_layers", "num_heads")}
    sizes |= {name: 4 for name in ("encoder_attention_heads", "decoder_attention_heads")}
    sizes |= {"d_model": 32, "d_kv": 8, "d_ff": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    special = {"pad_token_id": ids.pad_id, "bos_token_id": ids.cls_id, "eos_token_id": ids.sep_id}
    start = ids.pad_id if kind is T5Config else ids.sep_id
    return kind(vocab_size=ids.vocab_size, decoder_start_token_id=start, **{**sizes, **special, **settings})


@pytest.mark.parametrize(
    ("kind", "config", "settings"),
    [(BartModel, BartConfig, {}), (MBartModel, MBartConfig, {}), (T5Model, T5Config, {}),
     (T5Model, T5Config, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False})],
)  # fmt: skip
def test_a_bare_encoder_decoder_is_imported_with_its_head(
    kind: type[PreTrainedModel], config: type[PretrainedConfig], settings: dict, byte_bpe_folder: Path, tmp_path: Path
) -> None:
    """The head is the table of words; only T5 1.1 has another, which is fresh."""
    torch.manual_seed(3)
    bare = encoder_decoder(kind(config_of(config, byte_bpe_folder, **settings)), tmp_path / "bare", byte_bpe_folder)
    if settings:
        with pytest.raises(ExportError, match=r"--new-head gives it fresh heads.*missing: lm_head.weight$"):
            from_hf(bare, tmp_path / "refused")
    done = from_hf(bare, tmp_path / "ours", new_head=bool(settings))
    assert done.comparisons and all(comparison.holds for comparison in done.comparisons)
    to_hf(tmp_path / "ours", tmp_path / "hf")
    before, after = kind.from_pretrained(bare).state_dict(), kind.from_pretrained(tmp_path / "hf").state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("declared", [False, True])
def test_an_encoder_without_its_decoder_is_refused(declared: bool, byte_bpe_folder: Path, tmp_path: Path) -> None:
    """Older versions of transformers declare a decoder that the files do not have."""
    model = T5EncoderModel(config_of(T5Config, byte_bpe_folder))
    change_json(encoder_decoder(model, tmp_path, byte_bpe_folder) / "config.json", is_encoder_decoder=declared)
    reason = r"missing: decoder\.block" if declared else "only models with is_encoder_decoder True"
    with pytest.raises(ExportError, match=reason):
        from_hf(tmp_path, tmp_path / "ours", new_head=True)
