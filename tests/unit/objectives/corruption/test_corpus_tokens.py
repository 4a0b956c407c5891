"""Random tokens of the corpus: their shares, the sample of a large corpus, and the same for every rank and resume."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.data.index.build import excerpt
from ctxlm_ds.data.numba_random import stream_key
from ctxlm_ds.data.stream.blend import PlannedRows
from ctxlm_ds.data.stream.loader import BatchBuilder, TrainLoader
from ctxlm_ds.data.stream.run_datasets import build_run_rows
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.objectives.corruption import corpus_tokens
from ctxlm_ds.recipe.check import check_config
from ctxlm_ds.recipe.schema import RunConfig
from tests.ragged import one_sample
from tests.sample_data import FIRST_WORD_ID, Documents, FakeTokenizer, run_config, write_dataset

TOKENIZER = FakeTokenizer(vocab_size=60)
CORPUS = {"name": "masked_lm", "random_tokens": "corpus", "random_prob": 0.5}


def skewed_documents(count: int, seed: int) -> Documents:
    """Sentences in which token 5 + n has a share proportional to 1 / (n + 1)."""
    shares = 1 / np.arange(1, TOKENIZER.vocab_size - FIRST_WORD_ID + 1)
    rng = np.random.default_rng(seed)
    return [
        [
            (FIRST_WORD_ID + rng.choice(len(shares), size=rng.integers(5, 30), p=shares / shares.sum())).tolist()
            for _ in range(rng.integers(1, 9))
        ]
        for _ in range(count)
    ]


def recipe(folder: Path, **objective: object) -> RunConfig:
    prefixes = []
    for number, size in enumerate((300, 60)):
        prefixes.append(str(folder / f"set{number}"))
        if not Path(f"{prefixes[-1]}.idx").exists():
            write_dataset(Path(prefixes[-1]), skewed_documents(size, number), eod_id=TOKENIZER.sep_id)
    return run_config(data={"sample_format": "doc_sentences", "train": prefixes}, objective=CORPUS | objective)


def test_random_tokens_have_the_shares_of_the_corpus(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    objective = build_objective(config.objective, TOKENIZER)  # type: ignore[arg-type]
    rows = build_run_rows(config.row_settings, TOKENIZER, objective).train  # type: ignore[arg-type]
    tokens = np.concatenate([index.dataset.tokens for index in rows.indexes])
    tokens = tokens[tokens >= FIRST_WORD_ID]
    drawn = []
    for epoch in range(20):
        samples, _ = rows.samples(np.arange(len(rows)), np.full(len(rows), epoch))
        examples = objective.corrupt_batch(samples, stream_key(1, "mask"), np.full(len(rows), 1000))
        for number in range(len(rows)):
            example = examples.example(number)
            seen = example.input_ids[example.prediction_positions]
            # A random token that is the original cannot be told from a kept one, so neither is counted.
            replaced = seen[(seen != TOKENIZER.mask_id) & (seen != example.prediction_labels)]
            drawn.append((replaced, example.prediction_labels))
    found = np.bincount(np.concatenate([one for one, _ in drawn]), minlength=TOKENIZER.vocab_size)
    shares = np.bincount(tokens, minlength=TOKENIZER.vocab_size) / len(tokens)
    wanted = shares * (1 - shares)  # drawn, and not the original
    wanted /= wanted.sum()
    errors = np.sqrt(wanted * (1 - wanted) / found.sum())
    assert (np.abs(found / found.sum() - wanted) <= 4 * errors + 1e-3).all()
    assert found[:FIRST_WORD_ID].sum() == 0 and shares[FIRST_WORD_ID] > 10 * shares[-1]


def test_the_sample_of_a_large_corpus_is_of_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe(tmp_path)
    objective = build_objective(config.objective, TOKENIZER)  # type: ignore[arg-type]
    rows = build_run_rows(config.row_settings, TOKENIZER, objective).train  # type: ignore[arg-type]
    special = np.arange(TOKENIZER.vocab_size) < FIRST_WORD_ID
    every = corpus_tokens.sample_tokens(rows, 1, special)
    assert len(every) == sum(int((index.dataset.tokens >= FIRST_WORD_ID).sum()) for index in rows.indexes)
    monkeypatch.setattr(corpus_tokens, "SAMPLE_TOKENS", 4096)
    monkeypatch.setattr(corpus_tokens, "RUN_TOKENS", 4)
    sample = corpus_tokens.sample_tokens(rows, 1, special)
    assert 0.85 * 4096 < len(sample) <= 4096
    share, size = (every == FIRST_WORD_ID).mean(), len(sample)
    assert abs((sample == FIRST_WORD_ID).mean() - share) <= 4 * math.sqrt(share * (1 - share) / size)
    assert np.array_equal(sample, corpus_tokens.sample_tokens(rows, 1, special))
    assert not np.array_equal(sample, corpus_tokens.sample_tokens(rows, 2, special)[:size])


def test_ranks_and_resumes_draw_the_same(tmp_path: Path) -> None:
    config = recipe(tmp_path)

    def steps(rank: int, ranks: int, start: int, count: int) -> list[np.ndarray]:
        objective = build_objective(config.objective, TOKENIZER)  # type: ignore[arg-type]
        rows = build_run_rows(config.row_settings, TOKENIZER, objective).train  # type: ignore[arg-type]
        loader = iter(TrainLoader(rows, objective, config.data, config.training, (rank, ranks), start_row=start))
        batches = [batch.fields["input_ids"].numpy() for _ in range(count) for batch in next(loader).micro_batches]
        return batches

    alone = np.concatenate(steps(0, 1, 0, 2))
    halves = [steps(rank, 2, 8, 1) for rank in range(2)]
    resumed = sorted(map(tuple, np.concatenate([*halves[0], *halves[1]]).tolist()))
    assert resumed == sorted(map(tuple, alone[8:].tolist()))


@pytest.mark.parametrize("settings", [{}, {"random_tokens": "vocabulary", "count_smoothing": 0.7}])
def test_static_masks_have_them_too(tmp_path: Path, settings: dict[str, object]) -> None:
    """Random tokens of the corpus, and weights of counts."""
    config = recipe(tmp_path, masking="static", **settings)
    check_config(config, None)
    objective = build_objective(config.objective, TOKENIZER)  # type: ignore[arg-type]
    rows = build_run_rows(config.row_settings, TOKENIZER, objective).train  # type: ignore[arg-type]
    builder = BatchBuilder(rows, objective, config.data, 7, "mask")
    numbers = np.arange(len(rows))
    first, later = (builder.examples(PlannedRows(numbers, np.full_like(numbers, epoch)))[0] for epoch in (0, 3))
    assert np.array_equal(first.input_ids, later.input_ids)


def test_a_preview_has_them_too(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    objective = build_objective(config.objective, TOKENIZER)  # type: ignore[arg-type]
    with excerpt(str(tmp_path / "set0"), TOKENIZER, config.row_settings, objective, 2) as (rows, _):  # type: ignore[arg-type]
        samples, _ = rows.samples(np.arange(2), np.zeros(2, dtype=np.int64))
        assert len(objective.corrupt_batch(samples, stream_key(1, "mask"), np.full(2, 100)).input_ids)


def test_rare_tokens_are_chosen_more_often(tmp_path: Path) -> None:
    """Shares are those of draws without replacement by count^-smoothing, which numpy makes one after another."""
    config = recipe(tmp_path, random_tokens="vocabulary", count_smoothing=0.7)
    objective = build_objective(config.objective, TOKENIZER)  # type: ignore[arg-type]
    rows = build_run_rows(config.row_settings, TOKENIZER, objective).train  # type: ignore[arg-type]
    tokens = np.concatenate([index.dataset.tokens for index in rows.indexes])
    weights = np.maximum(np.bincount(tokens, minlength=TOKENIZER.vocab_size), 1.0) ** -0.7
    assert np.array_equal(objective._choice.weights[FIRST_WORD_ID:], weights[FIRST_WORD_ID:])
    epochs, rng, number = 4000, np.random.default_rng(3), 5
    samples, _ = rows.samples(np.full(epochs, number), np.arange(epochs))
    examples = objective.corrupt_batch(samples, stream_key(1, "mask"), np.full(epochs, 1000))
    sample = one_sample(samples, 0)
    length, inside = len(sample.input_ids), np.flatnonzero(~sample.special_mask)
    shares = weights[sample.input_ids[inside]]
    found, wanted = np.zeros(length), np.zeros(length)
    for epoch in range(epochs):
        positions = examples.example(epoch).prediction_positions
        assert len(positions) == max(1, round(0.15 * length))
        found[positions] += 1
        wanted[rng.choice(inside, len(positions), replace=False, p=shares / shares.sum())] += 1
    errors = np.sqrt(2 * wanted * (1 - wanted / epochs)) + 1
    assert (np.abs(found - wanted) <= 4.5 * errors).all() and wanted.max() > 2 * wanted[inside].min()


def test_a_token_that_the_text_lacks_counts_once(tmp_path: Path) -> None:
    """Three, two, one and no occurrences: the weights are count^-0.5 of max(count, 1)."""
    config = run_config(
        data={"sample_format": "doc_sentences", "train": [str(tmp_path / "d")]},
        objective={"name": "masked_lm", "count_smoothing": 0.5},
    )
    write_dataset(tmp_path / "d", [[[5, 5, 5, 6, 6, 7]]])
    objective = build_objective(config.objective, TOKENIZER)  # type: ignore[arg-type]
    rows = build_run_rows(config.row_settings, TOKENIZER, objective).train  # type: ignore[arg-type]
    special = np.arange(TOKENIZER.vocab_size) < FIRST_WORD_ID
    weights = corpus_tokens.choice_weights(rows, 1, special, 0.5)
    assert weights[5:10].tolist() == pytest.approx([3**-0.5, 2**-0.5, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    "settings", [{"whole_word": True}, {"spans": "ngram"}, {"special_tokens": "roberta"}]
)
def test_counts_are_of_single_tokens_of_the_text(tmp_path: Path, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="objective.count_smoothing: 0.7: only single tokens"):
        check_config(recipe(tmp_path, random_tokens="vocabulary", count_smoothing=0.7, **settings), None)
