"""The recipe with which weights of another vocabulary are trained."""

from __future__ import annotations

from pathlib import Path

from ctxlm_ds.recipe.load import dump_config, load_config
from tools.measure_vocabulary import METHODS, recipe


def test_the_recipe_takes_the_model_and_the_tokenizer_of_the_weights(tmp_path: Path) -> None:
    weights = tmp_path / METHODS[0]
    weights.mkdir()
    source = load_config("bert-laptop", ["model.vocab_size=500", "model.num_layers=3"])
    (weights / "config.yaml").write_text(dump_config(source))
    config = load_config(recipe(tmp_path / "data", weights, 300))
    assert config.model == source.model.model_copy(update={"vocab_size": None})
    assert config.initialize_from == str(weights) and config.tokenizer.path == str(weights / "tokenizer")
    assert config.training.max_steps == 300 and config.evaluation.interval_steps == 100
