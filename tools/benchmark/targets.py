"""Figures of the target tokens of an encoder-decoder on a run's held-out rows: unigrams, and an exported model.

The unigram distribution of restored tokens, which the inputs lack (EncoderDecoder.restored), counts these alone.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ctxlm_ds.apps.evaluate.verdict import Figures, Predictions, figures_of_shares, mean_figures
from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.encoder_decoder import DECODER_FIELDS, LABELS, EncoderDecoder
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.registry import OBJECTIVES


class Targets(Predictions):
    """The rows of a run whose objective has targets.

    Raises ConfigError for another objective, and if the recipe names no held-out data.
    """

    objective: EncoderDecoder

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Open the rows of a recipe that names tokenizer and data."""
        if not issubclass(OBJECTIVES.get(config.objective.name), EncoderDecoder):
            raise ConfigError(f"objective.name {config.objective.name} has no targets; name one of an encoder-decoder")
        found = super().of(config)
        if not (found and found.rows.validation):
            raise ConfigError("data.validation is empty: name held-out datasets, as in training")
        return found

    def unigram_figures(self) -> tuple[Figures, Figures]:
        """Return the unigram distributions' figures of all target tokens, and of restored ones."""
        every, inside = (np.ones(self.vocab_size) for _ in range(2))
        for batch in self.trained():
            labels = self.labels(batch)
            every += np.bincount(labels, minlength=len(every))
            inside += np.bincount(labels[self._restored(batch)], minlength=len(inside))
        labels = np.concatenate(list(map(self.labels, self.held_out())))
        restored = np.concatenate([self._restored(batch) for batch in self.held_out()])
        of_all = figures_of_shares(every / every.sum(), labels)
        return of_all, figures_of_shares(inside / inside.sum(), labels[restored])

    @torch.no_grad()
    def model_figures(self, folder: Path, shift: int = 0) -> tuple[Figures, Figures]:
        """Return the figures of an exported model, computed by transformers, on the same tokens.

        With `shift` each row has the input of the row so many places before in its micro-batch. Raises ConfigError if
        a row may hold several texts.
        """
        if self.config.data.shares_rows:
            raise ConfigError("data.packing: transformers takes rows of one text; set it to false")
        import transformers

        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
        losses, hits, restored = [], [], []
        ids, _, sequences, _ = DECODER_FIELDS
        for batch in self.held_out():
            fields = {name: field.long() for name, field in batch.fields.items()}
            labels = fields[LABELS]
            kept = labels != IGNORE_LABEL
            inputs, mask = (fields[name].roll(shift, 0) for name in ("input_ids", "sequence_ids"))
            logits = model(
                input_ids=inputs, attention_mask=(mask > 0).long(), decoder_input_ids=fields[ids],
                decoder_attention_mask=(fields[sequences] > 0).long(),
            ).logits.float()[kept]  # fmt: skip
            losses.append(functional.cross_entropy(logits, labels[kept], reduction="none"))
            hits.append(logits.argmax(-1) == labels[kept])
            restored.append(self._restored(batch))
        loss, hit = torch.cat(losses).double().numpy(), torch.cat(hits).numpy()
        every, inside = ((loss[chosen], hit[chosen]) for chosen in (slice(None), np.concatenate(restored)))
        return mean_figures(*every), mean_figures(*inside)

    def _restored(self, batch: Batch) -> NDArray[np.bool_]:
        """Return [t]: True for restored ones of the labels of a batch."""
        fields = {name: field.numpy() for name, field in batch.fields.items()}
        return self.objective.restored(fields)[fields[LABELS] != IGNORE_LABEL]


def compare_targets(targets: Targets, folder: Path) -> list[str]:
    """Return lines with loss, perplexity and accuracy of unigrams and of an exported model on a run's held-out rows.

    What the model gains by its inputs is the difference from its figures on rows with those of others.
    """
    sides = {
        "unigram (add one)": targets.unigram_figures(), "model": targets.model_figures(folder),
        "model with another row's input": targets.model_figures(folder, shift=1),
    }  # fmt: skip
    lines = []
    for number, title in enumerate(("all target tokens", "restored tokens")):
        for name, figures in sides.items():
            found = figures[number]
            loss = f"{found.loss:.4f} nats, perplexity {math.exp(found.loss):.1f}"
            lines.append(f"{title}, {name}: {loss}, accuracy {found.accuracy:.1%}")
    return lines
