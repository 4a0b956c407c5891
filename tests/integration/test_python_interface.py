"""The example of docs/python.md, run on tiny data, and its run beside the command's."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import pytest

from tests.integration.conftest import Prepared
from tests.integration.pages import code, shell
from tests.integration.route import call, launcher, metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, bert_route: Prepared) -> Path:
    """A folder with the data that the page names, in which its example has run."""
    folder = bert_route.link(tmp_path_factory.mktemp("notebook"), train=bert_route.train, heldout=bert_route.heldout)
    (folder / "example.py").write_text(code("python.md"))
    (folder / "printed.txt").write_text(call(*launcher("forked", 1)[:2], "example.py", folder=folder).stdout)
    return folder


def test_the_example_prints_what_it_says(folder: Path) -> None:
    printed = (folder / "printed.txt").read_text()
    assert "'input_ids': (8, 128)" in printed and "[MASK]" in printed
    assert printed.splitlines()[-1] == "BertForPreTraining from runs/notebook/checkpoints"
    losses = metrics(folder / "runs" / "notebook")
    assert losses[20] < losses[1]


def test_its_steps_are_those_of_the_command(folder: Path) -> None:
    recipe = json.dumps({"extends": str(folder / "runs" / "notebook" / "config.yaml"), "run_dir": "runs/command"})
    (folder / "recipe.yaml").write_text(recipe)
    call(*launcher("forked", 1), "--config", "recipe.yaml", folder=folder)
    command, notebook = (metrics(folder / "runs" / name) for name in ("command", "notebook"))
    assert command[20] == notebook[20]


def test_a_limit_ends_its_steps(folder: Path) -> None:
    limited = """
        from ctxlm_ds import Run, load_recipe
        config = load_recipe("runs/notebook/config.yaml", ["run_dir=runs/limited", "training.max_tokens=3000"])
        for most in (None, 1):
            with Run(config) as run:
                print("steps", len(list(run.steps(most))), run.step)
    """
    (folder / "limited.py").write_text(dedent(limited))
    printed = call(*launcher("forked", 1)[:2], "limited.py", folder=folder).stdout.splitlines()
    assert [line for line in printed if line.startswith("steps")] == ["steps 3 3", "steps 1 1"]


def test_a_name_that_is_none_is_refused(folder: Path) -> None:
    done = shell("python -c 'from ctxlm_ds import Runn'", folder, check=False)
    assert "cannot import name 'Runn'" in done.stderr
