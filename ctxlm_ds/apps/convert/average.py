"""Average the weights of checkpoints: the last ones of a run, named steps, or several runs.

    ctxlm average RUN --last 5 --output runs/average
    ctxlm average RUN/checkpoints/step-00001000 OTHER_RUN --weights 1 3 --output runs/average

The result is a checkpoint without optimizer states: `ctxlm convert to-hf --checkpoint` exports it, `initialize_from`
starts a run from it.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ctxlm_ds.atomic import output_folder
from ctxlm_ds.checkpoint.chunk_index import write_weights
from ctxlm_ds.checkpoint.folders import AVERAGE_NAME, CHECKPOINTS_DIR, check_output, find_verified, list_checkpoints
from ctxlm_ds.checkpoint.ledger import join_ledgers
from ctxlm_ds.checkpoint.reader import READ_ELEMENTS, CheckpointReader
from ctxlm_ds.checkpoint.saved_state import read_saved_state
from ctxlm_ds.console import at_least, logger, setup_logging
from ctxlm_ds.errors import CheckpointError, ConfigError
from ctxlm_ds.recipe.load import load_saved_config
from ctxlm_ds.tokenizers.load import load_tokenizer

if TYPE_CHECKING:
    import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT", help="runs (the newest one) or checkpoints")
    add("--last", type=at_least(1), metavar="K", help="the last K checkpoints of each run")
    add("--weights", nargs="+", type=float, metavar="W", help="of each checkpoint, in any unit; default: equal")
    add("--output", type=Path, required=True, metavar="DIR", help="folder to write")
    arguments = parser.parse_args()
    setup_logging()
    sources = [one for path in arguments.checkpoints for one in last_of(path, arguments.last)]
    average(sources, arguments.weights, arguments.output)
    print(f"wrote {arguments.output}, the average of {len(sources)} checkpoints")
    print(f"next: ctxlm convert to-hf --checkpoint {arguments.output} --output {arguments.output}-hf")


def last_of(path: Path, last: int | None) -> list[Path]:
    """Return the last checkpoints of a run, oldest first; None: the path as it is. ConfigError if there are fewer."""
    if last is None:
        return [path]
    found = list(list_checkpoints(path / CHECKPOINTS_DIR).values())
    if len(found) < last:
        kept = ", ".join(folder.name for folder in found) or "none"
        raise ConfigError(f"--last {last}: {path} has fewer checkpoints ({kept}); keep more with checkpoint.keep_last")
    return found[-last:]


def average(checkpoints: Sequence[Path], weights: Sequence[float] | None, output: Path) -> None:
    """Write the weighted mean of the weights of checkpoints, summed in float64, as a checkpoint without moments.

    Parts of one parameter of one checkpoint are in memory, and the mean of one parameter.

    Raises:
        ConfigError: the weights are not one to a checkpoint, or not of a positive sum.
        CheckpointError: a checkpoint is missing or damaged, or they are not of one model, or `output` exists.
    """
    weights = weights or [1.0] * len(checkpoints)
    total = math.fsum(weights)
    if len(weights) != len(checkpoints):
        raise ConfigError(f"--weights: {len(weights)} numbers for {len(checkpoints)} checkpoints; give one to each")
    if not all(map(math.isfinite, weights)) or total <= 0:
        raise ConfigError(f"--weights {' '.join(map(str, weights))}: give finite numbers with a positive sum")
    shares = [weight / total for weight in weights]
    for path in checkpoints:
        check_output(output, path)
    verified = [find_verified(path) for path in checkpoints]
    sources = [folder for folder, _ in verified]
    readers = list(map(CheckpointReader, sources))
    refuse_other_models(readers)
    newest, manifest = max(verified, key=lambda one: one[1].step)
    logger.info("averaging %s", ", ".join(str(reader.path) for reader in readers))
    with output_folder(output) as folder:
        shutil.copytree(newest / "tokenizer", folder / "tokenizer")
        shutil.copyfile(newest / "config.yaml", folder / "config.yaml")
        record = [{"checkpoint": str(path.resolve()), "step": found.step, "share": share}
                  for (path, found), share in zip(verified, shares, strict=True)]  # fmt: skip
        trained = read_saved_state(newest).get("train_state") if all(map(read_saved_state, sources)) else None
        text = json.dumps({"average of": record, "train_state": trained}, indent=1)
        (folder / AVERAGE_NAME).write_text(text + "\n", encoding="utf-8")
        join_ledgers(folder, sources)
        shapes = {name: readers[0].shape(name) for name in readers[0].names()}
        write_weights(folder, manifest.step, shapes, partial(mean, readers, shares))


def refuse_other_models(readers: Sequence[CheckpointReader]) -> None:
    """Raise CheckpointError unless all checkpoints have the model, the tokenizer and the shapes of the first."""
    first = readers[0]
    model = load_saved_config(first.path / "config.yaml").model
    tokens = load_tokenizer(first.path / "tokenizer").fingerprint
    for other in readers[1:]:
        shapes = [{name: reader.shape(name) for name in reader.names()} for reader in (first, other)]
        names = [name for name in dict.fromkeys((*shapes[0], *shapes[1])) if len({one.get(name) for one in shapes}) > 1]
        if names or load_saved_config(other.path / "config.yaml").model != model:
            found = " and ".join(str(one.get(names[0], "missing")) for one in shapes) if names else "config.yaml"
            where = f"{names[0]}: {found}" if names else "the model sections of their config.yaml"
            raise CheckpointError(f"{first.path} and {other.path} are of different models ({where})")
        if load_tokenizer(other.path / "tokenizer").fingerprint != tokens:
            raise CheckpointError(f"{first.path} and {other.path} have different tokenizers, so their rows differ")


def mean(readers: Sequence[CheckpointReader], shares: Sequence[float], name: str) -> torch.Tensor:
    """Return the weighted mean of a parameter, flat, fp32."""
    import torch

    total = math.prod(readers[0].shape(name))
    result = torch.empty(total)
    for start in range(0, total, READ_ELEMENTS):
        length = min(READ_ELEMENTS, total - start)
        parts = (share * reader.read(name, start=start, length=length).double()
                 for reader, share in zip(readers, shares, strict=True))  # fmt: skip
        result[start : start + length] = sum(parts)
    return result
