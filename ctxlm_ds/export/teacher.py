"""The teacher of a run: a Hugging Face folder whose model the recipe adopts, and its weights.

In: a recipe that names a folder. Out: the recipe with the teacher's settings and fingerprint; its parameters by name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.errors import CheckpointError, ConfigError, ExportError, TokenizerError
from ctxlm_ds.export.hf_config import fingerprint, model_files, read_section
from ctxlm_ds.recipe.problems import raise_problems
from ctxlm_ds.recipe.schema import RunConfig, TeacherConfig
from ctxlm_ds.recipe.source_rules import needs_teacher, teacher_problems

if TYPE_CHECKING:
    from torch import Tensor

    from ctxlm_ds.tokenizers.base import Tokenizer

PREFIX = "teacher."
TOKENIZER_FILE = "tokenizer.json"


def with_teacher(config: RunConfig, tokenizer: Tokenizer | None = None) -> RunConfig:
    """Return the recipe with the settings of the teacher's model, read from its folder without torch.

    With the run's `tokenizer`, every file is read, and the fingerprint is set. Raises ConfigError if the recipe names
    no teacher that it needs, its folder is not complete, damaged or does not fit, or tokenizer or fingerprint differ.
    """
    if not needs_teacher(config.objective):
        return config
    folder = _folder(config.teacher.path, config.objective.name)
    try:
        found = read_section(folder)
        model_files(folder)
    except ExportError as error:
        raise ConfigError(f"teacher.path: {error}") from error
    given = config.teacher.model
    for name in () if given is None else given.model_fields_set:
        ours, theirs = getattr(given, name), getattr(found, name, None)
        if ours != theirs and ours is not None:
            raise ConfigError(
                f"teacher.model.{name} is {ours!r}, but {folder}/config.json says {theirs!r}; set teacher.model to null"
            )
    config = config.model_copy(update={"teacher": config.teacher.model_copy(update={"model": found})})
    problems = teacher_problems(config.teacher, config.model, config.data, config.objective, config.parallel)
    raise_problems(f"teacher {folder}", list(problems))
    if tokenizer is None:
        return config
    teacher = config.teacher.model_copy(update={"fingerprint": _checked_fingerprint(folder, config.teacher, tokenizer)})
    return config.model_copy(update={"teacher": teacher})


def _checked_fingerprint(folder: Path, teacher: TeacherConfig, tokenizer: Tokenizer) -> str:
    _check_tokenizer(folder, tokenizer)
    with_weights = _open(folder)
    if with_weights.model != teacher.model:
        raise ConfigError(f"teacher.path: {folder}/config.json leaves out settings of its model; write all of them")
    problem = with_weights.export.tokenizer_problem(with_weights.pad_id, tokenizer)
    if problem is not None:
        raise ConfigError(f"teacher.path: {folder}: {problem}")
    found = fingerprint(folder)
    if teacher.fingerprint not in (None, found):
        raise ConfigError(
            f"teacher.fingerprint is {teacher.fingerprint}, but {folder} has {found}: it is another teacher; restore "
            "its files, or leave the setting out"
        )
    return found


def teacher_values(folder: str) -> Callable[[str], Tensor]:
    """Return a function from the name of a teacher's parameter to its complete fp32 value.

    The function raises CheckpointError if a value is NaN or infinite.
    """
    weights = _open(Path(folder))
    return lambda name: weights.read_finite(name.removeprefix(PREFIX))


def _folder(path: str | None, objective: str) -> Path:
    if path is None:
        raise ConfigError(
            f"teacher.path is not set: objective {objective} learns from a teacher; name its Hugging Face "
            "folder, e.g. --set teacher.path=teacher (ctxlm convert to-hf writes one)"
        )
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(
            f"teacher.path: {folder} is not a folder; give a local Hugging Face model folder (download a model of the "
            "Hub there first, or write one with ctxlm convert to-hf)"
        )
    return folder


def _open(folder: Path) -> Any:
    from ctxlm_ds.export.weights import HuggingFaceWeights

    try:
        return HuggingFaceWeights(folder)
    except (ExportError, CheckpointError) as error:
        raise ConfigError(f"teacher.path: {error}") from error


def _check_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if the folder has a tokenizer with other ids; without one, the sizes were compared."""
    from ctxlm_ds.tokenizers.load import load_tokenizer

    if not (folder / TOKENIZER_FILE).is_file():
        return
    try:
        theirs = load_tokenizer(folder).backend.get_vocab()
    except TokenizerError as error:
        raise ConfigError(f"teacher.path: {error}") from error
    ours = tokenizer.backend.get_vocab()
    if theirs != ours:
        different = min(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        raise ConfigError(
            f"teacher.path: the tokenizer in {folder} is not that of the run: {different!r} is token "
            f"{theirs.get(different)} there, {ours.get(different)} in tokenizer.path; use the teacher's"
        )
