"""Vectors of sentences: equal to plain pooling, judged as scipy and numpy judge them, better after training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ctxlm_ds.commands.sentence_embeddings import load_encoder, main
from ctxlm_ds.errors import ConfigError
from tests.downstream_models import write_bert

SENTENCES = ["the film was good .", "Paris was bad", "Ann met a very unknown film in Paris .", "who was in the film ?"]
SIMILARITY = """
kind: regression
train: pairs.tsv
dev: pairs.tsv
format: tsv
columns: {text: a, pair: b, label: score}
metrics: [spearman]
published: {someone: 0.9}
"""
PARAPHRASES = """
kind: classification
train: pairs.tsv
dev: pairs.tsv
format: tsv
columns: {text: a, pair: b, label: score}
labels: {"0": other, "1": same, "2": same}
positive: same
"""
QUESTIONS = "{kind: question_answering, train: squad.json, dev: squad.json, format: squad}"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    write_bert(folder / "model", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    pairs = [(SENTENCES[at % 4], SENTENCES[(at * at + 1) % 4], at % 3) for at in range(8)]
    (folder / "pairs.tsv").write_text("a\tb\tscore\n" + "".join(f"{a}\t{b}\t{score}\n" for a, b, score in pairs))
    paragraphs = [
        {"context": text, "qas": [{"id": text, "question": asked, "answers": [{"text": text[:3], "answer_start": 0}]}]}
        for text, asked in zip(SENTENCES, ["good ?", "where ?", "Ann ?", "who ?"], strict=True)
    ]
    (folder / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    (folder / "similarity.yaml").write_text(SIMILARITY)
    (folder / "paraphrases.yaml").write_text(PARAPHRASES)
    (folder / "questions.yaml").write_text(QUESTIONS)
    (folder / "sentences.txt").write_text("\n".join(SENTENCES * 4))
    return folder


def run(folder: Path, command: str, *arguments: object) -> None:
    main([command, *map(str, arguments)])


def plain_vectors(folder: Path, texts: list[str]) -> Any:
    """The mean over each text's tokens, one text at a time, of length 1."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        means = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
    return torch.nn.functional.normalize(torch.stack(means)).numpy()


def test_vectors_and_scores_are_those_of_plain_pooling(files: Path) -> None:
    from scipy.stats import spearmanr
    from sklearn.metrics import average_precision_score

    folder = files / "model"
    found = load_encoder(folder, "mean", None).encode(SENTENCES, normalize_embeddings=True)
    np.testing.assert_allclose(found, plain_vectors(folder, SENTENCES), atol=1e-5)
    for task in ("similarity", "paraphrases", "questions"):
        run(files, "evaluate", "--model", folder, "--task", files / f"{task}.yaml", "--data", files,
            "--output", files / task)  # fmt: skip
    rows = [line.split("\t") for line in (files / "pairs.tsv").read_text().splitlines()[1:]]
    first, second = (plain_vectors(folder, [row[at] for row in rows]) for at in (0, 1))
    summary = json.loads((files / "similarity" / "metrics.json").read_text())
    expected = spearmanr((first * second).sum(1), [float(row[2]) for row in rows]).statistic
    assert summary["chosen"]["dev"]["spearman"]["median"] == pytest.approx(expected, abs=1e-6)
    assert summary["task"] == "similarity" and summary["published"] == {"someone": 0.9}
    summary = json.loads((files / "paraphrases" / "metrics.json").read_text())
    expected = average_precision_score([row[2] != "0" for row in rows], (first * second).sum(1))
    assert summary["chosen"]["dev"]["average_precision"]["median"] == pytest.approx(expected, abs=1e-6)
    similar = plain_vectors(folder, ["good ?", "where ?", "Ann ?", "who ?"]) @ plain_vectors(folder, SENTENCES).T
    ranks = (similar >= similar.diagonal()[:, None]).sum(1)
    summary = json.loads((files / "questions" / "metrics.json").read_text())
    assert summary["chosen"]["dev"]["mrr@10"]["median"] == pytest.approx((1 / ranks).mean())
    assert summary["chosen"]["dev"]["accuracy@1"]["median"] == pytest.approx((ranks == 1).mean())
    assert summary["task"] == "questions-vectors" and summary["metric"] == "mrr@10"


