"""GPT-2 and GPT to Hugging Face folders and back: bit for bit, with the same tokens from generate()."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    pipeline,
)

from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.base import Rows
from ctxlm_ds.export.huggingface import from_hf, to_hf
from ctxlm_ds.export.initial_weights import load_initial_weights
from ctxlm_ds.export.verify import make_fields, verify_folder
from ctxlm_ds.models.program import plain_program
from ctxlm_ds.parallel.parameters import initial_value
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.tokenizers.load import load_tokenizer
from tests.checkpoints import make_config, make_tokenizer, random_weights, write_run

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


def our_run(kind: str, tokenizer_folder: Path, folder: Path) -> Path:
    config = make_config(kind, tokenizer_folder, load_tokenizer(tokenizer_folder).vocab_size)
    return write_run(folder, config, random_weights(config))


def greedy(module: Any, prompt: list[int], count: int, without: int) -> list[int]:
    """A plain loop: the likeliest word but `without`, `count` times."""
    row = list(prompt)
    for _ in range(count):
        fields = make_fields(Rows([row], [[0] * len(row)]), 0, np.random.default_rng(0))
        with torch.no_grad():
            logits = module.run(fields)["logits"][0, -1]
        logits[without] = float("-inf")
        row.append(int(logits.argmax()))
    return row[len(prompt) :]


def test_ours_to_hugging_face_and_back_with_the_same_tokens(kind: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    run = our_run(kind, tokenizer_folder, tmp_path / "run")
    config = load_config(run / "checkpoints" / "step-00000100" / "config.yaml")
    weights = random_weights(config)
    to_hf(run, tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "back")
    reader = CheckpointReader(tmp_path / "back")
    assert set(reader.names()) == set(weights)
    assert all(torch.equal(reader.read_full(name), value) for name, value in weights.items())
    assert load_config(tmp_path / "back" / "config.yaml").model == config.model

    ours = plain_program(config.model, OUTPUTS).module().eval()
    ours.load_state_dict(weights)
    theirs = CLASSES[kind].from_pretrained(tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs.generation_config.eos_token_id == tokenizer.eos_token_id == 299
    for text in ("the river was", "books"):
        inputs = tokenizer(text, return_tensors="pt")
        written = theirs.generate(**inputs, do_sample=False, max_new_tokens=20, min_new_tokens=20)[0].tolist()
        prompt = inputs["input_ids"][0].tolist()
        # generate() was told not to end within 20 tokens, so that the end of text is never chosen: nor is it here.
        assert 299 not in written
        assert written[len(prompt) :] == greedy(ours, prompt, 20, without=299)


def test_the_export_is_a_pipeline_with_a_card(kind: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    to_hf(our_run(kind, tokenizer_folder, tmp_path / "run"), tmp_path / "hf")
    model, info = CLASSES[kind].from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "hf")) is CLASSES[kind]
    write = pipeline("text-generation", model=str(tmp_path / "hf"))
    (result,) = write("the river was", max_new_tokens=5, do_sample=False)
    assert result["generated_text"].startswith("the river was")
    card = (tmp_path / "hf" / "README.md").read_text()
    header = yaml.safe_load(card.split("---\n")[1])
    assert header["pipeline_tag"] == "text-generation" and "causal-lm" in header["tags"]
    assert f"{CLASSES[kind].__name__}.from_pretrained" in card and 'pipeline("text-generation"' in card
    assert "fill-mask" not in card and "mask_prob" not in card and "objective.name | causal_lm" in card


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_smaller_types_generate_as_the_rounded_model_does(dtype: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    conversion = to_hf(our_run("gpt2", tokenizer_folder, tmp_path / "run"), tmp_path / "hf", dtype)
    generated = next(c for c in conversion.comparisons if "generate" in c.name)
    assert generated.holds and generated.relative <= 1e-5


def test_a_file_as_openais_own_is_imported(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Names without prefix, the masks among the tensors, and a config.json without the newer settings."""
    original = hf_folder("gpt2", tokenizer_folder, tmp_path / "original")
    tensors = {
        name.removeprefix("transformer."): value for name, value in load_file(original / "model.safetensors").items()
    }
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(40, 40).tril().view(1, 1, 40, 40)
    save_file(tensors, original / "model.safetensors", metadata={"format": "pt"})
    kept = ("model_type", "vocab_size", "n_embd", "n_head", "n_layer", "n_positions", "activation_function")
    config = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps({key: config[key] for key in kept} | {"n_ctx": 40}))
    imported = from_hf(original, tmp_path / "ours")
    assert all(c.holds for c in imported.comparisons)


@pytest.mark.parametrize(
    ("kind", "values", "reason"),
    [
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"activation_function": "silu"}, "activation_function 'silu' is not one of"),
        ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("gpt1", {"afn": "silu"}, "afn 'silu' is not one of gelu, relu"),
    ],
)
def test_what_ours_cannot_compute_is_refused(
    kind: str, values: dict, reason: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    original = hf_folder(kind, tokenizer_folder, tmp_path / "original")
    config = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps(config | values))
    with pytest.raises(ExportError, match=reason):
        from_hf(original, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_dropout_of_its_own_on_embeddings_is_said_to_be_lost(
    tokenizer_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    original = hf_folder("gpt2", tokenizer_folder, tmp_path / "original", embd_pdrop=0.3)
    with caplog.at_level(logging.WARNING, logger="ctxlm_ds"):
        from_hf(original, tmp_path / "ours")
    assert "embd_pdrop 0.3 is not kept" in caplog.text


@pytest.mark.parametrize("name", ["transformer.h.1.attn.c_attn.weight", "transformer.ln_f.bias"])
def test_a_wrong_export_is_noticed(name: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    run = our_run("gpt2", tokenizer_folder, tmp_path / "run")
    to_hf(run, tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = tensors[name].roll(1, -1).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    step = run / "checkpoints" / "step-00000100"
    config = load_config(step / "config.yaml")
    with pytest.raises(ExportError, match=r"text/logits.*generate of 20 tokens"):
        verify_folder(tmp_path / "hf", CheckpointReader(step), config.model, OUTPUTS, load_tokenizer(tokenizer_folder))


def test_a_new_run_starts_from_either_with_more_positions(kind: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    run = our_run(kind, tokenizer_folder, tmp_path / "run")
    to_hf(run, tmp_path / "hf")
    config = make_config(kind, tokenizer_folder, 300, {"max_position_embeddings": 64})
    whole = plain_program(config.model, OUTPUTS)

    def fresh(name: str) -> torch.Tensor:
        return initial_value(name, whole.shapes[name], whole.facts[name].init, 5)

    model = config.model
    values = [dict(load_initial_weights(path, model, OUTPUTS, fresh)) for path in (run, tmp_path / "hf")]
    assert values[0].keys() == values[1].keys() == whole.shapes.keys()
    for name, value in values[0].items():
        assert torch.equal(value, values[1][name]), name
    positions = "embeddings.position_embeddings.weight"
    assert torch.equal(values[0][positions][40:], fresh(positions)[40:])
