"""TinyBERT as BertModel: weights, the projection beside them, the next run, and a pair of folders of one model_type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from ctxlm_ds.export.hf_config import from_hf_config, read_section
from ctxlm_ds.export.huggingface import from_hf, to_hf
from ctxlm_ds.export.initial_weights import load_initial_weights
from ctxlm_ds.export.safetensors_files import HEADS_FILE, SafetensorsFiles
from ctxlm_ds.export.weights import HuggingFaceWeights
from ctxlm_ds.recipe.load import load_saved_config
from ctxlm_ds.recipe.schema import RunConfig
from tests.checkpoints import make_config, outputs_of, random_weights, write_run
from tests.sections import objective_section

WIDE = 48
PREDICTIONS = {"embedding_weight": 0.0, "hidden_weight": 0.0, "attention_weight": 0.0, "prediction_weight": 1.0}


@pytest.fixture
def config(wordpiece_folder: Path) -> RunConfig:
    settings = {"fit_size": WIDE, "layer_norm_eps": 1e-12}
    made = make_config("tinybert", wordpiece_folder, model_settings=settings)
    return made.model_copy(update={"objective": objective_section(name="tinybert")})


def classifier_of(config: RunConfig) -> RunConfig:
    classes = config.model.model_copy(update={"num_classes": 3})
    return config.model_copy(update={"objective": objective_section(name="tinybert", **PREDICTIONS), "model": classes})


def test_an_export_is_a_bert_model_with_the_projection_beside_it(tmp_path: Path, config: RunConfig) -> None:
    weights = random_weights(config)
    conversion = to_hf(write_run(tmp_path / "run", config, weights), tmp_path / "hf")
    assert conversion.hf_class == "BertModel"
    assert {comparison.name for comparison in conversion.comparisons} == {
        f"{rows}/hidden_states.-1" for rows in ("random", "longest", "text")
    }
    theirs, info = transformers.AutoModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert type(theirs).__name__ == "BertModel"
    assert not info["unexpected_keys"] and set(info["missing_keys"]) == {"pooler.dense.weight", "pooler.dense.bias"}
    assert theirs.embeddings.word_embeddings.weight.equal(weights["word_embeddings.weight"])
    heads = SafetensorsFiles([tmp_path / "hf" / HEADS_FILE])
    assert heads.shapes == {"fit_dense.weight": (WIDE, 32), "fit_dense.bias": (WIDE,)}

    loaded = dict(load_initial_weights(tmp_path / "hf", config.model, outputs_of(config), lambda name: torch.zeros(1)))
    assert loaded.keys() == weights.keys()
    assert all(loaded[name].equal(value) for name, value in weights.items())


def test_a_classifier_is_exported_and_a_finetuned_model_can_be_a_teacher(tmp_path: Path, config: RunConfig) -> None:
    config = classifier_of(config)
    values = random_weights(config)
    conversion = to_hf(write_run(tmp_path / "run", config, values), tmp_path / "hf")
    assert (conversion.hf_class, conversion.pipeline) == ("BertForSequenceClassification", "text-classification")
    theirs, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert theirs.classifier.weight.equal(values["classifier_head.classifier.weight"])

    theirs.config.__dict__.pop("fit_size")
    theirs.save_pretrained(tmp_path / "tuned")
    assert "fit_size" not in (tmp_path / "tuned" / "config.json").read_text()
    tuned = HuggingFaceWeights(tmp_path / "tuned")
    assert (tuned.model.num_classes, tuned.outputs) == (3, ("class_logits",))
    assert all(tuned.read_full(name).equal(value) for name, value in values.items())
    assert read_section(tmp_path / "tuned") == tuned.model


@pytest.mark.parametrize(
    ("weights", "hf_class", "kept"),
    [
        ({}, "BertModel", {"embedding_weight": 0.0, "hidden_weight": 0.0}),
        (PREDICTIONS, "BertForSequenceClassification", PREDICTIONS),
    ],
)
def test_an_import_has_an_objective_for_the_encoder_alone_and_for_a_classifier(
    tmp_path: Path, config: RunConfig, weights: dict[str, float], hf_class: str, kept: dict[str, float]
) -> None:
    """The objective needs no head that the class lacks; another export of the import is the same model."""
    config = classifier_of(config) if weights else config
    to_hf(write_run(tmp_path / "run", config, random_weights(config)), tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "imported")
    imported = load_saved_config(tmp_path / "imported" / "config.yaml")
    assert imported.model == config.model
    assert imported.objective == objective_section(name="tinybert", **kept)
    assert to_hf(tmp_path / "imported", tmp_path / "again").hf_class == hf_class
    first, again = (SafetensorsFiles([tmp_path / name / "model.safetensors"]) for name in ("hf", "again"))
    assert first.shapes == again.shapes
    assert all(first.read(name).equal(again.read(name)) for name in first.shapes)


def test_a_folder_is_tinyberts_if_its_config_has_the_size_of_the_projection(tmp_path: Path, config: RunConfig) -> None:
    to_hf(write_run(tmp_path / "run", config, random_weights(config)), tmp_path / "hf")
    assert from_hf_config(tmp_path / "hf").model == config.model
    path = tmp_path / "hf" / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in values.items() if key != "fit_size"}))
    assert from_hf_config(tmp_path / "hf").model.family == "bert"
