"""What a model writes into texts after an evaluation.

A causal model continues them, a masked one fills their masks, a decoder writes the target of an input.
A token of a continuation or target, or all masks, cost the forward pass of a micro-batch. The passes are those of the
evaluation, in any layout: every rank takes part, the last pipeline stage chooses, and the ranks agree about the tokens.
Data-parallel ranks do the same work.
Shape letters: b rows, s positions, v vocabulary, n tensor-parallel ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ctxlm_ds.data.fields import Field
from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.sample import DECODER, Batch
from ctxlm_ds.objectives.base import Objective
from ctxlm_ds.objectives.encoder_decoder import DECODER_FIELDS, EncoderDecoder
from ctxlm_ds.recipe.problems import Problem, raise_problems, show_value
from ctxlm_ds.recipe.schema import EvaluationConfig, TrainingConfig
from ctxlm_ds.recipe.sections import DataSection
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.training.engine.losses import MaskChoice, TokenChoice

if TYPE_CHECKING:
    from ctxlm_ds.data.stream.run_datasets import RunRows
    from ctxlm_ds.parallel.topology import Topology
    from ctxlm_ds.training.engine.engine import Engine

PROMPT_TOKENS = 16
"""Most tokens of a held-out text that are given."""
FIRST_MASK, MASK_EVERY = 4, 7
"""Places of the masks in a held-out text: 15 % of its tokens."""

Text = tuple[str, str]
"""What was given, and what the model wrote."""


class Writing(NamedTuple):
    """What says how a run writes into texts."""

    data: DataSection
    training: TrainingConfig
    evaluation: EvaluationConfig
    objective: Objective
    tokenizer: Tokenizer


class Continuations:
    """Writes continuations of the same prompts after each evaluation."""

    def __init__(self, prompts: Sequence[Sequence[int]], run: Writing) -> None:
        """Prepare the rows; `prompts` are token ids, of which the last are kept if a row has no room for all."""
        self._run, self._tokenizer = run, run.tokenizer
        self._room, self._rows = run.data.seq_length, run.training.micro_batch_size
        self._tokens = min(run.evaluation.continuation_tokens, self._room - 1)
        self._texts: list[Any] = [list(prompt[-(self._room - self._tokens) :]) for prompt in prompts]
        self._fields: tuple[Field, ...] = run.objective.fields(run.data)
        self.on_pass: Callable[[], object] = lambda: None
        """Called after each pass."""

    def write(self, engine: Engine, step: int) -> list[Text]:
        """Return each text that was given, and what the model wrote; all ranks call it."""
        firsts = range(0, len(self._texts), self._rows)
        passes = (self._write(engine, self._texts[first : first + self._rows], step, first) for first in firsts)
        return [text for of_pass in passes for text in of_pass]

    def _choice(self, engine: Engine) -> TokenChoice:
        temperature = self._run.evaluation.continuation_temperature
        return TokenChoice(str(self._run.objective.written_tokens), temperature, engine.parallel)

    def _write(self, engine: Engine, texts: Sequence[Any], step: int, first: int) -> Iterator[Text]:
        """Yield at most a micro-batch of texts with their continuations up to the end of the document."""
        tokens = self.tokens(engine, self._choice(engine), texts, step, first)
        for prompt, written in zip(texts, tokens, strict=True):
            yield self._tokenizer.decode(prompt), self._tokenizer.decode(written)

    def tokens(
        self, engine: Engine, choice: TokenChoice, prompts: Sequence[Sequence[int]], step: int, first: int
    ) -> list[list[int]]:
        """Return the tokens after at most a micro-batch of prompts, the first of them number `first` of the run."""
        rows = [list(prompt) for prompt in prompts]
        end = self._tokenizer.sep_id
        spare = self._rows - len(rows)
        names = (f"continuation:{self._run.training.seed}:{step}:{first + number}" for number in range(self._rows))
        digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
        choice.keys = [int.from_bytes(digest, "little", signed=True) for digest in digests]
        for _ in range(self._tokens):
            choice.places = [len(row) - 1 for row in rows] + [0] * spare
            chosen = engine.choose(self._batch([*rows, *[[end]] * spare]), choice)
            self.on_pass()
            for row, token in zip(rows, chosen, strict=False):
                row.append(token)
            if all(end in row[len(prompt) :] for prompt, row in zip(prompts, rows, strict=True)):
                break
        written = (row[len(prompt) :] for prompt, row in zip(prompts, rows, strict=True))
        return [list(takewhile(end.__ne__, tokens)) for tokens in written]

    def _batch(self, rows: Sequence[Sequence[int]]) -> Batch:
        """Return rows of one sequence each as a micro-batch of the usual shape."""
        fields = {
            field.name: torch.full((len(rows), field.columns), field.fill, dtype=getattr(torch, field.dtype))
            for field in self._fields
        }
        _put(fields, rows)
        return Batch(fields)


def _put(fields: Mapping[str, Tensor], rows: Sequence[Sequence[int]], prefix: str = "") -> None:
    """Write rows of one sequence each into the fields of tokens, or with a prefix into those of a decoder."""
    for number, row in enumerate(rows):
        length = len(row)
        fields[f"{prefix}input_ids"][number, :length] = torch.tensor(row)
        fields[f"{prefix}position_ids"][number, :length] = torch.arange(length)
        fields[f"{prefix}sequence_ids"][number, :length] = 1
        fields[f"{prefix}sequence_starts"][number, :2] = torch.tensor([0, length])


class FilledMasks(Continuations):
    """Fills the masks of the same texts after each evaluation; held-out texts are given two masks."""

    def __init__(self, prompts: Sequence[Sequence[int]], run: Writing) -> None:
        """Prepare the rows; `prompts` are token ids, those without a mask are held-out texts."""
        super().__init__(prompts, run)
        special = run.tokenizer.special_ids - {run.tokenizer.mask_id}
        self._texts = [[token for token in prompt if token not in special][: self._room - 2] for prompt in prompts]
        self._slots = slots_of(run.objective, run.data)

    def _write(self, engine: Engine, texts: Sequence[Any], step: int, first: int) -> Iterator[Text]:
        choice = MaskChoice(str(self._run.objective.written_tokens), 0.0, engine.parallel)
        masked = [self._masked(prompt) for prompt in texts]
        places = [[at for at, token in enumerate(ids) if token == self._tokenizer.mask_id] for ids in masked]
        choice.places = [row * self._slots + slot for row, of_row in enumerate(places) for slot in range(len(of_row))]
        words = iter(engine.choose(self._masked_batch(masked, places), choice))
        self.on_pass()
        for prompt, ids, of_row in zip(texts, masked, places, strict=True):
            found = [self._word(next(words), prompt[at]) for at in of_row]
            yield self._tokenizer.decode(ids), ", ".join(found)

    def _masked(self, prompt: Sequence[int]) -> list[int]:
        mask = self._tokenizer.mask_id
        if mask in prompt:
            return list(prompt)
        first = min(FIRST_MASK, len(prompt) - 1)
        masked = range(first, len(prompt), MASK_EVERY)[: self._slots]
        return [mask if at in masked else token for at, token in enumerate(prompt)]

    def _word(self, word: int, before: int) -> str:
        found = self._tokenizer.decode([word])
        known = before != self._tokenizer.mask_id
        return f"{found} (was {self._tokenizer.decode([before])})" if known else found

    def _masked_batch(self, masked: Sequence[Sequence[int]], places: Sequence[Sequence[int]]) -> Batch:
        spare: list[list[int]] = [[]] * (self._rows - len(masked))
        texts = zip([*masked, *spare], [*places, *spare], strict=True)
        made = [self._run.objective.masked_row(ids, of_row, self._tokenizer) for ids, of_row in texts]
        batch = self._batch([row for row, _ in made])
        for number, (_, further) in enumerate(made):
            for name, values in further.items():
                batch.fields[name][number, : len(values)] = torch.tensor(values, dtype=torch.int64)
        return batch


class Given(NamedTuple):
    """A text for whose input a decoder writes a target."""

    ids: list[int]
    """Input of the encoder."""
    start: list[int]
    """Tokens that the decoder reads first."""
    target: list[int]
    """Target that a held-out text has; empty for others."""


class WrittenTargets(Continuations):
    """Writes the targets of the same inputs after each evaluation, token by token."""

    def __init__(self, given: Sequence[Given], run: Writing) -> None:
        super().__init__((), run)
        self._texts = [one._replace(ids=[*one.ids[:-1][: self._room - 1], one.ids[-1]]) for one in given]
        longest = next(field.columns for field in self._fields if field.name == DECODER_FIELDS[0])
        started = max(len(one.start) for one in given)
        self._tokens = min(run.evaluation.continuation_tokens, longest + 1 - started)
        self._inputs: list[list[int]] = []

    def _write(self, engine: Engine, texts: Sequence[Any], step: int, first: int) -> Iterator[Text]:
        targets = self.targets(engine, self._choice(engine), texts, step, first)
        for one, tokens in zip(texts, targets, strict=True):
            target = f" (was {self._text(one.target, one)})" if one.target else ""
            yield self._text(one.ids, one), self._text(tokens, one) + target

    def targets(
        self, engine: Engine, choice: TokenChoice, given: Sequence[Given], step: int, first: int
    ) -> list[list[int]]:
        """Return the targets of at most a micro-batch of inputs, the first of them number `first` of the run."""
        self._inputs = [one.ids for one in given]
        return self.tokens(engine, choice, [one.start for one in given], step, first)

    def _batch(self, rows: Sequence[Sequence[int]]) -> Batch:
        spare = [[self._tokenizer.sep_id]] * (len(rows) - len(self._inputs))
        batch = super()._batch([*self._inputs, *spare])
        _put(batch.fields, rows, DECODER)
        return batch

    def _text(self, ids: Sequence[int], given: Given) -> str:
        ends = {self._tokenizer.sep_id, self._tokenizer.pad_id, *given.start}
        return self._tokenizer.decode([token for token in ids if token not in ends])


def slots_of(objective: Objective, data: DataSection) -> int:
    return next(field.columns for field in objective.fields(data) if field.name == objective.slots_field)


def encode_prompts(
    texts: Sequence[str], data: DataSection, objective: Objective, tokenizer: Tokenizer
) -> list[list[int]]:
    """Return the token ids of evaluation.prompts.

    Raises ConfigError if the model fills masks, and a text has none, or more of them than a row has predictions.
    """
    prompts = [ids or [tokenizer.sep_id] for ids in tokenizer.encode_batch(list(texts))]
    if objective.masked_tokens is None:
        return prompts
    problems, name = [], tokenizer.id_to_token(tokenizer.mask_id)
    slots = slots_of(objective, data) if prompts else 0
    for number, (text, ids) in enumerate(zip(texts, prompts, strict=True)):
        count = ids[: data.seq_length - 2].count(tokenizer.mask_id)
        if not 0 < count <= slots:
            why = f"the model fills masks: write {name} for 1 to {slots} of its words, not {count}"
            problems.append(Problem(f"evaluation.prompts[{number}]", f"{show_value(text)}: {why}"))
    raise_problems("the recipe", problems)
    return prompts


def build_continuations(
    run: Writing, prompts: Sequence[Sequence[int]], rows: RunRows, topology: Topology
) -> Continuations | None:
    """Return what writes into texts after evaluations, the same texts on every rank; None if there are none.

    The texts are the encoded `prompts`, and held-out ones of the first source of `rows`.
    """
    count, objective, sources = run.evaluation.continuations, run.objective, list(rows.validation.values())[:1]
    if isinstance(objective, EncoderDecoder):
        given = [given_prompt(ids, objective, run.tokenizer) for ids in prompts]
        if count:
            drawn = (count, run.data, run.training.seed, objective)
            given += topology.compute_on_rank_0(
                lambda: [one for rows in sources for one in held_out_targets(rows, *drawn)]
            )
        return WrittenTargets(given, run) if given else None
    found: list[Sequence[int]] = list(prompts)
    if count:
        found += topology.compute_on_rank_0(lambda: [ids for rows in sources for ids in held_out_prompts(rows, count)])
    writer = Continuations if objective.masked_tokens is None else FilledMasks
    return writer(found, run) if found else None


def held_out_prompts(rows: RowSource, count: int) -> list[list[int]]:
    """Return the first tokens of the first `count` held-out rows."""
    import numpy as np

    numbers = np.arange(min(count, len(rows)), dtype=np.int64)
    samples, row_starts = rows.samples(numbers, np.zeros_like(numbers))
    begins = samples.starts[row_starts[:-1]]
    ends = np.minimum(samples.starts[row_starts[:-1] + 1], begins + PROMPT_TOKENS)
    return [samples.input_ids[begin:end].tolist() for begin, end in zip(begins, ends, strict=True)]


def given_prompt(ids: Sequence[int], objective: EncoderDecoder, tokenizer: Tokenizer) -> Given:
    """Return the input of a text, for which the decoder begins as transformers' generate()."""
    start = objective.generation_settings["decoder_start_token_id"]
    return Given(objective.input_row(ids, tokenizer), [start, *_forced(objective)], [])


