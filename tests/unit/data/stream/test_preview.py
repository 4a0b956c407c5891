"""What the model sees, as text."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from ctxlm_ds.data.formats.pairs import SegmentPair
from ctxlm_ds.data.index.build import build_rows
from ctxlm_ds.data.sample import NO_LABEL, Example
from ctxlm_ds.data.stream.loader import TrainLoader
from ctxlm_ds.data.stream.preview import preview_rows, render_row
from ctxlm_ds.objectives.build import build_objective
from tests.sample_data import FakeTokenizer, random_documents, run_config, write_dataset
from tests.sections import objective_section

TOKENIZER = FakeTokenizer()
LABELS = SegmentPair.sequence_labels


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


def test_colours_only_on_a_terminal() -> None:
    text = render_example(example([2, 4, 3], {1: 12}), TOKENIZER)
    for terminal in (True, False):
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, color_system="standard" if terminal else None)
        console.print(text, soft_wrap=True)
        assert ("\x1b[" in out.getvalue()) == terminal
        assert "MASK→w12" in out.getvalue()


def test_byte_level_tokens_are_read_as_text() -> None:
    class Bytes(FakeTokenizer):
        def decode(self, ids: list[int]) -> str:  # type: ignore[override]
            return {10: " the", 11: "re", 12: " cat"}[ids[0]]

        def id_to_token(self, token_id: int) -> str:
            return {2: "<s>", 3: "</s>", 4: "<mask>"}[token_id]

    text = render_example(example([2, 10, 11, 4, 3], {3: 12}), Bytes(kind="byte_bpe"))
    assert text.plain == "<s> there [<mask>→cat] </s>"


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
    rows = build_rows([write_dataset(tmp_path / "d", random_documents(20))], TOKENIZER, config, objective)
    shown = [text.plain for text in preview_rows(rows, objective, TOKENIZER, config, 2)]
    batch = next(iter(TrainLoader(rows, objective, config))).micro_batches[0]
    for text, ids in zip(shown, batch.fields["input_ids"], strict=True):
        lines = [line for line in text.splitlines() if line.startswith("  [CLS]")]
        tokens = [token.strip("[]").split("→")[0] for line in lines for token in line.split()]
        names = [TOKENIZER.id_to_token(token_id).strip("[]") for token_id in ids.tolist() if token_id != 0]
        assert tokens == names
    assert len(list(preview_rows(rows, objective, TOKENIZER, config, 10**6))) == len(rows)


def test_a_dataset_of_a_blend_can_be_looked_at_alone(tmp_path: Path) -> None:
    train = [{"path": str(tmp_path / name), "weight": 1} for name in "de"]
    config = run_config(data={"train": train, "blend": "weighted"})
    objective = build_objective(config.objective, TOKENIZER)
    rows = build_rows([write_dataset(tmp_path / "d", random_documents(20))], TOKENIZER, config, objective)
    shown, wanted = (list(preview_rows(rows, objective, TOKENIZER, each, 5)) for each in (config, run_config()))
    assert [text.plain for text in shown] == [text.plain for text in wanted]
