"""Answers to prompts: the words decide, calibration divides, long examples are shortened, choices fill the gap.

Scores equal those of plain models of transformers, one text at a time and unpadded.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.kinds.sequence import Classification, MultipleChoice
from ctxlm_ds.apps.downstream.language_model import CONTENT_FREE, Prompting, load_scorer
from ctxlm_ds.apps.downstream.prepare import load_tokenizer
from ctxlm_ds.apps.downstream.prompt import PromptDescription
from ctxlm_ds.apps.downstream.task import TaskDescription
from ctxlm_ds.errors import ConfigError
from tests.downstream_models import WORDS, causal_export, sentiment, write_bert
from tests.unit.apps.evaluate.test_suite_harness import ROLLING, ROWS, write_task

PROMPT = PromptDescription(pattern="{text} a {mask} film .", words={"bad": "bad", "good": "good"}, separator=" ")


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


def test_choices_fill_the_gap(prompting: Prompting, caplog: pytest.LogCaptureFixture) -> None:
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


TEXTS = [("the film was ", "good", " ."), ("Paris was a very very ", "unknown", " film ."), ("", "Ann", " met Paris")]
SIZES = {"d_model": 16, "num_layers": 2, "num_heads": 2, "d_kv": 8, "d_ff": 24}


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("masked"), [*WORDS, "<extra_id_0>"])


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return causal_export(tmp_path_factory.mktemp("causal"))


def plain_score(model: Any, row: list[int], places: list[int], targets: list[int], **inputs: Any) -> float:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row]), **inputs).logits[0]
    return float(torch.log_softmax(logits, -1)[places, targets].sum())


def test_masks_are_predicted_together(masked: Path) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(masked), AutoModelForMaskedLM.from_pretrained(masked).eval()
    scorer = load_scorer(masked, load_tokenizer(masked, False))
    items = [scorer.item(*text) for text in TEXTS]
    expected = []
    for before, word, after in TEXTS:
        targets = tokenizer(word, add_special_tokens=False).input_ids
        row = tokenizer(before + tokenizer.mask_token * len(targets) + after).input_ids
        places = [at for at, token in enumerate(row) if token == tokenizer.mask_token_id]
        expected.append(plain_score(model, row, places, targets))
    np.testing.assert_allclose(scorer.scores(items), expected, atol=1e-5)
    assert scorer.scores(items, mean=True)[1] == pytest.approx(expected[1] / 2, abs=1e-5)
    with pytest.raises(ConfigError, match="no tokens for 'xyz'"):
        scorer.item("the film was ", "xyz", "")


def test_a_gpu_is_used_if_there_is_one(masked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("transformers.PreTrainedModel.to", lambda model, device: used.append(device) or model)
    load_scorer(masked, load_tokenizer(masked, False))
    assert used == ["cuda"]


def test_a_causal_model_continues(causal: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(causal), AutoModelForCausalLM.from_pretrained(causal).eval()
    scorer = load_scorer(causal, load_tokenizer(causal, False))
    assert scorer.causal
    texts = [("the river walked ", "slowly"), ("a mountain\n", "unhappy times"), ("", "books")]
    expected = []
    for before, word in texts:
        context = tokenizer(before.rstrip()).input_ids if before else [tokenizer.eos_token_id]
        row = tokenizer(before + word).input_ids if before else [*context, *tokenizer(word).input_ids]
        places = list(range(len(context) - 1, len(row) - 1))
        expected.append(plain_score(model, row, places, row[len(context) :]))
    found = scorer.scores([scorer.item(before, word, "") for before, word in texts])
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.long
def test_lm_evaluation_harness_finds_the_same_log_probabilities(causal: Path, tmp_path: Path) -> None:
    """The run of docs/downstream.md: a task of local files, no network."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    write_task(tmp_path)
    write_task(tmp_path, "rivers_text", **ROLLING)
    done = simple_evaluate(
        model="hf", model_args={"pretrained": str(causal), "dtype": "float32"}, device="cpu", batch_size=4,
        tasks=["rivers", "rivers_text"], task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )  # fmt: skip
    scorer = load_scorer(causal, load_tokenizer(causal, False))
    words = ("books", "unhappy times")
    ours = scorer.scores([scorer.item(f"{row['text']} It was ", word, "") for row in ROWS for word in words])
    samples = sorted(done["samples"]["rivers"], key=lambda sample: sample["doc_id"])
    theirs = [value for sample in samples for value, _ in sample["filtered_resps"]]
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    right = ours.reshape(-1, 2).argmax(-1) == [row["label"] for row in ROWS]
    assert done["results"]["rivers"]["acc,none"] == pytest.approx(right.mean())
    texts = [row["text"] for row in ROWS]
    total = scorer.scores([scorer.item("", text, "") for text in texts]).sum()
    per_word = total / sum(len(text.split()) for text in texts)
    assert done["results"]["rivers_text"]["word_perplexity,none"] == pytest.approx(np.exp(-per_word), rel=1e-4)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_decoder_writes_the_gap(masked: Path, tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, BartConfig, T5Config

    tokenizer = AutoTokenizer.from_pretrained(masked)
    sentinel, mask = tokenizer.convert_tokens_to_ids("<extra_id_0>"), tokenizer.mask_token_id
    shared = {"vocab_size": len(tokenizer), "pad_token_id": 0, "decoder_start_token_id": 2}
    if family == "t5":
        config: Any = T5Config(**shared, **SIZES)
    else:
        tokenizer = AutoTokenizer.from_pretrained(write_bert(tmp_path / "bart"))
        config = BartConfig(**shared | {"vocab_size": len(tokenizer)}, d_model=16, encoder_layers=2, decoder_layers=2,
                            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
                            decoder_ffn_dim=24, max_position_embeddings=32)  # fmt: skip
    torch.manual_seed(2)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path / family)
    tokenizer.save_pretrained(tmp_path / family)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / family).eval()
    scorer = load_scorer(tmp_path / family, load_tokenizer(tmp_path / family, False))
    expected = []
    for before, word, after in TEXTS:
        targets = tokenizer(word, add_special_tokens=False).input_ids
        row = tokenizer(f"{before}[MASK]{after}").input_ids
        at = row.index(mask)
        if family == "t5":
            given, labels, first = [*row[:at], sentinel, *row[at + 1 :]], [sentinel, *targets], 1
        else:
            given, labels, first = row, [*row[:at], *targets, *row[at + 1 :]], at
        places = list(range(first, first + len(targets)))
        start = config.decoder_start_token_id
        decoder_input_ids = torch.tensor([[start, *labels[:-1]]])
        expected.append(plain_score(model, given, places, targets, decoder_input_ids=decoder_input_ids))
    np.testing.assert_allclose(scorer.scores([scorer.item(*text) for text in TEXTS]), expected, atol=1e-5)


def test_a_model_without_words_is_refused(tmp_path: Path) -> None:
    from transformers import BertModel, XLNetConfig, XLNetLMHeadModel

    folder = write_bert(tmp_path / "bert")
    BertModel.from_pretrained(folder).save_pretrained(folder)
    with pytest.raises(ConfigError, match="no weights of cls"):
        load_scorer(folder, load_tokenizer(folder, False))
    tokenizer = load_tokenizer(folder, False)
    config = XLNetConfig(vocab_size=len(tokenizer), d_model=8, n_layer=1, n_head=2, d_inner=8)
    XLNetLMHeadModel(config).save_pretrained(tmp_path / "xlnet")
    with pytest.raises(ConfigError, match="permuted positions"):
        load_scorer(tmp_path / "xlnet", tokenizer)
