"""Checks of the data sources of a recipe, and of the teacher of a distillation. Opens neither."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.choices import MODEL, OBJECTIVE, listed
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.schema import ParallelConfig, TeacherConfig
from ctxlm_ds.recipe.sections import DataSection, ModelSection, ObjectiveSection

PARTS = ("train", "valid", "test")
BLENDS_BY_WEIGHT = ("weighted", "megatron")
NUMBER = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*")


def source_names(data: DataSection) -> list[str]:
    """Return a name for each training source: the given one, else the last part of its path, else the path if taken."""
    short = [source.name or os.path.basename(source.path.rstrip("/")) for source in data.train]
    taken = Counter(short)
    return [
        source.path if taken[name] > 1 and source.name is None else name
        for source, name in zip(data.train, short, strict=True)
    ]


def split_shares(text: str) -> tuple[float, float, float]:
    """Return the shares of train, valid and test, which add up to 1; missing ones are 0.

    Follows Megatron's blended_megatron_dataset_config.py, which accepts any text between the numbers. Raises
    ConfigError unless it is one to three numbers of at least 0 with a first one above 0.
    """
    texts = re.split("[,/]", text)
    matches = [NUMBER.fullmatch(part) for part in texts]
    numbers = [float(match[1]) for match in matches if match]
    if len(numbers) != len(texts) or len(numbers) > len(PARTS) or numbers[0] == 0:
        raise ConfigError(
            f'"{text}": expected up to three numbers of at least 0 for train, valid and test, the first above 0, e.g. '
            "969,30,1"
        )
    train, valid, test = [*numbers, 0.0, 0.0][: len(PARTS)]
    total = train + valid + test
    return train / total, valid / total, test / total


def source_problems(data: DataSection, objective: ObjectiveSection) -> Iterator[Problem]:
    """Yield sources with wrong or duplicate names, or with settings that their blend does not use."""
    named = [(f"data.train[{index}]", source.path) for index, source in enumerate(data.train)]
    named += [(f"data.validation[{index}].path", source.path) for index, source in enumerate(data.validation)]
    for path, prefix in named:
        if prefix.endswith((".bin", ".idx")):
            text = f"{prefix}: give the prefix without the extension: {prefix[:-4]}"
            yield Problem(path, text, (path.split("[")[0],))
    for section, names in (
        ("data.train", [source.name for source in data.train if source.name is not None]),
        ("data.validation", [source.name for source in data.validation]),
    ):
        for name, count in Counter(names).items():
            if count > 1:
                yield Problem(section, f'{count} sources are named "{name}"; give each another name')
    for prefix, count in Counter(os.path.realpath(source.path) for source in data.train).items():
        if count > 1:
            yield Problem(
                "data.train",
                f"{prefix} is listed {count} times: its rows would repeat with the same masks; list it once, with "
                "`epochs` or a larger `weight`",
            )
    yield from _language_problems(data, objective)
    yield from _blend_problems(data)
    yield from _split_problems(data)


def _language_problems(data: DataSection, objective: ObjectiveSection) -> Iterator[Problem]:
    languages = {"data.train": [source.language for source in data.train]}
    languages["data.validation"] = [source.language for source in data.validation]
    for setting, given in languages.items():
        wrong = [index for index, language in enumerate(given) if objective.needs_languages == (language is None)]
        if not wrong:
            continue
        text = (
            f"missing: objective.name {objective.name} writes the token of each source's language (en_XX) if "
            "objective.language_tokens is true; name it, or set that to false"
        )
        if not objective.needs_languages:
            text = (
                f"{given[wrong[0]]} has no effect with objective.name {objective.name} unless it has "
                "objective.language_tokens: true; leave it out"
            )
        involved = (setting, "objective.name", "objective.language_tokens")
        yield Problem(f"{setting}[{wrong[0]}].language", text, involved)


def _blend_problems(data: DataSection) -> Iterator[Problem]:
    sources, blend = data.train, data.blend
    for setting, wanted in (("weight", BLENDS_BY_WEIGHT), ("epochs", ("concatenate",))):
        given = [index for index, source in enumerate(sources) if getattr(source, setting) is not None]
        if given and blend not in wanted:
            text = (
                f"{getattr(sources[given[0]], setting):g} has no effect with data.blend {blend}; set data.blend to "
                f"{' or '.join(wanted)}, or leave {setting} out"
            )
            yield Problem(f"data.train[{given[0]}].{setting}", text, ("data.train", "data.blend"))
    without = [index for index, source in enumerate(sources) if source.weight is None]
    if blend == "weighted" and without:
        text = "missing: data.blend weighted needs a weight for every source"
        yield Problem(f"data.train[{without[0]}].weight", text, ("data.train", "data.blend"))
    if blend == "megatron" and without and len(without) < len(sources):
        text = "missing: data.blend megatron takes a weight for every source, or for none (then their rows are weights)"
        yield Problem(f"data.train[{without[0]}].weight", text, ("data.train", "data.blend"))


def _split_problems(data: DataSection) -> Iterator[Problem]:
    if data.split is not None:
        try:
            split_shares(data.split)
        except ConfigError as error:
            yield Problem("data.split", str(error))
    trained = {os.path.realpath(source.path) for source in data.train}
    for index, held_out in enumerate(data.validation):
        where, involved = f"data.validation[{index}].part", ("data.validation", "data.split")
        if data.split is None and held_out.part != "all":
            text = f"{held_out.part}: there are no parts without data.split; set data.split, or part to all"
            yield Problem(where, text, involved)
        elif data.split is not None and held_out.part == "all" and os.path.realpath(held_out.path) in trained:
            text = (
                f"all of {held_out.path} includes the documents that data.split assigns to training; set part to valid "
                "or test (or train, to evaluate on the training documents)"
            )
            yield Problem(where, text, involved)


OWN_SETTING = re.compile(r"(?<![\w.])model\.")
"""A setting of the `model` section in a message."""
TAP = re.compile(r"(hidden_states|attention_scores)\.-?\d+")


def needs_teacher(objective: ObjectiveSection) -> bool:
    """Return whether the objective compares the model with a teacher."""
    return bool(OBJECTIVE.registry.get(objective.name)(objective).teacher_outputs)


def teacher_problems(
    given: TeacherConfig, model: ModelSection, data: DataSection, objective: ObjectiveSection, parallel: ParallelConfig
) -> Iterator[Problem]:
    """Yield problems of the teacher, as far as its model is known."""
    if not needs_teacher(objective):
        if given.path is not None or given.model is not None:
            objectives = [name for name, other in OBJECTIVE.entries().items() if other.teacher_outputs]
            text = (
                f"{OBJECTIVE.path} {objective.name} compares with no teacher; leave the section out, or set "
                f"{OBJECTIVE.path} to {listed(objectives)}"
            )
            yield Problem("teacher", text, (OBJECTIVE.path,))
        return
    teacher = given.model
    if teacher is None:
        return
    yield from _output_problems(objective, teacher)
    yield from objective.teacher_problems(model, teacher)
    yield from map(_of_teacher, teacher.problems())
    yield from map(_of_teacher, teacher.row_problems(data))
    if parallel.tensor_parallel_size > 1:
        yield from map(_of_teacher, teacher.tensor_parallel_problems(parallel.tensor_parallel_size))
    if parallel.context_parallel_size > 1:
        sizes = parallel.context_parallel_size, parallel.tensor_parallel_size
        yield from map(_of_teacher, teacher.context_parallel_problems(*sizes))
    words, theirs = model.vocab_size, teacher.vocab_size
    if None not in (words, theirs) and words != theirs:
        text = (
            f"{words} rows, but the teacher has {theirs}: both must have the same vocabulary; train with the "
            "teacher's tokenizer (tokenizer.path) and its number of rows"
        )
        yield Problem("model.vocab_size", text, ("teacher.model.vocab_size", "teacher.path"))


def _output_problems(section: ObjectiveSection, teacher: ModelSection) -> Iterator[Problem]:
    objective = OBJECTIVE.registry.get(section.name)(section)
    family = MODEL.registry.get(teacher.family)
    missing = [name for name in objective.teacher_outputs if name not in family.outputs and not TAP.fullmatch(name)]
    if missing:
        text = (
            f"{teacher.family} does not compute {listed(missing, 'and')}, which {OBJECTIVE.path} "
            f"{objective.name} needs of a teacher"
        )
        yield Problem("teacher.model.family", text, ("teacher.path", OBJECTIVE.path))


def _of_teacher(problem: Problem) -> Problem:
    path, text = (OWN_SETTING.sub("teacher.model.", part) for part in (problem.path, problem.text))
    involved = tuple(OWN_SETTING.sub("teacher.model.", name) for name in problem.involves)
    return replace(problem, path=path, text=text, involves=(*involved, "teacher.path"))
