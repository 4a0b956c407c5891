"""Answers to prompts: the words decide, calibration divides, long examples are shortened, choices fill the gap."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.kinds.sequence import Classification, MultipleChoice
from ctxlm_ds.apps.downstream.prepare import load_tokenizer
from ctxlm_ds.apps.downstream.prompt import CONTENT_FREE, PromptDescription
from ctxlm_ds.apps.downstream.prompting import Prompting, load_scorer
from ctxlm_ds.apps.downstream.task import TaskDescription
from ctxlm_ds.errors import ConfigError
from tests.downstream_models import sentiment, write_bert

WORDS = {"bad": "bad", "good": "good"}
PROMPT = PromptDescription(pattern="{text} a {mask} film .", words=WORDS, separator=" ")


@pytest.fixture(scope="module")
def prompting(tmp_path_factory: pytest.TempPathFactory) -> Prompting:
    folder = write_bert(tmp_path_factory.mktemp("model"))
    tokenizer = load_tokenizer(folder, False)
    kind = Classification(sentiment()[0], tokenizer, ["bad", "good"], 32)
    return Prompting(kind, PROMPT, load_scorer(folder, tokenizer))


def log_odds(prompting: Prompting, text: str) -> float:
    """Score of `good` minus that of `bad` in the gap after a text."""
    found = prompting.scorer.scores([prompting.scorer.item(f"{text} a ", word, " film .") for word in ("good", "bad")])
    return float(found[0] - found[1])


def test_words_and_solved_examples_decide(prompting: Prompting) -> None:
    examples = sentiment()[1][:6]
    for shots in ([], [examples[0]]):
        given = "".join(f"{one.text} a {one.label} film . " for one in shots)
        for example, prediction in zip(examples, prompting.predict(examples, shots), strict=True):
            odds = log_odds(prompting, given + example.text)
            assert prediction.probabilities["good"] == pytest.approx(1 / (1 + np.exp(-odds)))
            assert prediction.value == ("good" if odds > 0 else "bad")


def test_calibration_divides_by_content_free_inputs(prompting: Prompting) -> None:
    examples = sentiment()[1][:3]
    neutral = np.mean([1 / (1 + np.exp(-log_odds(prompting, text))) for text in CONTENT_FREE])
    for example, prediction in zip(examples, replace(prompting, calibrated=True).predict(examples, []), strict=True):
        odds = np.exp(log_odds(prompting, example.text)) / (neutral / (1 - neutral))
        assert prediction.probabilities["good"] == pytest.approx(odds / (1 + odds))


def test_long_examples_are_shortened_from_their_end(prompting: Prompting) -> None:
    given = "the film was good . a good film . "
    items, was_cut = prompting.fit(Example("f:1", "Paris met " + "very " * 40), given)
    assert was_cut and max(item.length for item in items) == 32
    assert items[0].input_ids[10:12] == tuple(prompting.scorer.tokenizer.convert_tokens_to_ids(["Paris", "met"]))
    with pytest.raises(ConfigError, match="lower --shots"):
        prompting.fit(Example("f:1", "Paris"), given * 4)


def test_choices_fill_the_gap(
    prompting: Prompting, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = TaskDescription(
        kind="multiple_choice", format="jsonl", train="t", dev="d",
        columns={"text": "text", "choices": "choices", "label": "label"},
    )  # fmt: skip
    kind = MultipleChoice(task, prompting.kind.tokenizer, [], 32)
    choices = ("good .", "very very bad .", "unknown")
    example = Example("f:1", "the film was", label="1", choices=choices)
    prompt = PromptDescription(pattern="{text} {mask}", separator=" ")
    sums, means = (Prompting(kind, prompt, prompting.scorer, mean) for mean in (False, True))
    given = "the film was very very bad . "
    for one, mean in ((sums, False), (means, True)):
        (prediction,) = one.predict([example], [example])
        items = [prompting.scorer.item(f"{given}the film was ", choice, "") for choice in choices]
        scores = np.exp(prompting.scorer.scores(items, mean))
        np.testing.assert_allclose(prediction.probabilities, scores / scores.sum(), rtol=1e-5)
        assert prediction.value == scores.argmax()
    (calibrated,) = replace(sums, calibrated=True).predict([example], [])
    assert sum(calibrated.probabilities) == pytest.approx(1)
    with pytest.raises(ConfigError, match="no tokens for 'xyz'"):
        sums.predict([replace(example, choices=("good", "xyz"))], [])
    tolerant = replace(sums, scorer=replace(sums.scorer, scores_unknown=True))
    caplog.set_level("WARNING", "ctxlm_ds")
    for _ in range(2):
        (found,) = tolerant.predict([replace(example, choices=("good", "a xyz film"))], [])
    given = [tolerant.scorer.item("the film was ", choice, "") for choice in ("good", "a [UNK] film")]
    odds = np.exp(tolerant.scorer.scores(given))
    np.testing.assert_allclose(found.probabilities, odds / odds.sum(), rtol=1e-5)
    assert [one.getMessage() for one in caplog.records] == ["unknown tokens in 1 of 2 choices are scored like others"]
