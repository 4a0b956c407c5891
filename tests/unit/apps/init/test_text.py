import pytest

from ctxlm_ds.apps.init.text import recipe_text, write_recipe
from ctxlm_ds.apps.init.translate import Setting
from ctxlm_ds.errors import ConfigError

SETTINGS = {
    "training.max_steps": Setting(7, "--train-iters 7"),
    "data.train": Setting([{"path": "a b", "weight": 0.5}], "--data-path"),
    "data.blend": Setting("megatron", ""),
    "name": Setting("true", "text"),
    "tokenizer.path": Setting(None, ""),
}


def test_settings_are_written_in_the_schemas_order_and_read_back(tmp_path):
    text = recipe_text(["first", ""], SETTINGS)
    lines = [line.partition("  #")[0].rstrip() for line in text.splitlines()]
    assert lines == [
        "# first", "#", 'name: "true"', "tokenizer:", "  path: null", "data:", "  train:",
        '    - {path: "a b", weight: 0.5}', "  blend: megatron", "training:", "  max_steps: 7",
    ]  # fmt: skip
    config = write_recipe(tmp_path / "x.yaml", text)
    assert (config.name, config.training.max_steps, config.data.train[0].path) == ("true", 7, "a b")


def test_nothing_is_overwritten_and_nothing_invalid_stays(tmp_path):
    path = tmp_path / "x.yaml"
    with pytest.raises(ConfigError, match=r"max_steps"):
        write_recipe(path, "training: {max_steps: -1}\n")
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        write_recipe(path, recipe_text([], SETTINGS))
    with pytest.raises(ConfigError, match=r"ends in .yaml"):
        write_recipe(tmp_path / "x.txt", "")
