"""Studies: a user's own, and a mistake names its place; the shipped ones: test_runs.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.apps.study.definition import Study, load_study
from ctxlm_ds.errors import ConfigError

GOOD = """
title: Masks
recipe: bert-docstrings
claim: {text: fewer are better, source: nobody, order: [few, many]}
arms:
  few: {set: {objective: {mask_prob: 0.1}}}
  many: {set: {objective: {mask_prob: 0.5}}}
sizes: {tiny: {budget: {tokens: 1M}}}
"""


def load(tmp_path: Path, text: str) -> Study:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return load_study(str(path))[1]


def test_a_study_of_ones_own(tmp_path: Path) -> None:
    study = load(tmp_path, GOOD)
    tiny = study.sizes["tiny"]
    assert (tiny.budget.given, tiny.seeds, study.rates) == ({"tokens": 1e6}, 5, [0.5, 1.0, 2.0])


@pytest.mark.parametrize(("old", "new", "message"), [
    ("tokens: 1M", "tokens: 1M, words: 1M", r"sizes.tiny.budget: words and tokens: give exactly one of words, tokens"),
    ("{tokens: 1M}", "{}", "sizes.tiny.budget: no unit: give exactly one"),
    ("[few, many]", "[few, meny]", "claim.order: meny is no arm; did you mean many"),
    ("arms:", "armes:", "armes.*did you mean arms"),
    ("title: Masks", "title: Masks\ncompare: pairs", "compare: pairs: one of loss"),
    ("title: Masks", "title: Masks\nmeasures: [sst2]", "measures: sst2: give minimal-pairs, or tasks that tag words"),
    ("title: Masks", "title: Masks\nmeasures: [conll2003-poss]", "no shipped task; did you mean conll2003-pos"),
    ("title: Masks", "title: Masks\nrates: [1, 0.5, 1]", "rates: give each factor once"),
    ("few: {set", "'f/w': {set", "arms.f/w: a name has letters"),
    ("few: {set", "few~size: {set", "arms.few~size: a name has letters"),  # the file of what a size sets for `few`
    ("few: {set", "'..': {set", r"arms\.\.\.: a name has letters"),
    ("few: {set: {objective: {mask_prob: 0.1}}}", "few: {of: meny}", "few.of: meny is no arm that trains.*many"),
    ("few: {set", "few: {teacher: many, set", "arms.few: it needs the runs of many, which is no earlier arm"),
    ("few: {set", "few: {of: many, set", "arms.few: it reads the runs of many; leave all but reading out"),
    ("{objective: {mask_prob: 0.5}}}\nsizes: {tiny: {budget: {tokens: 1M}}}",
     "{}, teacher: few}\nsizes: {tiny: {budget: {seconds: 60}}}", "tiny.budget: seconds: rates are measured before"),
    ("few: {set", "few: {reading: mix, set", "arms.few.reading: mix: only with `of`"),
    ("{tiny: {budget", "{huge: {budget", "sizes.huge"),
])  # fmt: skip
def test_a_mistake_names_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, GOOD.replace(old, new))
    with pytest.raises(ConfigError, match="no shipped study; did you mean masking-rate"):
        load_study("maskingrate")
