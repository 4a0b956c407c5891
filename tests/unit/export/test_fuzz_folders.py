"""Run folders and Hugging Face folders with mutated files are read or refused with one error, whatever the damage."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ctxlm_ds.checkpoint.folders import find_newest_intact, remove_leftovers
from ctxlm_ds.checkpoint.manifest import MANIFEST_NAME, hash_files, list_files, write_manifest
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.checkpoint.saved_state import read_saved_state
from ctxlm_ds.export.huggingface import from_hf, to_hf
from ctxlm_ds.export.initial_weights import load_initial_weights
from ctxlm_ds.tokenizers.load import load_tokenizer
from tests.checkpoints import make_config, make_tokenizer, outputs_of, random_weights, write_run
from tests.fuzz import Case, damage, damage_json, run_cases

pytestmark = pytest.mark.long

FULL_CONVERSION_EVERY = 10
KINDS = {"bert_nsp": "wordpiece", "roberta": "byte_bpe", "gpt2": "gpt2"}
NO_FILES: tuple[Callable[[Path], object], ...] = (os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero"))


class Folders:
    """Intact run folders and Hugging Face folders of small models, made once."""

    def __init__(self, work: Path) -> None:
        self.runs: dict[str, Path] = {}
        self.models: dict[str, Path] = {}
        self.configs = {}
        for kind, tokenizer_kind in KINDS.items():
            tokenizer = make_tokenizer(tokenizer_kind, work / f"tokenizer-{kind}")
            config = make_config(kind, tokenizer, load_tokenizer(tokenizer).vocab_size)
            self.configs[kind] = config
            self.runs[kind] = write_run(work / f"run-{kind}", config, random_weights(config), (50, 100))
            self.models[kind] = work / f"hf-{kind}"
            to_hf(self.runs[kind], self.models[kind], max_shard_bytes=50_000)


def mutate(folder: Path, drawn: random.Random) -> None:
    """Change one to three files of a folder."""
    for _ in range(drawn.randrange(1, 4)):
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
        texts = [path for path in files if path.suffix == ".json"]
        path = drawn.choice(texts if drawn.random() < 0.75 else files)
        if drawn.random() < 0.1:
            path.unlink()
            drawn.choice(NO_FILES)(path)
        elif path.suffix == ".json" and drawn.random() < 0.7:
            path.write_bytes(damage_json(path.read_bytes(), drawn))
        else:
            path.write_bytes(damage(path.read_bytes(), drawn))


def read_run(folders: Folders, folder: Path, kind: str, full: bool) -> None:
    """Read a run folder as a resume, a new run and an export do."""
    config = folders.configs[kind]
    for step in (folder / "checkpoints").glob("step-*"):
        read_saved_state(step)
        reader = CheckpointReader(step)
        for name in reader.names():
            for stored in reader.kinds(name):
                reader.read_full(name, stored)
    remove_leftovers(folder / "checkpoints")
    find_newest_intact(folder / "checkpoints")
    zeros = torch.zeros(1)
    for _ in load_initial_weights(folder, config.model, outputs_of(config), lambda name: zeros):
        pass
    if full:
        to_hf(folder, folder.with_name("out"))


def read_model(folders: Folders, folder: Path, kind: str, full: bool) -> None:
    """Read a Hugging Face folder as a new run and an import do."""
    config = folders.configs[kind]
    if full:
        from_hf(folder, folder.with_name("out"))
        return
    for _ in load_initial_weights(folder, config.model, outputs_of(config), lambda name: torch.zeros(1)):
        pass
    load_tokenizer(folder)


def manifests_match(folder: Path) -> None:
    """Make the manifests of a mutated run those of its files, as an attacker would."""
    for step in (folder / "checkpoints").glob("step-????????"):
        if step.is_dir() and not (step / MANIFEST_NAME).is_dir():
            names = [name for name in list_files(step) if (step / name).is_file()]
            (step / MANIFEST_NAME).unlink(missing_ok=True)
            write_manifest(step, int(step.name[5:]), hash_files(step, names))


def prepare(work: Path) -> Case:
    logging.getLogger("ctxlm_ds").setLevel(logging.CRITICAL)
    folders = Folders(work)

    def case(seed: int) -> str:
        drawn = random.Random(seed)
        kind, is_run = drawn.choice(list(KINDS)), drawn.random() < 0.5
        folder = work / "mutated"
        shutil.copytree((folders.runs if is_run else folders.models)[kind], folder)
        try:
            mutate(folder, drawn)
            if is_run and drawn.random() < 0.8 and not (folder / "checkpoints").is_file():
                manifests_match(folder)
            read = read_run if is_run else read_model
            read(folders, folder, kind, seed % FULL_CONVERSION_EVERY == 0)
        finally:
            for name in ("mutated", "out"):
                shutil.rmtree(work / name, ignore_errors=True)
        return "read"

    return case


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 2040), marks=pytest.mark.soak)])
def test_mutated_folders(seeds: range, tmp_path: Path) -> None:
    outcomes = run_cases(prepare, tmp_path, seeds, limit_s=60)
    assert outcomes["read"] and outcomes["refused"]
