"""What a `pipeline` section may not say: everything at once, with places; and pretraining does not care."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.cluster.pipeline_plan import make_plan
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.load import load_config
from tests.unit.cluster.pipelines import ROOT, recipe_plan, write_recipe


def problem_lines(recipe: str, *overrides: str) -> list[str]:
    """The problems that a plan of a recipe is refused with."""
    with pytest.raises(ConfigError) as refused:
        make_plan(recipe, overrides)
    return str(refused.value).splitlines()


def test_all_errors_at_once_with_their_places(tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path,
        {
            "shrads": 4, "workers": "four", "json_keys": ["text", "text"], "split_sentences": False,
            "tokenizer": {"vocab_size": 400, "type": "wordpeice"},
            "phases": [{"recipe": "bert-mni"}, {"set": ["training.max_step=3"]}],
            "append": [
                {"name": "export", "command": "ls {hf_dri}"}, {"name": "b", "command": "true", "after": ["exprt"]},
            ],
            "resources": {"pretrain": {"node": 2, "extra": ["--array=0-3"]}, "default": {"time": 90}},
        },
        training={"max_stpes": 10},
    )  # fmt: skip
    text = "\n".join(problem_lines(recipe))
    for expected in (
        r"training\.max_stpes: unknown setting .*did you mean training\.max_steps\?  \[.*recipe\.yaml:\d+\]",
        r"pipeline\.shrads: unknown setting .*did you mean pipeline\.shards\?  \[.*recipe\.yaml:\d+\]",
        r'pipeline\.workers: "four": expected a whole number above 0  \[.*recipe\.yaml:\d+\]',
        r"pipeline\.json_keys: .*each once  \[.*recipe\.yaml:\d+\]",
        r"pipeline\.tokenizer\.type: .*did you mean wordpiece\?",
        r"pipeline\.split_sentences: .*segment_pair needs sentences",
        r"pipeline\.phases\[0\]: recipe bert-mni: .*did you mean bert-mini\?",
        r"pipeline\.append\[0\]\.name: .*another step",
        r"pipeline\.append\[0\]\.command: \{hf_dri\}: did you mean \{hf_dir\}\?",
        r"pipeline\.append\[1\]\.after: .*did you mean export\?",
        r"pipeline\.resources\.pretrain\.node: unknown setting .*did you mean pipeline\.resources\.pretrain\.nodes\?",
        r'pipeline\.resources\.pretrain\.extra: "--array=0-3" .*pipeline\.shards',
        r'pipeline\.resources\.default\.time: 90: expected text or null; write "90" in quotes',
        r"pipeline\.phases\[1\]: .*max_step.*did you mean training\.max_steps\?",
    ):
        assert re.search(expected, text, re.DOTALL), f"{expected}\n{text}"


@pytest.mark.parametrize(
    ("section", "sections", "expected"),
    [
        ({"input": []}, {}, "pipeline.input: missing"),
        ({"tokenizer": None}, {}, "pipeline.tokenizer: missing"),
        ({}, {"tokenizer": {"path": "tok"}}, "pipeline.tokenizer: is to be trained, and tokenizer.path names tok"),
        ({}, {"data": {"train": ["data/a"]}}, "pipeline.input: names texts, and data.train names datasets"),
        ({}, {"data": {"validation": [{"name": "a", "path": "b"}]}}, "pipeline.heldout: names texts"),
        ({"tokenizer": {"lowercase": False, "type": "bpe"}}, {}, "pipeline.tokenizer.lowercase: false"),
        ({"append_eod": False}, {"extends": "gpt2-laptop"}, "pipeline.append_eod: false"),
        ({"output_dir": "out%j"}, {}, "pipeline.output_dir: 'out%j'"),
        ({"phases": [{"recipe": "bert-tiny"}]}, {}, "pipeline.phases[0]: its model.hidden_size is 128"),
        ({"export": False, "append": [{"name": "a", "command": "ls {hf_dir}"}]}, {}, "pipeline.export is false"),
        ({"append": [{"name": "a b", "command": "true"}]}, {}, 'pipeline.append[0].name: "a b"'),
        ({"append": [{"name": "pretrain-2", "command": "true"}]}, {}, "is the name of another step"),
        ({"resources": {"pretrain": {"nodes": 3, "ntasks_per_node": 5}}}, {}, "pipeline.resources.pretrain: 15 ranks"),
        ({"phases": [{"resources": {"nodes": 3, "ntasks_per_node": 5}}]}, {}, "pipeline.phases[0]: 15 ranks"),
    ],
)  # fmt: skip
def test_what_cannot_be(tmp_path: Path, section: dict[str, Any], sections: dict[str, Any], expected: str) -> None:
    recipe = write_recipe(tmp_path, section, **sections)
    assert expected in "\n".join(problem_lines(recipe))


def test_phases_do_not_repeat_what_is_wrong_with_the_recipe(tmp_path: Path) -> None:
    phases = [{"set": ["data.seq_length=64"]}, {"set": ["data.seq_lenth=64"]}]
    recipe = write_recipe(tmp_path, {"phases": phases}, training={"max_stpes": 10}, optimizer={"learning_rate": "x"})
    lines = problem_lines(recipe)
    assert lines[0].endswith(": 3 problems") and len(lines) == 4
    assert [line.split(": ")[0].strip() for line in lines[1:]] == [
        "optimizer.learning_rate", "training.max_stpes", "pipeline.phases[1]",
    ]  # fmt: skip
    assert lines[3].startswith("  pipeline.phases[1]: data.seq_lenth: unknown setting")
    ranks = {"phases": phases[:1], "resources": {"pretrain": {"nodes": 3, "ntasks_per_node": 5}}}
    (line,) = problem_lines(write_recipe(tmp_path, ranks))[1:]
    assert line.startswith("  pipeline.resources.pretrain: 15 ranks: ")


def test_a_recipe_without_the_section_is_told_so() -> None:
    assert "pipeline: missing" in problem_lines("bert-laptop")[1]


def test_pretraining_ignores_the_section(tmp_path: Path) -> None:
    """Neither what it cannot be together with nor the section itself reaches a run."""
    recipe = write_recipe(tmp_path, {"tokenizer": None, "append": [{"name": "export", "command": "true"}]})
    assert "pipeline.tokenizer: missing" in "\n".join(problem_lines(recipe))
    assert load_config(recipe).pipeline is not None
    words = ["-m", "ctxlm_ds.pretrain", "--check", "--config", recipe, "--set", "data.train=[data/mine]"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "data/mine" in done.stdout and "pipeline" not in re.sub(r"pipeline_\w+", "", done.stdout)


def test_texts_that_are_not_there_are_told_where_they_are_needed(tmp_path: Path) -> None:
    plan = recipe_plan(tmp_path, {"input": [str(tmp_path / "nothing-*.jsonl")]})
    told = {step.name: bool(step.unreadable) for step in plan.steps}
    assert [name for name, is_told in told.items() if is_told] == ["tokenizer", "preprocess"]
    assert "no file matches" in plan.by_name["tokenizer"].unreadable
