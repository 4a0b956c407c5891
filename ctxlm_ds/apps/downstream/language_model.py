"""Language models of transformers: log-probabilities of chosen tokens, of words in a gap of a text or after a text.

The output layer is computed at the chosen places only: no tensor [b, s, v] exists. Shape letters: b rows, s positions,
v vocabulary, n places of a batch, m of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from ctxlm_ds.apps.downstream.examples import Example, grouped
from ctxlm_ds.apps.downstream.kinds.base import Kind, Prediction, check_weights, quiet_transformers, softmax
from ctxlm_ds.apps.downstream.prepare import read_config
from ctxlm_ds.console import counted, logger
from ctxlm_ds.errors import ConfigError

if TYPE_CHECKING:
    from ctxlm_ds.apps.downstream.prompt import PromptDescription

BATCH_TOKENS = 2048
"""Most positions of a batch."""
Tokens = tuple[int, ...]
Values = NDArray[np.float64]
FIRST_SENTINEL = "<extra_id_0>"
CONTENT_FREE = ("N/A", "[MASK]", "")
"""Content-free inputs (Zhao et al. 2021, section 5)."""
CAUSAL_CLASSES = ("LMHeadModel", "ForCausalLM")


class Row(NamedTuple):
    """One input of the model, and the tokens that are scored."""

    input_ids: Tokens
    decoder_ids: Tokens
    """What the decoder of an encoder-decoder reads; empty for other models."""
    places: tuple[int, ...]
    """Positions of the logits of each scored token."""
    targets: Tokens

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
        same = grouped((row[:3], at) for at, row in enumerate(rows))  # by what decides the logits
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


@dataclass
class Scorer(ABC):
    """A language model with its tokenizer."""

    causal: ClassVar[bool] = False
    """True if the model reads only what is before the gap."""

    model: LanguageModel
    tokenizer: Any
    scores_unknown: bool = False
    """Whether unknown tokens are scored like others (choices are data), not refused."""

    @abstractmethod
    def item(self, before: str, word: str, after: str) -> Row:
        """Return the input that scores `word` between two texts; ConfigError for a word that has no tokens."""

    def scores(self, items: Sequence[Row], mean: bool = False) -> NDArray[np.float64]:
        """Return the sum (or mean) of the log-probabilities in nats of each item's tokens, [items]."""
        return np.array([values.mean() if mean else values.sum() for values in self.model.log_probs(items)])

    def _parts(self, before: str, word: str, after: str) -> tuple[Tokens, Tokens, Tokens]:
        """Return the tokens before the word, those of the word, and those after it in the complete text."""
        encoded = self.tokenizer(before + word + after, return_offsets_mapping=True)
        ids, first, last = tuple(encoded["input_ids"]), len(before), len(before) + len(word)
        places = [at for at, (start, end) in enumerate(encoded["offset_mapping"]) if start < last and end > first]
        begin, end = (places[0], places[-1] + 1) if places else (0, 0)
        self._check_known(ids[begin:end], word)
        return ids[:begin], ids[begin:end], ids[end:]

    def _check_known(self, ids: Sequence[int], word: str) -> None:
        if not ids or (self.tokenizer.unk_token_id in ids and not self.scores_unknown):
            raise ConfigError(f"the tokenizer has no tokens for {word!r}; choose another word")


class MaskedScorer(Scorer):
    """A masked language model: each token of the word is a mask, all are predicted in one pass."""

    def item(self, before: str, word: str, after: str) -> Row:
        first, targets, last = self._parts(before, word, after)
        masks = (self.tokenizer.mask_token_id,) * len(targets)
        return Row((*first, *masks, *last), (), places_of(targets, len(first)), targets)


