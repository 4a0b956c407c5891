"""Trackers and hooks that a recipe names: checks before a run, and the hooks themselves."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from ctxlm_ds.recipe.problems import Problem, did_you_mean, raise_problems, show_value
from ctxlm_ds.recipe.schema import LoggingConfig, RunConfig
from ctxlm_ds.registry import TRACKERS
from ctxlm_ds.training.hooks.hooks import Hook

logger = logging.getLogger("ctxlm_ds")


def check_hooks(logging_section: LoggingConfig) -> None:
    """Raise ConfigError with every tracker without its package and every hook that cannot be imported or built."""
    problems = [
        problem for tracker in trackers_of(logging_section) if (problem := _tracker_problem(tracker)) is not None
    ]
    for number, target in enumerate(logging_section.hooks):
        found = find_hook(target)
        if isinstance(found, str):
            problems.append(Problem(f"logging.hooks[{number}]", f"{show_value(target)}: {found}"))
    raise_problems("the recipe", problems)


def trackers_of(logging_section: LoggingConfig) -> list[str]:
    """Return the trackers of a recipe, each once."""
    switches = {name: TRACKERS.get(name).switch for name in logging_section.trackers}
    return [name for name, switch in switches.items() if switch is None or getattr(logging_section, switch)]


def _tracker_problem(tracker: str) -> Problem | None:
    entry = TRACKERS.get(tracker)
    if entry.extra is None or find_spec(entry.package) is not None:
        return None
    remedy = f"pip install 'ctxlm_ds[{entry.extra}]', or leave it out"
    return Problem("logging.trackers", f"{tracker} is not installed for {sys.executable}; {remedy}")


def find_hook(target: str) -> type[Hook] | str:
    """Return the class that `package.module:Class` names, or why it cannot be a hook.

    Modules in the folder in which the command was started are found too.
    """
    module_name, colon, name = target.partition(":")
    if not (colon and module_name and name):
        return "expected package.module:Class"
    folder = os.getcwd()
    if not {"", folder} & set(sys.path):
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        return f"cannot be imported ({type(error).__name__}: {error}); check the name, or install its package"
    found = getattr(module, name, None)
    if found is None:
        near = did_you_mean(name, (each for each in vars(module) if not each.startswith("_")))
        return f"{module_name} has no {name}{near}"
    if not (inspect.isclass(found) and issubclass(found, Hook)):
        return "is no class of ctxlm_ds.training.hooks.hooks.Hook; derive it from that"
    if takes_config(found) is None:
        return f"{name}{inspect.signature(found)} needs other arguments; a hook is built with none or with the recipe"
    return found


def takes_config(hook: type[Hook]) -> bool | None:
    """Return whether a class is built with the recipe rather than with nothing; None if neither is possible."""
    signature = inspect.signature(hook)
    for arguments in (("config",), ()) if "config" in signature.parameters else ((), ("config",)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return bool(arguments)
    return None


def build_user_hooks(config: RunConfig) -> list[Hook]:
    """Build the hooks of logging.hooks, with the recipe if they take it."""
    check_hooks(config.logging)
    classes = [found for target in config.logging.hooks if not isinstance(found := find_hook(target), str)]
    return [found(config) if takes_config(found) else found() for found in classes]  # type: ignore[call-arg]


def build_trackers(logging_section: LoggingConfig, run_dir: Path, peak_row_seconds: float | None) -> list[Hook]:
    """Build the trackers of a recipe; `peak_row_seconds` is the time of a row at the devices' peak, if known."""
    hooks: list[Hook] = []
    for name in trackers_of(logging_section):
        tracker = TRACKERS.get(name)
        if tracker.package is None or find_spec(tracker.package) is not None:
            hooks.append(tracker(run_dir, logging_section.interval_steps, peak_row_seconds))
        else:
            remedy = f"pip install {tracker.package}"
            logger.warning("logging.trackers: %s is not installed and is skipped (%s)", name, remedy)
    return hooks
