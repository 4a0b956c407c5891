"""A run equals transformers' plain Trainer with the same arguments, and leaves complete results only."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ctxlm_ds.apps.downstream.fit import (
    FitSettings,
    Point,
    Tuning,
    load_config,
    make_trainer,
    run_point,
    training_arguments,
)
from ctxlm_ds.apps.downstream.prepare import Parts, make_kind, make_sets
from ctxlm_ds.errors import ConfigError
from tests.downstream_models import sentiment, write_bert

LABELS = ["bad", "good"]
POINT = Point(batch_size=4, learning_rate=5e-3, epochs=3, seed=3)


def test_results_equal_a_plain_trainer(tmp_path: Path) -> None:
    import transformers

    folder = write_bert(tmp_path / "model")
    task, examples = sentiment()
    parts = Parts(examples[:16], examples[16:], None, LABELS)
    kind = make_kind(task, folder, parts)
    settings = FitSettings()
    result = run_point(folder, kind, make_sets(kind, parts), POINT, settings, tmp_path / "ours", {})

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = [{**tokenizer(one.text), "labels": int(one.label == "good")} for one in examples]
    transformers.set_seed(POINT.seed)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    arguments = training_arguments(tmp_path / "plain", POINT, settings, "accuracy")
    collator = transformers.DataCollatorWithPadding(tokenizer)
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=rows[:16], eval_dataset=rows[16:], data_collator=collator
    )
    trainer.train()
    logits = torch.tensor(trainer.predict(rows[16:]).predictions)
    lines = (tmp_path / "ours" / "dev_predictions.jsonl").read_text().splitlines()
    ours = torch.tensor([[json.loads(line)["probabilities"][name] for name in ("bad", "good")] for line in lines])
    assert torch.equal(ours, torch.softmax(logits.double(), -1).to(ours.dtype))
    accuracy = float((logits.argmax(-1) == torch.tensor([row["labels"] for row in rows[16:]])).float().mean())
    assert result["dev"]["accuracy"] == pytest.approx(accuracy)
    losses = [[line["loss"] for line in log if "loss" in line] for log in (result["log"], trainer.state.log_history)]
    assert losses[0] == losses[1] and len(losses[0]) == 3


def test_a_run_of_many_epochs_shows_few_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_bert(tmp_path / "model")
    task, examples = sentiment()
    kind = make_kind(task, folder, Parts(examples[:4], examples[16:], None, LABELS))
    sets = make_sets(kind, Parts(examples[:4], examples[16:], None, LABELS))
    caplog.set_level("INFO", "ctxlm_ds")
    point = Point(batch_size=4, learning_rate=5e-3, epochs=23, seed=3)
    result = run_point(folder, kind, sets, point, FitSettings(), tmp_path / "ours", {})
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("epoch ")]
    shown = [int(line.removeprefix("epoch ").split(",")[0]) for line in lines if "train" in line]
    assert shown == [3, 6, 9, 12, 15, 18, 21, 23] and len(lines) == 2 * len(shown)
    assert len([line for line in result["log"] if "eval_loss" in line]) == 23, "metrics.json has every epoch"
    assert result["most_frequent"]["accuracy"] == 0.5 and result["most_frequent"]["matthews"] == 0.0


def test_a_failed_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_bert(tmp_path / "model")
    task, examples = sentiment(8)
    parts = Parts(examples, examples, None, LABELS)
    kind = make_kind(task, folder, parts)
    monkeypatch.setattr(type(kind), "score", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_point(folder, kind, make_sets(kind, parts), POINT, FitSettings(), tmp_path / "out" / "point", {})
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize(
    "tuning", [Tuning(lora_rank=2), Tuning(layer_decay=0.8), Tuning(gradual=True), Tuning(layers=1)]
)
def test_every_way_of_tuning_learns_and_saves_a_plain_model(tmp_path: Path, tuning: Tuning) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = write_bert(tmp_path / "model")
    task, examples = sentiment()
    parts = Parts(examples, examples, examples[:5], LABELS)
    kind = make_kind(task, folder, parts)
    settings = FitSettings(tuning=tuning, early_stopping=4, save_model=True)
    point = Point(batch_size=4, learning_rate=1e-2, epochs=5, seed=1)
    result = run_point(folder, kind, make_sets(kind, parts), point, settings, tmp_path / "out", {"a": 1})
    losses = [line["loss"] for line in result["log"] if "loss" in line]
    assert losses[-1] < losses[0]
    assert set(result) >= {"dev", "test", "log"} and not (tmp_path / "out" / "trainer").exists()
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "model")
    assert saved.config.id2label == {0: "bad", 1: "good"}


def test_a_deepspeed_file_that_contradicts_the_command_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text('{"train_batch_size": 64, "zero_optimization": {"stage": 2}}')
    given: dict[str, Any] = {}

    def make(**arguments: Any) -> Any:
        given.update(arguments)
        found = ["- ds train_batch_size=64 vs hf train_batch_size (calculated)=4"]  # transformers' words
        return SimpleNamespace(hf_deepspeed_config=SimpleNamespace(mismatches=found))

    with pytest.raises(ConfigError, match=r"mine\.json: train_batch_size=64, the command has .*=4; write .auto."):
        training_arguments(tmp_path, POINT, FitSettings(deepspeed=str(mine)), "accuracy", make)
    assert given["deepspeed"]["train_batch_size"] == 64 and given["deepspeed"]["gradient_clipping"] == "auto"


def test_random_weights_are_a_seed_apart_from_the_folder(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "model")
    task, examples = sentiment(8)
    parts = Parts(examples, examples, None, LABELS)
    kind = make_kind(task, folder, parts)
    weights = []
    for random, seed in ((False, 1), (True, 1), (True, 1), (True, 2)):
        point = Point(4, 1e-3, 1, seed)
        trainer = make_trainer(folder, kind, make_sets(kind, parts), point, FitSettings(random=random), tmp_path)
        weights.append(trainer.model.bert.embeddings.word_embeddings.weight.detach())
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[3])
    assert load_config(folder, kind).problem_type == "single_label_classification"
