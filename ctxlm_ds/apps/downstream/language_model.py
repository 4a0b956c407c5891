"""Log-probabilities of chosen tokens under a language model of transformers.

The output layer is computed at the chosen places only: no tensor [b, s, v] exists. Shape letters: b rows, s positions,
v vocabulary, n places of a batch, m of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from ctxlm_ds.apps.downstream.kinds.base import quiet_transformers
from ctxlm_ds.apps.downstream.model_folder import check_weights
from ctxlm_ds.errors import ConfigError

BATCH_TOKENS = 2048
"""Most positions of a batch."""
Tokens = tuple[int, ...]
Values = NDArray[np.float64]


class Row(NamedTuple):
    """One input of the model, and the tokens that are scored."""

    input_ids: Tokens
    decoder_ids: Tokens
    """What the decoder of an encoder-decoder reads; empty for other models."""
    places: tuple[int, ...]
    """Positions of the logits of each scored token."""
    targets: Tokens
    """The scored tokens."""

    @property
    def length(self) -> int:
        """Return the positions of the longer stack."""
        return max(len(self.input_ids), len(self.decoder_ids))


@dataclass
class LanguageModel:
    """A model of transformers with an output layer over its vocabulary."""

    model: Any
    pad_id: int = 0
    batch_tokens: int = BATCH_TOKENS
    way: str = ""
    """What a model that hides tokens in several ways reads."""
    pads: ClassVar[bool] = True
    """Whether rows of different lengths share a batch."""

    @torch.inference_mode()
    def log_probs(self, rows: Sequence[Row]) -> list[Values]:
        """Return the log-probabilities in nats of each row's targets, float64 [m].

        Rows with the same input share a forward pass; the others are batched by length.
        """
        same: dict[Any, list[int]] = {}
        for at, row in enumerate(rows):
            same.setdefault(row[:3], []).append(at)  # what decides the logits
        found: list[Values] = [np.empty(0)] * len(rows)
        for batch in self._batches(sorted((rows[places[0]] for places in same.values()), key=_sizes)):
            logits = self.logits(batch).float()
            members, start = [], 0
            for row in batch:
                members += [(at, start) for at in same[row[:3]]]
                start += len(row.places)
            counts = [len(rows[at].targets) for at, _ in members]
            lines = [start + own for (_, start), count in zip(members, counts, strict=True) for own in range(count)]
            targets = [target for at, _ in members for target in rows[at].targets]
            values = logits[lines, targets].double() - logits.logsumexp(dim=-1)[lines].double()
            for (at, _), value in zip(members, values.cpu().split(counts), strict=True):
                found[at] = value.numpy()
        return found

    def decoder_ids(self, labels: Tokens) -> Tokens:
        """Return what the decoder of an encoder-decoder reads to write labels."""
        return tuple(self.model.prepare_decoder_input_ids_from_labels(labels=torch.tensor([labels]))[0].tolist())

    def inputs(self, batch: Sequence[Row]) -> dict[str, torch.Tensor]:
        """Return the arguments of the model's forward pass for a batch."""
        inputs = {"input_ids": padded([row.input_ids for row in batch], self.pad_id)}
        if len({len(row.input_ids) for row in batch}) > 1:
            inputs["attention_mask"] = padded([(1,) * len(row.input_ids) for row in batch], 0)
        if batch[0].decoder_ids:
            # Behind the last scored token; a causal decoder's earlier logits do not depend on it.
            inputs["decoder_input_ids"] = padded([row.decoder_ids for row in batch], self.pad_id)
        return inputs

    def columns(self, row: Row) -> Sequence[int]:
        """Return the places of the row's logits among the model's outputs."""
        return row.places

    def logits(self, batch: Sequence[Row]) -> torch.Tensor:
        """Return the logits [n, v] of all rows' places."""
        inputs = {name: value.to(self.model.device) for name, value in self.inputs(batch).items()}
        columns = [(number, column) for number, row in enumerate(batch) for column in self.columns(row)]
        picked = torch.tensor(columns, dtype=torch.int64).reshape(-1, 2).t().to(self.model.device)
        handle = self.model.get_output_embeddings().register_forward_pre_hook(
            lambda _, given: (given[0][picked[0], picked[1]][None], *given[1:])
        )
        try:
            return self.model(**inputs).logits[0]
        finally:
            handle.remove()

    def _batches(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Yield rows, sorted by length, in batches of at most batch_tokens positions."""
        batch: list[Row] = []
        for row in rows:
            # Half a batch or more of one length needs no padding.
            mixed = bool(batch) and _sizes(row) != _sizes(batch[0])
            fills = len(batch) * row.length * 2 >= self.batch_tokens or not self.pads
            if batch and ((len(batch) + 1) * row.length > self.batch_tokens or (mixed and fills)):
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch


def load_model(folder: Path, auto_class: Any) -> Any:
    """Return a folder's model in fp32, on the GPU if there is one; ConfigError for missing or damaged weights."""
    quiet_transformers()  # it would report each input that is still to be shortened
    model, loading = auto_class.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, local_files_only=True, output_loading_info=True
    )
    missing = sorted(loading["missing_keys"])
    if missing:
        raise ConfigError(f"--model {folder}: no weights of {missing[0]}: the export has no language model's output "
                          "layer (of an ELECTRA, the folder generator has one)")  # fmt: skip
    check_weights(folder, model)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def padded(rows: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
    """Return rows of different lengths as [b, s]."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=fill)


def _sizes(row: Row) -> tuple[int, int, int]:
    return len(row.input_ids), len(row.decoder_ids), len(row.places)
