"""slurm/pipeline.sh on the test cluster: one pipeline from raw text to an exported model, shared by the tests."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.slurm.cluster import Cluster, Finished, wait_for
from tests.slurm.runs import last_step
from tests.text import write_corpus

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

STEPS = ["tokenizer", "preprocess", "merge", "preprocess-heldout", "samples", "pretrain", "samples-2", "pretrain-2",
         "export", "gate", "last"]  # fmt: skip
TINY = {
    "model": {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
              "max_position_embeddings": 64},
    "data": {"seq_length": 32},
    "schedule": {"warmup_steps": 2, "total_steps": 12},
    "training": {"global_batch_size": 8, "micro_batch_size": 2, "max_steps": 8},
    "evaluation": {"interval_steps": 4, "max_rows": 16},
    "checkpoint": {"interval_steps": 4},
    "logging": {"interval_steps": 1, "tensorboard": False},
}  # fmt: skip


@dataclass
class Pipeline:
    """A recipe and the folder that its pipeline fills."""

    cluster: Cluster
    recipe: Path
    out: Path

    def sh(self, *words: str, check: bool = True, **environ: str) -> Finished:
        """slurm/pipeline.sh RECIPE WORDS."""
        return self.cluster.run("slurm/pipeline.sh", self.recipe, *words, check=check, **environ)

    def rows(self, *words: str, **environ: str) -> dict[str, list[str]]:
        """The table that it prints: state, job, remark by step."""
        lines = self.sh(*words, **environ).stdout.splitlines()
        cells = [re.split(r"\s{2,}", line.strip()) for line in lines]
        return {row[0]: row[1:] for row in cells if len(row) > 1 and row[0] != "step"}

    def submit(self, **environ: str) -> dict[str, str]:
        """Submit what is to do: ids by step."""
        return {name: row[1] for name, row in self.rows(**environ).items() if row[0] == "submitted"}

    def states(self) -> dict[str, str]:
        """--status: the state of each step."""
        return {name: row[0] for name, row in self.rows("--status").items()}

    def wait(self, jobs: dict[str, str]) -> dict[str, str]:
        """How the jobs ended."""
        return {name: self.cluster.wait(job) for name, job in jobs.items()}

    def logs(self) -> str:
        """All of them, for a failed test."""
        paths = sorted((self.out / "logs").glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in paths)

    def mtimes(self) -> dict[str, int]:
        """Of every file, but the lock of those who submit."""
        paths = [path for path in self.out.rglob("*") if path.is_file() and "lock" not in path.name]
        return {str(path): path.stat().st_mtime_ns for path in paths}


@dataclass
class First(Pipeline):
    """The pipeline and what was seen of it until its step `gate` failed."""

    submitted: dict[str, str]
    ended: dict[str, str]
    status: dict[str, list[str]]


def write_recipe(path: Path, pipeline: dict[str, object], **sections: object) -> Path:
    content = {"extends": "bert-pipeline-laptop", "name": "tiny", **TINY, **sections, "pipeline": pipeline}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def first(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> First:
    """From raw text to an exported model; one pretraining job is requeued while others wait for it."""
    folder = tmp_path_factory.mktemp("pipeline")
    for name, count, seed in (("train-0", 30, 1), ("train-1", 30, 2), ("heldout", 15, 3)):
        write_corpus(folder / f"{name}.jsonl", num_documents=count, seed=seed)
    out = folder / "out"
    phase = ["data.seq_length=64", "schedule.start_step=8", "training.max_steps=4", "training.global_batch_size=4"]
    recipe = write_recipe(
        folder / "recipe.yaml",
        {
            "input": [str(folder / "train-*.jsonl")],
            "heldout": [str(folder / "heldout.jsonl")],
            "tokenizer": {"vocab_size": 400},
            "workers": 1,
            "output_dir": str(out),
            "phases": [{"set": [*phase, "training.micro_batch_size=4"]}],
            "append": [
                {"name": "gate", "command": "test -f {output_dir}/allowed && ls {hf_dir} > {output_dir}/gate",
                 "output": "{output_dir}/gate"},
                {"name": "last", "command": "cp {output_dir}/gate {output_dir}/last", "output": "{output_dir}/last"},
            ],
            "resources": {"default": {"time": "30"}, "pretrain": {"ntasks_per_node": 1, "time": "40"}},
        },
    )  # fmt: skip
    pipeline = Pipeline(cluster, recipe, out)
    submitted = pipeline.submit()
    assert cluster.job(submitted["merge"])["TimeLimit"] == "00:30:00"
    assert cluster.job(submitted["pretrain"])["TimeLimit"] == "00:40:00"
    wait_for(lambda: cluster.job(submitted["pretrain"])["JobState"] == "RUNNING", 240, "the pretraining job")
    cluster.scontrol("requeue", submitted["pretrain"])
    ended = pipeline.wait(submitted)
    return First(cluster, recipe, out, submitted, ended, pipeline.rows("--status"))


@pytest.fixture(scope="module")
def finished(first: First) -> First:
    """The pipeline when the failed step has been mended."""
    (first.out / "allowed").touch()
    again = first.submit()
    assert list(again) == ["gate", "last"], "only what is left"
    assert set(first.wait(again).values()) == {"COMPLETED"}, first.logs()
    return first


def test_raw_text_to_an_exported_model(first: First) -> None:
    assert list(first.submitted) == STEPS
    assert {first.ended[name] for name in STEPS[:-2]} == {"COMPLETED"}, first.logs()
    assert first.cluster.job(first.submitted["pretrain"])["Restarts"] == "1"
    weights = (first.out / "logs" / f"pretrain-2-{first.submitted['pretrain-2']}.log").read_text()
    assert f"weights taken from {first.out / 'pretrain'}" in weights
    steps = [json.loads(line)["step"] for line in (first.out / "pretrain-2" / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 4
    shards = [json.loads(path.read_text())["shard"] for path in sorted((first.out / "data" / "shards").glob("*.json"))]
    assert shards == [[0, 2], [1, 2]]

    import torch
    import transformers

    model = transformers.AutoModelForPreTraining.from_pretrained(first.out / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(first.out / "hf")
    with torch.no_grad():
        logits = model(**tokenizer("the old river", return_tensors="pt")).prediction_logits
    assert logits.shape[-1] == 400 and bool(torch.isfinite(logits).all())


def test_a_failed_step_is_told_with_its_log_and_ends_what_waits_for_it(first: First) -> None:
    assert (first.ended["gate"], first.ended["last"]) == ("FAILED", "CANCELLED")
    state, job, remark = first.status["gate"]
    assert (state, job) == ("failed", first.submitted["gate"])
    log = Path(remark.rpartition("log: ")[2])
    assert log.parent == first.out / "logs" and "ended with status 1: test -f" in log.read_text()
    assert first.status["last"][0] == "cancelled"
    assert {first.status[name][0] for name in STEPS[:-2]} == {"done"}


def test_again_nothing_is_submitted_or_touched(finished: First) -> None:
    before = finished.mtimes()
    again = finished.sh()
    assert "nothing to submit: everything is done" in again.stdout
    assert finished.cluster.run("squeue", "-h").stdout == ""
    assert finished.mtimes() == before
    assert set(finished.states().values()) == {"done"}


def test_what_was_deleted_is_made_again_and_nothing_else(finished: First) -> None:
    data = finished.out / "data"
    before = (data / "train_text_sentence.bin").read_bytes()
    for path in [*data.glob("train_text_sentence.*"), *(data / "shards").iterdir()]:
        if path.is_file():
            path.unlink()
    states = finished.states()
    assert [name for name, state in states.items() if state != "done"] == ["preprocess", "merge"]
    again = finished.submit()
    assert list(again) == ["preprocess", "merge"]
    assert "in the queue" in finished.sh().stdout, "a second start finds the jobs and submits none"
    assert set(finished.wait(again).values()) == {"COMPLETED"}, finished.logs()
    assert (data / "train_text_sentence.bin").read_bytes() == before
    assert set(finished.states().values()) == {"done"}


def test_changed_settings_are_refused_by_name(finished: First) -> None:
    before = finished.mtimes()
    refused = finished.sh("--set", "pipeline.tokenizer.vocab_size=380", check=False)
    assert refused.returncode == 2 and "tokenizer: vocab_size 400 -> 380" in refused.stderr
    assert "export: it is made of pretrain-2, which changes" in refused.stderr and "--redo" in refused.stderr
    assert finished.mtimes() == before and finished.cluster.run("squeue", "-h").stdout == ""


@pytest.mark.soak
def test_steps_wait_for_the_last_of_a_line_of_successors(finished: First, tmp_path: Path) -> None:
    """Where a run goes on in another job, what waits for its end must neither begin nor be cancelled before that."""
    own = {"input": [], "heldout": [], "tokenizer": None, "phases": [], "shards": 1, "export": False}
    after = {"name": "after", "command": "cp {run_dir}/checkpoints/latest {output_dir}/after"}
    resources = {"pretrain": {"ntasks_per_node": 1}}
    recipe = write_recipe(
        tmp_path / "recipe.yaml",
        {**own, "output_dir": str(tmp_path / "out"), "append": [after], "resources": resources},
        tokenizer={"path": str(finished.out / "tokenizer")},
        data={"seq_length": 32, "train": [str(finished.out / "data" / "train_text_sentence")]},
        training={**TINY["training"], "max_steps": 150},
        schedule={"warmup_steps": 2, "total_steps": 150},
    )  # fmt: skip
    pipeline = Pipeline(finished.cluster, recipe, tmp_path / "out")
    cluster, jobs = finished.cluster, pipeline.submit(CTXLM_RESTART="successor")
    assert list(jobs) == ["samples", "pretrain", "after"]
    run = pipeline.out / "pretrain"
    wait_for(lambda: last_step(run) >= 5, 240, "step 5")
    cluster.run("scancel", "--batch", "--signal=USR1", jobs["pretrain"])
    assert cluster.wait(jobs["pretrain"]) == "COMPLETED", pipeline.logs()
    assert cluster.job(jobs["after"])["JobState"] == "PENDING"
    assert pipeline.states()["after"] in ("waiting", "queued") and last_step(run) < 150
    assert "in the queue" in pipeline.sh(CTXLM_RESTART="successor").stdout
    assert cluster.wait(jobs["after"]) == "COMPLETED", pipeline.logs()
    assert (pipeline.out / "after").read_text().strip() == "step-00000150"
    assert set(pipeline.states().values()) == {"done"} or pipeline.states()["samples"] == "not needed"
