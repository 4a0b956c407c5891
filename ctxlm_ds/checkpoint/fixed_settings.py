"""What a run cannot change when it resumes: settings of the recipe, and its training rows. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ctxlm_ds.checkpoint.saved_state import SOURCES
from ctxlm_ds.console import counted
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.recipe.load import load_saved_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.sections import TrainSource


def refuse_changed_settings(folder: Path, config: RunConfig) -> None:
    """Raise CheckpointError for changes of the settings that a run cannot change, without data or an engine."""
    # Loading gives settings that are newer than the checkpoint their defaults.
    saved_config = load_saved_config(folder / "config.yaml")
    before, now = dict(_leaves(saved_config.model_dump(mode="json"))), dict(_leaves(config.model_dump(mode="json")))
    fixed = tuple(f"{name}." for name in (*saved_config.fixed_settings, *config.fixed_settings))
    changed = [
        f"  {key}: {before.get(key)!r} -> {now.get(key)!r}"
        for key in dict.fromkeys((*before, *now))
        if f"{key}.".startswith(fixed) and before.get(key) != now.get(key)
    ]
    if before.get("model.vocab_size") != now.get("model.vocab_size"):
        # The cause of the other size.
        paths = {
            "tokenizer.path": (saved_config.tokenizer.path, config.tokenizer.path),
            "data.train": [", ".join(source.path for source in one.data.train) for one in (saved_config, config)],
        }
        changed = [*(f"  {key}: {old} -> {new}" for key, (old, new) in paths.items() if old != new), *changed]
    _refuse(folder, changed + _changed_mix(saved_config.data.train, config.data.train))


def refuse_changed_data(folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise CheckpointError if what describes the training rows is not what describes them in a checkpoint."""
    sources = enumerate(zip_longest(saved.get(SOURCES, []), now.get(SOURCES, [])))
    changed = [
        f"  data.train[{number}]: {_show_source(before)} in the checkpoint, {_show_source(after)} now"
        for number, (before, after) in sources
        if before is None or after is None or before["index"] != after["index"]
    ]
    changed += [
        f"  {key}: {saved.get(key)!r} in the checkpoint, {value!r} now"
        for key, value in now.items()
        if key != SOURCES and saved.get(key) != value
    ]
    _refuse(folder, changed)


def _changed_mix(saved: Sequence[TrainSource], current: Sequence[TrainSource]) -> list[str]:
    """Return a line for each change of weights, epochs or languages; paths may change: indexes say what is in them."""
    before, now = (
        [
            f"weight {source.weight}, epochs {source.epochs or 1.0:g}"
            + ("" if source.language is None else f", language {source.language}")
            for source in sources
        ]
        for sources in (saved, current)
    )
    if len(before) != len(now):
        return [f"  data.train: {counted(len(before), 'source')} -> {counted(len(now), 'source')}"]
    pairs = enumerate(zip(before, now, strict=True))
    return [f"  data.train[{number}]: {old} -> {new}" for number, (old, new) in pairs if old != new]


def _show_source(source: Mapping[str, Any] | None) -> str:
    if source is None:
        return "no source"
    first, last = source["documents"]
    return f"{source['path']} (documents {first} to {last}, {source['rows']} rows, samples {source['index'][:12]})"


def _refuse(folder: Path, changed: Sequence[str]) -> None:
    if changed:
        raise CheckpointError(
            f"{folder} cannot be continued with what has changed since:\n" + "\n".join(changed) + "\nPut the "
            "settings back; or start another run, with --set run_dir=NEW_FOLDER, and also initialize_from="
            f"{folder} if it begins with these weights"
        )


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting by its full name."""
    if not isinstance(value, Mapping) or not value:
        yield path, value
        return
    for name, below in value.items():
        yield from _leaves(below, f"{path}.{name}" if path else name)