class CausalScorer(Scorer):
    """A causal model that continues a text; the same tokens as those of lm-evaluation-harness."""

    causal = True

    def item(self, before: str, word: str, after: str) -> Row:
        context = before.rstrip()
        word = before[len(context) :] + word
        begin, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        first = end if begin is None else begin
        if not context and first is None:
            raise ConfigError("nothing is before the gap, and the tokenizer has no token for a beginning or an end; "
                              "begin the pattern with a word")  # fmt: skip
        given = self._tokens(context) if context else [first]
        ids = self._tokens(context + word) if context else [*given, *self._tokens(word)]
        self._check_known(ids[len(given) :], word)
        targets = tuple(ids[len(given) :])
        return Row(tuple(ids[:-1]), (), places_of(targets, len(given) - 1), targets)

    def _tokens(self, text: str) -> list[int]:
        """Return the tokens of a text without the special tokens that close it."""
        encoded = self.tokenizer(text, return_special_tokens_mask=True)
        ids, special = list(encoded["input_ids"]), list(encoded["special_tokens_mask"])
        while special and special[-1] and ids[-1] in (self.tokenizer.eos_token_id, self.tokenizer.sep_token_id):
            ids.pop()
            special.pop()
        return ids


class SentinelScorer(Scorer):
    """A T5: a sentinel is in place of the word, which the decoder writes after the same sentinel."""

    def item(self, before: str, word: str, after: str) -> Row:
        first, targets, last = self._parts(before, word, after)
        sentinel = self.tokenizer.convert_tokens_to_ids(FIRST_SENTINEL)
        decoder_ids = self.model.decoder_ids((sentinel, *targets))
        return Row((*first, sentinel, *last), decoder_ids, places_of(targets, 1), targets)


class InfillingScorer(Scorer):
    """A BART: one mask is in place of the word, and the decoder writes the complete text."""

    def item(self, before: str, word: str, after: str) -> Row:
        first, targets, last = self._parts(before, word, after)
        given = (*first, self.tokenizer.mask_token_id, *last)
        decoder_ids = self.model.decoder_ids((*first, *targets, *last))
        return Row(given, decoder_ids, places_of(targets, len(first)), targets)


def places_of(targets: Tokens, start: int) -> tuple[int, ...]:
    return tuple(range(start, start + len(targets)))


def load_scorer(folder: Path, tokenizer: Any, scores_unknown: bool = False) -> Scorer:
    """Return the language model of a folder, on the GPU if there is one; ConfigError if it cannot score words."""
    auto_class, scorer = choose_class(folder, read_config(folder), tokenizer)
    return scorer(LanguageModel(load_model(folder, auto_class), tokenizer.pad_token_id), tokenizer, scores_unknown)


def choose_class(folder: Path, config: Any, tokenizer: Any) -> tuple[Any, type[Scorer]]:
    """Return transformers' class and the scorer of a folder's model; ConfigError if it predicts no words."""
    kind, name = type(config), str(next(iter(config.architectures or []), ""))
    if hasattr(config, "mem_len"):
        raise ConfigError(f"--model {folder}: {config.model_type} predicts permuted positions, which prompts do not")
    if config.is_encoder_decoder and kind in AutoModelForSeq2SeqLM._model_mapping:
        has_sentinel = FIRST_SENTINEL in tokenizer.get_vocab()
        if has_sentinel or tokenizer.mask_token_id is not None:
            return AutoModelForSeq2SeqLM, SentinelScorer if has_sentinel else InfillingScorer
    elif kind in AutoModelForMaskedLM._model_mapping and not name.endswith(CAUSAL_CLASSES):
        if tokenizer.mask_token_id is not None:
            return AutoModelForMaskedLM, MaskedScorer
    elif kind in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM, CausalScorer
    raise ConfigError(f"--model {folder}: {name or config.model_type} predicts no words, or its tokenizer has no mask")


def content_free(example: Example) -> list[Example]:
    """Return the example with content-free inputs; its choices stay."""
    return [replace(example, text=text, pair=None if example.pair is None else text) for text in CONTENT_FREE]


