"""The model card (README.md) of an exported model, from what its run recorded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import read_object
from ctxlm_ds.console import format_duration
from ctxlm_ds.export.base import CardText
from ctxlm_ds.export.weights import CheckpointSource
from ctxlm_ds.process.run_files import HELD_OUT, METRICS_NAME, read_lines
from ctxlm_ds.process.run_history import START, read_history
from ctxlm_ds.recipe.sections import DataSection, TrainSource

MAX_CHANGE_CHARACTERS = 300
MARKUP = re.compile(r"[\\`*<>&\[\]|#~]")
CARD_MARK = "\n- ctxlm_ds\n"
"""The tag by which a card of this project is known."""
UNKNOWN = "not recorded"


def write_model_card(
    source: CheckpointSource, text: CardText, hf_class: str, dtype: str, num_parameters: int,
    num_layers: int | None = None,
) -> str:  # fmt: skip
    """Return the card as Markdown with the Hub's YAML header; `num_layers` is None for all of the model's layers."""
    config, train_state = source.config, source.train_state
    step, run = int(train_state.get("step", 0)), source.folder.parent.parent
    origin = "pretrained" if train_state else "imported"
    start = f" Training started from the weights of {_code(config.initialize_from)}." if config.initialize_from else ""
    start += f" It learned from the outputs of the teacher {_code(config.teacher.path)}." if config.teacher.path else ""
    evaluation = read_evaluation(run / METRICS_NAME, step) if train_state else {}
    figures = {key.removeprefix(HELD_OUT): value for key, value in evaluation.items()}
    measured = f"Measured during training, last at or before step {step:,}.\n\n{_table(figures)}"
    trained = _table(_training_rows(source, train_state)) + _resumes(run, step)
    return Path(__file__).with_suffix(".md").read_text(encoding="utf-8").format(
        header=_header(config.name, config.data.train, text, figures), name=_escape(config.name), kind=text.kind,
        num_layers=num_layers or source.model.num_blocks, num_parameters=num_parameters, dtype=dtype, origin=origin,
        hf_class=hf_class, heads=text.heads, start=start, pipeline=", pipeline" if text.task else "", usage=text.usage,
        training_data=_training_data(config.data.train) if train_state else "Not recorded.",
        held_out=measured if figures else "None were recorded up to this checkpoint.",
        model=_table(source.model.model_dump()),
        training=trained if train_state else _table({"source": "imported weights"}), limits=_trained_length(source),
        language_model=text.language_model, version=version("ctxlm_ds"),
    )  # fmt: skip


def _trained_length(source: CheckpointSource) -> str:
    if source.trained_length == source.model.longest_sequence:
        return ""
    effect = "later positions have random weights" if source.model.learned_positions else "it never saw longer ones"
    return f"It was trained on sequences of {source.trained_length} tokens; {effect}. "


def _header(name: str, sources: Sequence[TrainSource], text: CardText, figures: Mapping[str, float]) -> str:
    """Return the Hub's YAML, with the held-out figures as evaluation results."""
    from huggingface_hub import EvalResult, ModelCardData

    measured = [(*key.partition("/")[::2], round(value, 6)) for key, value in figures.items()]
    results = [
        EvalResult(
            task_type=text.task or "feature-extraction", dataset_type=source, dataset_name=f"{source} (held out)",
            metric_type=metric, metric_value=value,
        )
        for source, metric, value in measured if metric
    ]  # fmt: skip
    data = ModelCardData(
        license="unknown",
        language=sorted({source.language.partition("_")[0] for source in sources if source.language}) or None,
        library_name="transformers",
        pipeline_tag=text.task,
        tags=["ctxlm_ds", text.tag, "deepspeed"],
        model_name=name,
        eval_results=results or None,
    )
    return str(data.to_yaml())


def _training_data(sources: Sequence[TrainSource]) -> str:
    lines = ["| dataset | documents | sequences | tokens | sentences split |", "|---|---|---|---|---|"]
    for prefix in dict.fromkeys(source.path for source in sources):
        metadata: dict[str, Any] = read_object(Path(f"{prefix}.json")) or {}
        counts = [metadata.get(key) for key in ("documents", "sequences", "tokens")]
        cells = [f"{count:,}" if isinstance(count, int) else UNKNOWN for count in counts]
        split = {True: "yes", False: "no"}.get(metadata.get("split_sentences", UNKNOWN), UNKNOWN)
        lines.append(f"| {_escape(Path(prefix).name)} | {' | '.join(cells)} | {split} |")
    return "\n".join(lines) if sources else "Not recorded."


def read_evaluation(metrics_file: Path, step: int) -> dict[str, float]:
    """Return the latest held-out figures of each name at or before `step`."""
    found = [record for record in read_lines(metrics_file, 0) if record["step"] <= step]
    numbers = ((name, value) for record in found for name, value in record.items() if isinstance(value, int | float))
    return {name: value for name, value in numbers if name.startswith(HELD_OUT)}


def _resumes(run: Path, step: int) -> str:
    """List the settings that resumes up to the checkpoint's step found changed, from the run's history."""
    lines = []
    for event in (event for event in read_history(run) if event["event"] == START):
        start, changes = event.get("step"), event.get("changed_settings")
        if type(start) is int and start < step and isinstance(changes, list) and changes:
            lines.append(f"- after step {start:,}: {'; '.join(map(_code, changes))}")
    head = "\n\nThese settings were changed when the run was resumed (old -> new); the table has the last ones.\n\n"
    return head + "\n".join(lines) if lines else ""


def _code(text: Any) -> str:
    """Return text of a user as a code span of one line."""
    return f"`{' '.join(str(text).replace('`', chr(39)).split())[:MAX_CHANGE_CHARACTERS]}`"


def _escape(text: Any) -> str:
    """Return text of a user as one line of Markdown that shows it, without links, images, HTML or table cells."""
    return MARKUP.sub(r"\\\g<0>", " ".join(str(text).split()))


def _training_rows(source: CheckpointSource, train_state: Mapping[str, Any]) -> dict[str, Any]:
    config = source.config
    rows = {
        "steps": train_state.get("step", 0),
        "tokens (without padding)": train_state.get("tokens", 0),
        "wall time": format_duration(float(train_state.get("seconds", 0.0))),
        "rows per step": config.training.global_batch_size,
        **({"batch ramp": str(list(config.training.batch_ramp))} if config.training.batch_ramp else {}),
        "precision": config.training.precision,
        "seed": str(config.training.seed),
        "sequence length": config.data.seq_length,
        "input format": config.data.sample_format,
    }
    data = config.data.model_dump()
    rows |= {f"data.{key}": value for key, value in data.items() if key not in DataSection.model_fields}
    for name in ("objective", "optimizer", "schedule"):
        values = getattr(config, name).model_dump()
        rows |= {f"{name}.{key}": value for key, value in values.items() if value is not None}
    return rows


def _table(rows: Mapping[str, Any]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {_escape(key)} | {_cell(value)} |" for key, value in rows.items())])


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_cell, value))
    if not isinstance(value, (int, float)):
        return _escape(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
