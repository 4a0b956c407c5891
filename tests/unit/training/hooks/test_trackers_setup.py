"""Trackers and hooks that a recipe names: a mistake is one error before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.pretrain import main
from ctxlm_ds.recipe.schema import LoggingConfig, RunConfig
from ctxlm_ds.run import build_hooks
from ctxlm_ds.training.hooks import trackers
from ctxlm_ds.training.hooks.trackers import check_hooks, trackers_of

MODULE = '''
from ctxlm_ds.training.hooks.hooks import Hook, StepMetrics


class Plain(Hook):
    pass


class Configured(Hook):
    def __init__(self, config=None):
        self.config = config


class Positional(Hook):
    def __init__(self, recipe):
        self.config = recipe


class Demanding(Hook):
    def __init__(self, one, two):
        pass


class NoHook:
    pass
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_hooks_module.py").write_text(MODULE)
    (tmp_path / "broken_hooks_module.py").write_text("import no_such_package")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "own_hooks_module", raising=False)
    return "own_hooks_module"


def logging_of(**settings: object) -> RunConfig:
    return RunConfig(logging=LoggingConfig(**settings))  # type: ignore[arg-type]


def test_hooks_are_built_with_the_recipe_or_without(module: str, tmp_path: Path) -> None:
    names = ("Plain", "Configured", "Positional")
    config = logging_of(hooks=[f"{module}:{name}" for name in names])
    built = {type(hook).__name__: hook for hook in build_hooks(config, tmp_path, Topology())}
    assert {*names, "TensorBoardWriter"} <= built.keys()
    assert all(built[name].config is config for name in names[1:])  # type: ignore[attr-defined]
    assert build_hooks(config, tmp_path, Topology(rank=1, world_size=2)) == []


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_colon", "expected package.module:Class"),
        ("no_such_module_x:Hook", "cannot be imported (ModuleNotFoundError: No module named 'no_such_module_x')"),
        ("broken_hooks_module:Hook", "cannot be imported (ModuleNotFoundError: No module named 'no_such_package')"),
        ("own_hooks_module:Plan", "own_hooks_module has no Plan; did you mean Plain?"),
        ("own_hooks_module:NoHook", "is no class of ctxlm_ds.training.hooks.hooks.Hook"),
        ("own_hooks_module:Demanding", "Demanding(one, two) needs other arguments"),
    ],
)
def test_a_hook_that_cannot_be_built_is_refused(module: str, target: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_hooks(logging_of(hooks=[target]).logging)
    assert f'logging.hooks[0]: "{target}": ' in str(refused.value) and reason in str(refused.value)


def test_only_a_run_imports_a_hook(module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "leaving_module.py").write_text("import pathlib, sys; pathlib.Path('ran').touch(); sys.exit(0)")
    words = ["--config", "bert-laptop", "--check", "--print", "--set", "logging.hooks=[leaving_module:Hook, os:x]"]
    main(words)
    assert "leaving_module:Hook" in capsys.readouterr().out and not (tmp_path / "ran").exists()
    with pytest.raises(SystemExit, match="2"):
        main([*words[:-1], "logging.hooks=[no_such_module_x:Hook, plain]"])
    shown = capsys.readouterr().err
    assert '"no_such_module_x:Hook": no package or file is named no_such_module_x' in shown
    assert '"plain": expected package.module:Class' in shown
    with pytest.raises(ConfigError, match=r"cannot be imported \(SystemExit: 0\)"):
        check_hooks(logging_of(hooks=["leaving_module:Hook"]).logging)


def test_a_missing_tracker_names_its_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        main(["--config", "bert-laptop", "--check", "--set", "logging.trackers=[tensorboard, wandb]"])
    shown = capsys.readouterr().err
    assert "pip install 'ctxlm_ds[wandb]'" in shown and "Traceback" not in shown


def test_trackers_keep_the_meaning_of_the_older_setting() -> None:
    assert trackers_of(RunConfig().logging) == ["tensorboard"]
    assert trackers_of(logging_of(tensorboard=False).logging) == []
    assert trackers_of(logging_of(trackers=["wandb", "tensorboard", "wandb"]).logging) == ["wandb", "tensorboard"]
    assert trackers_of(logging_of(trackers=[]).logging) == []
