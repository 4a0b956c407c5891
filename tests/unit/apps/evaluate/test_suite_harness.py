"""Tasks of lm-evaluation-harness in a suite: the table has what the harness itself finds, and errors come first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.apps.evaluate.command import main
from ctxlm_ds.errors import ConfigError, DataError
from tests.downstream_models import write_bert, write_gpt2

ROWS = [{"text": "the river" + " walked slowly" * at, "label": at % 2} for at in range(5)]

ROLLING = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
           "doc_to_choice": None, "metric_list": [{"metric": "word_perplexity"}]}  # fmt: skip


def write_task(folder: Path, name: str = "rivers", **changes: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    task = {
        "task": name, "dataset_path": "json", "validation_split": "validation", "output_type": "multiple_choice",
        "dataset_kwargs": {"data_files": {"validation": str(folder / "dev.jsonl")}}, "doc_to_target": "label",
        "doc_to_text": "{{text}} It was", "doc_to_choice": ["books", "unhappy times"],
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(json.dumps(task | changes))


def suite(folder: Path, **changes: Any) -> list[str]:
    entry = {"task": "lm-eval", "harness": "rivers", "files": "tasks", **changes}
    (folder / "suite.yaml").write_text(json.dumps({"tasks": {"rivers": entry}}))
    return ["--suite", str(folder / "suite.yaml"), "--data", str(folder), "--output", str(folder / "out")]


@pytest.mark.long
@pytest.mark.parametrize("metric", ["acc", "acc_norm,first"])
def test_the_table_has_what_the_harness_finds(metric: str, tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    model = write_gpt2(tmp_path / "gpt")
    first = {"name": "first", "filter": [{"function": "take_first"}]}
    write_task(tmp_path / "tasks", **({"filter_list": [first]} if "," in metric else {}))
    options = suite(tmp_path, metric=metric, shots=1)
    main([str(model), *options])
    (row,) = json.loads((tmp_path / "out" / "table.json").read_text())
    done = simple_evaluate(
        model="hf", model_args={"pretrained": str(model), "dtype": "float32"}, device="cpu", tasks=["rivers"],
        num_fewshot=1, task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        bootstrap_iters=0,
    )  # fmt: skip
    assert row["mean"] == pytest.approx(done["results"]["rivers"][metric if "," in metric else f"{metric},none"])
    assert (row["metric"], row["definition"], row["examples"]) == (metric, "lm-eval: rivers", len(ROWS))
    assert row["interval_low"] <= row["mean"] <= row["interval_high"]
    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/gpt/rivers/points/*/*")}
    main([str(model), *options])
    assert files == {path: path.stat().st_mtime_ns for path in files} and files


@pytest.mark.long
def test_a_metric_that_is_no_mean_has_no_interval(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks", **ROLLING)
    main([str(write_gpt2(tmp_path / "gpt")), *suite(tmp_path, metric="word_perplexity")])
    (row,) = json.loads((tmp_path / "out" / "table.json").read_text())
    assert row["mean"] > 1 and row["interval_low"] is None and row["examples"] == len(ROWS)


def test_what_is_wrong_is_told_before_a_model_is_read(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks")
    with pytest.raises(ConfigError, match=r"tasks\.rivers\.harness: missing"):
        main([str(tmp_path), *suite(tmp_path, harness=None)])
    with pytest.raises(ConfigError, match=r"tasks\.rivers\.epochs: only for tasks of fine-tuning, not for lm-eval"):
        main([str(tmp_path), *suite(tmp_path, epochs=2)])
    with pytest.raises(ConfigError, match=r"scored by babylm"):
        main([str(write_bert(tmp_path / "bert")), *suite(tmp_path)])
    model = str(write_gpt2(tmp_path / "gpt"))
    for metric in ("f1", "acc,first"):
        with pytest.raises(ConfigError, match=f"harness: rivers: has no metric {metric}; there are acc, acc_norm"):
            main([model, *suite(tmp_path, metric=metric)])
    write_task(tmp_path / "tasks", dataset_kwargs={"data_files": {"validation": str(tmp_path / "none.jsonl")}})
    with pytest.raises(DataError, match="harness: rivers: its data cannot be read: .*none.jsonl"):
        main([model, *suite(tmp_path)])
    (tmp_path / "tasks" / "rivers.yaml").write_text("task: rivers\nprocess_docs: !function mine.run\n")
    with pytest.raises(DataError, match=r"rivers\.yaml: names Python code \(!function\), which is not run here"):
        main([model, *suite(tmp_path)])
