"""slurm/published: the tables are what the planner answers, and every layout in them is possible."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ctxlm_ds.apps.plan.layouts import Layout
from ctxlm_ds.recipe.check import check_config
from ctxlm_ds.recipe.hardware import find_gpu
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.registry import FAMILIES
from ctxlm_ds.tokenizers.train import tokenizer_types
from tools.write_published_scripts import GPUS_PER_NODE, SCRIPTS, ReadyLayout, planner_of, recommended_layout, table

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "slurm" / "published"
LINES = [line for line in (FOLDER / "layouts.txt").read_text().splitlines() if not line.startswith("#")]
GPUS = ("V100-32", "A100-40", "A100-80", "H100", "H200")
REMEDY = "run tools/write_published_scripts.py"


def lines_of(recipe: str) -> list[str]:
    return [line for line in LINES if line.split()[0] == recipe]


def read_layout(line: str) -> ReadyLayout:
    """Weigh a line of layouts.txt anew."""
    recipe, gpu_name, nodes, deepspeed, *settings = line.split()
    gpu = find_gpu(gpu_name)
    values = dict(setting.split("=") for setting in settings)
    tensor = int(values.get("parallel.tensor_parallel_size", "1"))
    pipeline = int(values.get("parallel.pipeline_parallel_size", "1"))
    layout = Layout(
        data=int(nodes) * GPUS_PER_NODE // (tensor * pipeline),
        tensor=tensor,
        pipeline=pipeline,
        zero_stage=int(deepspeed.removeprefix("zero")),
        micro_batch_size=int(values["training.micro_batch_size"]),
        recompute=values.get("training.activation_checkpointing") == "true",
        sequence_parallel=values.get("parallel.sequence_parallel") == "true",
    )
    return ReadyLayout(recipe, gpu, int(nodes), planner_of(recipe, gpu, int(nodes)).weigh(layout))


@pytest.mark.parametrize("script", SCRIPTS)
def test_tables_are_what_the_planner_weighs(script: str) -> None:
    text = (FOLDER / f"{script}.sbatch").read_text()
    recipes, num_nodes = SCRIPTS[script]
    for recipe in recipes:
        layouts = [read_layout(line) for line in lines_of(recipe)]
        assert [layout.line for layout in layouts] == lines_of(recipe), REMEDY
        assert f"\n{table(layouts)}" in text, REMEDY
        assert {(layout.gpu.name, layout.nodes) for layout in layouts} == {
            (gpu, nodes) for gpu in GPUS for nodes in num_nodes
        }


@pytest.mark.parametrize(("script", "gpu"), list(zip(SCRIPTS, [*GPUS, *GPUS], strict=False))[::3])
def test_layouts_are_what_the_planner_recommends(script: str, gpu: str) -> None:
    """One layout of some scripts here; all of them: test_every_layout."""
    recipes, num_nodes = SCRIPTS[script]
    found = recommended_layout(recipes[-1], find_gpu(gpu), num_nodes[-1])
    assert found is not None
    assert found.line in LINES, REMEDY


@pytest.mark.soak
def test_every_layout() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "write_published_scripts.py", "--check"],
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", LINES[::7] + LINES[-1:])
def test_a_layout_is_accepted_by_training(line: str) -> None:
    recipe, _, nodes, _, *settings = line.split()
    check_config(load_config(recipe, settings), int(nodes) * GPUS_PER_NODE)


def test_every_script_has_a_table() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.sbatch")) == sorted(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_differ_only_in_name_recipes_and_resources(script: str) -> None:
    text, recipes = (FOLDER / f"{script}.sbatch").read_text(), SCRIPTS[script][0]
    kind = {1: "pretrain_one", 2: "pretrain_two"}[len(recipes)]
    assert text.endswith(f'\n{kind} {" ".join(recipes)} "$@"\n')
    assert f"#SBATCH --job-name={script}\n" in text
    for name in ("signal", "requeue", "open-mode", "output"):
        pattern = re.compile(rf"^#SBATCH --{name}.*$", re.MULTILINE)
        assert pattern.findall(text) == pattern.findall((ROOT / "slurm" / "pretrain.sbatch").read_text())


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_example_names_a_tokenizer_that_the_recipe_accepts(script: str) -> None:
    """tokenizers/TYPE as tools/train_tokenizer.py makes it, with as many words as the recipe has by default."""
    model = load_config(SCRIPTS[script][0][0]).model
    family = FAMILIES.get(model.family)
    assert f" tokenizer.path=tokenizers/{family.tokenizer}\n" in (FOLDER / f"{script}.sbatch").read_text()
    assert tokenizer_types()[family.tokenizer].default_vocab_size == model.vocab_size == family.vocab_size


def shell(command: str, **environment: str) -> str:
    """A function of common.sh."""
    done = subprocess.run(
        ["bash", "-c", f'source "$CTXLM_HOME/slurm/published/common.sh" && {command}'],
        env={"PATH": os.environ["PATH"], "CTXLM_HOME": str(ROOT), "CTXLM_PYTHON": sys.executable, **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_job_finds_its_layout() -> None:
    where = {"SLURM_NTASKS": "128", "SLURM_JOB_NUM_NODES": "16", "CTXLM_GPU": "V100-32"}
    said = shell('find_layout roberta-large; printf "%s|" "${LAYOUT[@]}"', **where)
    line = next(line for line in LINES if line.startswith("roberta-large V100-32 16 "))
    words = line.split()
    assert said.splitlines()[-1] == "|".join(["--deepspeed_config", words[3], "--set", *words[4:], ""])
    for other in ({"SLURM_NTASKS": "64"}, {"SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS": "24"}, {"CTXLM_GPU": "T4"}):
        said = shell('find_layout roberta-large; echo "${#LAYOUT[@]}"', **{**where, **other})
        assert "no layout for" in said
        assert said.endswith("0\n")


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        ("NVIDIA H200, 143771 MiB", "H200"),
        ("NVIDIA H100 80GB HBM3, 81559 MiB", "H100"),
        ("NVIDIA A100-SXM4-80GB, 81920 MiB", "A100-80"),
        ("NVIDIA A100-SXM4-40GB, 40960 MiB", "A100-40"),
        ("Tesla V100-SXM2-32GB, 32768 MiB", "V100-32"),
        ("Tesla V100-SXM2-16GB, 16384 MiB", ""),
        ("NVIDIA L4, 23034 MiB", ""),
    ],
)
def test_the_gpu_is_known_by_what_nvidia_smi_says(answer: str, name: str, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '{answer}'\necho '{answer}'\n")
    smi.chmod(0o755)
    assert shell("gpu_type", PATH=f"{tmp_path}:{os.environ['PATH']}").strip() == name
