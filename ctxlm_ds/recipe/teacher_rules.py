"""Checks of a recipe's teacher: its model against objective, rows, vocabulary and layout. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from ctxlm_ds.recipe.choices import MODEL, OBJECTIVE, listed
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.schema import ParallelConfig, TeacherConfig
from ctxlm_ds.recipe.sections import DataSection, ModelSection, ObjectiveSection

OWN_SETTING = re.compile(r"(?<![\w.])model\.")
"""A setting of the `model` section in a message."""
TAP = re.compile(r"(hidden_states|attention_scores)\.-?\d+")


def needs_teacher(objective: ObjectiveSection) -> bool:
    """Return whether the objective compares the model with a teacher."""
    return bool(OBJECTIVE.registry.get(objective.name)(objective).teacher_outputs)


def teacher_problems(
    given: TeacherConfig,
    model: ModelSection,
    data: DataSection,
    objective: ObjectiveSection,
    parallel: ParallelConfig,
) -> Iterator[Problem]:
    """Yield problems of the teacher, as far as its model is known."""
    if not needs_teacher(objective):
        if given.path is not None or given.model is not None:
            objectives = [name for name, other in OBJECTIVE.entries().items() if other.teacher_outputs]
            yield Problem(
                "teacher",
                f"{OBJECTIVE.path} {objective.name} compares with no teacher; leave the section out, or set "
                f"{OBJECTIVE.path} to {listed(objectives)}",
                (OBJECTIVE.path,),
            )
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
    sizes = model.vocab_size, teacher.vocab_size
    if None not in sizes and sizes[0] != sizes[1]:
        yield Problem(
            "model.vocab_size",
            f"{sizes[0]} rows, but the teacher has {sizes[1]}: both must have the same vocabulary; train with the "
            "teacher's tokenizer (tokenizer.path) and its number of rows",
            ("teacher.model.vocab_size", "teacher.path"),
        )


def _output_problems(section: ObjectiveSection, teacher: ModelSection) -> Iterator[Problem]:
    objective = OBJECTIVE.registry.get(section.name)(section)
    family = MODEL.registry.get(teacher.family)
    missing = [name for name in objective.teacher_outputs if name not in family.outputs and not TAP.fullmatch(name)]
    if missing:
        yield Problem(
            "teacher.model.family",
            f"{teacher.family} does not compute {listed(missing, 'and')}, which {OBJECTIVE.path} "
            f"{objective.name} needs of a teacher",
            ("teacher.path", OBJECTIVE.path),
        )


def _of_teacher(problem: Problem) -> Problem:
    """Return a problem of a model's section as one of the teacher's."""
    path, text = (OWN_SETTING.sub("teacher.model.", part) for part in (problem.path, problem.text))
    involved = tuple(OWN_SETTING.sub("teacher.model.", name) for name in problem.involves)
    return replace(problem, path=path, text=text, involves=(*involved, "teacher.path"))
