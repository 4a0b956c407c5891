"""The objective of DistilBERT: its terms, what it asks of a teacher, and labels at every token or the masked ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.sample import Examples
from ctxlm_ds.objectives.base import build_objective
from tests.sections import data_section, objective_section

LENGTH = 6
DATA = data_section(sample_format="full_sentences", seq_length=LENGTH)


def objective(**settings: Any) -> Any:
    return build_objective(objective_section(name="distillation", **settings))


def test_without_angles_no_hidden_state_is_asked_for() -> None:
    made = objective(cosine_weight=0.0, soft_target_weight=3.0, temperature=1.5)
    assert [(term.name, term.weight) for term in made.terms] == [("soft_targets", 3.0), ("masked_lm", 2.0)]
    assert made.teacher_outputs == ("predicted_logits",) and not made.taps


def filled(made: Any) -> dict[str, Any]:
    """One row of four tokens, of which the second and the last are predicted."""
    ids, positions, labels = (np.array(one, dtype=np.int32) for one in ([1, 4, 6, 4], [1, 3], [5, 7]))
    unlabelled = np.array([-1], dtype=np.int8)
    examples = Examples(ids, np.array([0, 4]), np.array([4]), unlabelled, positions, labels, np.array([0, 2]))
    arrays = {field.name: np.full((1, field.columns), field.fill, dtype=np.int32) for field in made.fields(DATA)}
    assert made.fill(examples, np.array([0, 1]), arrays) == -1
    return {name: value[0].tolist() for name, value in arrays.items()}


def test_every_token_has_a_soft_target_and_masked_ones_a_label() -> None:
    found = filled(objective())
    none = IGNORE_LABEL
    assert found["prediction_positions"] == list(range(LENGTH))
    assert found["masked_lm_labels"] == [none, 5, none, 7, none, none]
    assert found["soft_target_labels"] == [1, 1, 1, 1, none, none]


def test_soft_targets_at_masked_tokens_have_their_slots() -> None:
    made = objective(soft_targets="masked", mask_prob=0.5)
    slots = made.slots(DATA)
    found = filled(made)
    assert len(found["soft_target_labels"]) == slots < LENGTH
    assert [label != IGNORE_LABEL for label in found["masked_lm_labels"]] == [
        target == 1 for target in found["soft_target_labels"]
    ]


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"soft_target_weight": -1.0}, {"soft_targets": "some"}])
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        objective(**settings)
