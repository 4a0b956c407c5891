"""The recipes of a pipeline's pretraining phases: what the user wrote, with what the pipeline makes filled in.

In: the recipe, its `pipeline` section, the places of tokenizer and datasets. Out: a resolved RunConfig a phase.
Not here: jobs. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.check import find_problems
from ctxlm_ds.recipe.deepspeed import DEFAULT_CONFIG, build_deepspeed_config, load_deepspeed_json
from ctxlm_ds.recipe.load import find_recipe, load_config
from ctxlm_ds.recipe.pipeline_schema import PipelineConfig, StepResources
from ctxlm_ds.recipe.problems import Problem, ProblemsError
from ctxlm_ds.recipe.schema import RunConfig, TokenizerConfig
from ctxlm_ds.recipe.sections import TrainSource, ValidationSource

SHARED_DATA = ("train", "validation", "split", "blend", "temperature")
"""Of the section `data`, what every phase has from the first."""


@dataclass(frozen=True)
class Places:
    """Where the steps before pretraining leave what it reads; empty where the recipe names it already."""

    folder: Path
    tokenizer: str
    train: tuple[str, ...] = ()
    """Dataset prefixes, one a JSON key."""
    heldout: tuple[tuple[str, str], ...] = ()
    """Name and prefix."""


def phase_name(kind: str, index: int) -> str:
    """`pretrain`, `pretrain-2`: the first keeps its name when a second is added."""
    return kind if index == 0 else f"{kind}-{index + 1}"


def phase_configs(recipe: str, overrides: Sequence[str], config: RunConfig, places: Places) -> list[RunConfig]:
    """The recipe of each phase, with tokenizer, datasets, run directory and where its weights come from.

    Raises:
        ConfigError: the recipe of a further phase cannot be loaded.
    """
    assert config.pipeline is not None
    configs = [_filled(config, places)]
    for index in range(len(config.pipeline.phases)):
        own = load_phase(recipe, overrides, config.pipeline, index)
        shared = {name: getattr(configs[0].data, name) for name in SHARED_DATA}
        default = places.folder / phase_name("pretrain", index + 1)
        run_dir = own.run_dir if own.run_dir != config.run_dir else None
        configs.append(
            own.model_copy(
                update={
                    "name": config.name,
                    "tokenizer": configs[0].tokenizer,
                    "data": own.data.model_copy(update=shared),
                    "run_dir": str(Path(run_dir).absolute() if run_dir else default),
                    "initialize_from": configs[-1].run_dir,
                    "pipeline": None,
                }
            )
        )
    return configs


def load_phase(recipe: str, overrides: Sequence[str], pipeline: PipelineConfig, index: int) -> RunConfig:
    """The recipe of a further phase as the user wrote it; a path is relative to the recipe that names it.

    Raises:
        ConfigError: it cannot be loaded.
    """
    phase = pipeline.phases[index]
    if phase.recipe is None:
        return load_config(recipe, [*overrides, *phase.set])
    return load_config(str(find_recipe(phase.recipe, find_recipe(recipe).parent)), phase.set)


def _filled(config: RunConfig, places: Places) -> RunConfig:
    data = config.data
    if places.train:
        data = data.model_copy(update={"train": [TrainSource(path=prefix) for prefix in places.train]})
    if places.heldout:
        held_out = [ValidationSource(name=name, path=prefix) for name, prefix in places.heldout]
        data = data.model_copy(update={"validation": held_out})
    run_dir = Path(config.run_dir).absolute() if config.run_dir else places.folder / "pretrain"
    tokenizer = TokenizerConfig(path=places.tokenizer)
    return config.model_copy(
        update={"data": data, "tokenizer": tokenizer, "run_dir": str(run_dir), "pipeline": None}
    )


def phase_checks(recipe: str, overrides: Sequence[str]) -> Callable[[RunConfig], Iterator[Problem]]:
    """A check for load_config: every phase can be loaded, has the first one's model, and fits its job's ranks."""

    def check(config: RunConfig) -> Iterator[Problem]:
        if config.pipeline is None:
            return
        first = [*_rank_problems(config, _pretrain_resources(config.pipeline, -1), "pipeline.resources.pretrain")]
        yield from first
        for index in range(len(config.pipeline.phases)):
            here = f"pipeline.phases[{index}]"
            try:
                own = load_phase(recipe, overrides, config.pipeline, index)
            except ProblemsError as error:
                yield from _own_problems(error, _recipe_problems(recipe, overrides), here)
                continue
            except ConfigError as error:
                yield Problem(here, str(error), ("pipeline.phases",))
                continue
            yield from _model_problems(config, own, here)
            ranks = _rank_problems(own, _pretrain_resources(config.pipeline, index), here)
            yield from (item for item in ranks if item.text not in [other.text for other in first])

    return check


def _recipe_problems(recipe: str, overrides: Sequence[str]) -> tuple[Problem, ...]:
    """What the recipe itself is refused for, whatever its phases."""
    try:
        load_config(recipe, overrides)
    except ProblemsError as error:
        return error.problems
    return ()


def _own_problems(error: ProblemsError, told: Sequence[Problem], here: str) -> Iterator[Problem]:
    """The problems of a phase's recipe, but for those that are told of the first one."""
    for item in error.problems:
        if item not in told:
            yield Problem(here, f"{item.path}: {item.text}", ("pipeline.phases",), item.where)


def _model_problems(first: RunConfig, own: RunConfig, here: str) -> Iterator[Problem]:
    """Yield what a phase cannot change of the model of the one before."""
    for name in dict.fromkeys((*first.model.same_function, *first.model.same_shape)):
        before, now = getattr(first.model, name), getattr(own.model, name, None)
        if before != now:
            text = f"its model.{name} is {now}, that of the first phase {before}; weights cannot be taken over"
            yield Problem(here, text, ("pipeline.phases", f"model.{name}"))
        if type(own.model) is not type(first.model):
            return


def _pretrain_resources(pipeline: PipelineConfig, index: int) -> StepResources:
    own = [pipeline.phases[index].resources] if index >= 0 else []
    return combined(pipeline.resources.default, pipeline.resources.pretrain, *own)


def combined(*resources: StepResources) -> StepResources:
    """The later ones over the earlier ones; `extra` options are added up."""
    values: dict[str, object] = {}
    for item in resources:
        values |= {name: value for name, value in item if value is not None and name != "extra"}
    return StepResources(**values, extra=[option for item in resources for option in item.extra])  # type: ignore[arg-type]


def _rank_problems(config: RunConfig, resources: StepResources, here: str) -> Iterator[Problem]:
    """What the job of a phase would refuse after its time in the queue."""
    if resources.ntasks_per_node is None:
        return
    world_size = (resources.nodes or 1) * resources.ntasks_per_node
    place = ("pipeline.phases",) if "phases" in here else ()
    known = {(problem.path, problem.text) for problem in find_problems(config)}
    found = [item for item in find_problems(config, world_size) if (item.path, item.text) not in known]
    for problem in found:
        yield Problem(here, f"{world_size} ranks: {problem.path}: {problem.text}", (*place, problem.path))
    if found or known:
        return
    try:
        source = config.deepspeed or DEFAULT_CONFIG
        build_deepspeed_config(config, load_deepspeed_json(source), world_size, f"DeepSpeed config {source}")
    except ConfigError as error:
        yield Problem(here, f"{world_size} ranks: {error}", (*place, "deepspeed"))
