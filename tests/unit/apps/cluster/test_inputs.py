"""Copies on a node's own disk by slurm/stage.sh: what is copied, what proves it, and what a run reads then."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ctxlm_ds.apps.cluster.inputs import ROOT_NAME, staging_lines
from ctxlm_ds.apps.plan.check_run import index_places
from ctxlm_ds.tokenizers.load import load_tokenizer
from tests.unit.apps.run_inputs import config_of, rows_of

STAGE = Path(__file__).resolve().parents[4] / "slurm" / "stage.sh"


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
def test_a_damaged_source_or_a_full_disk_stages_nothing(route: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(route, tmp_path / "route")
    recipe = copied / "recipe.json"
    recipe.write_text(recipe.read_text().replace(str(route), str(copied)))
    (tmp_path / "file").write_text("")
    settings, said = stage(copied, tmp_path / "file")
    assert not settings and "everything is read from where the recipe says" in said
    damage(copied / "b/text.bin")
    settings, said = stage(copied, tmp_path)
    assert not settings and "text.bin: FAILED" in said and "if a source is damaged, make it again" in said


def test_the_plan(route: Path, tmp_path: Path) -> None:
    """A folder of indexes is given up, because the copies have their own; a teacher is copied, too."""
    overrides = [
        "objective.name=distillation",
        "model.family=distilbert",
        f"data.sample_index_dir={tmp_path / 'indexes'}",
        f"teacher.path={tmp_path / 'teacher'}",
    ]
    config = config_of(route, *overrides)
    places = index_places(config.row_settings, config.tokenizer.path, config.model.vocab_size)
    folders = {"tokenizer.path": config.tokenizer.path, "teacher.path": config.teacher.path}
    lines = list(staging_lines(config.data, places, folders, tmp_path))
    assert "set\tdata.sample_index_dir=null" in lines
    assert any(line.startswith(f"copy\t{tmp_path / 'teacher'}\t") for line in lines)
    assert any(line.startswith("set\tteacher.path=") for line in lines)
