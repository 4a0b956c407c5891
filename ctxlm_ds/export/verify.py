"""Proof of a conversion: the logits of our model and of transformers' on the same input.

Our model is filled from our weights, theirs is loaded by transformers from the folder as any user would; both compute
in fp32, one after the other, so that only one is in memory. Inputs are random ids (a padded batch and one row of the
longest length, which uses every position) and real text through the folder's own tokenizer. Causal models also
generate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream.collate import CAUSAL_LM, NEXT_SENTENCE
from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.weights import WeightSource, build_module
from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.tokenizers.base import Tokenizer

BOUND = 1e-4
"""Largest difference of logits computed in fp32 from the same weights, relative to the largest logit."""
ROUNDING_BOUNDS = {"fp32": BOUND, "fp16": 2e-2, "bf16": 1e-1}
"""Largest difference that rounding the weights to an export's data type may make, relative to the largest logit."""
MAX_PREDICTIONS = 16
"""Positions of a row whose logits over the vocabulary are compared."""
GENERATED_TOKENS = 20
SEED = 20181011

TEXT_PAIRS = (
    ("It was the best of times, it was the worst of times.", "It was the age of wisdom, the age of foolishness."),
    ("Call me Ishmael.", "Some years ago I thought I would sail about a little and see the watery part of the world."),
    ("The quality of mercy is not strained; it droppeth as the gentle rain from heaven.", "2 + 2 = 4"),
)
"""Real text (Dickens, Melville, Shakespeare; public domain) for models of any language: only the ids matter."""


@dataclass(frozen=True)
class Comparison:
    """The largest difference between two models' logits of one loss term on one input."""

    name: str
    largest_difference: float
    logit_scale: float
    """Largest magnitude of the reference's logits."""
    bound: float
    """Bound of `largest_difference / logit_scale`."""

    @property
    def relative(self) -> float:
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


def verify_folder(
    folder: Path,
    source: WeightSource,
    model: TransformerSection,
    terms: Sequence[str],
    tokenizer: Tokenizer,
    dtype: str = "fp32",
) -> list[Comparison]:
    """Compare the transformers model in `folder` with ours filled from `source`.

    `dtype` is that of the folder's weights: ours are rounded alike for the comparison, and the effect of the rounding
    itself is compared with a bound of its own. Raises ExportError with every difference past its bound.
    """
    inputs = build_inputs(folder, model, tokenizer)
    theirs = transformers_logits(folder, inputs, terms)
    ours = our_logits(source, model, terms, inputs, dtype)
    comparisons = compare(ours, theirs, BOUND)
    if dtype != "fp32":
        exact = our_logits(source, model, terms, inputs, "fp32")
        comparisons += compare(exact, theirs, ROUNDING_BOUNDS[dtype], f" (rounding to {dtype})")
    if model.is_decoder:
        comparisons.append(compare_generation(folder, source, model, inputs["text"], dtype))
    failed = [str(comparison) for comparison in comparisons if not comparison.holds]
    if failed:
        raise ExportError(
            "the logits of transformers and of this project's model differ: " + "; ".join(failed)
            + ". Nothing was kept. Try the versions in constraints.txt; if it stays, please report it with yours"
        )
    return comparisons


def compare_generation(
    folder: Path, source: WeightSource, model: TransformerSection, prompts: Batch, dtype: str
) -> Comparison:
    """Whether a greedy loop over our model gives the tokens of transformers' greedy generate().

    Ours reads what theirs wrote: each token must have our largest logit at its place (up to BOUND, so that a tie of two
    words is none of the conversion's doing). By induction a loop of our own writes the same.
    """
    length = min(GENERATED_TOKENS, model.max_position_embeddings - 1)
    lengths = (prompts.sequence_ids > 0).sum(dim=1).clamp(max=model.max_position_embeddings - length)
    texts = [row[:end] for row, end in zip(prompts.input_ids, lengths.tolist(), strict=True)]
    written = _generated(folder, texts, length)
    module = filled_module(source, model, (CAUSAL_LM,), dtype)
    largest, scale = 0.0, 0.0
    for prompt, tokens in zip(texts, written, strict=True):
        row = torch.cat([prompt, tokens])
        batch = make_batch([row.tolist()], [[0] * len(row)], 0, np.random.default_rng(SEED))
        with torch.no_grad():
            logits = module(batch.model_inputs())[0][0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, tokens[:, None])[:, 0]
        largest = max(largest, float((logits.amax(dim=1) - chosen).max()))
        scale = max(scale, float(logits.abs().max()))
    return Comparison(f"text/generate of {length} tokens", largest, scale, BOUND)


