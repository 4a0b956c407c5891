"""tools/train_babylm.py and ctxlm convert babylm: text becomes folders that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxlm_ds.apps.convert.convert_checkpoint import main
from ctxlm_ds.apps.evaluate.word_scorers import WordScorer
from ctxlm_ds.checkpoint.manifest import hash_files, list_files, write_manifest
from ctxlm_ds.data.preprocess.sentences import split_sentences
from ctxlm_ds.errors import DataError
from ctxlm_ds.export.verify import _filled_model
from ctxlm_ds.export.weights import open_checkpoint
from tests.checkpoints import make_tokenizer, write_random_run
from tests.integration.route import ROOT, Finished, call_here, tool, write_recipe
from tests.text import make_documents
from tools.train_babylm import main as train

TEXT = "The old river opened. It was quiet!"


def convert(*arguments: object) -> Finished:
    return call_here(main, ROOT / "tools" / "convert_checkpoint.py", "babylm", *arguments)


def own_logits(checkpoint: Path, ids: torch.Tensor) -> torch.Tensor:
    """The logits of this project's model with the weights of a checkpoint."""
    source, length = open_checkpoint(checkpoint), ids.shape[1]
    module = _filled_model(source.reader, source.model, source.outputs, "fp32")
    fields = {
        "input_ids": ids, "position_ids": torch.arange(length)[None], "sequence_ids": torch.ones_like(ids),
        "sequence_starts": torch.tensor([[0, length]]), "token_type_ids": torch.zeros_like(ids),
    }  # fmt: skip
    with torch.no_grad():
        (logits,) = module.run(fields).values()
    return logits


def test_make_babylm_writes_folders_with_the_logits_of_their_checkpoints(tmp_path: Path) -> None:
    """The steps of `make babylm`, from text of a sentence a line to the table of pairs."""
    documents = make_documents(60, seed=1)
    (tmp_path / "corpus").mkdir()
    for name, part in (("a.train", documents[:30]), ("b.train", documents[30:])):
        (tmp_path / "corpus" / name).write_text("\n".join(split_sentences(" ".join(part))) + "\n")
    words = sum(len(document.split()) for document in documents)
    recipe = write_recipe(tmp_path / "recipe.yaml", {
        "model": {"family": "gpt2", "hidden_size": 32, "num_layers": 2, "num_attention_heads": 2,
                  "intermediate_size": 64, "max_position_embeddings": 512},
        "objective": {"name": "causal_lm"}, "schedule": {"warmup_steps": 1},
        "data": {"sample_format": "blocks", "seq_length": 32, "max_epochs": 10},
        "training": {"max_words": 2 * words, "max_steps": None, "global_batch_size": 8, "micro_batch_size": 8,
                     "precision": "fp32"},
        "evaluation": {"interval_steps": 0}, "checkpoint": {"at_words": [words // 2, words]},
    })  # fmt: skip
    pair = {"sentence_good": documents[0].partition(".")[0], "sentence_bad": "qzx", "UID": "unknown word"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    command = ("train_babylm.py", "--corpus", tmp_path / "corpus", "--recipe", recipe, "--output-dir", tmp_path,
               "--document", "lines:4", "--vocab-size", 400, "--blimp", tmp_path / "pairs.jsonl")  # fmt: skip
    said = tool(*command).stdout
    head, *table = json.loads((tmp_path / "pairs.json").read_text())
    assert head[:2] == ["scorer", "paradigms"] and [row[0] for row in table] == ["model", *WordScorer.ways]
    assert all(row[-2:] == ["1", "0"] for row in table) and "kneser-ney-5" in said
    run, output = tmp_path / "run", tmp_path / "submission"
    names = [f"chck_{words // 2}", f"chck_{words}", "main"]
    assert sorted(path.name for path in output.iterdir()) == sorted(names)
    found = []
    checkpoints = sorted((run / "checkpoints").glob("step-*"))
    for name, checkpoint, epochs in zip(names, checkpoints, (0.5, 1.0, 2.0), strict=True):
        tokenizer = AutoTokenizer.from_pretrained(output / name)
        assert tokenizer.is_fast and tokenizer.pad_token is not None and tokenizer.model_max_length == 512
        encoded = tokenizer(TEXT, return_tensors="pt", return_offsets_mapping=True)
        assert encoded["offset_mapping"][0, :, 1].max() == len(TEXT)
        model = AutoModelForCausalLM.from_pretrained(output / name).eval()
        with torch.no_grad():
            theirs = model(encoded["input_ids"]).logits
        torch.testing.assert_close(theirs, own_logits(checkpoint, encoded["input_ids"]), atol=1e-4, rtol=1e-4)
        found.append(theirs)
        card = (output / name / "README.md").read_text()
        rows = dict(line.strip("| ").split(" | ") for line in card.partition("## BabyLM")[2].splitlines()[4:])
        state = json.loads((checkpoint / "state.json").read_text())["train_state"]
        assert rows["white-space words read"] == f"{state['words']:,}"
        assert rows["words of the training text"] == f"{words:,}"
        assert float(rows["epochs"]) == pytest.approx(epochs, abs=0.15)
        assert rows["tokenizer was trained on"] == "the training text"
        assert float(rows["FLOPs of training"]) > 6 * state["tokens"] * 2 * 12 * 32**2
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    assert convert(run, "--output", output).stdout.count("complete already") == 3
    assert before == {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}


def test_missing_pairs_are_named_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text(TEXT)
    with pytest.raises(DataError, match="none: no minimal pairs"):
        train(["--corpus", str(tmp_path / "corpus.txt"), "--output-dir", str(tmp_path / "out"),
               "--blimp", str(tmp_path / "none")])  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_a_run_that_cannot_be_submitted_is_refused(tmp_path: Path) -> None:
    run = write_random_run(tmp_path / "run", "gpt2", make_tokenizer("gpt2", tmp_path / "tokenizer"))
    refused = convert(run, "--output", tmp_path / "out")
    assert refused.returncode == 2 and "no checkpoint was saved at a number of words" in refused.stderr
    checkpoint = next((run / "checkpoints").glob("step-*"))
    state = {"train_state": {"step": 100, "words": 10**6, "reached_words": 10**6}}
    (checkpoint / "state.json").write_text(json.dumps(state))
    write_manifest(checkpoint, 100, hash_files(checkpoint, list_files(checkpoint)))
    refused = convert(run, "--output", tmp_path / "out")
    assert refused.returncode == 2 and "max_position_embeddings: 40" in refused.stderr
    assert not (tmp_path / "out").exists()
