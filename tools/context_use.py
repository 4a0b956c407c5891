"""Measure whether a causal model uses a long context: the loss of the same tokens after much and after little text.

    python tools/context_use.py runs/long/hf runs/short/hf --data data/held_text_document

Rows are consecutive tokens of one document. The last tokens of each row are scored in one pass over the complete row,
and in blocks that each see a short context only. The 95 % interval of a difference is a bootstrap over rows, each of
which gives both numbers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ctxlm_ds.console import run_command
from ctxlm_ds.errors import DataError
from ctxlm_ds.process.launch import quiet_libraries

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from ctxlm_ds.data.dataset.reader import IndexedDataset

SEED = 5


def rows_of(dataset: IndexedDataset, length: int, repeat: bool) -> Iterator[torch.Tensor]:
    """Yield rows of `length` tokens, none of two documents; with `repeat` the second half repeats the first."""
    import numpy as np
    import torch

    for document in range(dataset.num_documents):
        tokens = torch.from_numpy(np.concatenate(list(dataset.document(document))).astype(np.int64))
        step = length // 2 if repeat else length
        for row in tokens[: len(tokens) // step * step].view(-1, step):
            yield torch.cat((row, row)) if repeat else row


def loss_of(model: torch.nn.Module, row: torch.Tensor, scored: int, context: int | None, block: int) -> float:
    """Return the mean loss of the last `scored` tokens of a row.

    They are scored in one pass, or with a `context` in blocks, each after that many tokens.
    """
    import torch
    from torch.nn import functional as F

    if context is None:
        logits = model(row[None]).logits[0, -scored - 1 : -1]
        return float(F.cross_entropy(logits.float(), row[-scored:]))
    starts = range(len(row) - scored, len(row), block)
    windows = torch.stack([row[start - context : start + block] for start in starts])
    logits = model(windows).logits[:, context - 1 : -1]
    return float(F.cross_entropy(logits.flatten(0, 1).float(), windows[:, context:].flatten()))


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each model and context, and each one's difference to the first."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("models", nargs="+", type=Path, help="exports; the first one is scored after long context too")
    parser.add_argument("--data", required=True, type=Path, help="dataset prefix of held-out documents")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--scored", type=int, default=1024, help="last tokens of a row that are scored")
    parser.add_argument("--context", type=int, default=256, help="tokens before each block, which is as long")
    parser.add_argument("--rows", type=int, default=200, help="most rows")
    parser.add_argument("--repeat", action="store_true", help="make rows whose second half repeats the first")
    asked = parser.parse_args(argv)
    if asked.scored % asked.context or asked.context + asked.scored > asked.length:
        parser.error("--scored: a multiple of --context, and with it at most --length")
    quiet_libraries()
    import numpy as np
    import torch
    from scipy.stats import bootstrap
    from transformers import AutoModelForCausalLM

    from ctxlm_ds.data.dataset.reader import IndexedDataset

    rows = list(islice(rows_of(IndexedDataset(asked.data), asked.length, asked.repeat), asked.rows))
    if not rows:
        raise DataError(f"{asked.data}: no document has {asked.length:,} tokens; give a smaller --length")
    cases = [(asked.models[0], None), *((model, asked.context) for model in asked.models)]
    first: NDArray[np.float64] | None = None
    for path, context in cases:
        model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True).eval()
        with torch.no_grad():
            losses = np.array([loss_of(model, row, asked.scored, context, asked.context) for row in rows])
        before = asked.length - asked.scored if context is None else context
        line = f"{path} after {before} tokens: loss {losses.mean():.4f}"
        if first is not None:
            found = bootstrap((losses - first,), np.mean, rng=np.random.default_rng(SEED)).confidence_interval
            line += f", {(losses - first).mean():+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
        first = losses if first is None else first
        print(line, flush=True)


if __name__ == "__main__":
    run_command(main)
