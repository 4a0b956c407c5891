"""What a run says at its end: its held-out loss beside the loss of word frequencies, by hand."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.evaluate.verdict import Predictions, VerdictHook, verdict
from ctxlm_ds.process.run_files import read_status
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.train import train_tokenizer
from ctxlm_ds.training.hooks.hooks import RunEnd
from tests.sample_data import run_config, write_dataset

TRAINED, HELD_OUT = [5, 6, 7, 8] * 16, [5, 5, 6, 7] * 8


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A causal model on two datasets of one document each."""
    folder = tmp_path_factory.mktemp("verdict")
    tokenizer = train_tokenizer("gpt2", iter(["some text"] * 9), 264, folder / "tok")
    for name, tokens in (("train", TRAINED), ("held", HELD_OUT)):
        made_with = {"tokenizer_fingerprint": tokenizer.fingerprint}
        write_dataset(folder / name, [[tokens]], eod_id=tokenizer.sep_id, metadata=made_with)
    validation = [{"name": "held", "path": str(folder / "held")}]
    data = {"train": [str(folder / "train")], "validation": validation, "sample_index_dir": str(folder / "indexes")}
    return run_config(
        model={"family": "gpt2", "hidden_size": 8, "num_layers": 1, "num_attention_heads": 1, "intermediate_size": 8},
        objective={"name": "causal_lm"}, tokenizer={"path": str(folder / "tok")},
        data={"sample_format": "blocks", "seq_length": 8, "num_workers": 0, **data},
        training={"global_batch_size": 1, "micro_batch_size": 1}, evaluation={"max_rows": 100},
    )  # fmt: skip


def write_metrics(folder: Path, *lines: dict[str, Any]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": 1, **line}) + "\n" for line in lines))


def frequencies() -> tuple[float, float]:
    """Loss and accuracy on the held-out labels of counts of the training labels, add-one; no row predicts its first."""
    end = 263  # the last of 264 tokens
    counts, labels = Counter([*TRAINED[1:], end]), [*HELD_OUT[1:], end]
    loss = -sum(math.log((counts[label] + 1) / (64 + 264)) for label in labels) / len(labels)
    best = min(label for label in counts if counts[label] == max(counts.values()))
    return loss, labels.count(best) / len(labels)


@pytest.mark.parametrize(
    ("gain", "said"), [(0.0, "it has learned nothing"), (0.5, "it has begun to learn"), (2.0, "it has learned from")]
)
def test_a_model_is_compared_with_word_frequencies(config: RunConfig, tmp_path: Path, gain: float, said: str) -> None:
    loss, accuracy = frequencies()
    old, new = ({"eval/held/causal_lm_loss": value, "eval/held/causal_lm_accuracy": 0.25} for value in (9, loss - gain))
    write_metrics(tmp_path, old, new)
    (line,) = verdict(Predictions.of(config), tmp_path)
    model, known = (f"{value:.2f} nats (perplexity {math.exp(value):.3g}), " for value in (loss - gain, loss))
    assert line.startswith(f"held: {model}25% of the tokens right; word frequencies alone: {known}{accuracy:.0%} of")
    assert said in line


def test_a_model_that_repeats_its_text_is_named(config: RunConfig, tmp_path: Path) -> None:
    held = {"eval/held/causal_lm_loss": 3.0}
    write_metrics(tmp_path, {"causal_lm": 1.0, "epoch": 4}, held)
    said = verdict(Predictions.of(config), tmp_path)[1]
    assert said.startswith("the training loss is far lower, 1.00: the model repeats its text")
    write_metrics(tmp_path, {"causal_lm": 2.9, "epoch": 4}, held)
    assert len(verdict(Predictions.of(config), tmp_path)) == 1


def test_what_cannot_be_compared_is_said(config: RunConfig, tmp_path: Path) -> None:
    write_metrics(tmp_path)
    assert "no text was held out" in verdict(Predictions.of(config.with_values("data", validation=[])), tmp_path)[0]


def test_the_verdict_is_in_the_status_unless_a_signal_ended_the_run(config: RunConfig, tmp_path: Path) -> None:
    write_metrics(tmp_path, {"eval/held/causal_lm_loss": 3.0})
    hook = VerdictHook(lambda: Predictions.of(config), tmp_path)
    hook.on_run_end(RunEnd("stopped by signal SIGTERM", 1, 8, 1.0, completed=False, signal_number=15))
    assert "verdict" not in read_status(tmp_path)
    hook.on_run_end(RunEnd("training.max_steps (1) reached", 1, 8, 1.0))
    assert read_status(tmp_path)["verdict"] == verdict(Predictions.of(config), tmp_path)
