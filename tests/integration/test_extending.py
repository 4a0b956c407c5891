"""The package of docs/extending.md: installed outside the project, named in a recipe, trained under two layouts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.integration.conftest import Prepared
from tests.integration.pages import commands, shell, write_files
from tests.integration.route import FORKED, ROOT, Finished, call, launcher, metrics

PAGE = "extending.md"
ALONE = (
    "the_planner_counts_what_is_built", "every_parameter_has_its_own_initial_value", "impossible_layouts_are_refused",
)  # fmt: skip
CHOSEN = "trains or rare_words and one_rank and (tp2-pp1 or zero3 or pp2-dp1-zero1) and not tp2-pp2 or "
CHOSEN += " or ".join(f"{name}[bag_mixer]" for name in ALONE)
"""Cases of the contract suite: parts of the tests' names."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, bert_route: Prepared) -> Path:
    """A folder with the page's files, its package installed, and the data that its recipe names."""
    folder = bert_route.link(tmp_path_factory.mktemp("toy"), wiki=bert_route.train)
    write_files(PAGE, folder)
    install = commands(PAGE).splitlines()[0]
    assert "install" in install
    shell(install, folder)
    return folder


def here(folder: Path, *words: object, check: bool = True) -> Finished:
    """Run a command in a fork that finds the installed package."""
    return call(FORKED, 1, *words, folder=folder, check=check, PYTHONPATH=str(folder / "site"))


def test_the_page_runs_as_written(folder: Path) -> None:
    check, *trainings = commands(PAGE).splitlines()[1:]
    resolved = here(folder, *check.removeprefix("python ").split()).stdout
    assert "family: bag_mixer" in resolved and "rare_from: 200" in resolved
    assert "name: normed" in resolved and "name: stairs" in resolved and "linear: float64" in resolved
    for training in trainings:
        words = training.removeprefix("torchrun --standalone --nproc-per-node 2 -m ctxlm_ds.pretrain ").split()
        call(*launcher("forked", 2), *words, folder=folder, PYTHONPATH=str(folder / "site"))
    tensor, stages = (metrics(folder / "runs" / name) for name in ("tensor", "stages"))
    assert stages == pytest.approx(tensor, rel=1e-5)
    assert len(tensor) == 30 and tensor[30] < 0.95 * tensor[1]
    lowest = json.loads((folder / "runs" / "tensor" / "lowest.json").read_text())
    assert (lowest["loss"], lowest["step"]) == min((loss, step) for step, loss in tensor.items())
    assert metrics(folder / "runs" / "tensor", "rare_words").keys() == tensor.keys()
    rates = metrics(folder / "runs" / "tensor", "learning_rate")
    assert rates[10] == 2e-3 and rates[11] == rates[20] == pytest.approx(1.4e-3)
    assert f"30,train/loss,{tensor[30]}" in (folder / "runs" / "tensor" / "figures.csv").read_text().splitlines()


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (
            "model.inner_sise=64 model.num_attention_heads=4",
            ["model.inner_sise: unknown setting (value 64); did you mean model.inner_size?",
             "model.num_attention_heads"],
        ),
        (
            "objective.name=causal_lm parallel.tensor_parallel_size=3",
            ["bag_mixer does not compute", "3 does not divide model.inner_size; 2 would do"],
        ),
        (
            "parallel.context_parallel_size=2",
            ["parallel.context_parallel_size: 2, but layers of model.family bag_mixer read complete rows"],
        ),
    ],
    ids=["settings", "combinations", "shared rows"],
)  # fmt: skip
def test_mistakes_are_refused_by_name(folder: Path, overrides: str, messages: list[str]) -> None:
    words = f"-m ctxlm_ds.pretrain --config recipe.yaml --check --set {overrides}".split()
    done = here(folder, *words, check=False)
    assert done.returncode == 2
    for message in messages:
        assert message in " ".join(done.stderr.split()), done.stderr


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        ("", "missing 1 required keyword-only argument: 'shared'"),
        (', shared="rows"', "field rare_labels of the objective"),
    ],
    ids=["missing", "misspelled"],
)
def test_a_field_says_how_ranks_share_it(folder: Path, tmp_path: Path, shared: str, message: str) -> None:
    changed = shutil.copytree(folder, tmp_path / "toy", symlinks=True)
    for module in (changed / "toy_family.py", changed / "site" / "toy_family.py"):
        module.write_text(module.read_text().replace(', shared="slots"', shared))
    words = "-m ctxlm_ds.pretrain --config recipe.yaml --deepspeed_config zero1 --set run_dir=broken"
    done = here(changed, *words.split(), "training.max_steps=1", check=False)
    assert done.returncode and message in done.stderr and not (changed / "broken" / "checkpoints").exists()


def test_a_kind_of_tokenizer_is_trained_and_opened(folder: Path) -> None:
    (folder / "text").mkdir()
    (folder / "text" / "train.jsonl").write_text('{"text": "a bad cab"}\n' * 3)
    page = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    line = next(line.strip() for line in page.splitlines() if "--type letters" in line and "ctxlm" in line)
    here(folder, "-m", "ctxlm_ds.cli", *line.removeprefix("ctxlm ").split())
    code = "from ctxlm_ds import *; t = open_tokenizer('letters'); print(t.kind, t.decode(t.encode_batch(['cab'])[0]))"
    (folder / "opened.py").write_text(code)
    assert here(folder, "opened.py").stdout == "letters c a b\n"
    words = ["-m", "ctxlm_ds.cli", "tokenizer", "--input", "text/train.jsonl", "--type", "x", "--output-dir", "x"]
    assert "letters" in here(folder, *words, check=False).stderr


def test_the_contract_suite_runs_for_the_installed_package(folder: Path) -> None:
    """In a process of its own, which has imported no test; the whole suite takes minutes."""
    page = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    line = next(line.partition("#")[0].strip() for line in page.splitlines() if "--package" in line)
    command = line.replace("PACKAGE", "toy-family").replace("tests/families", f"{ROOT}/tests/families")
    options = f"-c {ROOT}/pyproject.toml --rootdir {ROOT} -rA -p no:cacheprovider -k '{CHOSEN}'"
    done = shell(f"{command} {options}", folder)
    passed = {line.rpartition("::")[2] for line in done.stdout.splitlines() if line.startswith("PASSED")}
    cases = {f"test_the_tiny_recipe_trains[{name}]" for name in ("bag_mixer", "bag_mixer+rare_words")}
    layouts = ("tp2-pp1-dp1-zero1", "tp1-pp2-dp1-zero1", "tp1-pp1-dp2-zero3")
    cases |= {f"test_a_layout_gives_the_numbers_of_one_rank[bag_mixer+rare_words-{each}-dropout]" for each in layouts}
    assert passed == cases | {f"test_{name}[bag_mixer]" for name in ALONE}
