"""The command as a user types it: a grid over seeds, its report, a second start, and mistakes."""

from __future__ import annotations

import json
import re
import shutil
from importlib import import_module
from pathlib import Path

import pytest

from ctxlm_ds.export.hf_config import EXPORT_RECORD
from ctxlm_ds.finetune import main
from tests.downstream_models import sentiment, write_bert, write_task
from tests.integration.route import Finished, call, call_here, launcher


def run(*arguments: object, ranks: int = 1, kind: str = "forked") -> Finished:
    return call(*launcher(kind, ranks)[:-2], "-m", "ctxlm_ds.finetune", *arguments)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finetune")
    write_bert(folder / "model")
    examples = sentiment(60)[1]
    write_task(folder, examples[:48], examples[48:], title="Good & bad", published={"someone": 0.5})
    return folder


def test_a_grid_is_run_reported_and_not_run_again(files: Path) -> None:
    command = ["--task", files / "mine.yaml", "--model", files / "model", "--data", files / "data",
               "--output", files / "out",
               "--seeds", 1, 2, "--learning-rates", "1e-2", "--epochs", 8, "--batch-sizes", 8]  # fmt: skip
    first = run(*command)
    assert first.returncode == 0, first.stderr
    summary = json.loads((files / "out" / "metrics.json").read_text())
    assert summary["chosen"]["seeds"] == [1, 2]
    assert summary["chosen"]["dev"]["accuracy"]["median"] == 1.0
    assert re.search(r"seeds +n dev .*\n.*chosen .* 2 +12 ", first.stdout)
    assert "48 steps: below some 200" in first.stderr and "one seed" not in first.stderr
    assert "run 2 of 2" in first.stderr and "1.0000" in first.stdout and "Traceback" not in first.stderr
    page = (files / "out" / "report.html").read_text()
    assert "Good &amp; bad" in page and "someone" in page
    assert page.count("<svg") == 1 and "<th>right \\ predicted</th>" in page
    second = call_here(main, "finetune", *command)
    assert second.returncode == 0 and "2 points of 2 have a result already" in second.stderr
    assert "run 1 of" not in second.stderr and second.stdout == first.stdout
    other = call_here(main, "finetune", *command, "--lora", 2)
    assert other.returncode == 2 and "choose another --output" in other.stderr


def test_scores_of_an_earlier_export_are_refused(files: Path, tmp_path: Path) -> None:
    """Another checkpoint may be exported to the same folder; a result that names no export is taken as it is."""
    model = shutil.copytree(files / "model", tmp_path / "model")
    command = ["--task", files / "mine.yaml", "--model", model, "--data", files / "data", "--output", tmp_path / "out",
               "--epochs", 1]  # fmt: skip
    assert call_here(main, "finetune", *command).returncode == 0
    (settings,) = tmp_path.glob("out/points/*/settings.json")
    known = json.loads(settings.read_text())
    settings.write_text(json.dumps({name: value for name, value in known.items() if name != "export"}))
    (model / EXPORT_RECORD).write_text('{"manifest": "first"}')
    assert "1 point of 1 have a result already" in call_here(main, "finetune", *command).stderr
    settings.write_text(json.dumps(known | {"export": {"manifest": "first"}}))
    assert call_here(main, "finetune", *command).returncode == 0
    (model / EXPORT_RECORD).write_text('{"manifest": "second"}')
    refused = call_here(main, "finetune", *command)
    assert refused.returncode == 2 and 'export {"manifest": "first"} -> {"manifest": "second"}' in refused.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--task", "nothing"), "no shipped task"),
        (("--model", "missing"), "no such file or folder"),
        (("--data", "missing"), "no such file"),
        (("--point", "7"), "the grid has the points 0 to 0"),
        (("--warmup", "1"), "not a number from 0 up to 1"),
        (("--deepspeed", "missing.json"), "no such file"),
        (("--deepspeed", "zero2"), "needs a launcher, also for one process: torchrun"),
    ],
)
def test_a_mistake_is_one_line(files: Path, tmp_path: Path, change: tuple[str, str], message: str) -> None:
    name, value = change
    options = {"--task": str(files / "mine.yaml"), "--model": str(files / "model"), "--data": str(files / "data"),
               "--output": str(tmp_path / "out")} | {name: value}  # fmt: skip
    done = call_here(main, "finetune", *[part for option in options.items() for part in option])
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("out/points/*"))


@pytest.mark.parametrize("kind", ["forked", pytest.param("torchrun", marks=pytest.mark.soak)])
def test_two_ranks_share_a_batch_and_train_the_same_model(kind: str, files: Path, tmp_path: Path) -> None:
    import_module("ctxlm_ds.apps.downstream.fit")  # once for both ranks
    model = write_bert(tmp_path / "model", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    found = []
    for ranks in (1, 2):
        output = tmp_path / f"ranks{ranks}"
        words = ("--task", files / "mine.yaml", "--model", model, "--data", files / "data", "--output", output,
                 "--batch-sizes", 8, "--learning-rates", "5e-3", "--early-stopping", 2)  # fmt: skip
        done = run(*words, ranks=ranks, kind=kind if ranks > 1 else "forked")
        assert done.returncode == 0, done.stderr
        (result,) = output.glob("points/*/metrics.json")
        log = json.loads(result.read_text())["log"]
        found.append([line[name] for name in ("loss", "eval_loss") for line in log if name in line])
        assert len((result.parent / "dev_predictions.jsonl").read_text().splitlines()) == 12
        assert [path.name for path in output.glob("points/*")] == [result.parent.name]
    assert found[0] == pytest.approx(found[1], rel=1e-3)
