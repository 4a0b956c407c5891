"""The default job as `make pretrain CORPUS=…` runs it, on a small corpus."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from ctxlm_ds.apps.demo import pretrain_default
from ctxlm_ds.apps.demo.pretrain_default import (
    SUFFIX,
    default_folder,
    demonstrated_model,
    heldout_sentences,
    main,
    split_corpus,
)
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.recipe.load import load_config, shipped_recipes
from tests.integration.forked import can_fork
from tests.integration.route import ROOT, call, call_here, launcher
from tests.text import write_corpus

TINY = ("model.hidden_size=32", "model.num_layers=1", "model.num_attention_heads=2", "model.intermediate_size=64",
        "model.vocab_size=null", "training.max_steps=6", "evaluation.interval_steps=3", "evaluation.max_rows=32",
        "training.global_batch_size=8", "training.micro_batch_size=4")  # fmt: skip


@pytest.fixture
def in_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's commands run as typed, in forks of this process; test_babylm.py starts real ones."""

    def run(command: list[str], environ: dict[str, str]) -> int:
        done = call(*launcher("forked", 1)[:2], "-m", "ctxlm_ds.cli", *command[1:], check=False, **environ)
        print(done.stdout, end="")
        print(done.stderr, end="", file=sys.stderr)
        return done.returncode

    can_fork()  # DeepSpeed speaks when it is imported
    monkeypatch.setattr(pretrain_default, "run_process", run)


def test_a_signal_stops_the_step_that_runs(tmp_path: Path) -> None:
    save = f"trap 'echo saved > {tmp_path}/said; exit 143' TERM"
    step = f"{save}; touch {tmp_path}/ready; while :; do sleep 0.1; done"
    job = f"from {pretrain_default.__name__} import run_step; run_step('bash', '-c', {step!r})"
    with subprocess.Popen([sys.executable, "-c", job]) as process:
        while not (tmp_path / "ready").exists() and process.poll() is None:
            time.sleep(0.05)
        process.terminate()
    assert (tmp_path / "said").read_text() == "saved\n"
    assert process.returncode == 128 + signal.SIGTERM


def test_the_whole_job_and_again(in_forks: None, tmp_path: Path) -> None:
    write_corpus(tmp_path / "mine.txt", num_documents=60, seed=3, format="text")
    command = [
        "pretrain_default.py", "--corpus", tmp_path / "mine.txt", "--output-dir", tmp_path / "out", "--vocab-size", 400,
        "--set", *TINY,
    ]  # fmt: skip
    first = call_here(main, *command)
    assert first.returncode == 0, first.stdout + first.stderr
    for words in ("ctxlm tokenizer", "ctxlm preprocess", "ctxlm pretrain", "to-hf"):
        assert words in first.stdout
    assert "nats (perplexity " in first.stdout and "word frequencies alone: " in first.stdout
    assert "verdict: heldout: " in first.stderr
    assert "[INFO]" not in first.stdout + first.stderr and "[WARNING]" not in first.stdout + first.stderr
    assert first.stdout.count("filled:") == 5
    again = call_here(main, *command)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "ctxlm tokenizer" not in again.stdout and "ctxlm preprocess" not in again.stdout
    losses = [line for line in first.stdout.splitlines() if "nats" in line]
    assert losses == [line for line in again.stdout.splitlines() if "nats" in line]
    evaluated = [json.loads(line) for line in (tmp_path / "out" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in evaluated if "eval/heldout/loss" in line] == [3, 6]
    assert ". training   o heldout" in first.stdout  # the picture of the loss
    assert "<svg" in (tmp_path / "out" / "run" / "report.html").read_text(encoding="utf-8")
    assert len(re.findall(r"^\$ ", first.stdout, re.MULTILINE)) == 6


def test_another_family_continues_text(in_forks: None, tmp_path: Path) -> None:
    write_corpus(tmp_path / "mine.txt", num_documents=60, seed=3, format="text")
    done = call_here(
        main, "pretrain_default.py", "--family", "gpt2", "--corpus", tmp_path / "mine.txt",
        "--output-dir", tmp_path / "out", "--vocab-size", 400, "--set", *TINY,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--append-eod" in done.stdout and "--split-sentences" not in done.stdout
    assert "heldout: " in done.stdout and done.stdout.count("continued: ") == 5


@pytest.mark.parametrize("recipe", [name for name in shipped_recipes() if name.endswith(SUFFIX)])
def test_every_family_of_the_job_shows_what_it_predicts(recipe: str) -> None:
    config = load_config(recipe, (), 2)
    assert config.model.family + SUFFIX == recipe == config.name
    folder, task = demonstrated_model(config.model.family, config.objective)
    assert (folder, task) == {
        "electra": ("generator", "fill-mask"), "gpt2": ("", "text-generation"), "llama": ("", "text-generation"),
        "t5": ("", "text2text-generation"), "bart": ("", "text2text-generation"),
    }.get(config.model.family, ("", "fill-mask"))  # fmt: skip


def test_folders() -> None:
    assert default_folder([], "bert") == ROOT / "runs" / "default"
    assert default_folder([], "gpt2") == ROOT / "runs" / "default-gpt2"
    assert default_folder(["texts/mine.txt", "b"], "bert") == ROOT / "runs" / "mine"


def test_a_tenth_of_the_documents_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"Document {i}."}) + "\n" for i in range(25)))
    split_corpus([str(tmp_path / "text.jsonl")], tmp_path / "out")
    held_out = [json.loads(line)["text"] for line in (tmp_path / "out" / "heldout.jsonl").read_text().splitlines()]
    assert held_out == ["Document 9.", "Document 19."]
    assert len((tmp_path / "out" / "train.jsonl").read_text().splitlines()) == 23


def test_the_folder_of_another_text_is_refused(in_forks: None, tmp_path: Path) -> None:
    for name in "ab":
        write_corpus(tmp_path / f"{name}.txt", num_documents=20, seed=ord(name), format="text")
    config = load_config("bert-docstrings", (), 1)
    for name, size, changed in (("a", 300, None), ("a", 300, None), ("b", 300, "text"), ("a", 200, "vocab_size")):
        job = pretrain_default.Job(tmp_path / "out", config.model, config.data)
        said = f"out already exists and was made differently: {changed}.*; choose another --output-dir or remove it"
        with nullcontext() if changed is None else pytest.raises(ConfigError, match=said):
            job.make_datasets([str(tmp_path / f"{name}.txt")], size)


def test_too_small_a_corpus_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("One document only.\n")
    with pytest.raises(DataError, match="1 documents"):
        split_corpus([str(tmp_path / "text.txt")], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_heldout_sentences_lose_a_middle_word(tmp_path: Path) -> None:
    text = "Too short. The quick brown fox jumps over the very lazy dog today."
    # A line of JSON may hold characters that end a line of text.
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in (text, "Too\u2028short. Too\x85short.")]
    (tmp_path / "heldout.jsonl").write_text("\n".join([*lines, ""]))
    assert heldout_sentences(tmp_path / "heldout.jsonl") == [
        ("The quick brown fox jumps {} the very lazy dog today.", "over")
    ]


def test_heldout_sentences_come_from_documents_far_apart(tmp_path: Path) -> None:
    words = [f"w{letter}" * 2 for letter in "abcdefghijklmnopqrst"]
    texts = [f"This sentence has the word {word} in its very middle." for word in words]
    (tmp_path / "heldout.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    good = heldout_sentences(tmp_path / "heldout.jsonl", lambda word: word != words[4])
    assert [word for _, word in good] == [words[number] for number in (0, 3, 7, 10, 13)]
