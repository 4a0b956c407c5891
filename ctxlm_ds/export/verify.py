"""Proof of a conversion: the outputs of our model and of transformers' on the same inputs.

Our model is filled from our weights, theirs is loaded by transformers from the folder as any user would; both compute
in fp32, one after the other, so that only one is in memory. Models that predict the next token also generate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.base import FamilyExport, Fields, Rows, at_positions, export_of
from ctxlm_ds.export.verify_inputs import SEED, build_inputs, longest_row, make_fields, quiet_transformers
from ctxlm_ds.export.weights import WeightSource
from ctxlm_ds.models.build import plain_model
from ctxlm_ds.recipe.sections import ModelSection
from ctxlm_ds.tokenizers.base import Tokenizer

BOUND = 1e-4
"""Largest difference of logits computed in fp32 from the same weights, relative to the largest logit."""
ROUNDING_BOUNDS = {"fp32": BOUND, "fp16": 2e-2, "bf16": 1e-1}
"""Largest difference that rounding the weights to an export's data type may make, relative to the largest logit."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GENERATED_TOKENS = 20


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
        """The difference in units of the reference's largest logit."""
        return self.largest_difference / self.logit_scale if self.logit_scale > 0 else self.largest_difference

    @property
    def holds(self) -> bool:
        """False for a NaN too."""
        return self.relative <= self.bound

    def __str__(self) -> str:
        return (
            f"{self.name}: largest difference {self.largest_difference:.2e} at logits up to {self.logit_scale:.3g}, "
            f"relative {self.relative:.2e} (bound {self.bound:g})"
        )


class Continuation(NamedTuple):
    """A prompt's ids and those that a model wrote after it."""

    prompt: torch.Tensor
    tokens: torch.Tensor


def verify_folder(
    folder: Path,
    source: WeightSource,
    model: ModelSection,
    outputs: Sequence[str],
    tokenizer: Tokenizer,
    dtype: str = "fp32",
) -> list[Comparison]:
    """Compare the transformers model in `folder` with ours filled from `source`.

    `dtype` is that of the folder's weights: ours are rounded alike for the comparison, and the effect of the rounding
    itself is compared with a bound of its own.

    Raises:
        ExportError: lists every difference past its bound.
    """
    export = export_of(model.family)
    inputs = build_inputs(folder, export, model, tokenizer)
    theirs, written = _their_side(folder, export, model, outputs, inputs)
    ours = filled_model(source, model, outputs, dtype)
    comparisons = _compare(_our_logits(ours, export, inputs), theirs, BOUND)
    if written:
        comparisons.append(_compare_generation(ours, str(export.next_token_output), written))
    if dtype != "fp32":
        ours = filled_model(source, model, outputs, "fp32")
        comparisons += _compare(
            _our_logits(ours, export, inputs), theirs, ROUNDING_BOUNDS[dtype], f" (rounding to {dtype})"
        )
    failed = [str(comparison) for comparison in comparisons if not comparison.holds]
    if failed:
        raise ExportError(
            "the logits of transformers and of this project's model differ: "
            + "; ".join(failed)
            + ". Nothing was kept. Try the versions in constraints.txt; if it stays, please report it with yours"
        )
    return comparisons


def filled_model(source: WeightSource, model: ModelSection, outputs: Sequence[str], dtype: str) -> Any:
    """Build our model with the source's weights, rounded to `dtype` and held in fp32."""
    module = plain_model(model, outputs, "cpu")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(source.read_full(name).to(DTYPES[dtype]))
    return module


def load_with_transformers(folder: Path, hf_class: str) -> Any:
    """Load the folder's model in fp32 and evaluation mode.

    Raises:
        ExportError: transformers misses a tensor, or finds one of another shape.
    """
    import transformers

    with quiet_transformers():
        module, info = getattr(transformers, hf_class).from_pretrained(
            str(folder), dtype=torch.float32, output_loading_info=True, local_files_only=True, use_safetensors=True
        )
    wrong = {key: sorted(map(str, info[key])) for key in ("missing_keys", "mismatched_keys") if info.get(key)}
    if wrong:
        raise ExportError(f"transformers cannot fill {type(module).__name__} from {folder}: {wrong}")
    return module.eval()