def _generated(folder: Path, prompts: Sequence[torch.Tensor], length: int) -> list[torch.Tensor]:
    """The tokens that transformers writes after each prompt, the end-of-text token being one like any other."""
    from transformers import GenerationConfig

    module = load_with_transformers(folder, (CAUSAL_LM,))
    # The model's own settings (its end-of-text token, a release's sampling) are not what is compared.
    module.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=length, eos_token_id=None, pad_token_id=0
    )
    with quiet_transformers():
        return [
            module.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]))[0, len(prompt) :]
            for prompt in prompts
        ]


def compare(
    reference: dict[str, torch.Tensor], other: dict[str, torch.Tensor], bound: float, note: str = ""
) -> list[Comparison]:
    """One comparison for each name; ExportError where shapes differ."""
    comparisons = []
    for name, expected in reference.items():
        if other[name].shape != expected.shape:
            raise ExportError(f"{name}: logits of shape {tuple(other[name].shape)}, expected {tuple(expected.shape)}")
        difference = float((expected - other[name]).abs().max())
        comparisons.append(Comparison(name + note, difference, float(expected.abs().max()), bound))
    return comparisons


def build_inputs(folder: Path, model: TransformerSection, tokenizer: Tokenizer) -> dict[str, Batch]:
    """Inputs by name: `random`, `longest` and `text`."""
    rng = np.random.default_rng(SEED)
    longest = model.max_position_embeddings
    short = min(24, longest)
    lengths = [short, max(2, short // 2), max(2, short - 3)]
    inputs = {
        "random": make_batch(*random_rows(rng, model, tokenizer.pad_id, lengths), tokenizer.pad_id, rng),
        "longest": make_batch(*random_rows(rng, model, tokenizer.pad_id, [longest]), tokenizer.pad_id, rng),
    }
    inputs["text"] = make_batch(*text_rows(folder, model, tokenizer), tokenizer.pad_id, rng)
    return inputs


def random_rows(
    rng: np.random.Generator, model: TransformerSection, pad_id: int, lengths: Sequence[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Ids over the whole vocabulary but padding, and token types 0 then 1 (RoBERTa: 0)."""
    assert model.vocab_size is not None
    ids = [(pad_id + rng.integers(1, model.vocab_size, n)) % model.vocab_size for n in lengths]
    num_types = min(2, model.type_vocab_size) if model.family == "bert" else 1
    types = [[position * num_types // n for position in range(n)] for n in lengths]
    return [row.tolist() for row in ids], types


def text_rows(folder: Path, model: TransformerSection, tokenizer: Tokenizer) -> tuple[list[list[int]], list[list[int]]]:
    """Real text through the folder's tokenizer as transformers loads it, every seventh token masked.

    Raises ExportError where it does not give the ids that the model was trained on.
    """
    from transformers import AutoTokenizer

    with quiet_transformers():
        theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    texts = [text for pair in TEXT_PAIRS for text in pair]
    expected = tokenizer.encode_batch(texts)
    for text, ids in zip(texts, expected, strict=True):
        loaded = theirs(text, add_special_tokens=False, verbose=False)["input_ids"]
        if loaded != ids:
            raise ExportError(f"the exported tokenizer gives {loaded} for {text!r}, the model was trained on {ids}")
    if model.is_decoder:
        return _continuous_rows(theirs, model, tokenizer)
    if theirs.pad_token_id != tokenizer.pad_id or theirs.mask_token_id != tokenizer.mask_id:
        raise ExportError(
            f"the exported tokenizer has pad {theirs.pad_token_id} and mask {theirs.mask_token_id}, "
            f"the model was trained with {tokenizer.pad_id} and {tokenizer.mask_id}"
        )
    encoded = theirs(
        [a for a, _ in TEXT_PAIRS], [b for _, b in TEXT_PAIRS],
        truncation="longest_first", max_length=model.max_position_embeddings, return_token_type_ids=True,
    )  # fmt: skip
    rows = [[tokenizer.mask_id if i % 7 == 3 else token for i, token in enumerate(row)] for row in encoded["input_ids"]]
    types = encoded["token_type_ids"]
    if model.family == "roberta" or model.type_vocab_size == 1:
        types = [[0] * len(row) for row in rows]
    return rows, types


def _continuous_rows(
    theirs: Any, model: TransformerSection, tokenizer: Tokenizer
) -> tuple[list[list[int]], list[list[int]]]:
    """The pairs as one text each, cut to the model's length; raises ExportError where a text's end is another token."""
    if theirs.eos_token_id != tokenizer.sep_id:
        raise ExportError(
            f"the exported tokenizer ends a text with {theirs.eos_token_id}, the model was trained with "
            f"{tokenizer.sep_id}"
        )
    rows = [ids[: model.max_position_embeddings] for ids in tokenizer.encode_batch([" ".join(p) for p in TEXT_PAIRS])]
    return rows, [[0] * len(row) for row in rows]


def make_batch(rows: list[list[int]], types: list[list[int]], pad_id: int, rng: np.random.Generator) -> Batch:
    """One sequence a row, padded to the longest, with the same number of predicted positions in each row."""
    length = max(len(row) for row in rows)
    predictions = min(MAX_PREDICTIONS, min(len(row) for row in rows))

    def padded(values: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
        return torch.tensor([[*row, *[fill] * (length - len(row))] for row in values])

    chosen = [sorted(rng.choice(len(row), predictions, replace=False).tolist()) for row in rows]
    return Batch(
        input_ids=padded(rows, pad_id),
        token_type_ids=padded(types, 0),
        position_ids=padded([range(len(row)) for row in rows], 0),
        sequence_ids=padded([[1] * len(row) for row in rows], 0),
        sequence_starts=torch.tensor([[0, len(row)] for row in rows]),
        prediction_positions=torch.tensor(chosen),
        cls_positions=torch.zeros(len(rows), 1, dtype=torch.int64),
        labels={},
    )


def our_logits(
    source: WeightSource, model: TransformerSection, terms: Sequence[str], inputs: dict[str, Batch], dtype: str
) -> dict[str, torch.Tensor]:
    """Logits of our model by `input/term`, its weights rounded to `dtype` and computed in fp32."""
    module = filled_module(source, model, terms, dtype)
    logits: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, batch in inputs.items():
            for term, value in zip(terms, module(batch.model_inputs()), strict=True):
                picked = at_predictions(value, batch) if term == CAUSAL_LM else value
                logits[f"{name}/{term}"] = picked.float()
    return logits


def filled_module(source: WeightSource, model: TransformerSection, terms: Sequence[str], dtype: str) -> torch.nn.Module:
    """Our model with the source's weights, rounded to `dtype` and held in fp32."""
    rounding = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    module = build_module(model, terms, "cpu")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(source.read_full(name).to(rounding))
    return module


def at_predictions(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Logits of every position [b, s, V] -> those of the predicted positions [b, p, V]."""
    return logits.gather(1, batch.prediction_positions[:, :, None].expand(-1, -1, logits.shape[-1]))


def transformers_logits(folder: Path, inputs: dict[str, Batch], terms: Sequence[str]) -> dict[str, torch.Tensor]:
    """Logits of the folder's model by `input/term`, shaped as ours: a word's [b, p, V], next_sentence [b, 1, 2].

    Raises ExportError where transformers misses a tensor, or finds one that it does not know.
    """
    module = load_with_transformers(folder, terms)
    logits: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, batch in inputs.items():
            arguments = {"input_ids": batch.input_ids, "attention_mask": (batch.sequence_ids > 0).long()}
            if module.config.model_type == "bert":
                arguments["token_type_ids"] = batch.token_type_ids
            output = module(**arguments)
            predictions = output.prediction_logits if NEXT_SENTENCE in terms else output.logits
            logits[f"{name}/{terms[0]}"] = at_predictions(predictions, batch)
            if NEXT_SENTENCE in terms:
                logits[f"{name}/next_sentence"] = output.seq_relationship_logits[:, None]
    return logits


def load_with_transformers(folder: Path, terms: Sequence[str]) -> Any:
    """The folder's model in fp32 and evaluation mode, every tensor accounted for."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertForPreTraining

    loader = BertForPreTraining if NEXT_SENTENCE in terms else AutoModelForMaskedLM
    if CAUSAL_LM in terms:
        loader = AutoModelForCausalLM
    with quiet_transformers():
        module, info = loader.from_pretrained(
            str(folder), dtype=torch.float32, output_loading_info=True, local_files_only=True, use_safetensors=True
        )
    wrong = {key: sorted(map(str, info[key])) for key in ("missing_keys", "mismatched_keys") if info.get(key)}
    if wrong:
        raise ExportError(f"transformers cannot fill {type(module).__name__} from {folder}: {wrong}")
    return module.eval()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' own progress bars and reports: what matters of them is raised as an error."""
    from transformers.utils import logging as hf_logging

    verbosity = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
