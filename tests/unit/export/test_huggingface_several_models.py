"""A family of two classes: the discriminator in the folder, the generator in a folder of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining, ElectraModel

from ctxlm_ds.errors import CheckpointError, ExportError
from ctxlm_ds.export.huggingface import from_hf, to_hf
from ctxlm_ds.export.initial_weights import load_initial_weights
from ctxlm_ds.models import program
from ctxlm_ds.models.layers import LayerSequence
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.tokenizers.load import load_tokenizer
from tests.checkpoints import change_json, change_weights, outputs_of, write_random_run

SHARED = {"embedding_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 40, "initializer_range": 0.3}
SIZES = {
    "": {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48},
    "generator": {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24},
}
CLASSES = {"": ElectraForPreTraining, "generator": ElectraForMaskedLM}
TABLE = "electra.embeddings.word_embeddings.weight"


@pytest.fixture
def original(wordpiece_folder: Path, tmp_path: Path) -> Path:
    """Two models of transformers' own with random weights and equal tables, saved by transformers."""
    torch.manual_seed(3)
    size, tables = load_tokenizer(wordpiece_folder).vocab_size, None
    for part, kind in CLASSES.items():
        model = kind(ElectraConfig(vocab_size=size, **SHARED, **SIZES[part]))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
        tables = tables or model.electra.embeddings.state_dict()
        model.electra.embeddings.load_state_dict(tables)
        model.save_pretrained(tmp_path / "original" / part)
    AutoTokenizer.from_pretrained(wordpiece_folder).save_pretrained(tmp_path / "original")
    return tmp_path / "original"


def test_embeddings_as_wide_as_the_discriminator_need_no_projection(wordpiece_folder: Path, tmp_path: Path) -> None:
    to_hf(write_random_run(tmp_path / "run", "electra", wordpiece_folder, {"embedding_size": 32}), tmp_path / "hf")
    found = {part: load_file(tmp_path / "hf" / part / "model.safetensors").keys() for part in CLASSES}
    assert "electra.embeddings_project.weight" in found["generator"] - found[""]


def test_an_export_describes_its_model_once(
    wordpiece_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = []

    class Counted(LayerSequence):
        def __init__(self, *arguments: Any) -> None:
            devices.append(torch.empty(0).device.type)
            super().__init__(*arguments)

    run = write_random_run(tmp_path / "run", "electra", wordpiece_folder)
    monkeypatch.setattr(program, "LayerSequence", Counted)
    to_hf(run, tmp_path / "hf")
    assert devices.count("meta") == 1


def test_a_run_starts_from_both_models(original: Path, wordpiece_folder: Path, tmp_path: Path) -> None:
    from_hf(original, tmp_path / "ours")
    config = load_config(tmp_path / "ours" / "config.yaml")

    def fresh(name: str) -> torch.Tensor:
        raise AssertionError(name)

    values = dict(load_initial_weights(original, config.model, outputs_of(config), fresh))
    for part, name in (("", "encoder.1.mlp.up.weight"), ("generator", "generator.1.mlp.up.weight")):
        theirs = load_file(original / part / "model.safetensors")["electra.encoder.layer.1.intermediate.dense.weight"]
        assert torch.equal(values[name], theirs)
    other = config.model.model_copy(update={"generator_num_attention_heads": 1})
    with pytest.raises(CheckpointError, match="model.generator_num_attention_heads is 2 there, 1 here"):
        load_initial_weights(original, other, outputs_of(config), fresh)


def test_one_model_alone_is_refused(original: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="no folder generator: ElectraForPreTraining is trained with its Elec"):
        from_hf(original / "generator", tmp_path / "ours")


@pytest.mark.parametrize("bare", [("",), ("generator",), ("", "generator")])
def test_bare_models_get_fresh_heads(original: Path, tmp_path: Path, bare: tuple[str, ...]) -> None:
    before = {part: load_file(original / part / "model.safetensors") for part in CLASSES}
    for part in bare:
        ElectraModel.from_pretrained(original / part).save_pretrained(original / part)
    with pytest.raises(ExportError, match="from-hf --new-head gives it fresh heads"):
        from_hf(original, tmp_path / "refused")
    assert all(comparison.holds for comparison in from_hf(original, tmp_path / "ours", new_head=True).comparisons)
    to_hf(tmp_path / "ours", tmp_path / "hf")
    for part in CLASSES:
        after = load_file(tmp_path / "hf" / part / "model.safetensors")
        heads = {name for name in after if part in bare and not name.startswith("electra.")}
        assert after.keys() == before[part].keys() and bool(heads) == (part in bare)
        changed = {name for name in after if not torch.equal(after[name], before[part][name])}
        assert {name for name in heads if after[name].dim() == 2} <= changed <= heads


def test_models_of_two_runs_are_refused(original: Path, tmp_path: Path) -> None:
    change_weights(original / "generator", lambda tensors: tensors[TABLE][5].add_(1.0))
    with pytest.raises(ExportError, match=rf"have different {TABLE}, which the two models share here"):
        from_hf(original, tmp_path / "ours")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"embedding_size": 16}, "does not hold one model: embedding_size is 24 in .*16 in another folder"),
        ({"hidden_act": "relu"}, "does not hold one model: hidden_activation"),
        ({"model_type": "bert"}, "model_type 'bert' is not electra"),
        ({"num_hidden_layers": 3}, "generator is not a ElectraForMaskedLM.*missing"),
    ],
)
def test_configs_that_do_not_fit_together_are_refused(
    original: Path, tmp_path: Path, values: dict[str, object], text: str
) -> None:
    change_json(original / "generator" / "config.json", **values)
    with pytest.raises(ExportError, match=text):
        from_hf(original, tmp_path / "ours")


def test_an_activation_that_the_generator_does_not_have_is_refused(wordpiece_folder: Path, tmp_path: Path) -> None:
    run = write_random_run(tmp_path / "run", "electra", wordpiece_folder, {"hidden_activation": "relu"})
    with pytest.raises(ExportError, match="ElectraForMaskedLM's head always computes the exact gelu"):
        to_hf(run, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_wrong_generator_fails_the_proof(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ctxlm_ds.families.electra import export

    monkeypatch.setattr(export.GeneratorExport, "their_inputs", lambda self, fields: {
        "input_ids": fields["input_ids"], "attention_mask": fields["sequence_ids"],
        "token_type_ids": 1 - fields["token_type_ids"],
    })  # fmt: skip
    with pytest.raises(ExportError, match="random/generator_logits"):
        from_hf(original, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
