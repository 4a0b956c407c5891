"""The four ways of the packing benchmark, and the figures of its table."""

from __future__ import annotations

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.load import load_config
from tools.benchmark.packing import PACKED, WAYS, DocumentSteps, compare_packing, packing_rows, recipe_for
from tools.benchmark.steps import StepBenchmark, measured_recipe
from tools.benchmark.turns import Facts, SideProcess, Turn

CASE = measured_recipe(load_config("bert-tiny", ["training.micro_batch_size=2"]), 0.0, "fp32", 3)


def test_short_position_tables_grow() -> None:
    small = measured_recipe(load_config("bert-docstrings"), 0.0, "fp32", 1)
    assert recipe_for(small, PACKED).model.longest_sequence == 512


def test_a_side_knows_its_tokens() -> None:
    tokens, share = DocumentSteps(recipe_for(CASE, PACKED), "zero1", PACKED, None).fill()
    assert 0.95 < share <= 1.0 and tokens == pytest.approx(share * 6 * 512)


def test_ratios_are_those_of_each_round() -> None:
    """Packed rows are twice as fast in both rounds, of which the second is ten times slower."""
    sides = {way: SideProcess(way, None) for way in (PACKED, WAYS[2])}  # type: ignore[arg-type]
    sides[PACKED].turns = [Turn(2.0, 2.0, 0.0), Turn(20.0, 20.0, 0.0)]
    sides[WAYS[2]].turns = [Turn(1.0, 1.0, 0.0), Turn(10.0, 10.0, 0.0)]
    fills = {PACKED: (800.0, 0.98), WAYS[2]: (200.0, 0.5)}
    packed, padded = packing_rows(sides, dict.fromkeys(sides, Facts(2_000_000, None)), fills)
    assert packed == [PACKED, "220 (40 to 400)", "-", "98 %", "2.0 MB"]
    assert padded == [WAYS[2], "110 (20 to 200)", "2.00 (2.00 to 2.00)", "50 %", "2.0 MB"]


def test_a_recipe_without_rows_to_pack() -> None:
    benchmark = StepBenchmark("zero1", dropouts=[0.0], rounds=1)
    with pytest.raises(ConfigError, match="packing is measured on masked language models"):
        next(compare_packing(load_config("gpt2-small"), benchmark))
