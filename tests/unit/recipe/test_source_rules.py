"""Sources of a recipe: both ways to write them, their names, and what is said about wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.load import dump_config, load_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.source_rules import source_names

BLEND = """
data:
  blend: weighted
  train:
    - {path: data/wiki, weight: 3, name: encyclopedia}
    - path: data/books
      weight: 0.5
"""


def test_both_ways_to_write_a_source_survive_a_dump(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(BLEND)
    config = load_config(tmp_path / "r.yaml")
    assert [(source.path, source.weight) for source in config.data.train] == [("data/wiki", 3.0), ("data/books", 0.5)]
    plain = load_config(tmp_path / "r.yaml", ["data.blend=concatenate", "data.train=[a, {path: b, epochs: 2}]"])
    for made, written in (
        (config, [{"path": "data/wiki", "weight": 3, "name": "encyclopedia"}, {"path": "data/books", "weight": 0.5}]),
        (plain, ["a", {"path": "b", "epochs": 2}]),
    ):
        (tmp_path / "dumped.yaml").write_text(dump_config(made))
        assert yaml.safe_load(dump_config(made))["data"]["train"] == written
        assert load_config(tmp_path / "dumped.yaml") == made


def test_wrong_sources_are_told_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(BLEND.replace("weight: 0.5", "wieght: 0.5").replace("weight: 3", "weight: 0"))
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "r.yaml", ["data.temperature=0.5"])
    text = str(caught.value)
    assert "data.train[1].wieght: unknown setting (value 0.5); did you mean data.train[1].weight?" in text
    assert "data.train[0].weight: 0: expected a number above 0, at most 1e+15 or null" in text
    assert f"{tmp_path / 'r.yaml'}:5" in text and f"{tmp_path / 'r.yaml'}:7" in text
    assert "data.temperature: 0.5: expected a number from 1 to 1e+06" in text
    with pytest.raises(ConfigError, match=r"data.train\[0\]: 7: expected text or a section with path, weight"):
        load_config(tmp_path / "r.yaml", ["data.train=[7]"])


def test_names_are_short_where_they_can_be() -> None:
    train = ["data/wiki", "a/text_document", {"path": "b/text_document"}, {"path": "c/text_document", "name": "books"}]
    config = RunConfig.model_validate({"data": {"train": train}})
    assert source_names(config.data) == ["wiki", "a/text_document", "b/text_document", "books"]
