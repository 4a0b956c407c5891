"""slurm/route.sh on the test cluster: one route from raw text to an exported model, shared by the tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.integration.route import wait_for
from tests.slurm.cluster import Cluster, Finished
from tests.text import write_corpus

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

STEPS = ["tokenizer", "preprocess-heldout", "preprocess", "merge", "samples", "pretrain", "export", "after"]
TINY = {
    "extends": "bert-laptop",
    "name": "tiny",
    "model": {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
              "max_position_embeddings": 64},
    "data": {"seq_length": 32},
    "schedule": {"warmup_fraction": None, "warmup_steps": 2},
    "training": {"global_batch_size": 8, "micro_batch_size": 2, "max_steps": None},
    "phases": [
        {"steps": 8},
        {"steps": 4, "moments": "fresh",
         "set": {"data": {"seq_length": 64}, "training": {"global_batch_size": 4, "micro_batch_size": 4}}},
    ],
    "evaluation": {"interval_steps": 4, "max_rows": 16},
    "checkpoint": {"interval_steps": 4},
    "logging": {"interval_steps": 1, "tensorboard": False},
}  # fmt: skip


@dataclass
class Route:
    """A recipe with a file of settings beside it, and the folder that the jobs fill."""

    cluster: Cluster
    recipe: Path
    out: Path
    submitted: dict[str, str] = field(default_factory=dict)
    """Ids of its first submission by step."""
    ended: dict[str, str] = field(default_factory=dict)
    """How these jobs ended."""

    def sh(self, *words: str, check: bool = True, **environ: str) -> Finished:
        """slurm/route.sh RECIPE WORDS."""
        return self.cluster.run("slurm/route.sh", self.recipe, *words, check=check, **environ)

    def submit(self, *words: str, **environ: str) -> dict[str, str]:
        """Submit the whole route: ids by step."""
        lines = [line.replace(",", "").split() for line in self.sh(*words, **environ).stdout.splitlines()]
        return {line[0].rstrip(":"): line[2] for line in lines}

    def wait(self, jobs: Mapping[str, str]) -> dict[str, str]:
        """How the jobs ended."""
        return {name: self.cluster.wait(job) for name, job in jobs.items()}

    def log(self, step: str, job: str) -> str:
        """What a job said, or the first one of an array."""
        paths = [path for ending in ("", "_0") if (path := self.out / "logs" / f"{step}-{job}{ending}.log").exists()]
        return paths[0].read_text(errors="replace")

    def logs(self) -> str:
        """All of them, for a failed test."""
        paths = sorted((self.out / "logs").glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in paths)

    def made(self) -> dict[str, int]:
        """When each file of the outputs was written; the run's own journals left out."""
        kept = [path for name in ("tokenizer", "data", "hf") for path in (self.out / name).rglob("*") if path.is_file()]
        kept += [path for path in self.out.glob("pretrain/checkpoints/*/*") if path.is_file()]
        return {str(path): path.stat().st_mtime_ns for path in kept}


@pytest.fixture(scope="module")
def first(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Route:
    """From raw text to an exported model; a pretraining job is requeued while others wait; the user's command fails."""
    folder = tmp_path_factory.mktemp("route")
    for name, count, seed in (("train-0", 30, 1), ("train-1", 30, 2), ("heldout", 15, 3)):
        write_corpus(folder / f"{name}.jsonl", num_documents=count, seed=seed)
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(TINY, sort_keys=False))
    settings = {
        "OUT": folder / "out",
        "WORKERS": 1,
        "OPTIONS": "--time=30",
        "INPUT": folder / "train-*.jsonl",
        "HELDOUT": folder / "heldout.jsonl",
        "VOCAB_SIZE": 400,
        "SHARDS": 2,
        "PRETRAIN_OPTIONS": "--time=40",
        "AFTER": f'test -f {folder}/allowed && ls "$HF" > "$OUT"/listed',
    }
    (folder / "recipe.env").write_text("".join(f"{name}='{value}'\n" for name, value in settings.items()))
    route = Route(cluster, recipe, folder / "out")
    planned = route.sh("--dry-run").stdout.splitlines()
    assert len(planned) == len(STEPS) and all(line.startswith("sbatch --parsable ") for line in planned)
    assert not route.out.exists() and cluster.run("squeue", "-h").stdout == ""
    submitted = route.submitted = route.submit()
    assert cluster.job(submitted["merge"])["TimeLimit"] == "00:30:00"
    assert cluster.job(submitted["pretrain"])["TimeLimit"] == "00:40:00"
    twice = route.sh(check=False)
    assert twice.returncode == 2 and "are in the queue" in twice.stderr and submitted["export"] in twice.stderr
    wait_for(lambda: cluster.job(submitted["pretrain"])["JobState"] == "RUNNING", 240, "the pretraining job")
    cluster.scontrol("requeue", submitted["pretrain"])
    route.ended = route.wait(submitted)
    return route


def test_raw_text_to_an_exported_model(first: Route) -> None:
    assert list(first.submitted) == STEPS
    assert {first.ended[name] for name in STEPS[:-1]} == {"COMPLETED"}, first.logs()
    assert first.cluster.job(first.submitted["pretrain"])["Restarts"] == "1"
    run, said = first.out / "pretrain", first.log("pretrain", first.submitted["pretrain"])
    assert f"weights taken from {run / 'checkpoints' / 'step-00000008'}" in said and "phase 2 of 2 begins" in said
    assert max(json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()) == 12
    shards = [json.loads(path.read_text())["shard"] for path in sorted((first.out / "data" / "shards").glob("*.json"))]
    assert shards == [[0, 2], [1, 2]]

    import torch
    import transformers

    model = transformers.AutoModelForPreTraining.from_pretrained(first.out / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(first.out / "hf")
    with torch.no_grad():
        logits = model(**tokenizer("the old river", return_tensors="pt")).prediction_logits
    assert logits.shape[-1] == 400 and bool(torch.isfinite(logits).all())


def test_again_nothing_is_made_anew_but_what_failed(first: Route) -> None:
    assert first.ended["after"] == "FAILED"
    before = first.made()
    (first.out.parent / "allowed").touch()
    again = first.submit()
    assert list(again) == STEPS
    assert set(first.wait(again).values()) == {"COMPLETED"}, first.logs()
    assert first.made() == before
    for step in ("tokenizer", "preprocess", "preprocess-heldout", "merge", "export"):
        assert "complete already" in first.log(step, again[step]), step
    assert "config.json" in (first.out / "listed").read_text()


def test_a_step_that_fails_is_told_and_ends_what_waits_for_it(first: Route) -> None:
    """Other settings for the same folder: the tool refuses, and nothing after it begins."""
    before = first.made()
    jobs = first.submit("VOCAB_SIZE=380")
    ended = first.wait(jobs)
    assert ended == {"tokenizer": "FAILED", **dict.fromkeys(STEPS[1:], "CANCELLED")}
    assert "was made differently: vocab_size 400 -> 380" in first.log("tokenizer", jobs["tokenizer"])
    assert first.made() == before and first.cluster.run("squeue", "-h").stdout == ""