@dataclass
class Prompting:
    """A model that answers the prompts of one task."""

    kind: Kind
    """The task; `max_length` is the longest prompt in tokens."""
    prompt: PromptDescription
    scorer: Scorer
    mean: bool = False
    """Score words by the mean log-probability of their tokens, not the sum."""
    calibrated: bool = False
    """Divide by the probabilities after content-free inputs (Zhao et al. 2021; for choices, the pointwise mutual
    information of Holtzman et al. 2021)."""
    _reported_unknown: bool = field(default=False, init=False)

    def predict(self, examples: Sequence[Example], shots: Sequence[Example]) -> list[Prediction]:
        """Return a prediction for each example after the solved examples `shots`."""
        fillings = [self._words(one)[self.kind.target(one)] for one in shots]
        given = self.prompt.demonstrations(shots, fillings, self.scorer.causal)
        probabilities = self._probabilities(examples, given)
        if self.calibrated:
            neutral = self._neutral(examples, given)
            divided = [row / base for row, base in zip(probabilities, neutral, strict=True)]
            probabilities = [row / row.sum() for row in divided]
        if self.kind.task.entry.answer == "choice":
            return [Prediction(int(row.argmax()), row.tolist()) for row in probabilities]
        labels = self.kind.labels
        return [Prediction(labels[row.argmax()], dict(zip(labels, row.tolist(), strict=True))) for row in probabilities]

    def _neutral(self, examples: Sequence[Example], given: str) -> Iterable[NDArray[np.float64]]:
        """Return the mean probabilities after content-free inputs, for each example."""
        if self.kind.task.entry.answer != "choice":
            return [np.mean(self._probabilities(content_free(examples[0]), given), axis=0)] * len(examples)
        inputs = [one for example in examples for one in content_free(example)]
        rows, each = self._probabilities(inputs, given), len(inputs) // len(examples)
        return [np.mean(rows[at : at + each], axis=0) for at in range(0, len(rows), each)]

    def _probabilities(self, examples: Sequence[Example], given: str) -> list[NDArray[np.float64]]:
        """Return the probability of each label (or choice) among all of them, for each example."""
        items, counts, cut = [], [], 0
        for example in examples:
            fitting, was_cut = self.fit(example, given)
            items += fitting
            counts.append(len(fitting))
            cut += was_cut
        if cut:
            logger.info("%s shortened to prompts of %d tokens", counted(cut, "example"), self.kind.max_length)
        unknown = sum(self.scorer.tokenizer.unk_token_id in item.targets for item in items)
        if unknown and not self._reported_unknown:
            self._reported_unknown = True
            logger.warning("unknown tokens in %d of %d choices are scored like others", unknown, len(items))
        return [softmax(row) for row in np.split(self.scorer.scores(items, self.mean), np.cumsum(counts)[:-1])]

    def fit(self, example: Example, given: str) -> tuple[list[Row], bool]:
        """Return an input for each word, and whether the example was cut; ConfigError if not even an empty one fits."""
        words, was_cut = self._words(example), False
        while True:
            before, after = self.prompt.gapped(example, self.scorer.causal)
            items = [self.scorer.item(given + before, word, after) for word in words]
            excess = max(item.length for item in items) - self.kind.max_length
            if excess <= 0:
                return items, was_cut
            example, was_cut = self._shortened(example, excess), True

    def _shortened(self, example: Example, excess: int) -> Example:
        """Return the example without the last tokens of its longer segment."""
        tokenize = partial(self.scorer.tokenizer, add_special_tokens=False, return_offsets_mapping=True)
        offsets = {name: tokenize(text)["offset_mapping"] for name, text in
                   (("text", example.text), ("pair", example.pair or ""))}  # fmt: skip
        longer = max(offsets, key=lambda name: len(offsets[name]))
        if not offsets[longer]:
            raise ConfigError(f"{example.origin}: the prompt without the example has {excess} tokens more than the "
                              f"longest input ({self.kind.max_length}); lower --shots")  # fmt: skip
        kept = offsets[longer][: max(0, len(offsets[longer]) - excess)]
        text = str(getattr(example, longer))[:-1][: kept[-1][1] if kept else 0]
        return replace(example, text=text) if longer == "text" else replace(example, pair=text)

    def _words(self, example: Example) -> list[str]:
        if self.kind.task.entry.answer == "choice":
            return list(example.choices)
        return [self.prompt.words[label] for label in self.kind.labels]
