"""The folder of a teacher's outputs, computed ahead: what its manifest records, and whether it fits a run.

In: a recipe that names the folder (`teacher.outputs`). Out: the manifest, or one message of what differs. Row r of the
part `train` is row r of the run's stream (step times global batch plus place in the batch, without a ramp), row r of a
held-out part is the r-th that the evaluation reads. So ranks, micro-batches and the global batch may differ. Imports no
torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from ctxlm_ds import atomic
from ctxlm_ds.checkpoint.manifest import FileEntry
from ctxlm_ds.checkpoint.tensor_file import CODE_BYTES
from ctxlm_ds.console import counted
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.untrusted_json import read_json_object

if TYPE_CHECKING:
    from ctxlm_ds.data.index.index import RowSource
    from ctxlm_ds.data.stream.run_datasets import RunRows
    from ctxlm_ds.tokenizers.base import Tokenizer

MANIFEST_NAME = "teacher_outputs.json"
FORMAT, VERSION = "ctxlm_ds-teacher-outputs", 1
SHARD_BYTES = 1 << 28
"""Most bytes of a file, unless one micro-batch has more."""
TRAIN = "train"
SHOWN_CHARACTERS = 40
TOOL = "ctxlm teacher"


@dataclass(frozen=True)
class Part:
    """The rows of the training stream, or of a held-out source."""

    name: str
    """`train`, or the name of the held-out source after `eval/`."""
    rows: int
    sources: list[list[Any]]
    """What decides the rows: for each dataset the key of its sample index, documents, rows, weight and epochs."""


@dataclass(frozen=True)
class Outputs:
    """The manifest."""

    settings: dict[str, Any]
    """Settings of the recipe that decide the outputs, by path."""
    dtype: str
    """Data type of all tensors, as safetensors names it."""
    tensors: dict[str, list[int]]
    """Shape of one row of each tensor."""
    shard_rows: int
    """Rows of each file, except the last of a part."""
    parts: list[Part]
    """The training rows first."""
    files: dict[str, FileEntry] | None
    """Size and sha256 of every file; None until all are written."""

    @property
    def row_bytes(self) -> int:
        """Size of one row."""
        return CODE_BYTES[self.dtype] * sum(map(prod, self.tensors.values()))

    def shards(self) -> list[tuple[str, int, int, int]]:
        """Return (name of the file, number of the part, first row, row after the last) of every file."""
        return [
            (shard_name(number, first // self.shard_rows), number, first, min(first + self.shard_rows, part.rows))
            for number, part in enumerate(self.parts)
            for first in range(0, part.rows, self.shard_rows)
        ]


def shard_name(part: int, number: int) -> str:
    """Return the name of a file."""
    return f"part{part}-{number:08d}.safetensors"


def read_manifest(folder: Path) -> Outputs | None:
    """Return the manifest of a folder; None if it has none.

    Raises:
        ConfigError: the manifest is damaged, or of another format.
    """
    path = folder / MANIFEST_NAME
    if not path.exists():
        return None
    document = read_json_object(path, ConfigError)
    found = document.pop("format", None), document.pop("version", None)
    try:
        if found != (FORMAT, VERSION):
            raise ValueError(f"format {found[0]!r}, version {found[1]!r}")
        outputs = TypeAdapter(Outputs).validate_python(document)
        if outputs.shard_rows < 1 or outputs.dtype not in CODE_BYTES or not outputs.parts or outputs.row_bytes < 1:
            raise ValueError("impossible sizes")
    except (ValidationError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{path} is no manifest of teacher outputs ({reason}); write them again ({TOOL})") from None
    return outputs


def write_manifest(folder: Path, outputs: Outputs) -> None:
    """Write the manifest."""
    document = {"format": FORMAT, "version": VERSION, **asdict(outputs)}
    atomic.write_text(folder / MANIFEST_NAME, json.dumps(document, indent=1) + "\n")


def deciding_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings of a recipe that decide a teacher's outputs, except the datasets."""
    teacher, dumped = config.teacher, config.model_dump(mode="json")
    precision = config.training.precision if teacher.precision == "run" else teacher.precision
    found: dict[str, Any] = {
        "teacher.path": teacher.fingerprint, "teacher.precision": precision, "training.seed": config.training.seed,
        "evaluation.mask_prob": config.evaluation.mask_prob,
    }  # fmt: skip
    found |= {f"data.{name}": dumped["data"].get(name) for name in config.data.fixed}
    kept = (name for name in dumped["objective"] if name not in config.objective.loss_settings)
    return found | {f"objective.{name}": dumped["objective"][name] for name in kept}


