"""Corruptions and pairs on real text: each figure is within four standard errors of the published rule."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxlm_ds.data.index.build import excerpt
from ctxlm_ds.data.preprocess.job import PreprocessConfig, preprocess
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.objective_statistics import MOST_ERRORS, lines, statistics
from tests.real_text import docstrings

pytestmark = pytest.mark.long

PHRASE = re.compile(r"\b(?:the|a|an|of) (?:\w+ )?\w+\b")
"""Spans to be given: some noun phrases."""
ROWS = 700
CASES: dict[str, tuple[str, ...]] = {
    "bert-base": (),
    "spanbert-base": (),
    "albert-base": (),
    "albert-base, any number": ("objective.max_predictions=null",),
    "bert-wwm-large, given spans": ("objective.spans=given",),
}


@pytest.fixture(scope="module")
def real_text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Tokenizer]]:
    """The standard library's docstrings as a dataset with spans, and its tokenizer."""
    folder = tmp_path_factory.mktemp("docstrings")
    texts = docstrings(140)
    records = [{"text": text, "spans": [match.span() for match in PHRASE.finditer(text)]} for text in texts]
    (folder / "spans.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    train_tokenizer("wordpiece", texts, 3000, folder / "tokenizer")
    settings = PreprocessConfig(split_sentences=True, spans_key="spans")
    (result,) = preprocess([str(folder / "spans.jsonl")], folder / "tokenizer", folder / "set", settings)
    yield result.prefix, load_tokenizer(folder / "tokenizer")


@pytest.mark.parametrize("name", CASES)
def test_figures_are_the_published_ones(name: str, real_text: tuple[str, Tokenizer], tmp_path: Path) -> None:
    prefix, tokenizer = real_text
    common = (
        "data.seq_length=128", "model.vocab_size=null", "objective.masking=dynamic", "data.num_duplicates=1",
        f"data.sample_index_dir={tmp_path}", f"data.train=[{prefix}]",
    )  # fmt: skip
    config = load_config(name.split(",")[0], [*common, *CASES[name]])
    objective = build_objective(config.objective, tokenizer)
    with excerpt(prefix, tokenizer, config.row_settings, objective, ROWS) as (rows, _):
        figures = statistics(rows, config, objective, ROWS)
    assert len(figures) >= 5
    wrong = [figure for figure in figures if figure.distance > MOST_ERRORS]
    assert not wrong, "\n".join(lines(figures))
