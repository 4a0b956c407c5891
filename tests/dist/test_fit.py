"""Fine-tuning on two ranks with DeepSpeed (ZeRO-2): every kind of task learns and predicts what one rank does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.downstream.fit import FitSettings, Point, Tuning, run_point
from ctxlm_ds.apps.downstream.prepare import make_kind, make_sets, read_parts
from ctxlm_ds.apps.downstream.task import load_task
from tests.dist.forks import fork_ranks
from tests.downstream_models import WORDS, sentiment, write_bert, write_gpt2, write_rows, write_t5

pytestmark = pytest.mark.dist
POINT = Point(batch_size=8, learning_rate=5e-3, epochs=2, seed=1)
RUNS: dict[str, tuple[str, str, str | None, dict[str, Any]]] = {
    "crf": ("tags", "bert", "crf", {}),
    "spans": ("spans", "bert", None, {}),
    "text-to-text": ("sentences", "t5", "text_to_text", {}),
    "gpt1-inputs": ("sentences", "gpt2", "gpt1_inputs", {}),
    "choices": ("choices", "bert", None, {}),
    "answers": ("answers", "bert", None, {}),
    "early-stopping": ("sentences", "bert", None, {"early_stopping": 1, "save_model": True}),
    "lora": ("sentences", "bert", None, {"tuning": Tuning(lora_rank=2)}),
}
"""Task, model, form and settings."""
SENTENCES = [
    (["Ann", "met", "a", "unknown", "films", "."], ["B-PER", "O", "O", "O", "B-WORK", "O"]),
    (["the", "film", "was", "in", "Paris"], ["O", "B-WORK", "O", "O", "B-PLACE"]),
    (["who", "met", "the", "very", "bad", "film"], ["O", "O", "O", "O", "B-WORK", "I-WORK"]),
]
SPANS = {"columns": {"text": 0, "label": 1}, "format": "conll", "scheme": "iob2"}


def write_task(folder: Path, name: str, suffix: str, texts: tuple[str, str], **settings: Any) -> None:
    parts = {"train": f"{name}-train{suffix}", "dev": f"{name}-dev{suffix}"}
    for file, text in zip(parts.values(), texts, strict=True):
        (folder / file).write_text(text)
    (folder / f"{name}.yaml").write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in
                                                   (parts | settings).items()))  # fmt: skip


def conll(count: int) -> str:
    rows = (zip(*SENTENCES[at % 3], strict=True) for at in range(count))
    return "\n\n".join("\n".join(f"{word} {tag}" for word, tag in row) for row in rows)


def choices(count: int) -> str:
    """Lines of multiple choice whose right one is first and second in turn."""
    ends = ("good film", "bad .")
    rows = [{"text": "the film was", "choices": [ends[at % 2], ends[1 - at % 2]], "label": at % 2}
            for at in range(count)]  # fmt: skip
    return "".join(json.dumps(row) + "\n" for row in rows)


def answers(count: int) -> str:
    """Questions about paragraphs of one length: a model's scores of padding are part of its loss."""
    paragraphs = []
    for at in range(count):
        text = "the film was in Paris . Ann met who" if at % 2 else "Ann was in a film . the bad film"
        answer = "Paris" if at % 2 else "film"
        question = {"id": str(at), "question": "where was the film ?"}
        question["answers"] = [{"text": answer, "answer_start": text.index(answer)}]
        paragraphs.append({"context": text, "qas": [question]})
    return json.dumps({"data": [{"title": "films", "paragraphs": paragraphs}]})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_bert(folder / "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout=0.0)
    write_t5(folder / "t5", words=[*WORDS, "sentence:"])
    write_gpt2(folder / "gpt2")
    task, examples = sentiment(26)
    write_rows(folder / "train.tsv", examples[:16])
    write_rows(folder / "dev.tsv", examples[16:])
    (folder / "sentences.yaml").write_text(json.dumps(task.model_dump(exclude_defaults=True)))
    both = conll(16), conll(10)
    write_task(folder, "tags", ".conll", both, kind="tagging", **SPANS)
    write_task(folder, "spans", ".conll", both, kind="span_classification", max_span_words=3, **SPANS)
    columns = {"text": "text", "choices": "choices", "label": "label"}
    write_task(folder, "choices", ".jsonl", (choices(16), choices(10)), kind="multiple_choice", format="jsonl",
               columns=columns)  # fmt: skip
    write_task(folder, "answers", ".json", (answers(16), answers(10)), kind="question_answering", format="squad")
    return folder


def fine_tune(rank: int, world_size: int, files: Path, output: Path, deepspeed: str | None) -> None:
    if deepspeed is not None:  # the group exists; a launcher would have set its address
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    for name, (task_name, model, form, settings) in RUNS.items():
        task = load_task(str(files / f"{task_name}.yaml"))[1]
        parts = read_parts(task, files)
        kind = make_kind(task, files / model, parts, form)
        run_point(files / model, kind, make_sets(kind, parts), POINT, FitSettings(deepspeed=deepspeed, **settings),
                  output / name, {})  # fmt: skip


def results(output: Path) -> tuple[list[float], list[dict[str, Any]]]:
    """Training losses and predictions."""
    log = json.loads((output / "metrics.json").read_text())["log"]
    lines = (output / "dev_predictions.jsonl").read_text().splitlines()
    return [line["loss"] for line in log if "loss" in line], [json.loads(line) for line in lines]


def numbers(value: Any) -> Any:
    """Return the numbers in a prediction's probabilities."""
    if isinstance(value, dict):
        return [number for one in value.values() for number in numbers(one)]
    if isinstance(value, list):
        return [number for one in value for number in numbers(one)]
    return [value] if isinstance(value, float) else []


def test_two_ranks_with_deepspeed_do_what_one_rank_does(files: Path, tmp_path: Path) -> None:
    fine_tune(0, 1, files, tmp_path / "one", None)
    fork_ranks(fine_tune, 2, files, tmp_path / "two", "zero2", timeout_s=240)
    for name in RUNS:
        (losses, right), (other_losses, predictions) = (
            results(tmp_path / "one" / name),
            results(tmp_path / "two" / name),
        )
        assert other_losses == pytest.approx(losses, rel=1e-4), name
        for one, other in zip(right, predictions, strict=True):
            assert (one["id"], one["prediction"]) == (other["id"], other["prediction"]), name
            assert numbers(one["probabilities"]) == pytest.approx(numbers(other["probabilities"]), abs=1e-4), name
    assert (tmp_path / "two" / "early-stopping" / "model" / "model.safetensors").is_file()