def deciding_parts(config: RunConfig, rows: RunRows, num_rows: int) -> list[Part]:
    """Return the parts of a run that reads `num_rows` rows."""
    mixed = [[source.weight, source.epochs] for source in config.data.train]
    described = [[*_described(rows.train, number), *mix] for number, mix in enumerate(mixed)]
    held_out = [
        Part(f"eval/{name}", min(config.evaluation.max_rows, len(source)), [_described(source, 0)])
        for name, source in rows.validation.items()
    ]
    return [Part(TRAIN, num_rows, described), *held_out]


def _described(rows: RowSource, number: int) -> list[Any]:
    index = rows.indexes[number]
    return [index.meta["key"], list(index.meta["dataset"]["documents"]), len(index)]


def with_tokenizer(settings: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the settings with the tokenizer's fingerprint."""
    return {"tokenizer.path": tokenizer.fingerprint, **settings}


def changed_settings(outputs: Outputs, settings: Mapping[str, Any]) -> list[str]:
    """Return `NAME THEIRS -> OURS` for each setting that differs from the manifest's."""
    now = json.loads(json.dumps(settings))
    names = [name for name in dict.fromkeys((*outputs.settings, *now)) if outputs.settings.get(name) != now.get(name)]
    return [f"{name} {_shown(outputs.settings.get(name))} -> {_shown(now.get(name))}" for name in names]


def changed_parts(outputs: Outputs, parts: Sequence[Part]) -> list[str]:
    """Return what differs in the datasets; a run may have fewer held-out sources, and fewer rows of each part."""
    stored = {part.name: part for part in outputs.parts}
    found = []
    for part in parts:
        name = "data.train" if part.name == TRAIN else f"data.validation {part.name.removeprefix('eval/')}"
        theirs = stored.get(part.name)
        if theirs is None:
            found.append(f"{name} none -> {counted(part.rows, 'row')}")
        elif theirs.sources != json.loads(json.dumps(part.sources)):
            found.append(f"{name} (other documents, weights, epochs or rows)")
        elif theirs.rows < part.rows:
            setting = "training.max_steps" if part.name == TRAIN else "evaluation.max_rows"
            found.append(f"{setting} ({name}) {theirs.rows:,} rows -> {part.rows:,} rows")
    return found


def open_outputs(config: RunConfig) -> Outputs:
    """Return the manifest of `teacher.outputs` after comparing the settings, without the datasets.

    Settings that are not known yet (the teacher's fingerprint) are not compared.

    Raises:
        ConfigError: the folder holds no complete outputs, or those of other settings.
    """
    assert config.teacher.outputs is not None
    folder = Path(config.teacher.outputs)
    outputs = read_manifest(folder)
    if outputs is None:
        raise ConfigError(f"teacher.outputs: {folder} holds no {MANIFEST_NAME}; {TOOL} writes the folder")
    if outputs.files is None:
        raise ConfigError(
            f"teacher.outputs: {folder} is not complete; run {TOOL} again, which writes the files that are missing"
        )
    settings = deciding_settings(config)
    known = {name: value for name, value in settings.items() if value is not None or name != "teacher.path"}
    refuse(folder, changed_settings(outputs, {**outputs.settings, **known}))
    return outputs


def refuse(folder: Path, changes: Sequence[str]) -> None:
    """Raise ConfigError if there are changes."""
    if changes:
        raise ConfigError(
            f"teacher.outputs: {folder} was written for another run: {', '.join(changes)}; set them as they were, or "
            f"write the outputs of this run ({TOOL}), or set teacher.outputs=null"
        )


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:12]}..."
