"""Tagging with a conditional random field (Lafferty et al. 2001) over the scores of first subwords.

The layer is torchcrf's; it learns which tag follows which (Lample et al. 2016, "Neural Architectures for Named Entity
Recognition", section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ctxlm_ds.apps.downstream.kinds.base import IGNORED_LABEL, Features, Prediction, concrete_class, load_extended
from ctxlm_ds.apps.downstream.kinds.tagging import SCHEME, Tagging, word_places
from ctxlm_ds.apps.downstream.tags import best_sequence, legal_transitions, marginals
from ctxlm_ds.errors import ConfigError


@dataclass
class CrfTagging(Tagging):
    """One tag per word, by the best legal sequence of a CRF."""

    def __post_init__(self) -> None:
        if (self.train_on, self.read_from) != ("first", "first"):
            raise ConfigError("--crf: reads the first subword of each word; drop --train-on and --read-from")

    def model(self, folder: Path, config: Any, random: bool) -> Any:
        return load_extended(_with_crf(concrete_class(self.auto_class(), config)), folder, config, random)

    def keep_logits(self, outputs: Any, labels: Any) -> Any:
        return outputs[:2]

    def predict(self, outputs: Any, features: Features) -> list[Prediction]:
        emissions, learned = outputs[0], outputs[1][0].astype(np.float64)
        transitions = learned + legal_transitions(self.labels, SCHEME if self.task.scheme else None)
        predictions = []
        for example, places in zip(features.examples, word_places(features), strict=True):
            scores = np.zeros((len(example.words), len(self.labels)))  # a word without subwords has no opinion
            for word, (at, positions) in places.items():
                scores[word] = emissions[at, positions[0]]
            path = best_sequence(scores, transitions)
            chosen = marginals(scores, transitions)[np.arange(len(path)), path]
            predictions.append(Prediction([self.labels[label] for label in path], chosen.tolist()))
        return predictions


def _crf_class() -> Any:
    """Return torchcrf's CRF over the first subwords of words."""
    try:
        from torchcrf import CRF
    except ImportError:
        raise ConfigError("--crf needs the package pytorch-crf: pip install 'ctxlm_ds[downstream]'") from None

    class FirstSubwordCrf(CRF):
        def forward(self, emissions: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
            """Return the mean negative log-likelihood of rows, and the transitions with start and end.

            Args:
                emissions: [rows, tokens, labels].
                labels: [rows, tokens]; IGNORED_LABEL at all but the first subwords.
            """
            scores, tags, mask, has_words = _first_subwords(emissions, labels)
            likelihood = super().forward(scores, tags, mask, "none")
            transitions = self.transitions.new_zeros(self.num_tags + 2, self.num_tags + 2)
            transitions[:-2, :-2] = self.transitions
            transitions[-2, :-2], transitions[:-2, -1] = self.start_transitions, self.end_transitions
            return -(likelihood * has_words).mean(), transitions

    return FirstSubwordCrf


def _with_crf(base: Any) -> Any:
    """Return transformers' class for tagging with a CRF as its output layer."""
    crf_class = _crf_class()

    class WithCrf(base):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.crf = crf_class(config.num_labels, batch_first=True)
            self.post_init()

        def _init_weights(self, module: Any) -> None:
            from transformers import initialization

            if isinstance(module, crf_class):  # what its constructor draws, which loading a folder skips
                for parameter in module.parameters():
                    initialization.uniform_(parameter, -0.1, 0.1)
            else:
                super()._init_weights(module)

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None, labels: Any = None) -> Any:
            """Return the loss and, for evaluation, scores [rows, tokens, labels] and transitions of each row."""
            segments = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
            emissions = super().forward(input_ids=input_ids, attention_mask=attention_mask, **segments).logits.float()
            loss, transitions = self.crf(emissions, labels)
            if self.training:
                return {"loss": loss}
            return {"loss": loss, "logits": emissions, "transitions": transitions.expand(len(emissions), -1, -1)}

    return WithCrf


def _first_subwords(
    emissions: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scores [rows, words, labels], tags and mask [rows, words], and which rows have words."""
    counts = (labels != IGNORED_LABEL).sum(dim=1)
    longest = max(1, int(counts.max()))
    order = torch.argsort((labels == IGNORED_LABEL).to(torch.uint8), dim=1, stable=True)[:, :longest]
    mask = torch.arange(longest, device=labels.device)[None, :] < counts[:, None]
    mask[:, 0] = True  # torchcrf wants a word in each row
    scores = emissions.gather(1, order[..., None].expand(-1, -1, emissions.shape[-1]))
    return scores, labels.gather(1, order).clamp(min=0), mask, counts > 0
