"""Proof of a conversion: our model and transformers' give the same outputs for the same inputs.

Our model is filled from our weights, theirs is loaded by transformers from the folder. Both compute in fp32, one after
the other, so that only one is in memory. The inputs are random ids, the longest row, and real text through the
tokenizer, which must give the same ids in transformers and here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ctxlm_ds.console import logger
from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.base import FamilyExport, Fields, Rows, at_positions, export_of
from ctxlm_ds.export.key_maps import WeightSource
from ctxlm_ds.kernels.dispatch import DTYPES
from ctxlm_ds.models.program import plain_program
from ctxlm_ds.recipe.sections import ModelSection
from ctxlm_ds.tokenizers.base import Tokenizer

MAX_PREDICTIONS = 16
"""Positions per row whose logits over the vocabulary are compared."""
UNLIMITED_LENGTH = 512
"""Longest row for a model that can read any length."""
MOST_POSITIONS = 2048
"""Positions of the longest row that is compared: transformers keeps all pairs of positions of a layer."""
SHORT_LENGTH = 24
SEED = 20181011
BOUND = 1e-4
"""Bound of the difference of logits computed in fp32 from the same weights, relative to the largest logit."""
ROUNDING_BOUNDS = {"fp32": BOUND, "fp16": 2e-2, "bf16": 1e-1}
"""Bound of the difference that rounding the weights to a data type makes, relative to the largest logit."""

TEXT_PAIRS = (
    ("It was the best of times, it was the worst of times.", "It was the age of wisdom, the age of foolishness."),
    ("Call me Ishmael.", "Some years ago I thought I would sail about a little and see the watery part of the world."),
    ("The quality of mercy is not strained; it droppeth as the gentle rain from heaven.", "2 + 2 = 4"),
)
"""Real text (Dickens, Melville, Shakespeare; public domain) for models of any language: only the ids matter."""


def build_inputs(folder: Path, export: FamilyExport, model: ModelSection, tokenizer: Tokenizer) -> dict[str, Fields]:
    """Return inputs by name: `random` (a padded batch), `longest` (every position up to MOST_POSITIONS) and `text`.

    Raises ExportError if the tokenizer as transformers loads it does not give the ids that the model was trained on.
    """
    rng = np.random.default_rng(SEED)
    longest = min(model.longest_sequence or UNLIMITED_LENGTH, MOST_POSITIONS)
    if longest < (model.longest_sequence or 0):
        logger.info("comparing rows of %d positions, of the %d that the model reads", longest, model.longest_sequence)
    short = min(SHORT_LENGTH, longest)
    num_types = min(2, export.num_token_types(model))
    rows = {
        name: _random_rows(rng, model, tokenizer.pad_id, num_types, lengths)
        for name, lengths in {"random": [short, max(2, short // 2), max(2, short - 3)], "longest": [longest]}.items()
    }
    rows["text"] = export.text_rows(_loaded_tokenizer(folder, tokenizer), model, tokenizer, TEXT_PAIRS)
    fields = {name: make_fields(some, tokenizer.pad_id, rng) for name, some in rows.items()}
    fields = {name: some | export.further_fields(some) for name, some in fields.items()}
    if export.encoder_decoder:
        start = export.start_id(tokenizer)
        return {name: some | _decoder_fields(some, start) for name, some in fields.items()}
    return fields


def _decoder_fields(fields: Fields, start_id: int) -> Fields:
    """Return the decoder's fields for a target of half a row's length without padding: tokens from its start on."""
    ids, shortest = fields["input_ids"], int((fields["sequence_ids"] > 0).sum(dim=1).min())
    rows, length = len(ids), max(1, shortest // 2)
    return {
        "decoder_input_ids": torch.cat([torch.full((rows, 1), start_id), ids[:, : length - 1]], dim=1),
        "decoder_position_ids": torch.arange(length).expand(rows, -1),
        "decoder_sequence_ids": torch.ones(rows, length, dtype=torch.int64),
        "decoder_sequence_starts": torch.tensor([[0, length]]).expand(rows, -1),
    }


def _random_rows(
    rng: np.random.Generator, model: ModelSection, pad_id: int, num_types: int, lengths: Sequence[int]
) -> Rows:
    """Draw ids of the vocabulary except padding, and token types from 0 up."""
    assert model.vocab_size is not None
    ids = [(pad_id + rng.integers(1, model.vocab_size, length)) % model.vocab_size for length in lengths]
    types = [[position * num_types // length for position in range(length)] for length in lengths]
    return Rows([row.tolist() for row in ids], types)


def _loaded_tokenizer(folder: Path, tokenizer: Tokenizer) -> Any:
    """Load the folder's tokenizer with transformers and compare its ids of real text with ours."""
    from transformers import AutoTokenizer

    with _inside_transformers(folder):
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    texts = [text for pair in TEXT_PAIRS for text in pair]
    for text, expected in zip(texts, tokenizer.encode_batch(texts), strict=True):
        ids = loaded(text, add_special_tokens=False, verbose=False)["input_ids"]
        if ids != expected:
            raise ExportError(f"the exported tokenizer gives {ids} for {text!r}, the model was trained on {expected}")
    return loaded


