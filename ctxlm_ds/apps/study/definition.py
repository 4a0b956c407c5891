"""Studies: YAML files, shipped (`studies/`) or a user's own, that compare arms under one budget. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ctxlm_ds.apps.downstream.task import load_description, load_task
from ctxlm_ds.apps.evaluate.suite import NAME, PAIRS
from ctxlm_ds.recipe.problems import Problem, did_you_mean, raise_problems
from ctxlm_ds.recipe.sections import PositiveFloat, PositiveSteps, Section
from ctxlm_ds.recipe.words import Words

STUDY_DIR = Path(__file__).resolve().parent / "studies"
SIZES = ("tiny", "small", "base")
LOSS = "loss"
Reading = Literal["best-layer", "embeddings", "mix", "fine-tuned", "random", "word2vec"]
MIX = "mix"
UNTRAINED = ("random", "word2vec")
"""Readings that take nothing from the weights of the arm's runs."""
Settings = dict[str, Any]
"""Sections of settings of a recipe, as in its YAML."""


class Budget(Section):
    """What every arm of a study spends, in one unit."""

    words: Words | None = None
    """White-space words read, repeated ones included."""
    tokens: Words | None = None
    """Tokens read, without padding."""
    flops: PositiveFloat | None = None
    """Units of 10^12 operations of training, the head's included, without recomputation."""
    seconds: PositiveFloat | None = None
    """Seconds of the device at the rate of each arm, measured once and written to rates.json."""

    @property
    def given(self) -> dict[str, float]:
        """Return the amounts by unit; a study that is loaded has one."""
        return {unit: float(amount) for unit, amount in self if amount is not None}


class Claim(Section):
    """A published result."""

    text: str
    source: str
    """Publication and table."""
    order: Annotated[list[str], Field(min_length=2)]
    """Arms as the publication ranks them, the best first; others are not ranked."""
    equal_within: PositiveFloat | None = None
    """Where it says that the arms do not differ: the largest difference that counts as none."""
    seen_at: str = ""
    """Size of the published runs."""


class Arm(Section):
    """One side of the comparison."""

    recipe: str | None = None
    """Recipe that this arm extends; null takes the study's."""
    set: Settings = {}
    starts_from: str | None = None
    """Arm whose run of the same seed gives the initial weights."""
    teacher: str | None = None
    """Arm whose run of the same seed is the teacher."""
    of: str | None = None
    """Another arm, whose runs this one reads in another way; it trains nothing."""
    reading: Reading = "best-layer"
    """What tasks on words read: a frozen layer (the best one, or `embeddings`, the first layer's input), a trained mix
    of all, the fine-tuned model, the same shape with random weights, or word2vec of the same text."""

    @property
    def needs(self) -> list[str]:
        """Return the arms whose runs come first."""
        return [name for name in (self.starts_from, self.teacher) if name is not None]


class Size(Section):
    """Shape and budget of one size of the study."""

    set: Settings = {}
    """Settings of all arms."""
    budget: Budget
    seeds: PositiveSteps = 5
    """Initial values and data orders; the same ones in each arm."""


class Study(Section):
    """A comparison of arms that differ in some settings of one recipe."""

    title: str
    claim: Claim
    recipe: str
    arms: Annotated[dict[str, Arm], Field(min_length=2)]
    """Name -> what is different."""
    sizes: Annotated[dict[Literal["tiny", "small", "base"], Size], Field(min_length=1)]
    compare: str = LOSS
    """Measure of the verdict: loss (arms of one objective), or one of `measures`."""
    measures: list[str] = []
    """Further tasks, scored where --data has their files."""
    rates: Annotated[list[PositiveFloat], Field(min_length=1)] = [0.5, 1.0, 2.0]
    """Factors of each arm's learning rates, searched with one seed that the comparison does not use."""

    @property
    def trained(self) -> dict[str, Arm]:
        return {name: arm for name, arm in self.arms.items() if arm.of is None}

    def depth(self, arm: str) -> int:
        """Return how many arms come one after another before the runs of an arm."""
        return max((1 + self.depth(other) for other in self.arms[arm].needs), default=0)


def load_study(name_or_path: str) -> tuple[Path, Study]:
    """Return file and content of a shipped study or a YAML file; ConfigError lists every problem."""
    inner = (*Claim.model_fields, *Arm.model_fields, *Size.model_fields, *Budget.model_fields)
    path, study = load_description(Study, name_or_path, STUDY_DIR, "study", "title, claim, recipe, arms, sizes", inner)
    raise_problems(f"study {path}", list(_problems(study)))
    return path, study


def _problems(study: Study) -> Iterator[Problem]:
    for name in study.arms:
        yield from _arm_problems(study, name)
    for name in study.claim.order:
        if name not in study.arms:
            yield Problem("claim.order", f"{name} is no arm{did_you_mean(name, study.arms)}")
        elif study.compare == LOSS and study.arms[name].of is not None:
            yield Problem("claim.order", f"{name} has no loss; set compare to one of measures")
    for name, size in study.sizes.items():
        if len(size.budget.given) != 1:
            given, units = " and ".join(size.budget.given) or "no unit", ", ".join(Budget.model_fields)
            text = f"{given}: give exactly one of {units}"
            yield Problem(f"sizes.{name}.budget", text)
        if size.budget.seconds is not None and any(arm.needs for arm in study.arms.values()):
            text = "seconds: rates are measured before there are weights to take; give words, tokens or flops"
            yield Problem(f"sizes.{name}.budget", text)
    if len(set(study.rates)) < len(study.rates):
        yield Problem("rates", "give each factor once")
    for name in study.measures:
        if name != PAIRS and load_task(name)[1].entry.answer != "tags":
            yield Problem("measures", f"{name}: give {PAIRS}, or tasks that tag words")
    if study.compare not in (LOSS, *study.measures):
        yield Problem("compare", f"{study.compare}: one of {', '.join((LOSS, *study.measures))}")


def _arm_problems(study: Study, name: str) -> Iterator[Problem]:
    arm, trained = study.arms[name], list(study.trained)
    if not NAME.fullmatch(name):
        yield Problem(f"arms.{name}", "a name has letters, digits, hyphens, dots and underscores")
    if arm.of is None and arm.reading != "best-layer":
        yield Problem(f"arms.{name}.reading", f"{arm.reading}: only with `of`, the arm that is read this way")
    if arm.of is not None and (arm.set or arm.recipe or arm.needs):
        yield Problem(f"arms.{name}", f"it reads the runs of {arm.of}; leave all but reading out")
    if arm.of is not None and arm.of not in trained:
        yield Problem(f"arms.{name}.of", f"{arm.of} is no arm that trains{did_you_mean(arm.of, trained)}")
    for other in arm.needs:
        if other not in trained[: trained.index(name) if name in trained else None]:
            known = did_you_mean(other, trained) if other not in trained else ""
            yield Problem(f"arms.{name}", f"it needs the runs of {other}, which is no earlier arm{known}")
