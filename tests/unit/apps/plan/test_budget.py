"""Sizes for so much text and time: the published laws with figures of their papers, and what is proposed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from ctxlm_ds.apps.plan.budget import PUBLISHED, SHAPES, Budget, Law, describe, read_ladder
from ctxlm_ds.apps.plan.plan_run import parse_budget
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.hardware import Cluster, find_gpu
from ctxlm_ds.recipe.load import load_config

HOFFMANN, BESIROGLU, MUENNIGHOFF = PUBLISHED


def test_the_laws_give_the_figures_of_their_papers() -> None:
    """Chinchilla's 70B and 1.4T tokens: 1.936 (Hoffmann 2022, table A9's law); 20 tokens a parameter (Besiroglu)."""
    assert HOFFMANN.loss(70e9, 1.4e12, 1e15) == pytest.approx(1.936, abs=0.002)
    for flops in (1e20, 1e22, 1e24):
        sizes = [10 ** (7 + step / 50) for step in range(250)]
        best = min(sizes, key=lambda size: BESIROGLU.loss(size, flops / 6 / size, 1e15))
        assert 15 < flops / 6 / best**2 < 28


def test_repeated_tokens_count_less() -> None:
    """Four passes are worth 93 % of new text, 44 not more than 15.4 new ones (Muennighoff 2023, section 6)."""
    new, again = (MUENNIGHOFF.loss(1e6, 4e9, unique) for unique in (4e9, 1e9))
    tokens = (1487.7 / (again - MUENNIGHOFF.e - 520.8 / 1e6**0.3527)) ** (1 / 0.3527)
    assert again > new and tokens == pytest.approx(0.931 * 4e9, rel=0.002)
    assert MUENNIGHOFF.loss(1e6, 44e9, 1e9) > MUENNIGHOFF.loss(1e6, 16.4e9, 16.4e9)
    # More parameters than 1e8 tokens are enough for are worth less than as many with enough text.
    plain = HOFFMANN.e + HOFFMANN.a / 1e10**HOFFMANN.alpha + HOFFMANN.b / 1e8**HOFFMANN.beta
    assert HOFFMANN.loss(1e10, 1e8, 1e8) > plain


def test_less_text_and_less_time_make_smaller_models() -> None:
    config, cluster = load_config("gpt2-small"), Cluster(find_gpu("H100"), 1, 1)
    best = []
    for words, hours in ((1e10, 100.0), (1e10, 1.0), (1e6, 100.0)):
        found = Budget(config, cluster, words, hours, PUBLISHED).proposals()
        assert [one.config.model.width for one in found] == [width for width, _ in SHAPES[: len(found)]]
        best.append(min(found, key=lambda one: one.losses[HOFFMANN.source]))
        batches = [one.config.training.global_batch_size for one in found]
        assert all(batch & (batch - 1) == 0 for batch in batches)
    assert best[0].parameters > best[1].parameters and best[0].parameters > best[2].parameters
    hours = best[0].seconds_per_step * best[0].config.training.max_steps / 3600
    assert hours == pytest.approx(100, rel=0.01)
    again = load_config("gpt2-small", best[0].settings, 1)
    assert again.deepspeed == f"zero{best[0].layout.zero_stage}"
    assert again.training.max_steps == best[0].config.training.max_steps and again.model == best[0].config.model
    text = "\n".join(describe([best[0]], 1e10, PUBLISHED))
    assert f"model.hidden_size={best[0].config.model.width}" in text and "they are a guess" in text


def test_a_ladder_of_ones_own_reaches_ten_times_its_largest_size(tmp_path: Path) -> None:
    law = {"e": 1.0, "a": 400.0, "alpha": 0.3, "b": 400.0, "beta": 0.3, "largest": 1e6}
    (tmp_path / "law.json").write_text(json.dumps({"law": law}))
    own = read_ladder(tmp_path / "law.json")
    assert own == Law(str(tmp_path / "law.json"), **law)
    found = Budget(load_config("gpt2-small"), Cluster(find_gpu("H100"), 1, 1), 1e8, 1.0, (own,)).proposals()
    assert [own.source in one.losses for one in found[:3]] == [True, False, False]
    assert "too far" in "\n".join(describe(found, 1e8, (own,)))
    (tmp_path / "law.json").write_text("{}")
    with pytest.raises(ConfigError, match="no law; python tools/scaling.py fit writes one"):
        read_ladder(tmp_path / "law.json")


def test_mistakes() -> None:
    assert parse_budget("words=10M,hours=1.5,gpu=H100") == {"words": 1e7, "hours": 1.5, "gpu": "H100"}
    for text in ("words=10M", "words=many,hours=1", "words=1M,hours=1,size=3", "words=0,hours=1", "words=1M,hours=nan"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_budget(text)
    with pytest.raises(ConfigError, match="elmo has no width and depth"):
        Budget(load_config("elmo-small"), Cluster(find_gpu("H100"), 1, 1), 1e6, 1.0, PUBLISHED).proposals()