@pytest.mark.parametrize("source", ["sentences", "task"])
def test_training_lowers_the_contrastive_loss(files: Path, source: str) -> None:
    given = ["--sentences", files / "sentences.txt"]
    if source == "task":
        given = ["--task", files / "questions.yaml", "--data", files]
    output = files / f"trained-{source}"
    command = ["--model", files / "model", "--output", output, "--seeds", 1, 2, "--batch-size", 4,
               "--learning-rate", 1e-3, "--epochs", 6, "--dropout", 0.1, *given]  # fmt: skip
    run(files, "train", *command)
    for seed in (1, 2):
        losses = json.loads((output / f"seed{seed}" / "losses.json").read_text())
        assert len(losses) == 6 and losses[-1] < losses[0]
    run(files, "evaluate", "--model", output / "seed1", output / "seed2", "--task", files / "questions.yaml",
        "--data", files, "--output", output / "scores")  # fmt: skip
    summary = json.loads((output / "scores" / "metrics.json").read_text())
    assert summary["chosen"]["seeds"] == [0, 1] and summary["model"] == str(output)
    assert source == "sentences" or summary["chosen"]["dev"]["mrr@10"]["median"] == 1.0
    written = (output / "seed1" / "losses.json").stat().st_mtime_ns
    run(files, "train", *command)
    assert (output / "seed1" / "losses.json").stat().st_mtime_ns == written
    with pytest.raises(ConfigError, match="made differently: temperature 0.05 -> 0.1"):
        run(files, "train", *command, "--temperature", 0.1)


def test_a_batch_is_that_of_all_devices_and_has_no_text_twice(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):
        """Ends the training before it begins."""

    def make(**given: Any) -> None:
        raise Stop(given)

    command = ["--model", files / "model", "--output", files / "devices", "--sentences", files / "sentences.txt",
               "--dropout", 0.1]  # fmt: skip
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    with pytest.raises(ConfigError, match="--batch-size 6: not a multiple of the 4 devices"):
        run(files, "train", *command, "--batch-size", 6)
    monkeypatch.setattr("sentence_transformers.SentenceTransformerTrainingArguments", make)
    with pytest.raises(Stop) as stopped:
        run(files, "train", *command, "--batch-size", 8)
    (given,) = stopped.value.args
    assert given["per_device_train_batch_size"] == 2
    assert given["batch_sampler"] == "no_duplicates"
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="without a launcher"):
        run(files, "train", *command)


def test_inputs_are_no_longer_than_the_positions(files: Path) -> None:
    assert [load_encoder(files / "model", "mean", given).max_seq_length for given in (16, 64)] == [16, 32]


def test_mistakes_are_named(files: Path) -> None:
    base = ["--model", files / "model", "--output", files / "nothing"]
    with pytest.raises(ConfigError, match="no dropout"):
        run(files, "train", *base, "--sentences", files / "sentences.txt")
    with pytest.raises(ConfigError, match="needs --data"):
        run(files, "train", *base, "--task", files / "questions.yaml")
    with pytest.raises(ConfigError, match="a task with pairs is needed"):
        run(files, "train", *base, "--task", files / "similarity.yaml", "--data", files)
    with pytest.raises(ConfigError, match=r"no config.json and no modules.json"):
        run(files, "evaluate", "--model", files, "--task", files / "questions.yaml", "--data", files,
            "--output", files / "nothing")  # fmt: skip
    assert not (files / "nothing").exists() or not list((files / "nothing").iterdir())
