"""ctxlm_ds.apps.cluster.inputs: what is missing, damaged or does not fit, before a job is queued.

Copies on a node's own disk by slurm/stage.sh: what is copied, what proves it, and what a run reads then.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.cluster.inputs import ROOT_NAME, input_lines, input_problems, staging_lines
from ctxlm_ds.data.stream.run_datasets import build_run_rows
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.sample_data import random_documents, run_config, write_dataset
from tests.text import make_documents

STAGE = Path(__file__).resolve().parents[4] / "slurm" / "stage.sh"


@pytest.fixture(scope="module")
def route(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tokenizers, two datasets of one name in two folders, a held-out one, and a recipe; indexes built."""
    folder = tmp_path_factory.mktemp("route")
    tokenizer = train_tokenizer("wordpiece", make_documents(60, seed=1), 300, folder / "tokenizer")
    train_tokenizer("wordpiece", make_documents(60, seed=2), 200, folder / "other")
    made_with = {"tokenizer_fingerprint": tokenizer.fingerprint}
    for seed, name in enumerate(("a/text", "b/text", "heldout")):
        (folder / name).parent.mkdir(exist_ok=True)
        write_dataset(
            folder / name, random_documents(20, seed=seed, vocab_size=tokenizer.vocab_size), metadata=made_with
        )
    recipe = {
        "tokenizer": {"path": str(folder / "tokenizer")},
        "data": {
            "train": [{"path": str(folder / "a/text"), "epochs": 2}, str(folder / "b/text")],
            "validation": [{"name": "held", "path": str(folder / "heldout")}], "seq_length": 32,
        },
    }  # fmt: skip
    (folder / "recipe.json").write_text(json.dumps(recipe))
    rows_of(config_of(folder), tokenizer)
    return folder


def problems(
    folder: Path, tokenizer: str | None = "tokenizer", train: tuple[str, ...] = ("heldout",), **settings: Any
) -> str:
    config = run_config(
        tokenizer={"path": None if tokenizer is None else str(folder / tokenizer)},
        data={"train": [str(folder / name) for name in train], "seq_length": 32},
    )
    return "\n".join(input_problems(config.model_copy(update=settings)))


def test_a_complete_run_has_none(route: Path) -> None:
    assert problems(route) == ""


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"tokenizer": "none"}, "no such tokenizer folder"),
        ({"tokenizer": None}, "tokenizer.path and data.train are needed"),
        ({"train": ()}, "tokenizer.path and data.train are needed"),
        ({"train": ("heldout", "gone")}, "gone.idx"),
        ({"tokenizer": "other"}, "made with another tokenizer"),
        ({"initialize_from": "runs/none"}, "initialize_from: runs/none is not a folder"),
    ],
)
def test_each_problem_is_named(route: Path, changed: dict[str, Any], told: str) -> None:
    assert told in problems(route, **changed)


def test_all_problems_are_named_together(route: Path) -> None:
    assert len(problems(route, train=("gone", "lost"), initialize_from="no").splitlines()) >= 3


def test_a_check_names_what_is_not_here_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tok").mkdir()
    (tmp_path / "a.idx").touch()
    changes = ["tokenizer.path=tok", "data.train=[a, data/b]", "data.validation=[{name: c, path: c}]"]
    for given, named in (
        ([*changes, "initialize_from=w"], "data.train data/b.idx, data.validation c.idx, initialize_from w"),
        (changes[:1], "data.train (not set)"),
        ([], "tokenizer.path (not set), data.train (not set)"),
    ):
        missing, not_checked = input_lines(load_config("bert-base", given))
        assert missing == f"  not found from {tmp_path}: {named}"
        assert not_checked == "  tokenizer and data: not checked, for they are not all here"


SPLIT = ("data.validation=[]", "data.split_seed=1")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["tokenizer.path={folder}/other", "model.vocab_size=null"], "a/text: made with another tokenizer"),
        ([*SPLIT, "data.split='70,30'"], "holds out 8 of 20 documents for valid, fewer than 20"),
        (["data.sample_format=blocks", "objective.name=causal_lm", "model.family=gpt2"], "again with --append-eod"),
    ],
)
def test_a_check_refuses_data_that_the_run_would_refuse(route: Path, changes: list[str], told: str) -> None:
    config = config_of(route, *(change.format(folder=route) for change in changes))
    with pytest.raises(ConfigError, match="the run would end at its beginning\n") as caught:
        input_lines(config)
    assert told in str(caught.value)


