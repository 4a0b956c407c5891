"""One phase: exactly one length, and nothing that is not a setting."""

from __future__ import annotations

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.load import load_config


@pytest.mark.parametrize(("phase", "problem"), [
    ("{}", "phases[0]: no length: give exactly one of steps, tokens, words, hours, share"),
    ("{steps: 1, hours: 2}", "phases[0]: steps and hours: give exactly one"),
    ("{step: 1}", "phases[0].step: unknown setting (value 1); did you mean phases[0].steps?"),
    ("{steps: 1, moments: none}", "phases[0].moments: \"none\": expected one of keep, recount, fresh"),
    ("{steps: 0}", "phases[0].steps: 0: expected a whole number from 1"),
    ("{steps: 1, set: [5]}", "phases[0].set: [5]: expected sections of settings"),
])  # fmt: skip
def test_a_wrong_phase_is_one_problem(phase: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("bert-laptop", [f"phases=[{phase}]", "training.max_steps=null"])
    assert problem in str(error.value) and "1 problem" in str(error.value)
