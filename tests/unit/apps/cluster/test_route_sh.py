"""slurm/route.sh --dry-run, which needs no Slurm: what each step is told, and what it waits for."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
TEXTS = ("INPUT=corpus/*.jsonl more.txt", "HELDOUT=heldout.jsonl")


def dry_run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "CTXLM_PYTHON": sys.executable}
    command = [str(ROOT / "slurm" / "route.sh"), *words, "--dry-run"]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)


def jobs(folder: Path, *words: str) -> dict[str, list[str]]:
    """The words of each sbatch by step."""
    done = dry_run(folder, *words)
    assert done.returncode == 0, done.stderr
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    names = [re.fullmatch(r"--job-name=.*-\d+-([a-z]+(?:-heldout)?)", words[2]) for words in lines]
    return {str(name and name[1]): words for name, words in zip(names, lines, strict=True)}


def dependencies(found: dict[str, list[str]]) -> dict[str, set[str]]:
    """The steps that each waits for."""
    start = "--dependency=afterok:"
    return {
        step: {other for word in words if word.startswith(start) for other in word.removeprefix(start).split(":")}
        for step, words in found.items()
    }


def test_each_step_waits_for_what_it_needs(tmp_path: Path) -> None:
    found = jobs(tmp_path, "bert-laptop-phases", *TEXTS, "SHARDS=3", "AFTER=ls $HF")
    assert dependencies(found) == {
        "tokenizer": set(),
        "preprocess-heldout": {"tokenizer"},
        "preprocess": {"tokenizer"},
        "merge": {"preprocess"},
        "samples": {"preprocess-heldout", "preprocess", "merge"},
        "pretrain": {"samples"},
        "export": {"pretrain"},
        "after": {"export"},
    }
    assert all(("--kill-on-invalid-dep=yes" in found[step]) == bool(ids) for step, ids in dependencies(found).items())
    assert not any(tmp_path.iterdir()), "nothing is written"


def test_the_tools_get_the_settings(tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = jobs(
        tmp_path, "bert-laptop", *TEXTS, "SHARDS=3", "OUT=out", "VOCAB_SIZE=400", "WORKERS=2", "NODES=2", "RANKS=4",
        "OPTIONS=--account=me --qos=long", "CPU_OPTIONS=--mem=8G", "PRETRAIN_OPTIONS=--gpus-per-node=4",
        "TOKENIZER_OPTIONS=--cased --min-frequency 3", "--set", "training.max_steps=9", "training.micro_batch_size=8",
        "EXPORT_OPTIONS=--dtype bf16",
    )  # fmt: skip
    line = {step: " ".join(words) for step, words in found.items()}
    assert "--input corpus/*.jsonl more.txt --json-keys text --type wordpiece --vocab-size 400" in line["tokenizer"]
    assert "--cased --min-frequency 3" in line["tokenizer"]
    assert "--array=0-2" in found["preprocess"] and line["preprocess"].endswith(f"{out}/data/shards/train --shard %a/3")
    assert "--split-sentences" in found["preprocess"] and "--append-eod" not in found["preprocess"]
    parts = " ".join(f"{out}/data/shards/train_text_sentence_shard{i:05d}-of-00003" for i in range(3))
    assert line["merge"].endswith(f"--input {parts} --output-prefix {out}/data/train_text_sentence")
    settings = {
        f"tokenizer.path={out}/tokenizer", f"data.train=[{out}/data/train_text_sentence]", "training.max_steps=9",
        f"data.validation=[{{name: heldout, path: {out}/data/heldout_text_sentence}}]",
    }  # fmt: skip
    for step in ("samples", "pretrain"):
        assert settings <= set(found[step])
    assert found["pretrain"][-1] == f"run_dir={out}/pretrain"
    assert {"--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--qos=long"} <= set(found["pretrain"])
    assert {"--cpus-per-task=2", "--mem=8G", "--account=me"} <= set(found["merge"])
    assert "--mem=8G" not in found["pretrain"]
    assert line["export"].endswith(f"--checkpoint {out}/pretrain --output {out}/hf --dtype bf16")


def test_the_form_of_the_data_follows_from_the_recipe(tmp_path: Path) -> None:
    """That of other families: test_the_tools_get_the_settings."""
    found = jobs(tmp_path, "gpt2-laptop", "INPUT=x.txt")
    assert "--type gpt2" in " ".join(found["tokenizer"]) and "--append-eod" in found["preprocess"]
    assert "--split-sentences" not in found["preprocess"]
    assert dependencies(found)["samples"] == {"preprocess"}


def test_without_texts_the_route_begins_at_the_samples(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: bert-laptop\ntokenizer: {path: tok}\ndata: {train: [a]}\n")
    assert list(jobs(tmp_path, "mine.yaml")) == ["samples", "pretrain", "export"]


def test_a_file_beside_the_recipe_holds_the_settings(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: bert-laptop\nname: mine\n")
    (tmp_path / "mine.env").write_text('INPUT="a.txt b.txt"\nSHARDS=2\n')
    found = jobs(tmp_path, "mine.yaml")
    assert "--array=0-1" in found["preprocess"] and "--input a.txt b.txt" in " ".join(found["tokenizer"])
    found = jobs(tmp_path, "mine.yaml", "SHARDS=1", "TOKENIZER=tok")
    assert "merge" not in found, "the command line wins"
    assert "tokenizer" not in found, "there is one"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "name a recipe"),
        (("bert-laptp",), "did you mean bert-laptop?"),
        (("bert-laptop", "bert-base"), "bert-base: a route has one recipe, with all phases of the run"),
        (("bert-laptop-phases", "RANKS=4", "INPUT=x", "--set", "training.micro_batch_size=16"), "phases[1]"),
        (("bert-laptop", "SHARD=2"), "SHARD: no such setting"),
        (("bert-laptop", "--status"), "--status: no such option"),
        (("bert-laptop", "RANKS=5", "INPUT=x"), "is not a multiple of"),
        (("bert-laptop", "HELDOUT=x"), "HELDOUT without INPUT needs TOKENIZER"),
    ],
)
def test_a_mistake_is_told_before_anything_is_submitted(tmp_path: Path, words: tuple[str, ...], told: str) -> None:
    done = dry_run(tmp_path, *words)
    assert done.returncode == 2 and told in done.stderr and done.stdout == "" and "Traceback" not in done.stderr
