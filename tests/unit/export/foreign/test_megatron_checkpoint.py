"""Checkpoints of Megatron-LM and Megatron-DeepSpeed against megatron-core's own models."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.foreign.megatron_checkpoint import from_megatron
from ctxlm_ds.tokenizers.load import load_tokenizer
from tests.checkpoints import make_tokenizer
from tests.integration.route import FORKED, call

pytestmark = pytest.mark.long

PROGRAM = Path(__file__).parent / "megatron_reference.py"
HEADS = 4
OLD_NAMES = (
    ("self_attention.linear_qkv", "attention.query_key_value"),
    ("self_attention.linear_proj", "attention.dense"),
    ("pre_mlp_layernorm", "post_attention_layernorm"),
    ("mlp.linear_fc1", "mlp.dense_h_to_4h"),
    ("mlp.linear_fc2", "mlp.dense_4h_to_h"),
)
"""Names of megatron-core and of megatron/model, which Megatron-DeepSpeed has today."""


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {"bert": make_tokenizer("wordpiece", folder / "bert"), "gpt": make_tokenizer("gpt2", folder / "gpt")}


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, tokenizers: dict[str, Path]) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    sizes = [str(load_tokenizer(path).vocab_size) for path in tokenizers.values()]
    call(FORKED, 1, PROGRAM, folder, *sizes)
    return folder


def read(folder: Path) -> dict[str, Any]:
    path = folder / "iter_0000012" / "mp_rank_00" / "model_optim_rng.pt"
    with torch.serialization.safe_globals([Namespace]):
        return torch.load(path, weights_only=True)


def write(folder: Path, content: dict[str, Any], name: str = "mp_rank_00", **more: Any) -> Path:
    """Write the file of a rank; returns the checkpoint's folder."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    torch.save(content, folder / name / "model_optim_rng.pt", **more)
    return folder


def difference(folder: Path, output: Path, kind: str) -> tuple[float, float]:
    """Largest differences of the converted model's logits: of words, of pairs."""
    expected = torch.load(folder / "reference.pt", weights_only=True)
    inputs, outputs = expected["inputs"], expected["outputs"]
    if kind == "gpt":
        model = transformers.GPT2LMHeadModel.from_pretrained(output).eval()
        with torch.no_grad():
            logits = model(inputs["input_ids"]).logits
        return float((logits - outputs["words"]).abs().max()), 0.0
    model = transformers.MegatronBertForPreTraining.from_pretrained(output).eval()
    with torch.no_grad():
        found = model(**inputs)
    words, pairs = found.prediction_logits - outputs["words"], found.seq_relationship_logits - outputs["pairs"]
    return float(words.abs().max()), float(pairs.abs().max())


