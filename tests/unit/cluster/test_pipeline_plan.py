"""From a recipe to steps: names, order, commands that the tools accept, recipes that pretraining accepts."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ctxlm_ds.cluster.pipeline_plan import make_plan
from ctxlm_ds.cluster.pipeline_steps import Plan
from ctxlm_ds.recipe.load import load_config
from tests.unit.cluster.pipelines import ROOT, recipe_plan, write_recipe

PARSERS = ("train_tokenizer", "preprocess_data", "merge_datasets", "build_samples")


def parsed(command: str) -> argparse.Namespace:
    """A command line read by the tool's own parser."""
    words = shlex.split(command)
    assert words[0] == "python" and (ROOT / words[1]).is_file()
    module = importlib.import_module(f"tools.{Path(words[1]).stem}")
    parser: argparse.ArgumentParser = module.build_parser()
    return parser.parse_args(words[2:])


def by_tool(plan: Plan, tool: str) -> list[argparse.Namespace]:
    """The commands of one tool, in order."""
    lines = [line for step in plan.steps for line in step.commands if f"tools/{tool}.py" in line]
    return [parsed(line) for line in lines]


def test_the_shipped_recipe_goes_from_text_to_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path, {})  # for the texts
    texts = f"pipeline.input=[{tmp_path}/train.jsonl]", f"pipeline.heldout=[{tmp_path}/heldout.jsonl]"
    plan = make_plan("bert-pipeline-laptop", texts)
    assert [step.name for step in plan.steps] == [
        "tokenizer", "preprocess", "merge", "preprocess-heldout", "samples", "pretrain", "samples-2", "pretrain-2",
        "export",
    ]  # fmt: skip
    assert plan.folder == tmp_path / "pipelines" / "bert-pipeline-laptop"
    assert [len(step.tasks) for step in plan.steps if step.name == "preprocess"] == [2]
    assert {step.name: step.comes_after for step in plan.steps}["pretrain-2"] == ("merge", "pretrain", "samples-2")
    assert not any(step.unreadable for step in plan.steps)
    assert list(tmp_path.glob("pipelines*")) == [], "planning writes nothing"


def test_the_tools_take_every_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    section = {"shards": 3, "workers": 5, "json_keys": ["text", "title"], "max_bad_records": 2}
    plan = recipe_plan(tmp_path, section)
    for tool in PARSERS:
        assert by_tool(plan, tool), tool
    shards, heldout = by_tool(plan, "preprocess_data")
    assert (shards.shard, shards.workers, shards.json_keys) == ("$SLURM_ARRAY_TASK_ID/3", 5, ["text", "title"])
    assert shards.split_sentences and not shards.append_eod and heldout.shard == "0/1"
    merged = by_tool(plan, "merge_datasets")
    assert [Path(merge.output_prefix).name for merge in merged] == ["train_text_sentence", "train_title_sentence"]
    assert [len(merge.input) for merge in merged] == [3, 3]
    names = [[output.path for output in task] for task in plan.by_name["preprocess"].tasks]
    assert [merge.input for merge in merged] == [[task[key] for task in names] for key in (0, 1)]
    export = shlex.split(plan.by_name["export"].commands[0])
    assert export[2] == "to-hf" and export[export.index("--checkpoint") + 1] == str(plan.folder / "pretrain")


@pytest.mark.parametrize(
    ("extends", "kind", "sentences", "eod"),
    [("bert-laptop", "wordpiece", True, False), ("roberta-laptop", "bpe", True, False),
     ("gpt2-laptop", "gpt2", False, True)],
)  # fmt: skip
def test_what_follows_from_the_model(tmp_path: Path, extends: str, kind: str, sentences: bool, eod: bool) -> None:
    plan = recipe_plan(tmp_path, extends=extends)
    (tokenizer,) = by_tool(plan, "train_tokenizer")
    data = by_tool(plan, "preprocess_data")
    assert tokenizer.type == kind
    assert [(run.split_sentences, run.append_eod) for run in data] == [(sentences, eod)] * 2


def test_one_shard_needs_no_merge(tmp_path: Path) -> None:
    plan = recipe_plan(tmp_path)
    assert "merge" not in plan.by_name and not plan.by_name["preprocess"].temporary
    assert plan.by_name["pretrain"].needs == ("preprocess",)
    assert plan.outputs("preprocess")[0].path == str(tmp_path / "out" / "data" / "train_text_sentence")


def test_recipes_of_the_phases_are_what_pretraining_takes(tmp_path: Path) -> None:
    phases = [{"set": ["data.seq_length=64", "training.max_steps=7"]}, {"recipe": "bert-mini", "set": ["name=other"]}]
    plan = recipe_plan(tmp_path, {"phases": phases}, "training.max_steps=9")
    configs = []
    for name, text in plan.recipes.items():
        (tmp_path / name).write_text(text)
        configs.append(load_config(tmp_path / name))
    first, second, third = configs
    assert list(plan.recipes) == ["pretrain.yaml", "pretrain-2.yaml", "pretrain-3.yaml"]
    assert (first.training.max_steps, second.training.max_steps, second.data.seq_length) == (9, 7, 64)
    assert third.training.max_steps == load_config("bert-mini").training.max_steps, "a recipe of its own, as it is"
    out = tmp_path / "out"
    assert [Path(str(config.run_dir)).name for config in configs] == ["pretrain", "pretrain-2", "pretrain-3"]
    assert first.run_dir == str(out / "pretrain")
    assert [config.initialize_from for config in configs] == [None, first.run_dir, second.run_dir]
    for config in configs:
        assert config.pipeline is None and config.tokenizer.path == str(out / "tokenizer")
        assert [source.path for source in config.data.train] == [str(out / "data" / "train_text_sentence")]
        assert [source.name for source in config.data.validation] == ["heldout"]


