"""The model card (README.md) of an exported model, from what its run recorded.

In: the resolved recipe, state.json, the run's metrics.jsonl and the JSON next to each dataset. Out: Markdown; what is
unknown is "not recorded".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import read_object
from ctxlm_ds.console import format_duration
from ctxlm_ds.export.base import CardText
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.sections import DataSection
from ctxlm_ds.untrusted_json import open_regular

MAX_LINE_BYTES = 1 << 20
CARD_MARK = "\n- ctxlm_ds\n"
"""The tag by which a card of this project is known."""


@dataclass(frozen=True)
class CardFacts:
    """The facts of a model card."""

    config: RunConfig
    text: CardText
    hf_class: str
    dtype: str
    num_parameters: int
    train_state: Mapping[str, Any]
    """step, tokens, seconds; empty if the weights were imported."""
    evaluation: Mapping[str, float]
    """Latest held-out figures at or before the step, by metric name."""
    datasets: Mapping[str, Mapping[str, Any] | None]
    """JSON of each training dataset by prefix; None if it is missing."""
    trained_length: int | None
    """Longest sequence that the weights were trained on."""


def read_evaluation(metrics_file: Path, step: int) -> dict[str, float]:
    """Return the latest held-out figures of each name at or before `step`; damaged lines are skipped."""
    figures: dict[str, float] = {}
    with suppress(OSError), open_regular(metrics_file) as file:
        for line in iter(partial(file.readline, MAX_LINE_BYTES), b""):
            figures |= _evaluation(line, step) if b'"eval/' in line else {}
    return figures


def _evaluation(line: bytes, step: int) -> dict[str, float]:
    try:
        entry = json.loads(line)
        is_wanted = type(entry["step"]) is int and entry["step"] <= step
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    numbers = {key: value for key, value in entry.items() if isinstance(value, (int, float))}
    return {key: value for key, value in numbers.items() if is_wanted and key.startswith("eval/")}


def read_dataset_metadata(prefixes: Sequence[str]) -> dict[str, dict[str, Any] | None]:
    """Return the JSON of each dataset by prefix; None if it is missing or unreadable."""
    return {prefix: read_object(Path(f"{prefix}.json")) for prefix in prefixes}


def write_model_card(facts: CardFacts) -> str:
    """Return the card as Markdown with the Hub's YAML header."""
    sections = [
        f"---\nlibrary_name: transformers\npipeline_tag: {facts.text.task}\n"
        f"tags:\n- ctxlm_ds\n- {facts.text.tag}\n- deepspeed\n---",
        f"# {facts.config.name}\n\n{_summary(facts)}",
        f"## How to load it\n\n{_loading(facts)}",
        f"## Training data\n\n{_training_data(facts)}",
        f"## Held-out figures\n\n{_figures(facts)}",
        f"## Model\n\n{_table(_rows(facts.config.model.model_dump()))}",
        f"## Training\n\n{_table(_training_rows(facts))}",
        f"## Limits\n\n{_limits(facts)}",
    ]
    return "\n\n".join(sections) + "\n"


def _summary(facts: CardFacts) -> str:
    origin = "pretrained" if facts.train_state else "imported"
    text = (
        f"A {facts.text.kind} with {facts.config.model.num_blocks} layers ({facts.num_parameters:,} "
        f"parameters, stored in {facts.dtype}), {origin} with ctxlm_ds and exported as the plain "
        f"`{facts.hf_class}` of transformers. {facts.text.heads} Its logits were "
        "compared with those of the trained model on random ids and on real text when it was exported."
    )
    if facts.config.initialize_from:
        text += f" Training started from the weights of `{facts.config.initialize_from}`."
    return text


def _loading(facts: CardFacts) -> str:
    return (
        "```python\n"
        f"from transformers import AutoTokenizer, {facts.hf_class}, pipeline\n\n"
        'folder = "."  # this folder\n'
        f"model = {facts.hf_class}.from_pretrained(folder)\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        f"{facts.text.usage}"
        "```"
    )


def _training_data(facts: CardFacts) -> str:
    if not facts.datasets:
        return "Not recorded."
    lines = ["| dataset | documents | sequences | tokens | sentences split |", "|---|---|---|---|---|"]
    for prefix, metadata in facts.datasets.items():
        if metadata is None:
            lines.append(f"| {Path(prefix).name} | not recorded | not recorded | not recorded | not recorded |")
            continue
        counts = [_count(metadata.get(key)) for key in ("documents", "sequences", "tokens")]
        split = {True: "yes", False: "no"}.get(metadata.get("split_sentences", None), "not recorded")
        lines.append(f"| {Path(prefix).name} | {' | '.join(counts)} | {split} |")
    return "\n".join(lines)


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "not recorded"


def _figures(facts: CardFacts) -> str:
    if not facts.evaluation:
        return "None were recorded up to this checkpoint."
    rows = {key.removeprefix("eval/"): _number(value) for key, value in facts.evaluation.items()}
    return f"Measured during training, last at or before step {facts.train_state.get('step', 0):,}.\n\n{_table(rows)}"


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_number, value))
    if not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _training_rows(facts: CardFacts) -> dict[str, str]:
    if not facts.train_state:
        return {"source": "imported weights"}
    config, state = facts.config, facts.train_state
    rows = {
        "steps": _number(state.get("step", 0)),
        "tokens (without padding)": _number(state.get("tokens", 0)),
        "wall time": format_duration(float(state.get("seconds", 0.0))),
        "rows per step": _number(config.training.global_batch_size),
        "precision": config.training.precision,
        "seed": str(config.training.seed),
        "sequence length": _number(config.data.seq_length),
        "input format": config.data.sample_format,
    }
    data = config.data.model_dump()
    rows |= _rows({key: value for key, value in data.items() if key not in DataSection.model_fields}, "data.")
    objective = config.objective.model_dump()
    for name, values in (
        ("objective", objective),
        ("optimizer", config.optimizer.model_dump()),
        ("schedule", config.schedule.model_dump()),
    ):
        rows |= _rows({key: value for key, value in values.items() if value is not None}, f"{name}.")
    return rows


def _rows(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    return {f"{prefix}{key}": _number(value) for key, value in values.items()}


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())])


def _limits(facts: CardFacts) -> str:
    longest, trained = facts.config.model.longest_sequence, facts.trained_length
    untrained = f"It was trained on sequences of {trained} tokens; later positions have random weights. "
    return ("" if trained == longest else untrained) + (
        f"A {facts.text.language_model} language model completes text as its training data would; it repeats that "
        "data's errors and biases and states no facts. Check it on your own task before you rely on it."
    )
