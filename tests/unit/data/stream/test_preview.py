"""Rows as the model sees them, as text and by name: rows on record are the rows that were trained on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.text import Text

from ctxlm_ds.data.formats.pairs import SegmentPair
from ctxlm_ds.data.index.build import build_rows
from ctxlm_ds.data.sample import NO_LABEL, Example
from ctxlm_ds.data.stream.loader import TrainLoader
from ctxlm_ds.data.stream.preview import BatchRows, SourceRows, preview_planned, preview_rows, render_row, summary
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.kinds.sentencepiece import SentencePieceTokenizer
from tests.sample_data import FakeTokenizer, locate, random_documents, run_config, write_dataset
from tests.sections import objective_section

TOKENIZER: Any = FakeTokenizer()
LABELS = SegmentPair.sequence_labels


BATCH = 8
BLENDS: list[dict[str, Any]] = [
    {"blend": "weighted", "weights": (1, 3)},
    {"blend": "concatenate", "weights": (None, None), "packing": True},
]


def blended_rows(folder: Path, blend: str, weights: tuple[Any, Any], **data: Any) -> Any:
    sources = [{"path": str(folder / "large"), "name": "books"}, {"path": str(folder / "small")}]
    for source, weight, documents in zip(sources, weights, (20, 4), strict=True):
        source |= {} if weight is None else {"weight": weight}
        write_dataset(Path(source["path"]), random_documents(documents, sentences=4, seed=documents))
    settings = {"train": sources, "blend": blend, "sample_format": "doc_sentences", "seq_length": 32, **data}
    config = run_config(data=settings, objective={"name": "masked_lm"})
    objective = build_objective(config.objective, TOKENIZER)
    return (
        build_rows([source["path"] for source in sources], TOKENIZER, config.row_settings),
        objective,
        config,
    )


def render_example(example: Example, tokenizer: FakeTokenizer) -> Text:
    return build_objective(objective_section()).render(example, tokenizer)


def example(ids: list[int], predictions: dict[int, int], is_random: int = NO_LABEL) -> Example:
    positions = np.array(sorted(predictions), dtype=np.int64)
    labels = np.array([predictions[position] for position in sorted(predictions)], dtype=np.int64)
    return Example(np.array(ids), np.zeros(len(ids), dtype=np.int64), positions, labels, is_random)


def test_predictions_stand_in_brackets() -> None:
    text = render_example(example([2, 10, 4, 11, 20, 30, 3], {2: 12, 4: 40, 5: 30}), TOKENIZER)
    assert text.plain == "[CLS] w10 [MASK→w12] ##w11 [w20→w40] [w30→w30] [SEP]"
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert styles["[MASK→w12]"] == "bold yellow" and styles["[w20→w40]"] == "bold red"
    assert styles["[w30→w30]"] == "bold green" and styles["[CLS]"] == "cyan"


def test_byte_level_tokens_are_read_as_text() -> None:
    class Bytes(FakeTokenizer):
        shown = Tokenizer.shown

        def decode(self, ids: list[int]) -> str:  # type: ignore[override]
            return "".join({10: " the", 11: "re", 12: " cat"}[number] for number in ids)

        def id_to_token(self, token_id: int) -> str:
            return {2: "<s>", 3: "</s>", 4: "<mask>"}[token_id]

    text = render_example(example([2, 10, 11, 4, 3], {3: 12}), Bytes())
    assert text.plain == "<s> there [<mask>→cat] </s>"


def test_pieces_of_sentencepiece_are_read_as_text() -> None:
    class Pieces(FakeTokenizer):
        shown = SentencePieceTokenizer.shown

        def decode(self, ids: list[int]) -> str:  # type: ignore[override]
            return "".join(map(self.id_to_token, ids)).replace("▁", " ").removeprefix(" ")

        def id_to_token(self, token_id: int) -> str:
            return {2: "[CLS]", 3: "[SEP]", 4: "[MASK]", 10: "▁the", 11: "re", 12: "▁cat"}[token_id]

    text = render_example(example([2, 10, 11, 4, 3], {3: 12}), Pieces())
    assert text.plain == "[CLS] there [MASK→cat] [SEP]"


def test_a_packed_row_shows_its_sequences_and_labels() -> None:
    row = [example([2, 10, 3], {1: 10}, is_random=0), example([2, 12, 14, 3], {1: 12}, is_random=1)]
    lines = render_row(row, "row 5", 16, LABELS, partial(render_example, tokenizer=TOKENIZER)).plain.splitlines()
    assert lines == [
        "row 5: 7 of 16 positions, 2 predictions",
        "  sequence 1 of 2: B follows A",
        "  [CLS] [w10→w10] [SEP]",
        "  sequence 2 of 2: B is from another document",
        "  [CLS] [w12→w12] w14 [SEP]",
    ]


def test_shows_what_training_reads_first(tmp_path: Path) -> None:
    config = run_config(data={"packing": True})
    objective = build_objective(config.objective, TOKENIZER)
    rows = build_rows([write_dataset(tmp_path / "d", random_documents(20))], TOKENIZER, config.row_settings)
    shown = [text.plain for text in preview_rows(rows, objective, TOKENIZER, config.data, config.training, 2)]
    batch = next(iter(TrainLoader(rows, objective, config.data, config.training))).micro_batches[0]
    for text, ids in zip(shown, batch.fields["input_ids"], strict=True):
        lines = [line for line in text.splitlines() if line.startswith("  [CLS]")]
        tokens = [token.strip("[]").split("→")[0] for line in lines for token in line.split()]
        names = [TOKENIZER.id_to_token(token_id).strip("[]") for token_id in ids.tolist() if token_id != 0]
        assert tokens == names
    assert len(list(preview_rows(rows, objective, TOKENIZER, config.data, config.training, 10**6))) == len(rows)


def test_a_dataset_of_a_blend_can_be_looked_at_alone(tmp_path: Path) -> None:
    train = [{"path": str(tmp_path / name), "weight": 1} for name in "de"]
    config = run_config(data={"train": train, "blend": "weighted"})
    objective = build_objective(config.objective, TOKENIZER)
    rows = build_rows([write_dataset(tmp_path / "d", random_documents(20))], TOKENIZER, config.row_settings)
    shown, wanted = (
        list(preview_rows(rows, objective, TOKENIZER, each.data, each.training, 5)) for each in (config, run_config())
    )
    assert [text.plain for text in shown] == [text.plain for text in wanted]


@pytest.mark.parametrize("blend", BLENDS, ids=lambda blend: blend["blend"])
def test_every_row_of_a_stretch_is_named(tmp_path: Path, blend: dict[str, Any]) -> None:
    rows, _, config = blended_rows(tmp_path, **blend)
    batch = BatchRows(rows, config.data, config.training)
    first, count = len(rows) - 5, 40  # across the end of an epoch
    planned = batch.plan(first, count)
    expected: dict[tuple[str, int], list[int]] = {}
    for row, epoch in zip(planned.rows.tolist(), planned.epochs.tolist(), strict=True):
        index, number = locate(rows, row)
        name = "books" if index is rows.indexes[0] else "small"
        expected.setdefault((name, epoch), []).append(number)
    found = batch.by_source(first, count)
    assert {(part.source, part.epoch): part.rows for part in found} == expected
    assert {part.source for part in found} == {"books", "small"}
    titles = batch.titles(first, count)
    assert sorted(titles) == sorted(
        f"position {first + place}: {name} row {number} in epoch {planned.epochs[place]}"
        for place, (index, number) in enumerate(locate(rows, row) for row in planned.rows.tolist())
        for name in ["books" if index is rows.indexes[0] else "small"]
    )


def test_what_is_shown_is_what_was_trained_on(tmp_path: Path) -> None:
    """The text of a batch in the middle of a run, masks and all, from its place in the stream alone."""
    rows, objective, config = blended_rows(tmp_path, **BLENDS[0])
    first = 5 * BATCH
    step = next(iter(TrainLoader(rows, objective, config.data, config.training, start_row=first)))
    ids = np.concatenate([batch.fields["input_ids"].numpy() for batch in step.micro_batches])
    batch = BatchRows(rows, config.data, config.training)
    planned, titles = batch.plan(first, BATCH), batch.titles(first, BATCH)
    shown = list(preview_planned(rows, objective, TOKENIZER, config.data, config.training.seed, planned, titles))
    assert len(shown) == len(ids) == BATCH
    for text, row, title in zip(shown, ids, titles, strict=True):
        heading, line = text.plain.splitlines()
        assert heading.startswith(title)
        tokens = [token.strip("[]").split("→")[0] for token in line.split()]
        assert tokens == [TOKENIZER.id_to_token(token_id).strip("[]") for token_id in row.tolist() if token_id != 0]


def test_a_summary_is_short() -> None:
    found = [SourceRows("books", 0, list(range(100, 112))), SourceRows("wiki", 2, [7])]
    assert summary(found) == "books epoch 0 rows 100, 101, 102, 103, 104, 105, 106, 107 and 4 more; wiki epoch 2 rows 7"
