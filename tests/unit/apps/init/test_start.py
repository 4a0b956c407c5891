import pytest

from ctxlm_ds.apps.init.machine import Machine, describe_gpu
from ctxlm_ds.apps.init.start import Answers, families, fitting_vocab_size, new_settings, shipped_recipe
from ctxlm_ds.apps.init.text import recipe_text, write_recipe
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.load import load_config, shipped_recipes

CPU = Machine(2, None, 5e10, 16e9)
H100 = Machine(8, describe_gpu("NVIDIA H100", 79.1, True))


def test_every_size_is_a_shipped_recipe_of_its_family():
    for family in families():
        for size in ("laptop", "small", "base"):
            try:
                recipe = shipped_recipe(family, size)
            except ConfigError as error:
                assert "has" in str(error)
                continue
            assert recipe in shipped_recipes()
            assert load_config(recipe).model.family == family


def test_a_recipe_for_cpus_ends_in_the_time_given(tmp_path):
    settings = new_settings(Answers("bert", "laptop", hours=0.5), CPU, "mine")
    config = write_recipe(tmp_path / "mine.yaml", recipe_text([], settings))
    assert (config.name, config.training.precision, config.training.micro_batch_size) == ("mine", "fp32", 32)
    assert config.training.max_steps < 8000
    assert config.checkpoint.interval_steps <= config.training.max_steps


def test_a_recipe_for_gpus_has_the_planners_layout(tmp_path):
    settings = new_settings(Answers("bert", "base", hours=1), H100, "mine")
    config = write_recipe(tmp_path / "mine.yaml", recipe_text([], settings))
    assert (config.training.precision, config.deepspeed) == ("bf16", "zero1")
    assert config.training.global_batch_size % (8 * config.training.micro_batch_size) == 0
    assert (config.schedule.warmup_steps, config.schedule.total_steps, config.schedule.warmup_fraction) == (
        (None, None, 0.06) if config.training.max_steps != 900_000 else (10_000, 1_000_000, None)
    )


def test_an_unknown_family_or_size_is_refused():
    with pytest.raises(ConfigError, match="did you mean roberta"):
        shipped_recipe("robeta", "base")
    with pytest.raises(ConfigError, match="family xlnet has laptop"):
        shipped_recipe("xlnet", "small")


@pytest.mark.parametrize(
    ("kind", "num_bytes", "size"),
    [("wordpiece", 500_000, 4000), ("wordpiece", 5_000_000, 8000), ("gpt2", 300_000_000, 16000),
     ("wordpiece", 2_000_000_000, None), ("wordpiece", 0, None)],
)  # fmt: skip
def test_the_vocabulary_grows_with_the_text(tmp_path, kind, num_bytes, size):
    with open(tmp_path / "a.txt", "wb") as file:
        file.truncate(num_bytes)
    assert fitting_vocab_size(kind, str(tmp_path / "*.txt")) == size
    assert fitting_vocab_size(kind, "hf://name") is fitting_vocab_size(kind, None) is None
