"""tools/layer_table.py: the rows of BERT's table 7, one run of the command each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from ctxlm_ds import finetune
from ctxlm_ds.commands.layer_table import main
from ctxlm_ds.errors import ConfigError
from tests.downstream_models import write_bert


def test_each_row_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls = []
    hf = str(write_bert(tmp_path / "hf"))

    def run(argv: Sequence[str]) -> None:
        calls.append(arguments := finetune.parse_arguments(argv))
        figures = {"median": len(calls) / 10, "lowest": 0.0, "highest": 1.0}
        arguments.output.mkdir(parents=True)
        summary = {"metric": "f1", "chosen": {"dev": {"f1": figures}}}
        (arguments.output / "metrics.json").write_text(json.dumps(summary))

    monkeypatch.setattr(finetune, "main", run)
    further = ["--task", "conll2003-ner", "--data", "data", "--seeds", "1", "2"]
    main(["--features", hf, "--output", str(tmp_path / "out"), "--compare", "glove.txt", "--pooling", "mean", *further])
    assert [one.layers for one in calls] == ["0", "0", "-2", "-1", "mix:4", "concat:4", "mix:all"]
    assert [str(one.features) for one in calls] == ["glove.txt"] + [hf] * 6
    assert [one.pooling for one in calls] == [None] + ["mean"] * 6
    assert all(one.seeds == [1, 2] and one.task == "conll2003-ner" for one in calls)
    table = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert table[0].startswith("| Vectors | dev f1") and len(table) == 9
    assert table[2] == "| Static: glove | 0.100 (0.000 to 1.000) |" and table[-1].startswith(
        "| Weighted sum all layers"
    )
    calls.clear()
    small = write_bert(tmp_path / "small", num_hidden_layers=1)
    main(["--features", str(small), "--output", str(tmp_path / "of small"), *further])
    assert [one.layers for one in calls] == ["0", "-2", "-1", "mix:all"]
    assert "no row 'Concat last four hidden': --layers concat:4" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--layers=1: the table chooses it itself"):
        main(["--features", "hf", "--output", "out", "--layers=1"])
