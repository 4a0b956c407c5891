"""A teacher's outputs computed ahead: losses and gradients as with the teacher in the step, in every layout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds import run as run_builder
from ctxlm_ds.run_data import build_loaders
from ctxlm_ds.data.stream.run_datasets import build_run_rows
from ctxlm_ds.errors import ConfigError, CtxlmError, DataError
from ctxlm_ds.export import stored_outputs
from ctxlm_ds.export.stored_loader import open_rows
from ctxlm_ds.export.teacher import with_checked_teacher
from ctxlm_ds.objectives.build import build_objective
from ctxlm_ds.parallel.topology import build_topology
from ctxlm_ds.process.launch import quiet_libraries
from ctxlm_ds.recipe.deepspeed import build_deepspeed_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.training.engine.runtime import init_process_group
from tests.families.runs import LEARNING_RATE, ONE_RANK, ROWS, STEPS, Layout, Run
from tests.families.test_contract import Results
from ctxlm_ds.commands import teacher_outputs

pytestmark = pytest.mark.dist
DISTILBERT, TINYBERT = "distilbert+teacher", "tinybert+teacher"
HELD_OUT_ROWS = 7
Changes = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    found = Results(tmp_path_factory.mktemp("teacher_outputs"))
    yield found
    found.groups.close()


def recipe(run: Run, changes: Changes) -> RunConfig:
    """The recipe of a run with held-out rows; `changes` are settings by section."""
    config = run.config()
    sections = config.model_dump(mode="json")
    sections["data"]["validation"] = [{"name": "heldout", "path": config.data.train[0].path}]
    sections["evaluation"]["max_rows"] = HELD_OUT_ROWS
    sections["training"]["max_steps"] = STEPS
    for name, settings in changes.items():
        sections[name] |= settings
    return RunConfig.model_validate(sections)


def write(rank: int, world_size: int, run: Run, folder: Path, changes: Changes, shard_bytes: int) -> list[str]:
    """Case: write the outputs; what went wrong on a rank, and the names of the files."""
    quiet_libraries()
    init_process_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teacher_outputs, "SHARD_BYTES", shard_bytes)
        try:
            teacher_outputs.write_outputs(recipe(run, changes), folder, STEPS, build_topology(rank, world_size))
        except CtxlmError as error:
            return [str(error)]
    return sorted(path.name for path in folder.iterdir())


def train(
    rank: int, world_size: int, run: Run, folder: Path | None, changes: Changes, start_row: int = 0
) -> dict[str, Any]:
    """Case: losses, norms and held-out figures, with stored outputs or with the teacher in the step."""
    quiet_libraries()
    init_process_group()
    layout, config = run.layout, recipe(run, changes)
    tokenizer = load_tokenizer(config.tokenizer.path)
    topology = build_topology(0, 1, layout.tensor, layout.pipeline)
    settings = build_deepspeed_config(config, {"zero_optimization": {"stage": layout.stage}}, world_size)
    objective = build_objective(config.objective, tokenizer)
    outputs = None if folder is None else str(folder)
    config = config.model_copy(update={"teacher": config.teacher.model_copy(update={"outputs": outputs})})
    try:
        config = with_checked_teacher(config, tokenizer)
        rows = build_run_rows(config.row_settings, tokenizer, objective)
        engine = run_builder.build_engine(config, settings, objective, topology)
        run_builder.initialize_weights(config, engine)
        last = config.training.rows_after(config.training.max_steps)
        stored = open_rows(config, rows, tokenizer, engine.module.inputs, last)
    except CtxlmError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    steps, validation = build_loaders(config, rows, objective, topology, start_row, stored)
    read = islice(steps, STEPS - start_row // ROWS)
    results = [engine.train_step(step, number, LEARNING_RATE) for number, step in enumerate(read)]
    return {
        "losses": [result.loss for result in results], "norms": [result.grad_norm for result in results],
        "held_out": engine.evaluate(validation["heldout"]),
        "built": [name for name in engine._frozen if name.startswith("teacher.")],
    }  # fmt: skip


def written(results: Results, name: str, ranks: int = 1, changes: Changes | None = None, shard_bytes: int = 1) -> Path:
    """The folder of the outputs of a run, in files of one micro-batch unless `shard_bytes` is larger."""
    values = [str(value) for section in (changes or {}).values() for value in section.values()]
    folder = results.folder / "-".join(["outputs", name, str(ranks), *values])
    run = results.run(name)
    if not folder.exists():
        results.groups.run(write, ranks, run, folder, changes or {}, shard_bytes)
        assert stored_outputs.read_manifest(folder).files
    return folder


def trained(results: Results, name: str, folder: Path | None, layout: Layout = ONE_RANK, **sections: Any) -> Any:
    start_row = sections.pop("start_row", 0)
    return results.groups.run(train, layout.world_size, results.run(name).on(layout), folder, sections, start_row)[-1]


@pytest.mark.parametrize("name", [DISTILBERT, TINYBERT])
def test_one_rank_gives_bitwise_the_same(results: Results, name: str) -> None:
    found, wanted = (trained(results, name, folder) for folder in (written(results, name), None))
    assert {key: found[key] for key in ("losses", "norms", "held_out")} == {
        key: wanted[key] for key in ("losses", "norms", "held_out")
    }
    assert not any("encoder" in one for one in found["built"]) and any("encoder" in one for one in wanted["built"])


def test_bf16_is_stored_as_bf16_and_gives_bitwise_the_same(results: Results) -> None:
    changes: Changes = {"training": {"precision": "bf16"}}
    folder = written(results, DISTILBERT, changes=changes)
    assert stored_outputs.read_manifest(folder).dtype == "BF16"
    found, wanted = (trained(results, DISTILBERT, one, Layout(stage=1), **changes) for one in (folder, None))
    assert (found["losses"], found["norms"]) == (wanted["losses"], wanted["norms"])


LAYOUTS = [
    Layout(data=2), Layout(data=2, stage=3), Layout(tensor=2, sequence_parallel=True), Layout(pipeline=2, stage=1),
    Layout(tensor=2, recompute=True),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", [DISTILBERT, TINYBERT])
def test_every_layout_reads_what_two_ranks_wrote(results: Results, name: str, layout: Layout) -> None:
    """Micro-batches of 4 rows at training, of 2 at writing."""
    sections: Changes = {"training": {**recipe(results.run(name), {}).training.model_dump(), "micro_batch_size": 4}}
    found = trained(results, name, written(results, name, ranks=2), layout, **sections)
    wanted = trained(results, name, None)
    for key in ("losses", "norms"):
        assert found[key] == pytest.approx(wanted[key], rel=1e-5)
    assert found["held_out"] == pytest.approx(wanted["held_out"], rel=1e-5)


@pytest.mark.parametrize(("precision", "theirs"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_a_pipeline_sends_tensors_of_another_precision(results: Results, precision: str, theirs: str) -> None:
    changes: Changes = {"training": {"precision": precision}, "teacher": {"precision": theirs}}
    folder, layout = written(results, DISTILBERT, changes=changes), Layout(pipeline=2, stage=1)
    found, wanted = (trained(results, DISTILBERT, one, layout, **changes) for one in (folder, None))
    assert (found["losses"], found["norms"]) == (wanted["losses"], wanted["norms"])


def test_a_resume_and_a_batch_ramp_read_their_rows(results: Results) -> None:
    folder = written(results, DISTILBERT, ranks=2)
    for sections in ({"start_row": ROWS}, {"training": {"batch_ramp": [4, 4, ROWS], "micro_batch_size": 2}}):
        found, wanted = (trained(results, DISTILBERT, one, **sections) for one in (folder, None))
        assert (found["losses"], found["norms"]) == (wanted["losses"], wanted["norms"])
        assert len(set(found["losses"])) == len(found["losses"])


REFUSALS: list[tuple[Changes, str]] = [
    ({"training": {"seed": 7}}, "training.seed 1234 -> 7"),
    ({"training": {"max_steps": STEPS + 1}}, r"training.max_steps \(data.train\) 24 rows -> 32 rows"),
    ({"objective": {"mask_prob": 0.2}}, "objective.mask_prob 0.15 -> 0.2"),
    ({"objective": {"soft_targets": "masked"}}, 'objective.soft_targets tokens -> masked'),
    ({"data": {"seq_length": 16}}, "data.seq_length 32 -> 16"),
    ({"teacher": {"precision": "bf16"}}, "teacher.precision fp32 -> bf16"),
    ({"evaluation": {"mask_prob": 0.1}}, "evaluation.mask_prob null -> 0.1"),
    ({"evaluation": {"max_rows": 9}}, r"evaluation.max_rows \(data.validation heldout\) 7 rows -> 9 rows"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_another_run_is_one_message(results: Results, changes: Changes, message: str) -> None:
    folder = written(results, DISTILBERT, ranks=2)
    error = trained(results, DISTILBERT, folder, **changes)["error"]
    assert re.search(f"^ConfigError: teacher.outputs: .* was written for another run: [^,]*{message}; ", error), error


def test_weights_of_the_losses_may_change(results: Results) -> None:
    folder = written(results, DISTILBERT, ranks=2)
    sections: Changes = {"objective": {"cosine_weight": 0.0, "temperature": 3.0}}
    found, wanted = (trained(results, DISTILBERT, one, **sections) for one in (folder, None))
    assert found["losses"] == wanted["losses"]


def test_cut_off_and_missing_files_are_written_again(results: Results, tmp_path: Path) -> None:
    folder, run = tmp_path / "outputs", results.run(DISTILBERT)
    names = results.groups.run(write, 1, run, folder, {}, 1)[0]
    assert len(names) == 1 + STEPS * ROWS // 2 + -(-HELD_OUT_ROWS // 2)
    contents = {name: (folder / name).read_bytes() for name in names}
    (folder / names[0]).unlink()
    assert re.search(f"^DataError: .*{names[0]} is missing", trained(results, DISTILBERT, folder)["error"])
    (folder / names[1]).write_bytes(contents[names[1]][:-9])
    (folder / names[2]).write_bytes(contents[names[2]][:-1] + b"\x55")
    assert results.groups.run(write, 1, run, folder, {}, 1)[0] == names
    assert {name: (folder / name).read_bytes() for name in names} == contents


def test_an_interrupted_folder_is_refused_and_continued(results: Results, tmp_path: Path) -> None:
    folder, run = tmp_path / "outputs", results.run(DISTILBERT)
    names = results.groups.run(write, 1, run, folder, {}, 1 << 20)[0]
    contents = {name: (folder / name).read_bytes() for name in names}
    outputs = stored_outputs.read_manifest(folder)
    stored_outputs.write_manifest(folder, outputs.__class__(**{**vars(outputs), "files": None}))
    assert "is not complete; run ctxlm teacher again" in trained(results, DISTILBERT, folder)["error"]
    assert results.groups.run(write, 1, run, folder, {}, 1 << 20)[0] == names
    assert {name: (folder / name).read_bytes() for name in names} == contents
    (error,) = results.groups.run(write, 1, run, folder, {"training": {"seed": 2}}, 1 << 20)[0]
    assert "holds the outputs of another run: training.seed 1234 -> 2; choose another folder" in error


def test_a_disk_without_space_is_refused(results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = stored_outputs.read_manifest(written(results, DISTILBERT, ranks=2))
    usage = teacher_outputs.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(teacher_outputs.shutil, "disk_usage", lambda folder: usage._replace(free=1 << 26))
    with pytest.raises(ConfigError, match=r"kB are needed and 67.1 MB are free; choose another disk"):
        teacher_outputs.begin(tmp_path / "outputs", outputs)
    (tmp_path / "other").write_text("")
    with pytest.raises(ConfigError, match="is not empty and has no teacher_outputs.json"):
        teacher_outputs.begin(tmp_path, outputs)


def test_a_run_that_reads_more_rows_is_told(results: Results) -> None:
    with pytest.raises(AssertionError, match=f"{DataError.__name__}: teacher.outputs holds 24 rows"):
        trained(results, DISTILBERT, written(results, DISTILBERT, ranks=2), start_row=ROWS + 4)