def test_a_check_counts_the_documents_of_the_run_and_writes_no_copy(route: Path, tmp_path: Path) -> None:
    changes = [f"data.sample_index_dir={tmp_path}", f"initialize_from={tmp_path}/later"]
    missing, found = input_lines(config_of(route, *changes))
    assert missing.endswith(f": initialize_from {tmp_path}/later")
    assert found == "  tokenizer and data: found, 40 documents to train on, 20 held out"
    tokenizer = load_tokenizer(route / "tokenizer")
    metadata = {"tokenizer_fingerprint": tokenizer.fingerprint}
    write_dataset(tmp_path / "long", random_documents(200, vocab_size=tokenizer.vocab_size), metadata=metadata)
    before = sorted(tmp_path.iterdir())
    config = config_of(route, f"data.train=[{tmp_path}/long]", *SPLIT, "data.split='80,20'")
    (found,) = input_lines(config)
    assert sorted(tmp_path.iterdir()) == before
    rows = build_run_rows(config.row_settings, tokenizer, build_objective(config.objective, tokenizer))
    counts = [index.meta["documents"] for index in (*rows.train.indexes, *rows.validation["long"].indexes)]
    assert found == f"  tokenizer and data: found, {counts[0]} documents to train on, {counts[1]} held out"


@pytest.fixture
def copied_route(route: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the route that a test may damage."""
    folder = tmp_path / "route"
    shutil.copytree(route, folder)
    recipe = (folder / "recipe.json").read_text().replace(str(route), str(folder))
    (folder / "recipe.json").write_text(recipe)
    yield folder


def config_of(folder: Path, *overrides: str) -> RunConfig:
    return load_config(folder / "recipe.json", overrides)


def rows_of(config: RunConfig, tokenizer: Tokenizer) -> dict[str, object]:
    """What a checkpoint keeps of the data: indexes by content."""
    rows = build_run_rows(config.row_settings, tokenizer, build_objective(config.objective, tokenizer))
    return rows.describe(config.data.train, tokenizer)


def stage(folder: Path, into: Path) -> tuple[list[str], str]:
    """The settings that the script prints, none if it fails, and what it says."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    words = [str(STAGE), str(into), str(folder / "recipe.json")]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**environ, "CTXLM_PYTHON": sys.executable}
    )
    assert (done.returncode == 0) == bool(done.stdout), done.stderr
    return done.stdout.splitlines(), done.stderr


def staged_files(into: Path) -> dict[str, int]:
    """Time at which the file was made or last changed, by path; its number may be used again."""
    root = into / ROOT_NAME
    return {str(p.relative_to(root)): p.stat().st_ctime_ns for p in sorted(root.rglob("*")) if p.is_file()}


def damage(path: Path, place: int = 0) -> None:
    """Change a byte; the time stays."""
    status, content = path.stat(), bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_run_reads_the_copies_and_sees_the_same_data(route: Path, tmp_path: Path) -> None:
    settings, said = stage(route, tmp_path)
    assert "1 nodes have their copies" in said
    before, now = config_of(route), config_of(route, *settings)
    # Nothing of the run may need the originals now, and no index is built anew.
    files = set(staged_files(tmp_path))
    for source in (*now.data.train, *now.data.validation):
        assert source.path.startswith(str(tmp_path))
    assert str(now.tokenizer.path).startswith(str(tmp_path))
    tokenizer = load_tokenizer(str(now.tokenizer.path))
    old, new = rows_of(before, tokenizer), rows_of(now, tokenizer)
    for mine in (old, new):
        for source in mine["sources"]:  # type: ignore[attr-defined]
            source.pop("path")
    assert old == new
    assert {name for name in staged_files(tmp_path) if not name.endswith("verified.json")} <= files
    assert [source.epochs for source in now.data.train] == [2, None]
    # Both are called `text`, so their paths are their names, which must not change with the copies.
    assert [source.name for source in now.data.train] == [source.path for source in before.data.train]


@pytest.mark.long
def test_what_is_there_is_not_copied_again_unless_it_is_damaged(route: Path, tmp_path: Path) -> None:
    stage(route, tmp_path)
    before = staged_files(tmp_path)
    stage(route, tmp_path)
    assert staged_files(tmp_path) == before
    damaged = next((tmp_path / ROOT_NAME).glob("heldout-*/heldout.bin"))
    damage(damaged, 5)
    assert stage(route, tmp_path)[0]
    assert damaged.read_bytes() == (route / "heldout.bin").read_bytes()


@pytest.mark.long
def test_a_damaged_source_or_a_full_disk_stages_nothing(copied_route: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings, said = stage(copied_route, tmp_path / "file")
    assert not settings and "everything is read from where the recipe says" in said
    damage(copied_route / "b/text.bin")
    settings, said = stage(copied_route, tmp_path)
    assert not settings and "text.bin: FAILED" in said and "if a source is damaged, make it again" in said


def test_the_plan(route: Path, tmp_path: Path) -> None:
    """A folder of indexes is given up, because the copies have their own; a teacher is copied, too."""
    overrides = [
        "objective.name=distillation",
        "model.family=distilbert",
        f"data.sample_index_dir={tmp_path / 'indexes'}",
        f"teacher.path={tmp_path / 'teacher'}",
    ]
    lines = list(staging_lines(config_of(route, *overrides), tmp_path))
    assert "set\tdata.sample_index_dir=null" in lines
    assert any(line.startswith(f"copy\t{tmp_path / 'teacher'}\t") for line in lines)
    assert any(line.startswith("set\tteacher.path=") for line in lines)
