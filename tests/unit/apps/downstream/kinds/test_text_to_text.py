"""Text to text: templates, label words, numbers; training as Seq2SeqTrainer does it; unknown outputs are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ctxlm_ds.apps.downstream.examples import Example, read_examples
from ctxlm_ds.apps.downstream.fit import FitSettings, Point, Tuning, make_trainer, run_point, training_arguments
from ctxlm_ds.apps.downstream.kinds.text_to_text import TextToText, mean_over_tokens
from ctxlm_ds.apps.downstream.metrics import UNKNOWN
from ctxlm_ds.apps.downstream.prepare import Parts, make_kind, make_sets
from ctxlm_ds.apps.downstream.task import TaskDescription, load_task
from ctxlm_ds.errors import ConfigError, DataError
from tests.downstream_models import WORDS, sentiment, word_tokenizer, write_t5

VOCABULARY = [*WORDS, "film:", "not", "3.2", "0.0", "-1", "answer"]
POINT = Point(batch_size=4, learning_rate=1e-2, epochs=2, seed=3)


def make(name: str, known: list[str] | None = None, **changes: Any) -> TextToText:
    task = load_task(name)[1].model_copy(update=changes)
    return TextToText(task, word_tokenizer(VOCABULARY), known or [], 32)


def generated(kind: TextToText, *texts: str) -> Any:
    rows = [[0, *kind.tokenizer(text)["input_ids"]] for text in texts]
    longest = max(map(len, rows))
    return np.array([row + [-100] * (longest - len(row)) for row in rows])


@pytest.mark.parametrize(
    ("name", "example", "read", "written"),
    [
        ("cola", Example("", "a film", label="acceptable"), "cola sentence: a film", "acceptable"),
        ("mrpc", Example("", "a", "b", "paraphrase"), "mrpc sentence1: a sentence2: b", "equivalent"),
        ("mnli", Example("", "a", "b", "neutral"), "mnli hypothesis: b premise: a", "neutral"),
        ("stsb", Example("", "a", "b", "3.25"), "stsb sentence1: a sentence2: b", "3.2"),
        ("squad", Example("", "in {pair}", "where ?", answers=(("in", 0),)),
         "question: where ? context: in {pair}", "in"),
        ("nq-open", Example("", "who ?", label="Ann", answers=(("Ann", 0),)), "nq question: who ?", "Ann"),
    ],
)  # fmt: skip
def test_published_templates(name: str, example: Example, read: str, written: str) -> None:
    kind = make(name)
    assert kind._inputs([example]) == [read] and kind._target(example) == written


def test_label_words_are_read_back_and_all_else_is_wrong() -> None:
    words = {"bad": "not good", "good": "good"}
    kind = make("sst2", ["bad", "good"], label_words=words, labels=None, metrics=["accuracy", "f1", "macro_f1"])
    examples = [Example("", "a film", label="bad"), Example("", "a film", label="good"), Example("", "a", label="good")]
    kind.check(examples)
    row = kind.features(examples)[0]
    assert kind.tokenizer.decode(row["labels"]) == "not good </s>"
    found = kind.predict(generated(kind, "not good", "good", "very"), kind.features(examples))
    assert [one.value for one in found] == ["bad", "good", UNKNOWN] and found[2].probabilities == {"output": "very"}
    scores = kind.score(found, examples)
    assert scores == pytest.approx({"accuracy": 2 / 3, "f1": 2 / 3, "macro_f1": 5 / 6})
    for words in ({"bad": "good"}, {"bad": "zzz", "good": "yyy"}):
        with pytest.raises(ConfigError, match="choose other words"):
            make("sst2", ["bad", "good"], label_words=words, labels=None).check(examples)
    with pytest.raises(DataError, match="unknown label .ugly"):
        kind.check([Example("dev:1", "a", label="ugly")])


def test_what_is_cut_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    kind = make("nq-open", max_target_length=2)
    long = Example("", "who " * 30, label="very very Ann", answers=(("very very Ann", 0),))
    short = Example("", "who " * 29, label="Ann", answers=(("Ann", 0),))
    rows = kind.features([long, short]).rows
    assert [len(row["input_ids"]) for row in rows] == [32, 32]
    assert [record.getMessage() for record in caplog.records] == [
        "1 input cut after 32 tokens; see max_length", "1 target cut after 2 tokens; see max_target_length"
    ]  # fmt: skip


def test_numbers_and_texts_are_judged() -> None:
    kind = make("stsb")
    examples = [Example("", "a", "b", "3"), Example("", "a", "b", "0"), Example("", "a", "b", "1")]
    found = kind.predict(generated(kind, "3.2", "0.0", "very"), kind.features(examples))
    assert [one.value for one in found] == [3.2, 0.0, -1.0]
    assert [kind.is_right(*pair) for pair in zip(found, examples, strict=True)] == [True, True, False]
    kind = make("nq-open")
    examples = [Example("", "who ?", label="Ann", answers=(("Ann", 0), ("the Paris", 0)))]
    found = kind.predict(generated(kind, "Paris"), kind.features(examples))
    assert kind.score(found, examples) == {"exact_match": 1.0, "f1": 1.0} and kind.is_right(found[0], examples[0])


def test_right_texts_are_one_or_a_list(tmp_path: Path) -> None:
    task = load_task("nq-open")[1]
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "who ?", "answer": ["Ann", "Paris"]}\n{"question": "who ?", "answer": "Ann"}\n')
    assert [one.label for one in read_examples(task, path)] == ["Ann", "Ann"]
    path.write_text('{"question": "who ?", "answer": []}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:1: answer is a text or a list of texts"):
        read_examples(task, path)


def test_results_equal_a_plain_seq2seq_trainer(tmp_path: Path) -> None:
    import transformers

    folder = write_t5(tmp_path / "model", VOCABULARY)
    task, examples = sentiment()
    task = task.model_copy(update={"template": "film: {text}"})
    parts = Parts(examples[:16], examples[16:], examples[:3], ["bad", "good"])
    kind = make_kind(task, folder, parts, "text_to_text", beams=2)
    settings = FitSettings(save_model=True)
    result = run_point(folder, kind, make_sets(kind, parts), POINT, settings, tmp_path / "ours", {})

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = [
        {"input_ids": tokenizer(f"film: {one.text}")["input_ids"], "labels": tokenizer(one.label)["input_ids"]}
        for one in examples
    ]
    transformers.set_seed(POINT.seed)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    arguments = training_arguments(
        tmp_path / "plain", POINT, settings, "accuracy",
        lambda **given: transformers.Seq2SeqTrainingArguments(
            predict_with_generate=True, generation_num_beams=2, generation_max_length=3, **given
        ),
    )  # fmt: skip
    collator = transformers.DataCollatorForSeq2Seq(tokenizer, model)
    sets = {"train_dataset": rows[:16], "eval_dataset": rows[16:]}
    trainer = transformers.Seq2SeqTrainer(model=model, args=arguments, data_collator=collator, **sets)
    trainer.train()
    outputs = trainer.predict(rows[16:]).predictions
    texts = tokenizer.batch_decode(np.where(outputs < 0, 0, outputs), skip_special_tokens=True)
    lines = [json.loads(line) for line in (tmp_path / "ours" / "dev_predictions.jsonl").read_text().splitlines()]
    assert [line["probabilities"]["output"] for line in lines] == texts
    logs = (result["log"], trainer.state.log_history)
    losses = [[line[name] for line in log for name in ("loss", "eval_loss") if name in line] for log in logs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][-1] < losses[0][0]
    assert len((tmp_path / "ours" / "test_predictions.jsonl").read_text().splitlines()) == 3
    saved = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours" / "model").state_dict()
    assert all(torch.allclose(saved[name], value, atol=1e-5) for name, value in trainer.model.state_dict().items())


def test_ranks_with_targets_of_other_lengths_have_one_mean() -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, 3, 5)
    labels = torch.tensor([[1, 2, 3], [1, 2, -100], [4, -100, -100], [4, -100, -100]])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert torch.equal(mean_over_tokens({"logits": logits}, labels), expected)
    ranks = [mean_over_tokens({"logits": logits[part]}, labels[part], torch.tensor(7)) * 2
             for part in (slice(0, 2), slice(2, 4))]  # fmt: skip
    assert torch.allclose(sum(ranks) / 2, expected)


def test_examples_that_fill_the_last_batch_of_ranks_are_left_out(tmp_path: Path) -> None:
    folder = write_t5(tmp_path / "model", VOCABULARY)
    task, examples = sentiment(8)
    parts = Parts(examples, examples[:2], None, ["bad", "good"])
    kind = make_kind(task, folder, parts, "text_to_text")
    sets = make_sets(kind, parts)
    trainer = make_trainer(folder, kind, sets, POINT, FitSettings(), tmp_path)
    assert len(kind.predict(trainer.predict(sets["dev"]).predictions, sets["dev"])) == 2
    assert trainer.gather_function == trainer.accelerator.gather_for_metrics


@pytest.mark.parametrize("tuning", [Tuning(lora_rank=2), Tuning(layers=1), Tuning(layer_decay=0.5)])
def test_ways_of_tuning_keep_tied_weights_tied(tmp_path: Path, tuning: Tuning) -> None:
    from transformers import AutoModelForSeq2SeqLM

    folder = write_t5(tmp_path / "model", VOCABULARY)
    task, examples = sentiment(8)
    parts = Parts(examples, examples[:2], None, ["bad", "good"])
    kind = make_kind(task, folder, parts, "text_to_text")
    settings = FitSettings(tuning=tuning, save_model=True, random=True)
    run_point(folder, kind, make_sets(kind, parts), POINT, settings, tmp_path / "out", {})
    saved = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out" / "model")
    assert saved.lm_head.weight is saved.shared.weight


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = write_t5(tmp_path / "model", VOCABULARY)
    task, examples = sentiment(4)
    parts = Parts(examples, examples, None, ["bad", "good"])
    kind = make_kind(task, folder, parts, "text_to_text")
    for tuning in (Tuning(layers=0), Tuning(gradual=True)):
        with pytest.raises(ConfigError, match="no separate head"):
            run_point(folder, kind, make_sets(kind, parts), POINT, FitSettings(tuning), tmp_path / "out", {})
    choice = TaskDescription(kind="tagging", format="conll", train="t", dev="d", columns={"text": 0, "label": 1})
    with pytest.raises(ConfigError, match="--text-to-text: for tasks .*; this one is of kind tagging"):
        make_kind(choice, folder, parts, "text_to_text")
