"""Figures of a run; tests/integration/test_study.py measures real ones."""

from __future__ import annotations

from ctxlm_ds.apps.evaluate.verdict import Figures, Predictions
from ctxlm_ds.apps.study.measure import GATE_NATS, gate
from ctxlm_ds.recipe.load import load_config


class Known(Predictions):
    """Predictions whose figures by frequency are known."""

    def __init__(self) -> None:
        self.objective = type("Masked", (), {"shifted": False})()

    def by_frequency(self):  # type: ignore[no-untyped-def]
        yield "heldout", Figures(6.5, 0.1)


def test_the_gate_of_masks_is_below_word_frequencies() -> None:
    config = load_config("bert-docstrings", ["tokenizer.path=tok", "data.train=[data/x]"])
    assert gate(config, Known()) == 6.5 - GATE_NATS
