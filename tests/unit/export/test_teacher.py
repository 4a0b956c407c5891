"""The teacher of a recipe: read without torch, refused with one message each, fingerprinted."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ctxlm_ds.checkpoint.saved_state import refuse_changed_settings
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.errors import CheckpointError, ConfigError
from ctxlm_ds.export.hf_config import from_hf_config, read_section
from ctxlm_ds.export.teacher import teacher_values, with_teacher
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import ModelBuild
from ctxlm_ds.models.program import build_program
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.layout import layout_problems
from ctxlm_ds.recipe.load import dump_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.load import load_tokenizer

SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}


def write_teacher(folder: Path, vocab_size: int, **settings: Any) -> Path:
    """Write a BERT of transformers."""
    torch.manual_seed(3)
    config = transformers.BertConfig(vocab_size=vocab_size, max_position_embeddings=40, **{**SHAPE, **settings})
    transformers.BertForMaskedLM(config).save_pretrained(folder, max_shard_size="20KB")
    return folder


@pytest.fixture
def size(wordpiece_folder: Path) -> int:
    return load_tokenizer(wordpiece_folder).vocab_size


@pytest.fixture
def teacher(tmp_path: Path, size: int) -> Path:
    return write_teacher(tmp_path / "teacher", size)


def recipe(folder: Path | None, tokenizer: Path, size: int | None, **sections: Any) -> RunConfig:
    """A student of two layers."""
    model = {"family": "distilbert", "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 48, "max_position_embeddings": 40, "vocab_size": size}  # fmt: skip
    given = sections.pop("teacher", {})
    return RunConfig.model_validate({
        "model": model | sections.pop("model", {}),
        "objective": {"name": "distillation"} | sections.pop("objective", {}),
        "teacher": {"path": None if folder is None else str(folder)} | given,
        "data": {"sample_format": "full_sentences", "seq_length": 32} | sections.pop("data", {}),
        "tokenizer": {"path": str(tokenizer)}, **sections,
    })  # fmt: skip


def test_the_recipe_gets_the_teachers_model_and_fingerprint(teacher: Path, wordpiece_folder: Path, size: int) -> None:
    config = with_teacher(recipe(teacher, wordpiece_folder, size), load_tokenizer(wordpiece_folder))
    found = config.teacher.model
    assert found == from_hf_config(teacher).model and (found.family, found.num_blocks) == ("bert", 3)
    assert len(config.teacher.fingerprint) == 64 and len(list(teacher.glob("*.safetensors"))) > 1
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config
    theirs = transformers.BertForMaskedLM.from_pretrained(teacher).state_dict()
    value = teacher_values(str(config.teacher.path))("teacher.encoder.2.mlp.up.weight")
    assert value.equal(theirs["bert.encoder.layer.2.intermediate.dense.weight"])


@pytest.mark.parametrize("name", ["BertConfig", "RobertaConfig", "AlbertConfig", "DistilBertConfig"])
def test_a_config_is_read_the_same_without_transformers(tmp_path: Path, name: str) -> None:
    getattr(transformers, name)().save_pretrained(tmp_path)
    assert read_section(tmp_path) == from_hf_config(tmp_path).model


def test_a_login_node_without_torch_reads_the_teacher(teacher: Path, wordpiece_folder: Path, tmp_path: Path) -> None:
    recipe_file = tmp_path / "recipe.yaml"
    recipe_file.write_text(dump_config(recipe(teacher, wordpiece_folder, None)), encoding="utf-8")
    command = (
        "import shutil, sys; sys.modules.update(torch=None, transformers=None, deepspeed=None)\n"
        "from ctxlm_ds.pretrain import main\n"
        f"words = ['--config', {str(recipe_file)!r}, '--check', '--print']\n"
        f"main(words); print('read', flush=True); shutil.rmtree({str(teacher)!r}); main(words)"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False)
    assert "num_layers: 3" in done.stdout and done.stdout.endswith("read\n"), done.stderr
    assert done.returncode == 2 and f"teacher.path: {teacher} is not a folder" in done.stderr


OTHERS = {
    "Roberta": {"pad_token_id": 1, "max_position_embeddings": 42, "type_vocab_size": 1},
    "Albert": {"embedding_size": 16, "max_position_embeddings": 40},
    "DistilBert": {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 40},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_teacher_of_any_family_gives_the_tensors_of_transformers(
    tmp_path: Path, wordpiece_folder: Path, size: int, name: str
) -> None:
    torch.manual_seed(4)
    shape = OTHERS[name] if name == "DistilBert" else SHAPE | OTHERS[name]
    settings = getattr(transformers, f"{name}Config")(vocab_size=size, initializer_range=0.3, **shape)
    theirs = getattr(transformers, f"{name}ForMaskedLM")(settings).eval()
    theirs.save_pretrained(tmp_path / "teacher")
    config = with_teacher(recipe(tmp_path / "teacher", wordpiece_folder, size))
    objective, kernels = build_objective(config.objective), KernelSet(dict(config.kernels), "cpu", torch.float32)
    build = ModelBuild((*objective.outputs, *objective.taps), kernels)
    program = build_program(config.model, build, objective, config.teacher)
    model, given = program.module().train(), teacher_values(str(config.teacher.path))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(given(key) if key.startswith("teacher.") else torch.zeros_like(parameter))
    fields = Batch.example(objective.fields(config.data), 3, np.random.default_rng(0), size).fields
    fields["input_ids"].clamp_(min=5)  # RoBERTa counts positions after its padding
    found = model.run(fields)
    wanted = theirs(input_ids=fields["input_ids"], output_hidden_states=True)
    positions = fields["prediction_positions"][:, :, None].expand(-1, -1, size)
    logits = wanted.logits.gather(1, positions)
    torch.testing.assert_close(found["teacher.predicted_logits"], logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["teacher.hidden_states.-1"], wanted.hidden_states[-1], rtol=1e-4, atol=1e-4)
    assert not any(found[key].requires_grad for key in found if key.startswith("teacher."))


def refused(config: RunConfig, tokenizer: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        with_teacher(config, load_tokenizer(tokenizer))
    return str(caught.value)


def test_a_missing_or_damaged_folder_is_one_message(teacher: Path, wordpiece_folder: Path, size: int) -> None:
    tokenizer = wordpiece_folder
    assert "teacher.path is not set: objective distillation learns from a teacher" in refused(
        recipe(None, tokenizer, size), tokenizer
    )
    config = recipe(teacher, tokenizer, size)
    shard = sorted(teacher.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:50])
    assert f"teacher.path: {shard} is damaged" in refused(config, tokenizer)
    (teacher / "config.json").unlink()
    assert "has no config.json" in refused(config, tokenizer)


def test_weights_that_are_not_finite_are_refused(teacher: Path, wordpiece_folder: Path, size: int) -> None:
    model = transformers.BertForMaskedLM.from_pretrained(teacher)
    model.bert.encoder.layer[1].output.dense.bias.data[3] = float("nan")
    model.save_pretrained(teacher / "broken")
    values = teacher_values(str(teacher / "broken"))
    with pytest.raises(CheckpointError, match=r"encoder\.1\.mlp\.down\.bias has NaN"):
        values("teacher.encoder.1.mlp.down.bias")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": {"vocab_size": 500}}, "model.vocab_size: 500 rows, but the teacher has"),
        ({"teacher": {"model": {"family": "bert", "num_layers": 12}}}, "teacher.model.num_layers is 12, but"),
        ({"teacher": {"fingerprint": "abc"}}, "teacher.fingerprint is abc, but"),
    ],
)  # fmt: skip
def test_a_teacher_that_does_not_fit_is_refused(
    teacher: Path, wordpiece_folder: Path, size: int, settings: dict[str, Any], message: str
) -> None:
    assert message in refused(recipe(teacher, wordpiece_folder, size, **settings), wordpiece_folder)


def test_a_teacher_without_the_head_is_refused(tmp_path: Path, wordpiece_folder: Path, size: int) -> None:
    config = transformers.BertConfig(vocab_size=size, max_position_embeddings=40, **SHAPE)
    transformers.BertModel(config).save_pretrained(tmp_path / "bare")
    assert "is not a BertForMaskedLM" in refused(recipe(tmp_path / "bare", wordpiece_folder, size), wordpiece_folder)
    gpt2 = transformers.GPT2Config(vocab_size=size, n_embd=32, n_head=4, n_layer=2)
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(tmp_path / "gpt2")
    message = refused(recipe(tmp_path / "gpt2", wordpiece_folder, size), wordpiece_folder)
    assert "gpt2 does not compute predicted_logits, which objective.name distillation needs of a teacher" in message


def test_another_tokenizer_is_refused(teacher: Path, wordpiece_folder: Path, byte_bpe_folder: Path, size: int) -> None:
    shutil.copy(wordpiece_folder / "tokenizer.json", teacher)
    config = recipe(teacher, wordpiece_folder, size)
    with_teacher(config, load_tokenizer(wordpiece_folder))
    assert "is not that of the run" in refused(config, byte_bpe_folder)


def test_stage_3_partitions_the_teacher_in_the_precision_of_the_run(wordpiece_folder: Path, size: int) -> None:
    config = recipe(None, wordpiece_folder, size, teacher={"precision": "fp32"})
    (problem,) = layout_problems(config, None, zero_stage=3)
    assert problem.path == "teacher.precision" and "use stage 0 to 2" in problem.text
    assert not list(layout_problems(config, None, zero_stage=2))


def test_a_resume_with_another_teacher_is_refused(
    teacher: Path, wordpiece_folder: Path, size: int, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(wordpiece_folder)
    first = with_teacher(recipe(teacher, wordpiece_folder, size), tokenizer)
    (tmp_path / "config.yaml").write_text(dump_config(first), encoding="utf-8")
    moved = shutil.move(teacher, tmp_path / "moved")
    refuse_changed_settings(tmp_path, with_teacher(recipe(Path(moved), wordpiece_folder, size), tokenizer))
    write_teacher(teacher, size, initializer_range=0.03)
    other = with_teacher(recipe(teacher, wordpiece_folder, size), tokenizer)
    with pytest.raises(CheckpointError, match="teacher.fingerprint: .* -> "):
        refuse_changed_settings(tmp_path, other)
