"""Tagging with a CRF: its likelihood by enumeration, legal sequences, windows, and what is saved."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.fit import FitSettings, Point, Tuning, load_config, run_point
from ctxlm_ds.apps.downstream.kinds.tagging import CrfTagging
from ctxlm_ds.apps.downstream.prepare import Parts, load_tokenizer, make_kind, make_sets
from ctxlm_ds.apps.downstream.tags import read_spans
from ctxlm_ds.apps.downstream.task import TaskDescription
from ctxlm_ds.errors import ConfigError
from tests.downstream_models import write_bert

TASK = TaskDescription(
    kind="tagging", format="conll", train="t", dev="d", columns={"text": 0, "label": 1}, scheme="iob2", stride=4
)
LABELS = ["O", "B-A", "I-A"]
EXAMPLES = [
    Example("t:1", words=("unknown", "films", "Paris"), tags=("B-A", "I-A", "O")),
    Example("t:2", words=("Ann", "\x01"), tags=("B-A", "O")),
    Example("t:3", words=("a", "bad", "film", "."), tags=("O", "O", "B-A", "O")),
    Example("t:4", words=("\x01",), tags=("O",)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return write_bert(tmp_path_factory.mktemp("crf"), **quiet)


def make(folder: Path, examples: list[Example] = EXAMPLES, **options: Any) -> CrfTagging:
    return make_kind(TASK, folder, Parts(examples, examples, None, LABELS), "crf", **options)  # type: ignore[return-value]


def chain(scores: Any, transitions: Any, tags: tuple[int, ...]) -> Any:
    """The score of one sequence, from the definition."""
    total = transitions[-2, tags[0]] + transitions[tags[-1], -1]
    total = total + sum(scores[at, tag] for at, tag in enumerate(tags))
    return total + sum(transitions[pair] for pair in zip(tags, tags[1:], strict=False))


def test_the_loss_is_that_of_all_sequences_enumerated(folder: Path) -> None:
    kind = make(folder)
    model = kind.model(folder, load_config(folder, kind), random=False).eval()
    rows = kind.features(EXAMPLES).rows
    found = model(**kind.collator()(rows))
    found["loss"].backward()
    transitions = found["transitions"][0].detach().double().requires_grad_()
    losses = []
    for at, row in enumerate(rows):
        tags = tuple(label for label in row["labels"] if label >= 0)
        places = [place for place, label in enumerate(row["labels"]) if label >= 0]
        scores = found["logits"][at, places].detach().double()
        if tags:
            every = torch.stack([chain(scores, transitions, one) for one in product(range(3), repeat=len(tags))])
            losses.append(every.logsumexp(0) - chain(scores, transitions, tags))
    assert [len([label for label in row["labels"] if label >= 0]) for row in rows] == [3, 1, 4, 0]
    expected = sum(losses) / len(rows)  # a row without a word has no loss
    expected.backward()
    assert found["loss"].item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(model.crf.transitions.grad.double(), transitions.grad[:3, :3], atol=1e-6)
    assert torch.allclose(model.crf.start_transitions.grad.double(), transitions.grad[3, :3], atol=1e-6)
    assert torch.allclose(model.crf.end_transitions.grad.double(), transitions.grad[:3, 4], atol=1e-6)


def test_the_best_legal_sequence_and_its_probabilities(folder: Path) -> None:
    kind = make(folder)
    features = kind.features(EXAMPLES)
    legal = [one for one in product(range(3), repeat=3) if not any(
        after == 2 and before == 0 for before, after in zip((0, *one), one, strict=False))]  # fmt: skip
    for seed in range(20):
        draw = np.random.default_rng(seed)
        emissions, learned = draw.normal(size=(4, 8, 3)), draw.normal(size=(5, 5))
        first = kind.predict((emissions, np.stack([learned] * 4)), features)[0]
        assert isinstance(read_spans(first.value, "iob2"), list)
        scores = emissions[0, [1, 3, 5]]
        values = np.array([chain(scores, learned, one) for one in legal])
        best = legal[int(values.argmax())]
        assert first.value == [LABELS[label] for label in best]
        weights = np.exp(values - values.max())
        shares = [weights[[one[at] == best[at] for one in legal]].sum() / weights.sum() for at in range(3)]
        assert first.probabilities == pytest.approx(shares)


@pytest.mark.parametrize("tuning", [Tuning(lora_rank=2), Tuning(gradual=True)])
def test_a_run_learns_saves_and_is_read_again(folder: Path, tmp_path: Path, tuning: Tuning) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForTokenClassification

    long = Example("t:5", words=("a", "bad", "film", ".") * 12, tags=("O", "O", "B-A", "O") * 12)
    examples = [EXAMPLES[0], EXAMPLES[2], long] * 4
    kind = make(folder, examples)
    sets = make_sets(kind, Parts(examples, examples, None, LABELS))
    assert len(sets["dev"]) > len(examples)  # the long sentence has windows
    settings = FitSettings(tuning, save_model=True)
    result = run_point(folder, kind, sets, Point(4, 1e-2, 3, 1), settings, tmp_path / "out", {})
    losses = [line["loss"] for line in result["log"] if "loss" in line]
    assert losses[-1] < losses[0]
    saved = tmp_path / "out" / "model"
    again = make(saved, examples)
    model = again.model(saved, load_config(saved, again), random=False)
    emissions = AutoModelForTokenClassification.from_pretrained(saved)
    assert torch.equal(model.classifier.weight, emissions.classifier.weight)
    weights = load_file(saved / "model.safetensors")
    learned = {name.removeprefix("crf."): value for name, value in weights.items() if name.startswith("crf.")}
    found = model.crf.state_dict()
    assert set(found) == set(learned) and all(torch.equal(found[name], value) for name, value in learned.items())


def test_options_of_other_readings_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="drop --train-on and --read-from"):
        CrfTagging(TASK, load_tokenizer(folder, True), LABELS, 16, read_from="sum")
