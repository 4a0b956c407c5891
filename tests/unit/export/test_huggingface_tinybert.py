"""TinyBERT as BertModel: weights, the projection beside them, the next run, and a pair of folders of one model_type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.hf_config import from_hf_config, read_section
from ctxlm_ds.export.huggingface import from_hf, to_hf
from ctxlm_ds.export.initial_weights import load_initial_weights
from ctxlm_ds.export.safetensors_files import HEADS_FILE, SafetensorsFiles
from ctxlm_ds.export.weights import HuggingFaceWeights
from ctxlm_ds.recipe.schema import RunConfig
from tests.checkpoints import make_config, outputs_of, random_weights, write_run
from tests.sections import objective_section

WIDE = 48


@pytest.fixture
def config(wordpiece_folder: Path) -> RunConfig:
    settings = {"fit_size": WIDE, "layer_norm_eps": 1e-12}
    made = make_config("tinybert", wordpiece_folder, model_settings=settings)
    return made.model_copy(update={"objective": objective_section(name="tinybert")})


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
    weights = {"embedding_weight": 0.0, "hidden_weight": 0.0, "attention_weight": 0.0, "prediction_weight": 1.0}
    config = config.model_copy(
        update={
            "objective": objective_section(name="tinybert", **weights),
            "model": config.model.model_copy(update={"num_classes": 3}),
        }
    )
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


def test_a_folder_is_tinyberts_if_its_config_has_the_size_of_the_projection(tmp_path: Path, config: RunConfig) -> None:
    to_hf(write_run(tmp_path / "run", config, random_weights(config)), tmp_path / "hf")
    assert from_hf_config(tmp_path / "hf").model == config.model
    with pytest.raises(ExportError, match="family tinybert cannot be imported: no objective for hidden_states.-1"):
        from_hf(tmp_path / "hf", tmp_path / "imported")
    path = tmp_path / "hf" / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in values.items() if key != "fit_size"}))
    assert from_hf_config(tmp_path / "hf").model.family == "bert"
