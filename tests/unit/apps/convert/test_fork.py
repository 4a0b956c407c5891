"""ctxlm fork: a branch with the linked files of a checkpoint; what is wrong leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from ctxlm_ds.apps.convert.fork import fork, main
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, find_verified
from ctxlm_ds.checkpoint.manifest import list_files
from ctxlm_ds.errors import CheckpointError, ConfigError
from ctxlm_ds.process.run_files import FORK_RECORD
from ctxlm_ds.recipe.load import load_config
from tests.checkpoints import make_tokenizer, write_random_run
from tests.integration.route import call_here


@pytest.fixture
def trunk(tmp_path: Path) -> Path:
    return write_random_run(tmp_path / "trunk", "gpt2", make_tokenizer("gpt2", tmp_path / "tok"))


def test_a_branch_shares_the_files_of_its_checkpoint(trunk: Path, tmp_path: Path) -> None:
    source, manifest = find_verified(trunk)
    new = tmp_path / "branch"
    done = call_here(main, "fork", f"{trunk}@{manifest.step}", new, "--set", "optimizer.learning_rate=1e-5")
    assert f"next: ctxlm pretrain --config {new / 'config.yaml'}" in done.stdout, done.stderr
    there, _ = find_verified(new)
    assert there.name == source.name and list_files(there) == list_files(source)
    assert all(os.path.samefile(there / name, source / name) for name in list_files(source))
    config = load_config(new / "config.yaml")
    assert (config.run_dir, config.optimizer.learning_rate) == (str(new.absolute()), 1e-5)
    record = json.loads((new / FORK_RECORD).read_text())
    assert record["step"] == manifest.step and record["settings"] == ["optimizer.learning_rate=1e-5"]
    shutil.rmtree(trunk)
    find_verified(new)


def test_where_no_links_are_files_are_copied(trunk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link", str(source))

    monkeypatch.setattr(os, "link", refuse)
    fork(str(trunk), tmp_path / "branch")
    source, there = find_verified(trunk)[0], find_verified(tmp_path / "branch")[0]
    assert not any(os.path.samefile(there / name, source / name) for name in list_files(source))


def test_what_is_wrong_leaves_nothing(trunk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, step = tmp_path / "branch", find_verified(trunk)[1].step
    with pytest.raises(CheckpointError, match=rf"no checkpoint of step 77777; it has kept: {step}"):
        fork(f"{trunk}@77777", new)
    with pytest.raises(CheckpointError, match="trnk: no such folder; give a run"):
        fork(f"{tmp_path / 'trnk'}@{step}", new)
    with pytest.raises(ConfigError, match="after @ stands the number of a step"):
        fork(f"{trunk}@last", new)
    with pytest.raises(CheckpointError, match=r"cannot be continued with what has changed since:\n.*model.hidden_size"):
        fork(str(trunk), new, ["model.hidden_size=64"])
    with pytest.raises(ConfigError, match="optimizer.lerning_rate"):
        fork(str(trunk), new, ["optimizer.lerning_rate=1"])
    with pytest.raises(CheckpointError, match="exists; give another folder"):
        fork(str(trunk), trunk)

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(OSError, match="No space left"):
        fork(str(trunk), new)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tok", "trunk"]


def test_a_checkpoint_that_its_run_removes_meanwhile_is_an_error(
    trunk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def rotated(source: Path, target: Path) -> None:
        shutil.rmtree(trunk / CHECKPOINTS_DIR, ignore_errors=True)
        link(source, target)

    monkeypatch.setattr(os, "link", rotated)
    with pytest.raises(CheckpointError, match="removed by its run meanwhile"):
        fork(str(trunk), tmp_path / "branch")
    assert not (tmp_path / "branch").exists()