@pytest.mark.parametrize("kind", ["bert", "gpt"])
def test_logits_are_those_of_megatron_core(
    kind: str, reference: Path, tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    done = from_megatron(reference / kind, tokenizers[kind], tmp_path / "hf")
    assert done.hf_class == {"bert": "MegatronBertForPreTraining", "gpt": "GPT2LMHeadModel"}[kind]
    assert max(difference(reference / kind, tmp_path / "hf", kind)) < 1e-5


def test_fused_gelu_is_exact_in_gpt_and_named_in_bert(
    reference: Path, tokenizers: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from_megatron(reference / "gpt_fused", tokenizers["gpt"], tmp_path / "gpt")
    assert difference(reference / "gpt_fused", tmp_path / "gpt", "gpt")[0] < 1e-5
    assert not caplog.records
    from_megatron(reference / "bert_fused", tokenizers["bert"], tmp_path / "bert")
    words, pairs = difference(reference / "bert_fused", tmp_path / "bert", "bert")
    assert pairs < 1e-5 < words < 1e-2
    assert "--bias-gelu-fusion" in caplog.text


def split(state: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """The part of one tensor-parallel rank, as Megatron-LM's layers split."""
    parts = {}
    for name, value in state.items():
        if re.search(r"(linear_proj|linear_fc2)\.weight", name):
            parts[name] = value.chunk(ranks, dim=1)[rank].clone()
        elif re.search(r"linear_qkv|linear_fc1|word_embeddings|output_layer", name):
            parts[name] = value.chunk(ranks)[rank].clone()
        else:
            parts[name] = value
    return parts


def stages(state: dict[str, Tensor], kind: str) -> list[dict[str, Tensor]]:
    """Two stages of a pipeline, whose layers are counted from 0 in each."""
    first: dict[str, Tensor] = {}
    last: dict[str, Tensor] = {}
    for name, value in state.items():
        layer = re.match(r"(\w+\.layers\.)(\d)(.*)", name)
        if layer:
            number = int(layer[2])
            (first if number < 2 else last)[f"{layer[1]}{number % 2}{layer[3]}"] = value
        else:
            (first if name.startswith("embedding.") else last)[name] = value
    last["output_layer.weight"] = state["embedding.word_embeddings.weight"]
    return [first, last]


@pytest.mark.parametrize("kind", ["bert", "gpt"])
def test_ranks_and_stages_are_joined(kind: str, reference: Path, tokenizers: dict[str, Path], tmp_path: Path) -> None:
    content = read(reference / kind)
    for stage, state in enumerate(stages(content["model"], kind)):
        for rank in range(2):
            part = content | {"model": split(state, rank, 2)}
            write(tmp_path / "iter_0000012", part, f"mp_rank_{rank:02d}_{stage:03d}")
    from_megatron(tmp_path / "iter_0000012", tokenizers[kind], tmp_path / "hf")
    assert max(difference(reference / kind, tmp_path / "hf", kind)) < 1e-5


def old_order(value: Tensor, version: float) -> Tensor:
    """Queries, keys and values [heads * 3 * size, ...] in the order of an older version of the format."""
    heads = value.view(HEADS, 3, -1, *value.shape[1:])
    return (heads.transpose(0, 1) if version == 0 else heads.movedim(1, 2)).reshape(value.shape)


def old_names(state: dict[str, Tensor], version: float, kind: str) -> dict[str, Any]:
    """The nested dicts of megatron/model."""
    language_model: dict[str, Any] = {"embedding": {}, "transformer": {}, "pooler": {}}
    model: dict[str, Any] = {"language_model": language_model, "lm_head": {}, "binary_head": {}}
    for name, value in state.items():
        if "linear_qkv" in name:
            value = old_order(value, version) if version < 2 else value
        for new, old in OLD_NAMES:
            name = name.replace(new, old)
        room, _, leaf = name.partition(".")
        if room == "embedding":
            table, _, leaf = leaf.partition(".")
            language_model["embedding"].setdefault(table, {})[leaf] = value
        elif room in ("encoder", "decoder"):
            language_model["transformer"][leaf] = value
        elif room == "pooler":
            language_model["pooler"][leaf] = value
        elif room == "binary_head":
            model["binary_head"][leaf] = value
        elif name != "output_layer.weight":
            model["lm_head"][leaf.replace("layer_norm", "layernorm")] = value
    return {key: value for key, value in model.items() if value}


@pytest.mark.parametrize("version", [None, 1.0, 3.0])
@pytest.mark.parametrize("kind", ["bert", "gpt"])
def test_names_and_orders_of_older_versions(
    kind: str, version: float | None, reference: Path, tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    content = read(reference / kind)
    content["model"] = old_names(content["model"], version or 0, kind)
    if version is None:
        del content["checkpoint_version"]
    else:
        content["checkpoint_version"] = version
    write(tmp_path / "run" / "release", content, _use_new_zipfile_serialization=version is not None)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("release\n")
    from_megatron(tmp_path / "run", tokenizers[kind], tmp_path / "hf")
    assert max(difference(reference / kind, tmp_path / "hf", kind)) < 1e-5


def test_the_engine_of_deepspeed(reference: Path, tokenizers: dict[str, Path], tmp_path: Path) -> None:
    content = read(reference / "bert")
    step = tmp_path / "run" / "global_step12"
    step.mkdir(parents=True)
    (tmp_path / "run" / "latest").write_text("global_step12")
    for rank in range(2):
        state = old_names(split(content["model"], rank, 2), 3.0, "bert")
        torch.save({"module": state, "args": content["args"], "checkpoint_version": 3.0, "dp_world_size": 1},
                   step / f"mp_rank_{rank:02d}_model_states.pt")  # fmt: skip
    from_megatron(tmp_path / "run", tokenizers["bert"], tmp_path / "hf")
    assert max(difference(reference / "bert", tmp_path / "hf", "bert")) < 1e-5


def test_the_pipeline_of_deepspeed(reference: Path, tokenizers: dict[str, Path], tmp_path: Path) -> None:
    content = read(reference / "gpt")
    step = tmp_path / "global_step12"
    step.mkdir()
    for rank in range(2):
        tables = {}
        layers: dict[int, dict[str, Tensor]] = {}
        for name, value in split(content["model"], rank, 2).items():
            for new, old in OLD_NAMES:
                name = name.replace(new, old)
            if name.startswith("embedding."):
                tables[name.removeprefix("embedding.")] = value
            elif match := re.match(r"decoder\.layers\.(\d)\.(.*)", name):
                layers.setdefault(int(match[1]), {})[match[2].replace("attention.", "self_attention.", 1)] = value
            elif name.startswith("decoder.final_layernorm."):
                layers.setdefault(5, {})[name.rpartition(".")[2]] = value
        files = {1: tables, 9: tables} | {3 + number: layer for number, layer in layers.items()}
        for number, tensors in files.items():
            torch.save(tensors, step / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
    torch.save({"args": content["args"], "checkpoint_version": 3.0}, step / "mp_rank_00_model_states.pt")
    from_megatron(step, tokenizers["gpt"], tmp_path / "hf")
    assert difference(reference / "gpt", tmp_path / "hf", "gpt")[0] < 1e-5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"swiglu": True}, "trained with swiglu True; only False"),
        ({"normalization": "RMSNorm"}, "trained with normalization 'RMSNorm'"),
        ({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ({"position_embedding_type": "rope"}, "position_embedding_type 'rope'"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"num_attention_heads": "4"}, "the argument num_attention_heads is '4', not a number"),
        ({"norm_epsilon": "small"}, "norm_epsilon is 'small', not a number"),
    ],
)
def test_what_no_plain_class_computes_is_refused(
    change: dict[str, Any], words: str, reference: Path, tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    content = read(reference / "gpt")
    content["args"] = Namespace(**vars(content["args"]) | change)
    run = write(tmp_path / "run", content)
    with pytest.raises(ExportError, match=re.escape(words)):
        from_megatron(run, tokenizers["gpt"], tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_mismatches_are_named(reference: Path, tokenizers: dict[str, Path], tmp_path: Path) -> None:
    content = read(reference / "gpt")

    def refused(model: dict[str, Tensor], words: str) -> None:
        run = write(tmp_path / "run", content | {"model": model})
        with pytest.raises(ExportError, match=re.escape(words)):
            from_megatron(run, tokenizers["gpt"], tmp_path / "hf")

    model = content["model"]
    refused(model | {"adapter.weight": torch.zeros(2)}, "the tensor adapter.weight is not part of Megatron-LM's BERT")
    refused(model | {"output_layer.weight": torch.zeros(384, 32)}, "untied output embedding")
    tables = {name: value for name, value in model.items() if "position_embeddings" not in name}
    refused(tables, "embeddings.position_embeddings.weight is missing")
    few = model | {"embedding.word_embeddings.weight": torch.zeros(100, 32)}
    refused(few, "word_embeddings.weight has 100 rows, the tokenizer 300 ids")
    assert not (tmp_path / "hf").exists()


def test_without_a_choice_of_gelu_it_is_the_tanh_form(
    reference: Path, tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    content = read(reference / "gpt_fused")
    for name in ("bias_gelu_fusion", "openai_gelu"):
        delattr(content["args"], name)
    from_megatron(write(tmp_path / "run", content), tokenizers["gpt"], tmp_path / "hf")
    assert difference(reference / "gpt_fused", tmp_path / "hf", "gpt")[0] < 1e-5
