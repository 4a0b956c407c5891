"""Figures of target tokens: unigrams by hand, and a model's as transformers computes its loss."""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.preprocess.config import PreprocessConfig
from ctxlm_ds.data.preprocess.job import preprocess
from ctxlm_ds.data.stream.loader import TrainLoader
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.sample_data import run_config
from tests.text import make_documents, write_corpus
from tools.benchmark.targets import Targets, compare_targets

SENTINELS = 100


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A T5 on a small corpus; what it is evaluated on is what it is trained on."""
    folder = tmp_path_factory.mktemp("targets")
    train_tokenizer("t5", make_documents(40, seed=3), 300, folder / "tok")
    write_corpus(folder / "text.jsonl", num_documents=40, seed=3)
    preprocess([str(folder / "text.jsonl")], folder / "tok", folder / "text", PreprocessConfig(split_sentences=False))
    prefix = str(folder / "text_text_document")
    return run_config(
        model={
            "family": "t5", "hidden_size": 16, "num_layers": 1, "num_decoder_layers": 1, "num_attention_heads": 2,
            "head_size": 8, "intermediate_size": 32,
        },
        objective={"name": "span_corruption"},
        data={
            "sample_format": "chunks", "seq_length": 32, "train": [prefix], "num_workers": 0,
            "validation": [{"name": "held", "path": prefix}], "sample_index_dir": str(folder / "indexes"),
        },
        tokenizer={"path": str(folder / "tok")},
        training={"global_batch_size": 4, "micro_batch_size": 2},
        evaluation={"max_rows": 6},
    )  # fmt: skip


def plain_targets(targets: Targets) -> tuple[list[int], list[int]]:
    """The target tokens of the training rows, and of the evaluated ones."""
    steps = -(-len(targets.rows.train) // 4)
    loader = TrainLoader(targets.rows.train, targets.objective, targets.config.data, targets.config.training)
    training = [batch for step in islice(loader, steps)
                for batch in step.micro_batches]  # fmt: skip
    found = [np.concatenate([batch.fields["decoder_labels"].numpy().ravel() for batch in batches])
             for batches in (training, list(targets.held_out()))]  # fmt: skip
    train, held = ([int(label) for label in labels if label != IGNORE_LABEL] for labels in found)
    return train, held


def test_unigrams_count_sentinels_and_end_tokens_like_words(config: RunConfig) -> None:
    targets = Targets.of(config)
    train, held = plain_targets(targets)
    size = targets.vocab_size
    inside = [[token for token in tokens if 2 < token < size - SENTINELS] for tokens in (train, held)]
    for found, (counted, read) in zip(targets.unigram_figures(), [(train, held), inside], strict=True):
        counts = Counter(counted)
        loss = sum(-math.log((counts[token] + 1) / (len(counted) + size)) for token in read) / len(read)
        assert found.loss == pytest.approx(loss)
        best = min(token for token in range(size) if counts[token] == max(counts.values()))
        assert found.accuracy == pytest.approx(sum(token == best for token in read) / len(read))
    assert len(inside[1]) < len(held)


def test_a_model_has_the_loss_that_transformers_computes(config: RunConfig, tmp_path: Path) -> None:
    import transformers

    targets = Targets.of(config)
    torch.manual_seed(1)
    settings = transformers.T5Config(
        vocab_size=targets.vocab_size, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(settings).eval()
    model.save_pretrained(tmp_path)
    losses, count = 0.0, 0
    for batch in targets.held_out():
        labels = batch.fields["decoder_labels"].long()
        mask = (batch.fields["sequence_ids"] > 0).long()
        with torch.no_grad():
            loss = model(input_ids=batch.fields["input_ids"].long(), attention_mask=mask, labels=labels).loss
        size = int((labels != IGNORE_LABEL).sum())
        losses, count = losses + float(loss) * size, count + size
    every, inside = targets.model_figures(tmp_path)
    assert every.loss == pytest.approx(losses / count, rel=1e-5)
    assert every.loss != inside.loss and 0.0 <= inside.accuracy <= 1.0
    lines = compare_targets(Targets.of(config), tmp_path)
    assert len(lines) == 6 and f"{every.loss:.4f} nats" in lines[1] and lines[4].startswith("restored tokens, model: ")
    shifted, _ = targets.model_figures(tmp_path, shift=1)
    assert shifted.loss != every.loss and f"{shifted.loss:.4f} nats" in lines[2]


def test_what_has_no_targets_is_refused(config: RunConfig) -> None:
    data = config.data.model_copy(update={"validation": []})
    with pytest.raises(ConfigError, match=r"data\.validation is empty"):
        Targets.of(config.model_copy(update={"data": data}))
    other = run_config(tokenizer={"path": config.tokenizer.path})
    with pytest.raises(ConfigError, match=r"objective\.name .* has no targets"):
        Targets.of(other)