def held_out_targets(
    rows: RowSource, count: int, data: DataSection, seed: int, objective: EncoderDecoder
) -> list[Given]:
    """Return inputs and targets of the first tokens of the first `count` held-out rows, corrupted as in training."""
    import numpy as np

    from ctxlm_ds.data.numba_random import stream_key
    from ctxlm_ds.data.sample import starts_of

    numbers = np.arange(min(count, len(rows)), dtype=np.int64)
    if not len(numbers):
        return []
    samples, row_starts = rows.samples(numbers, np.zeros_like(numbers))
    firsts = row_starts[:-1]
    places = [
        np.flatnonzero(~samples.special_mask[begin:end])[:PROMPT_TOKENS] + begin
        for begin, end in zip(samples.starts[firsts], samples.starts[firsts + 1], strict=True)
    ]
    lengths = np.array([len(of_text) for of_text in places], dtype=np.int64)
    begun = samples._replace(
        input_ids=samples.input_ids[np.concatenate(places)],
        special_mask=np.zeros(int(lengths.sum()), dtype=np.bool_),
        starts=starts_of(lengths),
        second_starts=lengths,
        sequence_labels=samples.sequence_labels[firsts],
        keys=samples.keys[firsts],
        continues_span=samples.continues_span[:0],
        language_ids=samples.language_ids[firsts],
    )
    key = stream_key(seed, "held-out texts")
    examples = objective.corrupt_batch(begun, key, objective.budgets(lengths, data))
    first_tokens = np.broadcast_to(objective.start_ids(examples), len(numbers)).tolist()
    made = ((examples.example(number), token) for number, token in enumerate(first_tokens))
    forced = _forced(objective)
    return [Given(one.input_ids.tolist(), [token, *forced], one.target_ids.tolist()) for one, token in made]


def _forced(objective: EncoderDecoder) -> list[int]:
    """Return the token with which every target begins, if there is one; the decoder reads it next."""
    return [token for name, token in objective.generation_settings.items() if name == "forced_bos_token_id"]
