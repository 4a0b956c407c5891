"""What the steps of a pipeline leave behind: whether it is there and whole, and a fingerprint of its content.

In: a kind and a path. Out: a fingerprint, or why there is none. Fingerprints are cheap (no large file is read whole)
and go by content, so that a copied or moved folder keeps them. Needs the standard library alone.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, list_checkpoints
from ctxlm_ds.process.run_history import END, START, read_history

TOKENIZER, DATASET, SAMPLES, RUN, MODEL, PATH = "tokenizer", "dataset", "samples", "run", "model", "path"
DATASET_ENDINGS = ("bin", "idx", "json", "sha256", "errors.jsonl")
EDGE_BYTES = 1 << 16
NO_OUTPUTS = "no outputs"
"""Stands for the fingerprint of a step that leaves nothing behind."""


@dataclass(frozen=True)
class Output:
    """One thing that a step makes."""

    kind: str
    path: str
    """Folder, file, or a dataset's prefix; absolute."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """`samples`: settings of the index wanted, and `folder` where the indexes do not lie beside the dataset.
    `run`: max_steps, max_tokens."""

    def fingerprint(self) -> str | None:
        """64 hexadecimal digits of its content; None where it is not there or not whole."""
        content = _FINGERPRINTS[self.kind](self)
        return None if content is None else hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def exists(self) -> bool:
        """Whether anything stands at its place, whole or not."""
        return any(os.path.lexists(path) for path in self.places()) and not self._is_empty()

    def _is_empty(self) -> bool:
        return os.path.isdir(self.path) and not os.listdir(self.path)

    def places(self) -> list[str]:
        """Its files and folders that would have to go for it to be made anew; none for what is rebuilt in place."""
        if self.kind == DATASET:
            own = [f"{self.path}.{ending}" for ending in DATASET_ENDINGS]
            return own + sorted(glob.glob(f"{glob.escape(self.path)}.samples-*"))
        return [] if self.kind == SAMPLES else [self.path]

    @property
    def is_exclusive(self) -> bool:
        """Whether nothing may stand at its place before the step: what a user's own command makes is its affair, and
        sample indexes are told apart by their keys."""
        return self.kind not in (SAMPLES, PATH)

    @property
    def appears_whole(self) -> bool:
        """Whether it gets its name only when it is complete."""
        return self.kind in (TOKENIZER, DATASET, MODEL)

    def missing(self) -> str:
        """Why there is no fingerprint, in words."""
        if self.kind == RUN:
            return _run_state(self)
        return _no_samples(self) if self.kind == SAMPLES else f"{self.path} is missing or not whole"


def join_fingerprints(outputs: Iterable[Output]) -> str | None:
    """One fingerprint for several outputs; None where any is not whole, or there is none at all."""
    found = [output.fingerprint() for output in outputs]
    if not found or None in found:
        return None
    return hashlib.sha256("".join(map(str, found)).encode()).hexdigest()


def need_fingerprint(outputs: Sequence[Output]) -> str | None:
    """What a step remembers of one that it is made from; None where an output of that one is not whole."""
    return join_fingerprints(outputs) if outputs else NO_OUTPUTS


def _tokenizer(output: Output) -> Any:
    content = _digest(Path(output.path) / "tokenizer.json")
    return content and [content]


def _dataset(output: Output) -> Any:
    facts = _read_json(Path(f"{output.path}.json"))
    sizes = [_size(Path(f"{output.path}.{ending}")) for ending in ("bin", "idx")]
    if facts is None or None in sizes or not isinstance(facts.get("sha256"), dict):
        return None
    return [facts["sha256"], facts.get("tokenizer_fingerprint"), facts.get("append_eod"), sizes]


def _samples(output: Output) -> Any:
    prefix = Path(output.path)
    folder = Path(output.facts.get("folder") or prefix.parent)
    keys = []
    for path in sorted(folder.glob(f"{glob.escape(prefix.name)}.samples-*/meta.json")):
        meta = _read_json(path) or {}
        settings = meta.get("settings", {})
        if all(settings.get(name) == value for name, value in output.facts.items() if name != "folder"):
            keys.append(meta.get("key"))
    return keys or None


def _no_samples(output: Output) -> str:
    facts = dict(output.facts)
    folder = facts.pop("folder", None)
    wanted = ", ".join(f"{name} {value}" for name, value in facts.items())
    return f"no sample index of {output.path}{f' in {folder}' if folder else ''} for these settings ({wanted})"


def _run(output: Output) -> Any:
    """A run that has reached its limit: its newest checkpoint and that one's manifest."""
    checkpoints = list_checkpoints(Path(output.path) / CHECKPOINTS_DIR)
    newest = max(checkpoints, default=None)
    if newest is None or not (newest >= output.facts["max_steps"] or _has_all_tokens(output)):
        return None
    manifest = _digest(checkpoints[newest] / "manifest.json")
    return manifest and [newest, manifest]


def _has_all_tokens(output: Output) -> bool:
    limit, end = output.facts.get("max_tokens"), _last_end(output.path)
    return bool(limit and end and end.get("completed") and f"max_tokens ({limit})" in str(end.get("reason")))


def _run_state(output: Output) -> str:
    end, steps = _last_end(output.path), output.facts["max_steps"]
    if end is not None:
        return f"{output.path} stopped at step {end.get('step')} of {steps} ({end.get('reason')})"
    if read_history(Path(output.path)):
        return f"{output.path} has not come to its end, step {steps}"
    return f"{output.path} has not begun"


def _last_end(path: str) -> dict[str, Any] | None:
    """The END event of the last start; None where that start has not ended in order."""
    last = None
    for event in read_history(Path(path)):
        if event["event"] == END:
            last = event
        elif event["event"] == START:
            last = None
    return last


def _model(output: Output) -> Any:
    """A Hugging Face folder: its small files, and the edges of its weights."""
    folder = Path(output.path)
    if not (folder / "config.json").is_file():
        return None
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    return [[name, _edges(folder / name)] for name in names]


def _path(output: Output) -> Any:
    """Anything: names and sizes below it, and the edges of a single file."""
    path = Path(output.path)
    if path.is_file():
        return _edges(path)
    if not path.is_dir():
        return None
    found = [(str(below.relative_to(path)), _size(below)) for below in path.rglob("*") if below.is_file()]
    return ["folder", *sorted(found)]


_FINGERPRINTS = {
    TOKENIZER: _tokenizer, DATASET: _dataset, SAMPLES: _samples, RUN: _run, MODEL: _model, PATH: _path,
}  # fmt: skip


def _edges(path: Path) -> Any:
    """Size, and sha256 of the first and last 64 KiB."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(file.read(EDGE_BYTES))
            file.seek(max(0, size - EDGE_BYTES))
            digest.update(file.read())
    except OSError:
        return None
    return [size, digest.hexdigest()]


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def outputs_to_json(outputs: Sequence[Output]) -> list[dict[str, Any]]:
    """As an order or a record keeps them."""
    return [{"kind": output.kind, "path": output.path, "facts": dict(output.facts)} for output in outputs]


def outputs_from_json(content: Iterable[Mapping[str, Any]]) -> tuple[Output, ...]:
    """Back again."""
    return tuple(Output(item["kind"], item["path"], item.get("facts", {})) for item in content)
