"""Runs a golden case as a user does, tools and ctxlm_ds.pretrain with their arguments, on ranks that live on.

In: cases.py. Out: data in a folder, figures of streams and runs. All that the golden tests import of the project is
imported here, and only for what no command tells: the micro-batches, and the weights in a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Imported before the ranks are forked, so that each need not import it again.
import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer
import torch

from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.data.stream.loader import TrainLoader
from ctxlm_ds.data.stream.run_datasets import build_run_rows
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.pretrain import main as pretrain
from ctxlm_ds.recipe.deepspeed_rules import deepspeed_keys
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.load import open_tokenizer
from tests.dist.runner import run_ranks
from tests.golden.cases import DATASETS, DIGESTED_STEPS, TOKENIZERS, Case
from tests.golden.corpus import write_corpus

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 280
DIGEST_CHARACTERS = 16
UNREPEATABLE = ("tokens_per_second", "rows_per_second", "step_seconds", "total_seconds", "memory_bytes")
"""Figures of metrics.jsonl that differ between equal runs."""

Figures = dict[str, Any]


def machine() -> Figures:
    """What decides how sums are rounded here: runs are bitwise alike where all of it is."""
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    vectors = [flag for flag in facts.get("flags", "").split() if flag.startswith(("avx", "amx", "fma"))]
    return {
        "cpu": facts.get("model name", platform.machine()),
        "vector_instructions": " ".join(sorted(vectors)),
        "rounding": rounding(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": 1,
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
    }


def rounding() -> str:
    """A digest of what torch's own layers learn: machines that call themselves alike may round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    digest = hashlib.sha256()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for dtype in (torch.float32, torch.bfloat16):
            layer = torch.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, activation="gelu", batch_first=True)
            optimizer = torch.optim.AdamW(layer.to(dtype).parameters(), lr=1e-2)
            for _ in range(20):
                x = torch.randn(4, 48, 64).to(dtype)
                torch.nn.functional.cross_entropy(layer(x).flatten(0, 1), x.flatten(0, 1).argmax(-1)).backward()
                optimizer.step()
                optimizer.zero_grad()
            for weight in layer.parameters():
                digest.update(weight.detach().float().numpy().tobytes())
    torch.set_num_threads(threads)
    return digest.hexdigest()[:DIGEST_CHARACTERS]


def prepare_data(folder: Path) -> Path:
    """Text, tokenizers and datasets, each made by the tool for it."""
    write_corpus(folder / "corpus.jsonl")
    for kind, size in TOKENIZERS.items():
        _tool(folder, "train_tokenizer.py", "--input", "corpus.jsonl", "--type", kind, "--vocab-size", str(size),
              "--output-dir", kind)  # fmt: skip
    for family, (tokenizer, *options) in DATASETS.items():
        _tool(folder, "preprocess_data.py", "--input", "corpus.jsonl", "--tokenizer", tokenizer, "--output-prefix",
              family, *options, "--workers", "1")  # fmt: skip
    return folder


def stream_figures(folder: Path, stream: str) -> list[list[dict[str, str]]]:
    """Of each micro-batch of the first steps, a digest of every field."""
    return run_ranks(_digest_stream, 1, folder, stream, timeout_s=LIMIT_S)[0]


def run_figures(folder: Path, case: Case) -> Figures:
    """The lines of metrics.jsonl, less what no two runs have alike, and digests of the last checkpoint."""
    recipe = case.recipe()
    train(folder, recipe, case.zero_stage, case.ranks)
    return {"steps": _metrics(folder / "runs" / case.name), **checkpoint_figures(last_checkpoint(folder, recipe))}


def train(folder: Path, recipe: dict[str, Any], zero_stage: int, ranks: int = 1) -> None:
    """`ctxlm_ds.pretrain --config RECIPE --deepspeed_config zeroN` on every rank, in `folder`."""
    path = folder / f"{recipe['name']}.yaml"
    path.write_text(json.dumps(recipe))
    # Kept for the ranks: DeepSpeed's sources are read for it.
    deepspeed_keys()
    words = ["--config", path.name, "--deepspeed_config", f"zero{zero_stage}"]
    run_ranks(_pretrain, ranks, folder, words, timeout_s=LIMIT_S)


def last_checkpoint(folder: Path, recipe: dict[str, Any]) -> Path:
    """The newest checkpoint of a run."""
    checkpoints = folder / "runs" / recipe["name"] / "checkpoints"
    return checkpoints / (checkpoints / "latest").read_text().strip()


def checkpoint_figures(checkpoint: Path) -> Figures:
    """A digest of each fp32 weight by name, and one of each kind of moment over all names."""
    reader = CheckpointReader(checkpoint)
    names = sorted(reader.names())
    weights = {name: digest([reader.read_full(name)]) for name in names}
    moments = {kind: digest(reader.read_full(name, kind) for name in names) for kind in reader.moment_kinds()}
    return {"weights": weights, "moments": moments}


def digest(tensors: Any) -> str:
    """The beginning of the SHA-256 over types, shapes and values; -0 is 0."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update((tensor + 0).contiguous().numpy().tobytes())
    return found.hexdigest()[:DIGEST_CHARACTERS]


def _tool(folder: Path, name: str, *words: str) -> None:
    run_ranks(_run_tool, 1, folder, name, words, timeout_s=LIMIT_S)


def _run_tool(rank: int, world_size: int, folder: Path, name: str, words: Sequence[str]) -> None:
    sys.argv = [name, *words]
    _as_command(folder, lambda: runpy.run_path(str(ROOT / "tools" / name), run_name="__main__"))


def _pretrain(rank: int, world_size: int, folder: Path, words: Sequence[str]) -> None:
    # The ranks have met already; a launcher would also say where.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    _as_command(folder, lambda: pretrain(words))


def _as_command(folder: Path, command: Callable[[], object]) -> None:
    """Run a command's entry in a folder with one thread; what it prints is in the test's output where it fails."""
    os.chdir(folder)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        command()
    except SystemExit as ended:
        if ended.code:
            raise AssertionError(f"ended with status {ended.code}; its message is in the captured output") from ended


def _digest_stream(rank: int, world_size: int, folder: Path, stream: str) -> list[list[dict[str, str]]]:
    os.chdir(folder)
    config = RunConfig.model_validate(Case(stream, stream, "fp32", 0).recipe())
    tokenizer, _ = open_tokenizer(config.tokenizer.path, config.model.vocab_size)
    objective = build_objective(config.objective, tokenizer)
    steps = iter(
        TrainLoader(
            build_run_rows(config.row_settings, tokenizer, objective).train, objective, config.data, config.training
        )
    )
    return [[_digest_batch(batch) for batch in next(steps).micro_batches] for _ in range(DIGESTED_STEPS)]


def _digest_batch(batch: Any) -> dict[str, str]:
    """Digest the fields of a batch; labels bear the names under which the figures have them."""
    named = {f"labels.{name.removesuffix('_labels')}" if name.endswith("_labels") else name: value
             for name, value in batch.fields.items()}  # fmt: skip
    return {name: digest([value]) for name, value in named.items()}


def _metrics(run_dir: Path) -> list[Figures]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in UNREPEATABLE} for line in lines]
