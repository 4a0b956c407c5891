"""Which files a checkpoint of Megatron has, and what a damaged folder says."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.foreign.megatron_checkpoint import read_megatron
from tests.unit.export.foreign.test_megatron_checkpoint import write

CONTENT = {"args": Namespace(num_attention_heads=4), "checkpoint_version": 3.0, "model": {"a": {"b": torch.ones(2)}}}


def test_the_newest_checkpoint_of_a_run_is_read(tmp_path: Path) -> None:
    write(tmp_path / "iter_0000001", CONTENT, "mp_rank_00")
    write(tmp_path / "iter_0000020", CONTENT, "mp_rank_00")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    found = read_megatron(tmp_path)
    assert found.folder == tmp_path / "iter_0000020" and found.version == 3.0
    assert list(found.stages[0][0]) == ["a.b"] and found.arguments == {"num_attention_heads": 4}


def test_virtual_stages_are_in_the_order_of_the_layers(tmp_path: Path) -> None:
    for stage in range(2):
        chunks = {f"model{chunk}": {f"chunk{chunk}stage{stage}": torch.ones(1)} for chunk in range(2)}
        write(tmp_path, {"args": CONTENT["args"], **chunks}, f"mp_rank_00_{stage:03d}")
    names = [next(iter(ranks[0])) for ranks in read_megatron(tmp_path).stages]
    assert names == ["chunk0stage0", "chunk0stage1", "chunk1stage0", "chunk1stage1"]


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", ".."])
def test_a_tracker_cannot_leave_the_folder(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(tmp_path, CONTENT, "elsewhere/mp_rank_00")
    run.mkdir()
    (run / "latest").write_text(name)
    with pytest.raises(ExportError, match="which is no folder there"):
        read_megatron(run)


def test_incomplete_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="no such folder"):
        read_megatron(tmp_path / "none")
    with pytest.raises(ExportError, match="no mp_rank_"):
        read_megatron(tmp_path)
    for name in ("mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001"):
        write(tmp_path / "run", CONTENT, name)
    with pytest.raises(ExportError, match="rank 1 of stage 1 is missing"):
        read_megatron(tmp_path / "run")
    (tmp_path / "run" / "mp_rank_01_000" / "model_optim_rng.pt").unlink()
    with pytest.raises(ExportError, match=r"mp_rank_01_000 has neither model_optim_rng\.pt nor"):
        read_megatron(tmp_path / "run")
    bare = {"args": CONTENT["args"]}
    for number, (ranks, message) in enumerate([
        ([{"model": {"a": torch.ones(1)}}], "no arguments of the run"),
        ([bare], "hold no model"),
        ([CONTENT, bare], "the file of a rank holds no model"),
        ([CONTENT | {"checkpoint_version": "three"}], "checkpoint_version is 'three', not a number"),
    ]):  # fmt: skip
        for rank, content in enumerate(ranks):
            write(tmp_path / str(number), content, f"mp_rank_{rank:02d}")
        with pytest.raises(ExportError, match=message):
            read_megatron(tmp_path / str(number))
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / ".metadata").write_bytes(b"")
    with pytest.raises(ExportError, match="torch_dist; convert it with Megatron-LM's"):
        read_megatron(tmp_path / "dist")


def test_a_rank_of_the_engine_may_not_be_missing(tmp_path: Path) -> None:
    for rank in (0, 2):
        torch.save({"module": {}, "args": CONTENT["args"]}, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
    with pytest.raises(ExportError, match="rank 1 of stage 0 is missing"):
        read_megatron(tmp_path)
    for layer, rank in ((1, 0), (1, 1), (3, 0)):
        torch.save({"weight": torch.ones(1)}, tmp_path / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
    with pytest.raises(ExportError, match="rank 1 of stage 1 is missing"):
        read_megatron(tmp_path)