def test_the_recipe_of_a_phase_may_lie_beside_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "second.yaml").write_text("extends: bert-laptop\ndata: {seq_length: 256}\n")
    recipe = write_recipe(tmp_path, {"phases": [{"recipe": "second.yaml"}]})
    monkeypatch.chdir("/")
    assert "seq_length: 256" in make_plan(recipe).recipes["pretrain-2.yaml"]


def test_finished_datasets_and_tokenizer_begin_at_the_samples(tmp_path: Path) -> None:
    section = {"input": [], "heldout": [], "tokenizer": None}
    sections = {"tokenizer": {"path": "tok"}, "data": {"train": ["data/a", {"path": "data/b", "epochs": 2}]}}
    plan = recipe_plan(tmp_path, section, **sections)
    assert [step.name for step in plan.steps] == ["samples", "pretrain", "export"]
    assert "- path: data/b" in plan.recipes["pretrain.yaml"]


def test_appended_steps_follow_and_know_the_places(tmp_path: Path) -> None:
    append = [
        {"name": "glue", "command": "python glue.py {hf_dir} ${HOME} {x,y} {print}", "output": "{output_dir}/glue"},
        {"name": "squad", "command": "echo {dataset} {heldout} {tokenizer} {run_dir}", "after": ["export"]},
        {"name": "report", "command": "true", "after": ["glue", "squad"]},
    ]
    plan = recipe_plan(tmp_path, {"append": append, "output_dir": str(tmp_path / "a folder")})
    out = tmp_path / "a folder"
    assert plan.by_name["glue"].commands == (f"python glue.py '{out}/hf' ${{HOME}} {{x,y}} {{print}}",)
    assert plan.outputs("glue")[0].path == f"{out}/glue"
    assert [plan.by_name[name].needs for name in ("glue", "squad", "report")] == [
        ("export",), ("export",), ("glue", "squad"),
    ]  # fmt: skip
    assert shlex.split(plan.by_name["squad"].commands[0])[1:] == [
        f"{out}/data/train_text_sentence", f"{out}/data/heldout_text_sentence", f"{out}/tokenizer", f"{out}/pretrain",
    ]  # fmt: skip


def test_planning_needs_neither_torch_nor_numpy() -> None:
    program = (
        "import sys, ctxlm_ds.cluster.pipeline, ctxlm_ds.cluster.pipeline_step\n"
        "print([name for name in ('torch', 'numpy', 'deepspeed', 'transformers', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_job_of_a_step_needs_the_standard_library_alone() -> None:
    """It runs outside of a container, where nothing is installed."""
    program = (
        "import sys, ctxlm_ds.cluster.pipeline_step\n"
        "print([name for name in ('pydantic', 'yaml', 'numpy', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_script_may_be_a_symbolic_link(tmp_path: Path) -> None:
    link = tmp_path / "pipeline"
    link.symlink_to(ROOT / "slurm" / "pipeline.sh")
    environ = {key: value for key, value in os.environ.items() if not key.startswith("CTXLM_")}
    done = subprocess.run(
        [str(link), "--help"], cwd=tmp_path, env={**environ, "CTXLM_PYTHON": sys.executable}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: slurm/pipeline.sh")


def test_a_dry_run_shows_every_command_and_writes_nothing(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, {"shards": 2, "phases": [{"set": ["training.max_steps=5"]}]})
    before = sorted(tmp_path.rglob("*"))
    environ = {key: value for key, value in os.environ.items() if not key.startswith("CTXLM_")}
    done = subprocess.run(
        ["slurm/pipeline.sh", recipe, "--dry-run", "--set", "pipeline.resources.pretrain.nodes=3"],
        cwd=ROOT, env={**environ, "CTXLM_PYTHON": sys.executable}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(tmp_path.rglob("*")) == before
    lines = done.stdout.splitlines()
    assert len([line for line in lines if "sbatch --parsable" in line]) == 9
    assert lines[-1] == "nothing was submitted; 9 of 9 steps would be"
    plan = make_plan(recipe)
    for step in plan.steps:
        assert all(f"    {command}" in lines for command in step.commands)
    pretrain = next(line for line in lines if line.endswith(f"slurm/pretrain.sbatch {plan.folder}/steps/pretrain.yaml"))
    assert "--nodes=3" in pretrain and "--dependency=afterok:<merge>:<samples>" in pretrain
    assert pretrain.startswith("CTXLM_PIPELINE_ORDER=")
