"""Small models of tasks over frozen vectors of words: a biLSTM or none, then tags, labels or numbers.

Shape letters: b rows, n words, k vectors of a word, w their width, s width of static vectors, d width of the encoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ctxlm_ds.apps.downstream.kinds.base import IGNORED_LABEL
from ctxlm_ds.apps.downstream.kinds.entries import Answer

Encoder = Literal["bilstm", "none"]
Place = Literal["input", "output", "both"]


@dataclass(frozen=True)
class HeadSettings:
    """Settings of the task's model."""

    encoder: Encoder = "bilstm"
    hidden_size: int = 128
    """Cells of each direction."""
    num_layers: int = 1
    dropout: float = 0.3
    """Of what the encoder reads, and of what it gives."""
    mix_at: Place = "input"
    """Where the vectors enter: at the input of the RNN, next to its output, or both (Peters 2018, section 3.3)."""
    mix_l2: float = 0.0
    """Factor of ||w||^2 of each mix in the loss."""
    layer_dropout: float = 0.0


@dataclass(frozen=True)
class InputShape:
    """What comes with each word."""

    num_vectors: int
    width: int
    static_width: int = 0
    """0 without static vectors."""


class ScalarMix(nn.Module):
    """A trained weighted sum of layers (Peters 2018, equation 1; allennlp/modules/scalar_mix.py).

    gamma * sum_j softmax(w)_j h_j, with gamma 1 and w 0 at the start: the mean of the layers.

    In training, `layer_dropout` leaves out each layer with that probability, and the others share its weight (UDify,
    Kondratyuk and Straka 2019).
    """

    def __init__(self, num_layers: int, layer_dropout: float = 0.0) -> None:
        super().__init__()
        self.scalars = nn.Parameter(torch.zeros(num_layers))
        self.gamma = nn.Parameter(torch.ones(()))
        self.layer_dropout = layer_dropout

    def weights(self) -> Tensor:
        """Return softmax(w), [layers]; without the layers that are dropped."""
        scalars = self.scalars
        if self.training and self.layer_dropout > 0:
            dropped = torch.rand_like(scalars) < self.layer_dropout
            if not dropped.all():
                scalars = scalars.masked_fill(dropped, -torch.inf)
        return scalars.softmax(dim=0)

    def penalty(self) -> Tensor:
        """Return ||w||^2, with which the loss draws the weights towards the mean of the layers."""
        return self.scalars.square().sum()

    def forward(self, layers: Tensor) -> Tensor:
        """Map layers [..., layers, width] to [..., width]."""
        return self.gamma * torch.einsum("l,...lw->...w", self.weights(), layers)


class FrozenModel(nn.Module):
    """A tag of each word, or a label or a number of a text, from the mean of its words.

    A pair of texts is u, v, |u - v| and u * v (InferSent, Conneau 2017).
    """

    def __init__(
        self, shape: InputShape, settings: HeadSettings, num_labels: int, answer: Answer, pairs: bool = False
    ) -> None:
        super().__init__()
        at_input, at_output = settings.mix_at != "output", settings.mix_at != "input"
        self.answer, self.pairs, self.mix_l2 = answer, pairs, settings.mix_l2
        self.input_mix = ScalarMix(shape.num_vectors, settings.layer_dropout) if at_input else None
        self.output_mix = ScalarMix(shape.num_vectors, settings.layer_dropout) if at_output else None
        self.dropout = nn.Dropout(settings.dropout)
        width = shape.static_width + shape.width * at_input
        self.rnn: nn.LSTM | None = None
        if settings.encoder == "bilstm":
            self.rnn = nn.LSTM(
                width, settings.hidden_size, settings.num_layers, batch_first=True, bidirectional=True,
                dropout=settings.dropout if settings.num_layers > 1 else 0.0,
            )  # fmt: skip
            width = 2 * settings.hidden_size
        width += shape.width * at_output
        self.classifier = nn.Linear(width * (4 if pairs else 1), num_labels)

    def mixes(self) -> Iterator[tuple[str, ScalarMix]]:
        """Yield the mixes with their places."""
        for place, mix in (("input", self.input_mix), ("output", self.output_mix)):
            if mix is not None:
                yield place, mix

    def forward(
        self, vectors: Tensor, lengths: Tensor, static: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Map vectors [b, n, k, w], of pairs [b, 2, n, k, w], to logits [b, labels], or [b, n, labels] for tags.

        The loss is the mean over rows, or over words with a tag; in training with the penalty of the mixes.
        """
        if self.pairs:
            vectors, lengths = _first_then_second(vectors), _first_then_second(lengths)
            static = None if static is None else _first_then_second(static)
        x = self._encode(vectors, static, lengths)
        if self.answer != "tags":
            inside = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
            x = (x * inside[..., None]).sum(dim=1) / lengths[:, None]
        if self.pairs:
            first, second = x.chunk(2)
            x = torch.cat([first, second, (first - second).abs(), first * second], dim=-1)
        logits = self.classifier(x)
        if labels is None:
            return {"logits": logits}
        if self.answer == "number":
            loss = F.mse_loss(logits.squeeze(-1), labels.to(logits.dtype))
        else:
            loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL)
        if self.training and self.mix_l2:
            loss = loss + self.mix_l2 * torch.stack([mix.penalty() for _, mix in self.mixes()]).sum()
        return {"loss": loss, "logits": logits}

    def _encode(self, vectors: Tensor, static: Tensor | None, lengths: Tensor) -> Tensor:
        """Map vectors [b, n, k, w] and static ones [b, n, s] of rows of `lengths` [b] words to [b, n, d]."""
        parts = [] if static is None else [static]
        if self.input_mix is not None:
            parts.append(self.input_mix(vectors))
        x = self.dropout(torch.cat(parts, dim=-1))
        if self.rnn is not None:
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            x, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=vectors.shape[1])
            x = self.dropout(x)
        if self.output_mix is not None:
            x = torch.cat([x, self.dropout(self.output_mix(vectors))], dim=-1)
        return x


def _first_then_second(pairs: Tensor) -> Tensor:
    """Map [b, 2, ...] to [2b, ...]: all first texts, then all second ones."""
    return pairs.transpose(0, 1).flatten(0, 1)