def _our_logits(module: Any, export: FamilyExport, inputs: dict[str, Fields]) -> Fields:
    """Compute our outputs by `input/output`."""
    with torch.no_grad():
        return {
            f"{name}/{output}": value.float()
            for name, fields in inputs.items()
            for output, value in _compared(module.run(fields), export, fields).items()
        }


def _their_side(
    folder: Path, export: FamilyExport, model: ModelSection, outputs: Sequence[str], inputs: dict[str, Fields]
) -> tuple[Fields, list[Continuation]]:
    """Compute transformers' outputs under our names and, if it predicts the next token, what it writes."""
    module = load_with_transformers(folder, export.hf_classes[frozenset(outputs)])
    logits: Fields = {}
    with torch.no_grad():
        for name, fields in inputs.items():
            found = export.their_outputs(module(**export.their_inputs(fields)), fields)
            logits |= {f"{name}/{output}": value for output, value in _compared(found, export, fields).items()}
    written = [] if export.next_token_output is None else _generated(module, inputs["text"], longest_row(model))
    return logits, written


def _compared(outputs: Fields, export: FamilyExport, fields: Fields) -> Fields:
    """Keep the predicted positions of an output that has logits everywhere, at padding too."""
    whole = export.next_token_output
    return {
        name: at_positions(value, fields["prediction_positions"]) if name == whole else value
        for name, value in outputs.items()
    }


def _compare(reference: Fields, other: Fields, bound: float, note: str = "") -> list[Comparison]:
    comparisons = []
    for name, expected in reference.items():
        if other[name].shape != expected.shape:
            raise ExportError(f"{name}: logits of shape {tuple(other[name].shape)}, expected {tuple(expected.shape)}")
        difference = float((expected - other[name]).abs().max())
        comparisons.append(Comparison(name + note, difference, float(expected.abs().max()), bound))
    return comparisons


def _generated(module: Any, prompts: Fields, longest: int) -> list[Continuation]:
    """Let transformers write after each prompt, the end-of-text token being one like any other."""
    from transformers import GenerationConfig

    length = min(GENERATED_TOKENS, longest - 1)
    # The model's own settings (its end-of-text token, a release's sampling) are not what is compared.
    module.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=length, eos_token_id=None, pad_token_id=0
    )
    lengths = (prompts["sequence_ids"] > 0).sum(dim=1).clamp(max=longest - length)
    texts = [row[:end] for row, end in zip(prompts["input_ids"], lengths.tolist(), strict=True)]
    with quiet_transformers():
        rows = [module.generate(text[None], attention_mask=torch.ones_like(text[None]))[0] for text in texts]
    return [Continuation(text, row[len(text) :]) for text, row in zip(texts, rows, strict=True)]


def _compare_generation(ours: Any, output: str, written: Sequence[Continuation]) -> Comparison:
    """Tell whether a greedy loop over our model gives the tokens of transformers' greedy generate().

    Ours reads what theirs wrote: each token must have our largest logit at its place (up to BOUND, so that a tie of two
    words is none of the conversion's doing). By induction a loop of our own writes the same.
    """
    largest, scale = 0.0, 0.0
    for prompt, tokens in written:
        row = torch.cat([prompt, tokens]).tolist()
        fields = make_fields(Rows([row], [[0] * len(row)]), 0, np.random.default_rng(SEED))
        with torch.no_grad():
            logits = ours.run(fields)[output][0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, tokens[:, None])[:, 0]
        largest = max(largest, float((logits.amax(dim=1) - chosen).max()))
        scale = max(scale, float(logits.abs().max()))
    return Comparison(f"text/generate of {len(written[0].tokens)} tokens", largest, scale, BOUND)
