"""Loader of recipes: YAML files and `--set a.b=c` become one checked, frozen RunConfig.

Files and overrides are merged as plain data (raw.py), then validated. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path

from ctxlm_ds.console import counted, logger
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.choices import CHOICES, OPTIMIZER, SCHEDULE
from ctxlm_ds.recipe.describe import find_field
from ctxlm_ds.recipe.phases import all_steps, run_phases
from ctxlm_ds.recipe.problems import nearest_name, shortened, show_value, text_problem
from ctxlm_ds.recipe.raw import RawRecipe, validate
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.yaml_source import MAX_CHARACTERS, MAX_DEPTH, YamlSource, read_yaml, write_yaml
from ctxlm_ds.untrusted_json import read_text

COMMAND_LINE = "--set "
"""Prefix of the place of a setting from the command line."""
MAX_SETTING_CHARACTERS = 300
"""Longest setting of the command line in a message."""
MAX_EXTENDS = 20
OLD_PHASES = {
    "modernbert-large-restart": ("modernbert-large", 2),
    "modernbert-large-phase2": ("modernbert-large", 3),
    "modernbert-large-phase3": ("modernbert-large", 4),
    "bert-laptop-phase1": ("bert-laptop-phases", 1),
    "bert-laptop-phase2": ("bert-laptop-phases", 2),
}
"""Recipes of one phase in earlier versions with another name than RECIPE-phaseN, by recipe and number of the phase."""
RECIPE_DIR = Path(__file__).resolve().parent.parent / "recipes"


def load_config(
    recipe: str | Path, overrides: Sequence[str] = (), world_size: int | None = None,
    lines: Mapping[str, str] | None = None,
) -> RunConfig:  # fmt: skip
    """Load a recipe (a path, or a shipped name) and those that it extends, replace settings (`a.b=c`), and check all.

    The number of ranks is checked if it is known. `lines` has the file and line of overrides that a file gives. Raises
    ConfigError with every unknown key, wrong type and impossible combination, each with its path.
    """
    tree = RawRecipe()
    for path, source in _recipe_chain(recipe):
        tree.merge(source, str(path))
    given: dict[tuple[str, ...], str] = {}
    for override in overrides:
        line = (lines or {}).get(override)
        name = line or f"{COMMAND_LINE}{shortened(override, MAX_SETTING_CHARACTERS)}"
        key, source = _read_override(override, tree, f"{line}: {override}" if line else f"{COMMAND_LINE}{override}")
        if given.setdefault(key, override) != override:
            logger.info("note: --set %s replaces --set %s", override, given[key])
        given[key] = override
        if key[0] == "phases" and len(key) > 1:
            source, key = _in_phase(tree, key, source, override), key[:1]
        tree.merge(source, name, key)
    tree.data.pop("extends", None)
    for note in tree.drop_settings_of_others((OPTIMIZER, SCHEDULE)):
        logger.warning(note)
    _let_phases_give_steps(tree)
    config = validate(tree, f"recipe {recipe}", world_size, is_new=True)
    if not config.phases:
        return config
    steps = all_steps(run_phases(config, world_size, tree), config.training.max_steps)
    return config.with_values("training", max_steps=steps)


def load_saved_config(path: Path) -> RunConfig:
    """Load the config.yaml of a run or checkpoint, also of an earlier version; ConfigError as load_config."""
    return validate(saved_settings(_read_recipe(path), str(path)), f"recipe {path}")


def saved_settings(source: YamlSource, name: str) -> RawRecipe:
    """Return settings in a file called `name` under the names that they have now.

    Settings of other entries are dropped, and `parallel.pipeline_partition: time` and `teacher.outputs`, which change
    no numbers.
    """
    tree = RawRecipe()
    tree.merge(source, name)
    list(tree.drop_settings_of_others(CHOICES.values()))
    layout = tree.data.get("parallel")
    if isinstance(layout, dict) and layout.get("pipeline_partition") == "time":
        del layout["pipeline_partition"]
    teacher = tree.data.get("teacher")
    if isinstance(teacher, dict):
        teacher.pop("outputs", None)
    return tree


def dump_config(config: RunConfig) -> str:
    """Return the resolved recipe as YAML; loading it gives an equal config."""
    return write_yaml(config.model_dump(mode="json", exclude={"extends"}))


def shipped_recipes() -> list[str]:
    return sorted(path.stem for path in RECIPE_DIR.glob("*.yaml"))


def find_recipe(recipe: str | Path, relative_to: Path | None = None) -> Path:
    """Return the file of a recipe given by path or shipped name; a path may be relative to the file that extends it.

    Raises ConfigError with the nearest name if there is none.
    """
    if problem := text_problem(str(recipe)):
        raise ConfigError(f"recipe {problem}")
    shipped = RECIPE_DIR / f"{recipe}.yaml"
    is_name = isinstance(recipe, str) and "/" not in recipe and not recipe.endswith((".yaml", ".yml"))
    if is_name and shipped.is_file():
        return shipped
    path = Path(recipe) if relative_to is None else relative_to / recipe
    if path.is_file():
        return path
    if not is_name:
        raise ConfigError(f"recipe {path}: no such file")
    near = nearest_name(str(recipe), shipped_recipes())
    known = f"did you mean {near}? `ctxlm recipes` lists all" if near else f"shipped: {', '.join(shipped_recipes())}"
    raise ConfigError(f"recipe {recipe}: no file and no shipped recipe of that name; {known}")


def _recipe_chain(recipe: str | Path) -> list[tuple[Path, YamlSource]]:
    """Return the recipe after every recipe that it extends, the outermost base first."""
    chain: dict[Path, tuple[Path, YamlSource]] = {}
    old = _old_phase(recipe)
    if old is not None:
        return [old]
    path = find_recipe(recipe)
    while True:
        names = [str(other) for other, _ in chain.values()] + [str(path)]
        if path.resolve() in chain:
            raise ConfigError(f"recipe {path}: `extends` forms a circle: {' -> '.join(names)}")
        if len(names) > MAX_EXTENDS:
            raise ConfigError(f"recipe {recipe}: more than {MAX_EXTENDS} recipes extend each other; merge some of them")
        source = _read_recipe(path)
        chain[path.resolve()] = (path, source)
        base = source.data.get("extends") if isinstance(source.data, dict) else None
        if base is None:
            return [*chain.values()][::-1]
        if not isinstance(base, str):
            raise ConfigError(f"recipe {path}: extends: {show_value(base)}: expected one path or shipped name")
        try:
            old = _old_phase(base)
            if old is not None:
                return [old, *[*chain.values()][::-1]]
            path = find_recipe(base, path.parent)
        except ConfigError as error:
            raise ConfigError(f"recipe {path}: extends: {error}") from error


def _let_phases_give_steps(tree: RawRecipe) -> None:
    """Drop training.max_steps of a base if the recipe that extends it has phases of lengths other than shares."""

    def written(*path: str) -> int:
        return max((number for number, places in enumerate(tree.places) if path in places), default=-1)

    phases, training = tree.data.get("phases"), tree.data.get("training")
    if not phases or not isinstance(phases, list) or not isinstance(training, dict):
        return
    divided = any(isinstance(phase, dict) and phase.get("share") is not None for phase in phases)
    if not divided and written("phases") > written("training", "max_steps"):
        training.pop("max_steps", None)


def _in_phase(tree: RawRecipe, key: tuple[str, ...], source: YamlSource, override: str) -> YamlSource:
    """Return the phases with a change of one, `phases.1.steps=500`; ConfigError if there is no such phase."""
    phases = deepcopy(tree.data.get("phases"))
    if not isinstance(phases, list) or not key[1].isdecimal() or int(key[1]) >= len(phases) or len(key) < 3:
        count = len(phases) if isinstance(phases, list) else 0
        raise ConfigError(f"{COMMAND_LINE}{override}: the recipe has {counted(count, 'phase')}, numbered from 0")
    place = phases[int(key[1])]
    for name in key[2:-1]:
        place = place.setdefault(name, {}) if isinstance(place, dict) else {}
    if not isinstance(place, dict):
        raise ConfigError(f"{COMMAND_LINE}{override}: {'.'.join(key[:-1])} is no section")
    place[key[-1]] = source.data
    return YamlSource(phases)


def _old_phase(recipe: str | Path) -> tuple[Path, YamlSource] | None:
    """Return one phase of a shipped recipe, RECIPE-phaseN or its name of an earlier version, with a warning."""
    name, _, number = str(recipe).rpartition("-phase")
    name, phase = OLD_PHASES.get(str(recipe), (name, int(number) if number.isdecimal() else 0))
    shipped = RECIPE_DIR / f"{name}.yaml"
    if not name or not shipped.is_file():
        return None
    phases = run_phases(load_config(name))
    if not 0 < phase <= len(phases) or len(phases) == 1:
        return None
    logger.warning("recipe %s is now phase %d of %s, which trains all its phases", recipe, phase, name)
    one = phases[phase - 1]
    moments = one.number > 0 and one.phase.moments != "fresh"
    settings = one.config.model_copy(update={"name": str(recipe), "initialize_moments": moments})
    return shipped, read_yaml(dump_config(settings), str(shipped))


def _read_recipe(path: Path) -> YamlSource:
    return read_yaml(read_text(path, ConfigError, 4 * MAX_CHARACTERS), str(path))


def _read_override(override: str, tree: RawRecipe, title: str) -> tuple[tuple[str, ...], YamlSource]:
    key, equals, value = override.partition("=")
    parts = tuple(key.strip().split("."))
    if not equals or not all(parts) or len(parts) > MAX_DEPTH:
        raise ConfigError(f"{title}: expected a.b=value, for example --set training.max_steps=1000")
    if parts == ("extends",):
        raise ConfigError(f"{title}: `extends` is for recipe files; name that recipe with --config")
    field_info = find_field(parts, tree.data)
    # Text needs no quotes inside the quotes of the shell: `--set name=2024`.
    is_text = field_info is not None and field_info.annotation in (str, str | None)
    if is_text and value.strip() not in ("null", "~", "") and value.strip()[0] not in "'\"[{":
        return parts, YamlSource(value.strip())
    return parts, read_yaml(value, title)
