import struct
from argparse import Namespace

import numpy as np
import pytest

from ctxlm_ds.apps.init import start
from ctxlm_ds.apps.init.settings import load_table, recipe_text, write_recipe
from ctxlm_ds.apps.init.start import Machine, describe_gpu, fitting_vocab_size, new_settings, num_rows, shipped_recipe
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.recipe.load import load_config, shipped_recipes
from tests.sample_data import random_documents, write_dataset


def answers(family, size, **given):
    return Namespace(
        family=family, size=size, **{"data": None, "text": None, "tokenizer": None, "hours": None, **given}
    )


CPU = Machine(2, None, 5e10, 16e9)
H100 = Machine(8, describe_gpu("NVIDIA H100", 79.1, True))


def test_every_size_is_a_shipped_recipe_of_its_family():
    for family, sizes in load_table("sizes").items():
        for size, recipe in sizes.items():
            assert shipped_recipe(family, size) == recipe and recipe in shipped_recipes()
            assert load_config(recipe).model.family == family


def test_a_recipe_for_cpus_ends_in_the_time_given(tmp_path):
    settings = new_settings(answers("bert", "laptop", hours=0.5), CPU, "mine")
    config = write_recipe(tmp_path / "mine.yaml", recipe_text([], settings))
    assert (config.name, config.training.precision, config.training.micro_batch_size) == ("mine", "fp32", 32)
    assert config.training.max_steps < 8000
    assert config.checkpoint.interval_steps <= config.training.max_steps


@pytest.mark.parametrize("family", ["bert", "xlnet", "elmo"])
@pytest.mark.parametrize("hours", [0.05, 1.0])
def test_evaluations_take_a_tenth_of_the_hours(family, hours, tmp_path, monkeypatch):
    monkeypatch.setattr("ctxlm_ds.apps.init.start.plan", lambda config, machine: (3.0, {}))
    settings = new_settings(answers(family, "laptop", hours=hours), CPU, "mine")
    config = write_recipe(tmp_path / "mine.yaml", recipe_text([], settings))
    steps, rows, batch = config.training.max_steps, config.evaluation.max_rows, config.training.global_batch_size
    assert steps * 3.0 == pytest.approx(0.9 * hours * 3600, abs=3.0)
    evaluations = 1 + steps // config.evaluation.interval_steps
    seconds = evaluations * rows / 3 / batch * 3.0
    assert rows >= batch and (seconds <= 0.1 * hours * 3600 or rows <= 2 * batch)


def test_a_recipe_for_gpus_has_the_planners_layout(tmp_path):
    settings = new_settings(answers("bert", "base", hours=1), H100, "mine")
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


def test_a_device_is_the_planners_gpu_of_its_name_or_the_nearest_in_memory():
    assert describe_gpu("NVIDIA H100 80GB HBM3", 79.1, True).name == "H100"
    assert describe_gpu("NVIDIA A100-SXM4-40GB", 39.4, True).name == "A100-40"
    other = describe_gpu("NVIDIA L40S", 44.4, True)
    assert (other.name, other.memory_gib, other.tflops_16bit) == ("NVIDIA L40S", 44.4, 312.0)
    assert Machine(1, describe_gpu("Tesla T4", 14.6, False)).precision == "fp16"


def test_a_dataset_of_few_documents_is_refused_before_the_run(tmp_path):
    write_dataset(tmp_path / "few", random_documents(80, seed=1))
    with pytest.raises(DataError, match=r"few: data.split 90,10,0 holds out \d+ of 80 documents .*--document lines:50"):
        new_settings(answers("bert", "laptop", data=str(tmp_path / "few")), CPU, "mine")


def test_a_laptops_recipe_holds_out_a_tenth_a_large_one_3_percent():
    for size, split in (("laptop", "90,10,0"), ("base", "97,3,0")):
        settings = new_settings(answers("bert", size), H100, "mine")
        assert (settings["data.split"].value, settings["data.split_seed"].value) == (split, 0)


def test_documents_of_a_large_text_are_not_drawn(tmp_path, monkeypatch):
    (tmp_path / "text").write_text("a b c d\n" * 100)
    for most, seed in ((200, 0), (199, None)):
        monkeypatch.setattr(start, "MOST_DRAWN_TOKENS", most)
        settings = new_settings(answers("bert", "laptop", text=str(tmp_path / "text")), CPU, "mine")
        assert settings["data.split_seed"].value == seed


def test_rows_of_a_dataset(tmp_path):
    lengths = np.array([90, 70], np.int32)
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 2)  # version, uint16, sequences, documents + 1
    arrays = (lengths, np.array([0, 180], np.int64), np.array([0, 2], np.int64))
    (tmp_path / "x.idx").write_bytes(head + b"".join(array.tobytes() for array in arrays))
    assert num_rows(str(tmp_path / "x"), 32) == 5
    assert num_rows(str(tmp_path / "x"), 512) == 1
    with pytest.raises(ConfigError, match="no such dataset"):
        num_rows(str(tmp_path / "y"), 32)
