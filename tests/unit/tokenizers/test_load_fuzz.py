"""Damaged tokenizer folders and bare vocabularies: ids of a text, or one refusal, in bounded time and memory."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.fuzz import Case, damage, damage_json, run_cases
from tests.text import make_documents

KINDS = ("wordpiece", "gpt2", "gpt1", "unigram")
BARE = {"wordpiece": "vocab.txt", "unigram": "spiece.model"}
TEXT = "A naïve text, 多语言 and “quotes”.\n<s> [MASK]\0"


def prepare(folder: Path) -> Case:
    documents = make_documents(60, seed=1)
    for kind in KINDS:
        whole = folder / "whole" / kind
        tokens = train_tokenizer(kind, documents, 300, whole).backend.get_vocab()
        if kind in BARE:
            (bare := folder / "whole" / f"bare-{kind}").mkdir()
            shutil.copy(whole / "tokenizer_config.json", bare)
            vocabulary = "\n".join(sorted(tokens, key=tokens.__getitem__)).encode()
            model = (whole / BARE[kind]).read_bytes() if kind == "unigram" else vocabulary
            (bare / BARE[kind]).write_bytes(model)

    def case(seed: int) -> str:
        drawn, own = random.Random(seed), folder / "own"
        shutil.rmtree(own, ignore_errors=True)
        shutil.copytree(folder / "whole" / drawn.choice([*KINDS, *(f"bare-{kind}" for kind in BARE)]), own)
        for path in drawn.choices(sorted(path for path in own.rglob("*") if path.is_file()), k=drawn.choice([1, 1, 2])):
            is_json = path.suffix == ".json" and drawn.random() < 0.7
            path.write_bytes((damage_json if is_json else damage)(path.read_bytes(), drawn))
        tokenizer = load_tokenizer(own)
        ids = [tokenizer.encode_batch([TEXT]) for _ in range(2)]
        assert ids[0] == ids[1]
        return "encoded"

    return case


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(1000, 3000), marks=pytest.mark.soak)])
def test_damaged_tokenizers_end_without_a_traceback(seeds: range, tmp_path: Path) -> None:
    found = run_cases(prepare, tmp_path, seeds)
    assert min(found["encoded"], found["refused"]) > len(seeds) / 20, found
