"""Trackers that follow a run in addition to metrics.jsonl, and the choice of trackers and hooks that a recipe names.

Weights & Biases has one run over all restarts, in files of the run directory unless the environment names a server.
Signatures and defaults are those of wandb 0.31 (`wandb.init`, `Run.log`, `Run.define_metric`).
"""

from __future__ import annotations

import importlib
import inspect
import netrc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ctxlm_ds.atomic import write_text
from ctxlm_ds.console import logger
from ctxlm_ds.recipe.problems import Problem, did_you_mean, raise_problems, show_value
from ctxlm_ds.recipe.schema import LoggingConfig
from ctxlm_ds.registry import TRACKERS
from ctxlm_ds.training.hooks.hooks import Hook, RunEnd, RunStart
from ctxlm_ds.training.hooks.metrics import FigureHook

PROJECT = "ctxlm_ds"
"""Project of wandb, unless the environment names another."""
WANDB_ID_NAME = "wandb-id"
FORM_OF_HOOK = "expected package.module:Class"
ONLINE_WAIT_S = 30.0
"""Longest wait for wandb's server before the run continues offline."""


class Tracker(FigureHook):
    """Sends a point every interval_steps, evaluations and texts to a tracker; a failure of it never ends the run."""

    failures = (Exception,)

    def __init__(self, run_dir: Path, interval_steps: int, peak_row_seconds: float | None = None) -> None:
        super().__init__(interval_steps, peak_row_seconds)
        self.run_dir = run_dir

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        self.add({f"train/{name}": value for name, value in figures.items()}, step)

    def on_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        self.add(figures, step)

    def add(self, figures: Mapping[str, float], step: int) -> None:
        """Send the figures of a step."""


class WandbTracker(Tracker):
    """A run of Weights & Biases: online if this machine is logged in and reaches the server, otherwise offline files.

    WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY and the other variables of wandb apply.
    """

    package = extra = "wandb"

    def on_run_start(self, start: RunStart) -> None:
        import wandb

        path = self.run_dir / WANDB_ID_NAME  # of an earlier start
        kept = path.read_text(encoding="utf-8").strip() or None if path.is_file() else None
        mode = os.environ.get("WANDB_MODE") or ("online" if is_logged_in() else "offline")
        try:
            self._run = self._init(start, kept, mode)
        except wandb.errors.CommError as error:
            logger.warning("wandb: no connection, this start is kept in %s/wandb: %s", self.run_dir, error)
            self._run = self._init(start, kept, "offline")
        # Steps are logged as a figure: wandb's counter refuses those that a resume repeats.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if kept is None:
            write_text(path, f"{self._run.id}\n")

    def _init(self, start: RunStart, identity: str | None, mode: str) -> Any:
        import wandb

        return wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=start.config.name,
            id=identity,
            resume="allow",
            dir=str(self.run_dir),
            config=start.config.model_dump(mode="json"),
            mode=mode,
            settings=wandb.Settings(init_timeout=ONLINE_WAIT_S, console="off", silent=True),
        )

    def add(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log({"step": step, **figures})

    def on_continuations(self, step: int, texts: Sequence[tuple[str, str]]) -> None:
        import wandb

        table = wandb.Table(columns=["given", "written"], data=[list(text) for text in texts])
        self._run.log({"step": step, "continuations": table})

    def on_run_end(self, end: RunEnd) -> None:
        if end.completed:
            self.report_last_step()
        self._run.finish(exit_code=int(end.failed))


def is_logged_in() -> bool:
    """Return whether this machine has a key for wandb's server: WANDB_API_KEY, or what `wandb login` wrote."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(str(host)) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def check_hooks(logging_section: LoggingConfig, find: Callable[[str], object] | None = None) -> None:
    """Raise ConfigError with every tracker without its package and every hook that `find` gives a reason against.

    A hook is code: by default it is imported, so only a run may do that; a check takes `look_for_hook`.
    """
    problems = []
    for name in trackers_of(logging_section):
        entry = TRACKERS.get(name)
        if entry.extra is not None and not _is_installed(entry):
            remedy = f"pip install 'ctxlm_ds[{entry.extra}]', or leave it out"
            why = f"{name} is not installed for {sys.executable}; {remedy}"
            problems.append(Problem("logging.trackers", why))
    for number, target in enumerate(logging_section.hooks):
        found = (find or find_hook)(target)
        if isinstance(found, str):
            problems.append(Problem(f"logging.hooks[{number}]", f"{show_value(target)}: {found}"))
    raise_problems("the recipe", problems)


def trackers_of(logging_section: LoggingConfig) -> list[str]:
    """Return the trackers of a recipe, each once."""
    switches = {name: TRACKERS.get(name).switch for name in logging_section.trackers}
    return [name for name, switch in switches.items() if switch is None or getattr(logging_section, switch)]


def _is_installed(entry: Any) -> bool:
    return entry.package is None or find_spec(entry.package) is not None


def look_for_hook(target: str) -> str | None:
    """Return why `package.module:Class` names nothing that is here, or None; imports nothing."""
    module, colon, name = target.partition(":")
    if not (colon and module and name):
        return FORM_OF_HOOK
    package = module.partition(".")[0]
    if package in sys.builtin_module_names or PathFinder.find_spec(package, [*sys.path, os.getcwd()]) is not None:
        return None
    return f"no package or file is named {package}; check the name, or install its package"


def find_hook(target: str) -> type[Hook] | str:
    """Return the class that `package.module:Class` names, or why it cannot be a hook.

    Modules in the folder in which the command was started are found too.
    """
    module_name, colon, name = target.partition(":")
    if not (colon and module_name and name):
        return FORM_OF_HOOK
    folder = os.getcwd()
    if not {"", folder} & set(sys.path):
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
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


def user_hooks(logging_section: LoggingConfig) -> list[type[Hook]]:
    """Return the classes of logging.hooks. Raises ConfigError for the first that is no hook."""
    check_hooks(logging_section)
    return [found for target in logging_section.hooks if not isinstance(found := find_hook(target), str)]


def build_trackers(logging_section: LoggingConfig, run_dir: Path, peak_row_seconds: float | None) -> list[Hook]:
    """Build the trackers of a recipe; `peak_row_seconds` is the time of a row at the devices' peak, if known."""
    hooks: list[Hook] = []
    for name in trackers_of(logging_section):
        tracker = TRACKERS.get(name)
        if _is_installed(tracker):
            hooks.append(tracker(run_dir, logging_section.interval_steps, peak_row_seconds))
        else:
            remedy = f"pip install {tracker.package}"
            logger.warning("logging.trackers: %s is not installed and is skipped (%s)", name, remedy)
    return hooks
