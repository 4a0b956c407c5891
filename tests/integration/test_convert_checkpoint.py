"""tools/convert_checkpoint.py as a user types it, in a process and then, which takes less time, here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import pipeline

from ctxlm_ds.apps.convert.convert_checkpoint import main
from ctxlm_ds.tokenizers.load import load_tokenizer
from tests.checkpoints import make_config, make_tokenizer, random_weights, write_run
from tests.integration.route import ROOT, Finished, call_here, tool
from tests.unit.export.foreign.test_fairseq import ARGUMENTS, Reference

TOOL = ROOT / "tools" / "convert_checkpoint.py"


def convert(*arguments: object) -> Finished:
    return call_here(main, TOOL, *arguments)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    tokenizer = make_tokenizer("wordpiece", tmp_path / "tokenizer")
    config = make_config("bert_nsp", tokenizer)
    return write_run(tmp_path / "run", config, random_weights(config))


@pytest.mark.parametrize(("kind", "tokenizer_kind", "mask"), [("bert_nsp", "wordpiece", "[MASK]"),
                                                              ("roberta", "byte_bpe", "<mask>")])  # fmt: skip
def test_to_hf_fills_a_mask_and_from_hf_goes_back(kind: str, tokenizer_kind: str, mask: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tokenizer_kind, tmp_path / "tokenizer")
    config = make_config(kind, tokenizer)
    run = write_run(tmp_path / "run", config, random_weights(config))
    words = ("to-hf", "--checkpoint", run, "--output", tmp_path / "hf", "--max-shard-size", "20KB")
    done = tool(TOOL.name, *words)
    assert "largest difference" in done.stdout and "text/predicted_logits" in done.stdout
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
    fill = pipeline("fill-mask", model=str(tmp_path / "hf"))
    guesses = fill(f"the river was {mask}.", top_k=3)
    assert fill.tokenizer.mask_token == mask
    assert len(guesses) == 3 and 0 < sum(guess["score"] for guess in guesses) <= 1

    done = convert("from-hf", "--model", tmp_path / "hf", "--output", tmp_path / "back")
    assert done.returncode == 0, done.stderr
    assert "initialize_from=" in done.stdout
    done = convert("to-hf", "--checkpoint", tmp_path / "back", "--output", tmp_path / "again", "--dtype", "bf16")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_same_export_again_is_done_at_once(run: Path, tmp_path: Path) -> None:
    words = ("to-hf", "--checkpoint", run, "--output", tmp_path / "hf")
    assert convert(*words).returncode == 0
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "hf").iterdir()}
    again = convert(*words)
    assert again.returncode == 0 and "complete already" in again.stdout
    other = convert(*words, "--dtype", "bf16")
    assert other.returncode == 2 and "dtype fp32 -> bf16" in other.stderr and "--overwrite" in other.stderr
    later = run / "checkpoints" / "step-00000200"
    shutil.copytree(run / "checkpoints" / "step-00000100", later)
    manifest = json.loads((later / "manifest.json").read_text())
    (later / "manifest.json").write_text(json.dumps(manifest | {"step": 200}))
    newer = convert(*words)
    assert newer.returncode == 2 and "checkpoint step-00000100 -> step-00000200" in newer.stderr
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "hf").iterdir()} == before
    assert convert(*words, "--overwrite").returncode == 0 and "complete already" in convert(*words).stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["to-hf", "--checkpoint", "{tmp}/none", "--output", "{tmp}/hf"], "no such file or folder; give a run"),
        (["to-hf", "--checkpoint", "{tmp}/run", "--output", "{tmp}/hf", "--max-shard-size", "huge"], "huge"),
        (["from-hf", "--model", "{tmp}/tokenizer", "--output", "{tmp}/out"], "config.json"),
    ],
)
def test_a_mistake_is_one_error(run: Path, tmp_path: Path, arguments: list[str], named: str) -> None:
    done = convert(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.count("error:") == 1 and named in done.stderr


def test_an_export_loads_no_deepspeed(run: Path, tmp_path: Path) -> None:
    script = (
        "import runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "print('loaded', *(name for name in ('torch', 'deepspeed', 'megatron') if name in sys.modules))\n"
    )
    command = [sys.executable, "-c", script, TOOL, "to-hf", "--checkpoint", run, "--output", tmp_path / "hf"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240, check=True)
    assert "wrote" in done.stdout and done.stdout.endswith("loaded torch\n")


def test_a_model_of_fairseq_fills_a_mask(tmp_path: Path) -> None:
    byte_bpe_folder = make_tokenizer("byte_bpe", tmp_path / "tokenizer")
    torch.manual_seed(3)
    model = Reference(load_tokenizer(byte_bpe_folder).vocab_size)
    torch.save({"args": ARGUMENTS, "model": model.fairseq_names("encoder", False)}, tmp_path / "model.pt")
    words = ("from-fairseq", "--checkpoint", tmp_path / "model.pt", "--tokenizer", byte_bpe_folder, "--output")
    done = convert(*words, tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    assert "RobertaForMaskedLM" in done.stdout and f"initialize_from={tmp_path / 'hf'}" in done.stdout
    assert len(pipeline("fill-mask", model=str(tmp_path / "hf"))("the river was <mask>.", top_k=3)) == 3
    done = convert("from-megatron", *words[1:], tmp_path / "other")
    assert done.returncode == 2 and done.stdout == "" and "no such folder" in done.stderr
    assert "Traceback" not in done.stderr
