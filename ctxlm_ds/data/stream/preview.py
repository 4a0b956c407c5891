"""What the model will see, as text: rows with their masks, labels and boundaries.

In: rows and the objective (injected), as the loader uses them. Out: rich Text, coloured on a terminal and plain
elsewhere: `[CLS] the [MASK→cat] sat`. A predicted token stands in brackets, what the model reads before what it should
say; where both are the same it was left as it is. For causal_lm every token is predicted by what stands before it:
the text alone, and behind it in brackets what its last token predicts. Not here: documents without an objective
(dataset/inspection.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.sample import NO_LABEL, Example
from ctxlm_ds.data.stream.blend import train_stream
from ctxlm_ds.data.stream.collate import CAUSAL_LM, Objective
from ctxlm_ds.data.stream.loader import TRAIN_MASKS, BatchBuilder
from ctxlm_ds.data.stream.sampler import PlannedRows, RowOrder
from ctxlm_ds.recipe.schema import RunConfig

if TYPE_CHECKING:
    from rich.text import Text

    from ctxlm_ds.tokenizers.base import Tokenizer

STYLES = {"mask": "bold yellow", "random": "bold red", "kept": "bold green", "special": "cyan", "text": ""}
LABELS = {0: "B follows A", 1: "B is from another document", NO_LABEL: ""}


def preview_rows(
    rows: RowSource, objective: Objective, tokenizer: Tokenizer, config: RunConfig, count: int, epoch: int = 0
) -> Iterator[Text]:
    """The first `count` rows that training reads in an epoch, with exactly the masks that they get there.

    Rows of other sources than data.train's (a single dataset to look at) come in the order of a run on them alone.
    """
    first = epoch * len(rows)
    is_blend = len(rows.indexes) == len(config.data.train)
    stream = train_stream(rows, config) if is_blend else RowOrder(len(rows), config.training.seed)
    planned = stream.at(np.arange(first, first + min(count, len(rows)), dtype=np.int64))
    yield from preview_planned(rows, objective, tokenizer, config, planned, [f"row {row}" for row in planned.rows])


def preview_planned(
    rows: RowSource,
    objective: Objective,
    tokenizer: Tokenizer,
    config: RunConfig,
    planned: PlannedRows,
    titles: Sequence[str],
) -> Iterator[Text]:
    """These rows with exactly the masks that training gives them, each under its title."""
    builder = BatchBuilder(rows, objective, config, config.training.seed, TRAIN_MASKS)
    render = render_text if CAUSAL_LM in objective.terms else render_example
    examples, row_starts = builder.examples(planned)
    for title, begin, end in zip(titles, row_starts[:-1], row_starts[1:], strict=True):
        sequences = [examples.example(number) for number in range(begin, end)]
        yield render_row(sequences, tokenizer, title, config.data.seq_length, render)


def render_row(
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    title: str,
    seq_length: int,
    render: Callable[[Example, Tokenizer], Text] | None = None,
) -> Text:
    """A row: a line of figures, then each of its sequences as `render` shows it (render_example)."""
    from rich.text import Text

    used = sum(len(example.input_ids) for example in examples)
    predictions = sum(len(example.prediction_positions) for example in examples)
    text = Text()
    text.append(f"{title}: {used} of {seq_length} positions, {predictions} predictions\n", style="bold")
    for number, example in enumerate(examples, start=1):
        label = LABELS[example.is_random_next]
        if len(examples) > 1 or label:
            place = f"sequence {number} of {len(examples)}" if len(examples) > 1 else ""
            text.append(f"  {': '.join(filter(None, (place, label)))}\n", style="magenta")
        text.append("  ").append_text((render or render_example)(example, tokenizer)).append("\n")
    return text


def render_text(example: Example, tokenizer: Tokenizer) -> Text:
    """One sequence of causal_lm on one line."""
    from rich.text import Text

    text = Text()
    for token_id in example.input_ids.tolist():
        lead, shown = _shown(token_id, tokenizer)
        text.append(lead).append(shown, style=STYLES["special" if token_id in tokenizer.special_ids else "text"])
    lead, shown = _shown(int(example.prediction_labels[-1]), tokenizer)
    text.append(lead).append(f"[→{shown}]", style=STYLES["mask"])
    return text[1:] if text.plain.startswith(" ") else text


def render_example(example: Example, tokenizer: Tokenizer) -> Text:
    """One sequence on one line."""
    from rich.text import Text

    labels = dict(zip(example.prediction_positions.tolist(), example.prediction_labels.tolist(), strict=True))
    text = Text()
    for position, token_id in enumerate(example.input_ids.tolist()):
        lead, shown = _shown(token_id, tokenizer)
        if position not in labels:
            text.append(lead).append(shown, style=STYLES["special" if token_id in tokenizer.special_ids else "text"])
            continue
        original_lead, original = _shown(labels[position], tokenizer)
        read = shown.strip("[]") if token_id == tokenizer.mask_id else shown
        kind = _kind(token_id, labels[position], tokenizer)
        text.append(original_lead).append(f"[{read}→{original}]", style=STYLES[kind])
    return text[1:] if text.plain.startswith(" ") else text


def _kind(token_id: int, label: int, tokenizer: Tokenizer) -> str:
    if token_id == tokenizer.mask_id:
        return "mask"
    return "kept" if token_id == label else "random"


def _shown(token_id: int, tokenizer: Tokenizer) -> tuple[str, str]:
    """What stands before a token, and the token: WordPiece tokens by name, a space between; others as their text."""
    if tokenizer.kind == "wordpiece" or token_id in tokenizer.special_ids:
        return " ", tokenizer.id_to_token(token_id)
    text = tokenizer.decode([token_id]).replace("\n", "⏎")
    return (" ", text[1:]) if text.startswith(" ") else ("", text)
