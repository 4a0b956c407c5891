"""slurm/published: the tables are what the planner answers, and every layout in them is possible."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from ctxlm_ds.apps.plan.check_run import layout_of
from ctxlm_ds.recipe.check import check_config
from ctxlm_ds.recipe.hardware import find_gpu
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.phases import run_phases
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.registry import FAMILIES
from ctxlm_ds.tokenizers.train import tokenizer_types
from tools.write_published_scripts import GPUS_PER_NODE, SCRIPTS, ReadyLayout, planners_of, recommended_layout, tables

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "slurm" / "published"
LINES = [line for line in (FOLDER / "layouts.txt").read_text().splitlines() if not line.startswith("#")]
GPUS = ("V100-32", "A100-40", "A100-80", "H100", "H200")
REMEDY = "run tools/write_published_scripts.py"


def lines_of(recipe: str) -> list[str]:
    return [line for line in LINES if line.split()[0] == recipe]


def phases_of(line: str) -> list[RunConfig]:
    """The recipe of each phase with the settings of a line of layouts.txt."""
    recipe, _, nodes, _, *settings = line.split()
    return [phase.config for phase in run_phases(load_config(recipe, settings), int(nodes) * GPUS_PER_NODE)]


def read_layout(line: str) -> ReadyLayout:
    """Weigh a line of layouts.txt again, which training accepts."""
    recipe, gpu_name, nodes, deepspeed, *_ = line.split()
    gpu, stage, world_size = find_gpu(gpu_name), int(deepspeed.removeprefix("zero")), int(nodes) * GPUS_PER_NODE
    layouts = [layout_of(phase.parallel, phase.training, stage, world_size) for phase in phases_of(line)]
    plans = []
    for planner, layout in zip(planners_of(recipe, gpu, int(nodes)), layouts, strict=True):
        plans.append(planner.weigh(layout))
        assert plans[-1].memory.total <= planner.cluster.usable_bytes, line
    for phase in phases_of(line):
        check_config(phase, world_size)
        assert phase.training.precision == ("fp16" if gpu_name == "V100-32" else "bf16")
    return ReadyLayout(recipe, gpu, int(nodes), tuple(plans))


@pytest.mark.parametrize("script", SCRIPTS)
def test_tables_are_what_the_planner_weighs(script: str) -> None:
    layouts = [read_layout(line) for line in lines_of(script)]
    assert [layout.line for layout in layouts] == lines_of(script), REMEDY
    assert f" ----\n{tables(layouts)}# ---- " in (FOLDER / f"{script}.sbatch").read_text(), REMEDY
    assert [(layout.gpu.name, layout.nodes) for layout in layouts] == list(product(GPUS, SCRIPTS[script]))


@pytest.mark.parametrize(("script", "gpu"), list(zip(SCRIPTS, [*GPUS, *GPUS], strict=False))[::3])
def test_layouts_are_what_the_planner_recommends(script: str, gpu: str) -> None:
    """One layout of some scripts here; all of them: test_every_layout."""
    found = recommended_layout(script, find_gpu(gpu), SCRIPTS[script][-1])
    assert found is not None
    assert found.line in LINES, REMEDY


@pytest.mark.soak
def test_every_layout() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "write_published_scripts.py", "--check"],
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_every_script_has_a_table() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.sbatch")) == sorted(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_differ_only_in_recipe_and_resources(script: str) -> None:
    text = (FOLDER / f"{script}.sbatch").read_text()
    assert text.endswith(f'\npretrain_one {script} "$@"\n')
    assert f"#SBATCH --job-name={script}\n" in text
    for name in ("signal", "requeue", "open-mode", "output"):
        pattern = re.compile(rf"^#SBATCH --{name}.*$", re.MULTILINE)
        assert pattern.findall(text) == pattern.findall((ROOT / "slurm" / "pretrain.sbatch").read_text())


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_example_names_a_tokenizer_that_the_recipe_accepts(script: str) -> None:
    """tokenizers/TYPE as tools/train_tokenizer.py makes it, with as many words as the recipe has by default."""
    model = load_config(script).model
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
        ("NVIDIA GH200 480GB, 97871 MiB", ""),
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
