"""Seeded mutations of run folders and Hugging Face folders: every reader accepts one or refuses it with one error.

    python -m tests.folder_mutations WORK_FOLDER FIRST_SEED LAST_SEED

Prints each seed that ended in another error, took longer than LIMIT_S, or took more memory than LIMIT_BYTES.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ctxlm_ds.checkpoint.folders import find_newest_intact, remove_leftovers
from ctxlm_ds.checkpoint.manifest import MANIFEST_NAME, hash_files, list_files, write_manifest
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.checkpoint.saved_state import read_saved_state
from ctxlm_ds.errors import CtxlmError
from ctxlm_ds.export.huggingface import from_hf, to_hf
from ctxlm_ds.export.initial_weights import load_initial_weights
from ctxlm_ds.tokenizers.load import load_tokenizer
from tests.checkpoints import make_config, make_tokenizer, outputs_of, random_weights, write_run

LIMIT_S = 60
LIMIT_BYTES = 2 << 30
FULL_CONVERSION_EVERY = 10
KINDS = {"bert_nsp": "wordpiece", "roberta": "byte_bpe", "gpt2": "gpt2"}
DEEP = "[" * 50_000 + "]" * 50_000
VALUES: list[Any] = [
    None, True, 0, -1, 5, 1e12, 10**12, 4 * 10**9, 10**30, float("nan"), float("inf"), "", "x", "../../etc/passwd",
    "os.system", "\ud800", "a\0b", "x" * 5000, [], [[]], {}, {"a": 1}, [1, 2, 3], -(10**9), 1 << 31, 0.5,
]  # fmt: skip


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


def change_json(path: Path, drawn: random.Random) -> None:
    """Replace one value of a JSON file, or give it another key."""
    document = json.loads(path.read_text())
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, below in items:
            places.append((value, key))
            walk(below)

    walk(document)
    if not places or drawn.random() < 0.05:
        document = drawn.choice(VALUES)
    else:
        container, key = drawn.choice(places)
        if drawn.random() < 0.15:
            del container[key]
        else:
            container[key] = drawn.choice(VALUES)
    path.write_text(json.dumps(document))


def replace(path: Path, make: Callable[[], object]) -> None:
    path.unlink()
    make()


def damage(path: Path, drawn: random.Random) -> None:
    """Replace a file by something else, or change its bytes."""
    choice = drawn.randrange(8)
    if choice == 0:
        replace(path, lambda: os.mkfifo(path))
    elif choice == 1:
        replace(path, lambda: path.symlink_to("/dev/zero"))
    elif choice == 2:
        replace(path, path.mkdir)
    elif choice == 3:
        path.write_text(DEEP)
    elif choice == 4:
        path.write_bytes(drawn.randbytes(drawn.randrange(200)))
    elif choice == 5:
        os.truncate(path, drawn.randrange(path.stat().st_size + 1))
    else:
        content = bytearray(path.read_bytes())
        for _ in range(drawn.randrange(1, 8)):
            if content:
                content[drawn.randrange(min(len(content), 3000))] = drawn.randrange(256)
        path.write_bytes(content)


def mutate(folder: Path, drawn: random.Random) -> None:
    """Change one to three files of a folder."""
    for _ in range(drawn.randrange(1, 4)):
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
        texts = [path for path in files if path.suffix == ".json"]
        path = drawn.choice(texts if drawn.random() < 0.75 else files)
        try:
            change_json(path, drawn) if path.suffix == ".json" and drawn.random() < 0.7 else damage(path, drawn)
        except (ValueError, RecursionError):
            damage(path, drawn)


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


def run_seed(folders: Folders, work: Path, seed: int) -> str | None:
    """Mutate one folder and read it; return what went wrong."""
    drawn = random.Random(seed)
    kind, is_run = drawn.choice(list(KINDS)), drawn.random() < 0.5
    folder = work / "mutated"
    shutil.copytree((folders.runs if is_run else folders.models)[kind], folder)
    signal.alarm(LIMIT_S)
    try:
        mutate(folder, drawn)
        if is_run and drawn.random() < 0.8 and not (folder / "checkpoints").is_file():
            manifests_match(folder)
        read = read_run if is_run else read_model
        read(folders, folder, kind, seed % FULL_CONVERSION_EVERY == 0)
    except CtxlmError:
        return None
    except BaseException:
        return f"seed {seed}, {kind}, {'run' if is_run else 'model'}:\n{traceback.format_exc()}"
    finally:
        signal.alarm(0)
        for name in ("mutated", "out"):
            shutil.rmtree(work / name, ignore_errors=True)
    return None


def run_seeds(work: Path, first: int, last: int) -> list[str]:
    """Run all seeds and return what went wrong."""
    logging.getLogger("ctxlm_ds").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _too_long)
    torch.set_num_threads(1)
    work.mkdir(parents=True, exist_ok=True)
    folders = Folders(work)
    found = [problem for seed in range(first, last) if (problem := run_seed(folders, work, seed)) is not None]
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{last - first} seeds, {len(found)} failures, peak {peak_bytes / 1e9:.2f} GB")
    return found + ([f"{peak_bytes} bytes of memory"] if peak_bytes > LIMIT_BYTES else [])


def _too_long(signal_number: int, frame: object) -> None:
    raise TimeoutError(f"longer than {LIMIT_S} s")


if __name__ == "__main__":
    failures = run_seeds(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    print("\n".join(failures))
    sys.exit(bool(failures))
