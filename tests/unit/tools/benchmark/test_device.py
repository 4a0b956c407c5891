"""The measurements of a GPU: refused in one line without one, and their parts run on a CPU with small shapes."""

from __future__ import annotations

import multiprocessing
import time

import pytest
import torch

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.load import load_config
from tests.dist.forks import prepare_to_fork
from tools.benchmark import device, turns
from tools.benchmark.__main__ import PARTS, build_parser
from tools.benchmark.device import (
    BACKENDS,
    DROPOUTS,
    MASKS,
    attention_table,
    compare_settings,
    measure_operations,
    seconds_of,
    settings_to_compare,
)
from tools.benchmark.steps import measured_recipe, refuse

SMALL = ["model.vocab_size=300", "training.micro_batch_size=1", "data.seq_length=32", "training.precision=fp32"]
CONFIG = measured_recipe(load_config("bert-tiny", SMALL), 0.0, "fp32", 1)


@pytest.mark.parametrize("part", PARTS)
def test_a_machine_without_gpu(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    arguments = build_parser().parse_args(["device", "--only", part])
    with pytest.raises(ConfigError, match="torch finds no GPU here"):
        list(arguments.measure(arguments))


def test_recipes_are_compared_with_transformers_and_published_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a small model; the sides of the comparison are those of a GPU."""
    sizes = ["model.num_layers=1", "training.micro_batch_size=1", "data.seq_length=32", "training.precision=fp32"]
    monkeypatch.setattr(device, "ANCHORED", {"bert-tiny": (["model.vocab_size=300"], "a rival: 1 token/s")})
    monkeypatch.setattr(device, "load_config", lambda name, settings: load_config(name, [*settings, *sizes]))
    prepare_to_fork()
    monkeypatch.setattr(turns, "CONTEXT", multiprocessing.get_context("fork"))
    (table,) = device.measure_anchored(1)
    assert [row[0] for row in table.rows] == [
        "ctxlm_ds",
        "transformers, fp32",
        "transformers.Trainer",
        "matrix product",
    ]
    assert table.notes[-1] == "Published: a rival: 1 token/s."
    assert "dropout of the recipe" in table.title


def test_the_measured_recipes_exist() -> None:
    for name, (settings, _) in device.ANCHORED.items():
        refuse(load_config(name, settings))


def test_single_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "LENGTHS", (16, 8))
    first, second, products = measure_operations(CONFIG, "cpu", 1, positions=32)
    assert "2 x 2 x 16 x 64" in first.title and "4 x 2 x 8 x 64" in second.title
    assert [row[1] for row in products.rows] == [
        "32 x 128 x 384", "32 x 128 x 128", "32 x 128 x 512", "32 x 512 x 128", "5 x 128 x 300", "5 x 128 x 384",
    ]  # fmt: skip
    assert all(float(cell) > 0 for row in products.rows for cell in row[2:])


def test_attention() -> None:
    """Every cell has a figure or says that there is none."""
    table = attention_table((2, 2, 16, 16), {"dtype": torch.float32, "device": "cpu"}, repetitions=1)
    assert len(table.rows) == len(BACKENDS) * len(MASKS)
    assert all(len(row) == len(table.header) == 1 + 2 * len(DROPOUTS) for row in table.rows)
    figures = {row[0]: row[1:] for row in table.rows}
    assert all(float(cell) >= 0 for cell in figures["math, no mask"] + figures["math, full mask"])
    assert figures["efficient, no mask"] == ["-"] * 4, "a CPU has no such backend"
    assert "2 x 2 x 16 x 16" in table.title


def test_the_first_runs_do_not_count() -> None:
    runs: list[int] = []

    def action() -> None:
        runs.append(len(runs))
        time.sleep(0.3 if len(runs) == 1 else 0.01)

    assert 0.01 <= seconds_of(action, 3) < 0.1
    assert len(runs) > 3


def test_a_model_without_these_sizes() -> None:
    config = load_config("bert-laptop")
    with pytest.raises(ConfigError, match="vocab_size"):
        next(measure_operations(config, "cpu", 1))


def test_a_setting_that_does_not_run_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {
        name: case
        for name, case in settings_to_compare(CONFIG).items()
        if name in ("attention varlen", "compile false")
    }
    monkeypatch.setattr(device, "settings_to_compare", lambda config: kept)
    monkeypatch.setitem(device.LEAST_STEPS, "cuda", 1)
    if not torch.cuda.is_available():
        prepare_to_fork()
        monkeypatch.setattr(turns, "CONTEXT", multiprocessing.get_context("fork"))
    (table,) = compare_settings(CONFIG, 1, "a test")
    assert [row[0] for row in table.rows] == ["compile false", "attention varlen"]
    assert table.rows[0][1][0].isdigit() and table.rows[1][1] == "-"
    assert len(table.notes) == 1 and "attention varlen: " in table.notes[0]
