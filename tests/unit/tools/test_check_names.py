"""tools/check_names.py finds comparisons with names of entries, of every kind, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.check_names import ROOT, comparisons, find_all, registered_names

NAMES = {"bert", "masked_lm"}


@pytest.mark.parametrize(
    "code",
    ['if family == "bert": pass', 'x = "bert" != family', 'x = family in ("gpt", "bert")', 'x = family not in ["bert"]',
     'match family:\n    case "bert": pass', 'x = sums["masked_lm"]', 'NAMES = ("bert",)', 'A, B = "bert", "x"',
     "x = config.is_decoder", 'x = ranks.launcher == "srun"'],
)  # fmt: skip
def test_comparisons_are_found(code: str) -> None:
    assert len(list(comparisons(ast.parse(code), NAMES))) == 1


@pytest.mark.parametrize(
    "code",
    [
        'x = "bert"',
        'call("bert")',
        '"""bert"""',
        'if family == "bert-base": pass',
        "x = bert == 1",
        'x = {"bert": 1}',
        'x = words[0] == "srun"',
    ],
)
def test_other_uses_of_a_name_are_none(code: str) -> None:
    assert list(comparisons(ast.parse(code), NAMES)) == []


def test_names_are_those_of_entries_and_terms() -> None:
    assert {"bert", "gpt2", "masked_lm_nsp", "next_sentence", "blocks", "segment_pair"} <= registered_names()


def test_files_of_entries_may_spell_names(tmp_path: Path) -> None:
    for place in ("ctxlm_ds/families/x.py", "ctxlm_ds/data/x.py", "tools/x.py"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text('\nif name == "gpt2": pass\n')
    assert find_all(tmp_path) == [f"{place}:2: compares with 'gpt2'" for place in ("ctxlm_ds/data/x.py", "tools/x.py")]


def test_the_project_has_none() -> None:
    assert find_all(ROOT) == []