def make_fields(rows: Rows, pad_id: int, rng: np.random.Generator) -> Fields:
    """Return one sequence per row, padded to the longest, with the same number of predicted positions in each row."""
    length = max(len(row) for row in rows.ids)
    predictions = min(MAX_PREDICTIONS, min(len(row) for row in rows.ids))

    def padded(values: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
        return torch.tensor([[*row, *[fill] * (length - len(row))] for row in values])

    chosen = [sorted(rng.choice(len(row), predictions, replace=False).tolist()) for row in rows.ids]
    return {
        "input_ids": padded(rows.ids, pad_id),
        "token_type_ids": padded(rows.types, 0),
        "position_ids": padded([range(len(row)) for row in rows.ids], 0),
        "sequence_ids": padded([[1] * len(row) for row in rows.ids], 0),
        "sequence_starts": torch.tensor([[0, len(row)] for row in rows.ids]),
        "prediction_positions": torch.tensor(chosen),
        "cls_positions": torch.zeros(len(rows.ids), 1, dtype=torch.int64),
    }


@contextmanager
def _inside_transformers(folder: Path) -> Iterator[None]:
    """Silence transformers, and raise any of its errors as an ExportError: it has many classes for damaged files."""
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    except Exception as error:
        raise ExportError(f"{folder}: transformers cannot use it ({type(error).__name__}: {error})") from error
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


@dataclass(frozen=True)
class Comparison:
    """The largest difference between two models' values of one output on one input."""

    name: str
    largest_difference: float
    logit_scale: float
    """Largest magnitude of the reference's logits."""
    bound: float
    """Bound of `largest_difference / logit_scale`."""

    @property
    def relative(self) -> float:
        """Return the difference as a part of the reference's largest logit."""
        return self.largest_difference / self.logit_scale if self.logit_scale > 0 else self.largest_difference

    @property
    def holds(self) -> bool:
        """Return whether the difference is within the bound; False for a NaN."""
        return self.relative <= self.bound

    def __str__(self) -> str:
        return (
            f"{self.name}: largest difference {self.largest_difference:.2e} at logits up to {self.logit_scale:.3g}, "
            f"relative {self.relative:.2e} (bound {self.bound:g})"
        )


def verify_folder(
    folder: Path,
    source: WeightSource,
    model: ModelSection,
    outputs: Sequence[str],
    tokenizer: Tokenizer,
    dtype: str = "fp32",
) -> list[Comparison]:
    """Compare the transformers models in `folder`, whose weights have the `dtype`, with ours filled from `source`.

    Ours are rounded in the same way; the effect of the rounding has another bound. Raises ExportError, which lists
    every difference past its bound.
    """
    inputs = build_inputs(folder, export_of(model.family), model, tokenizer)
    comparisons = []
    for export in export_of(model.family).models():
        own = export.shared_outputs(outputs)  # ours has only these outputs
        theirs = _their_logits(folder / export.folder, export, export.hf_classes[frozenset(own)], inputs)
        comparisons += _compare(_logits(export, inputs, _filled_model(source, model, own, dtype).run), theirs, BOUND)
        if dtype != "fp32":
            exact = _logits(export, inputs, _filled_model(source, model, own, "fp32").run)
            comparisons += _compare(exact, theirs, ROUNDING_BOUNDS[dtype], f" (rounding to {dtype})")
    failed = [str(comparison) for comparison in comparisons if not comparison.holds]
    if failed:
        raise ExportError(
            "the logits of transformers and of this project's model differ: "
            + "; ".join(failed)
            + ". Nothing was kept. Try the versions in constraints.txt; if they differ there too, please report it"
        )
    return comparisons


def _filled_model(source: WeightSource, model: ModelSection, outputs: Sequence[str], dtype: str) -> Any:
    """Build our model with the source's weights, rounded to `dtype` and held in fp32."""
    module = plain_program(model, outputs).module().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(source.read_full(name).to(DTYPES[dtype]))
    return module


def _their_logits(folder: Path, export: FamilyExport, hf_class: str, inputs: dict[str, Fields]) -> Fields:
    """Compute transformers' outputs under our names; ExportError if the folder does not fill the class."""
    import transformers

    with _inside_transformers(folder):
        module, info = getattr(transformers, hf_class).from_pretrained(
            str(folder), dtype=torch.float32, output_loading_info=True, local_files_only=True, use_safetensors=True,
            **export.proof_arguments.get(hf_class, {}),
        )  # fmt: skip
    wrong = {key: sorted(map(str, info[key])) for key in ("missing_keys", "mismatched_keys") if info.get(key)}
    if wrong:
        raise ExportError(f"transformers cannot fill {hf_class} from {folder}: {wrong}")
    module.eval()
    return _logits(export, inputs, lambda fields: export.their_outputs(module(**export.their_inputs(fields)), fields))


def _logits(export: FamilyExport, inputs: dict[str, Fields], run: Callable[[Fields], Fields]) -> Fields:
    """Compute a model's outputs by `input/output`; of logits at every position only those of predicted ones."""
    logits: Fields = {}
    with torch.no_grad():
        for name, fields in inputs.items():
            for output, value in run(fields).items():
                if output == export.next_token_output and not export.encoder_decoder:
                    value = at_positions(value, fields["prediction_positions"])
                elif output in export.position_outputs:
                    value = value[fields["sequence_ids"] > 0]
                logits[f"{name}/{output}"] = value.float()
    return logits


def _compare(reference: Fields, other: Fields, bound: float, note: str = "") -> list[Comparison]:
    comparisons = []
    for name, expected in reference.items():
        if other[name].shape != expected.shape:
            raise ExportError(f"{name}: logits of shape {tuple(other[name].shape)}, expected {tuple(expected.shape)}")
        difference = float((expected - other[name]).abs().max())
        comparisons.append(Comparison(name + note, difference, float(expected.abs().max()), bound))
    return comparisons


def compare_weights(ours: WeightSource, written: WeightSource, bound: float) -> Comparison:
    """Compare the written parameters, one at a time, with those of a checkpoint."""
    differences, magnitudes = [], []
    for name in written.names():
        value = ours.read_full(name)
        differences.append(float((value - written.read_full(name)).abs().max()))
        magnitudes.append(float(value.abs().max()))
    return Comparison("weights", max(differences), max(magnitudes), bound)
