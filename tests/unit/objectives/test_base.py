"""An objective of another package: float labels, pairs of positions, a row of a decoder, a count and a weight of its
own, through corruption, collation, workers, counts and preview.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ctxlm_ds.data.fields import FITS, IGNORE_LABEL, Field
from ctxlm_ds.data.index.build import build_rows
from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.sample import Batch, Example, Examples, Samples, starts_of
from ctxlm_ds.data.stream.collate import collate_arrays, count_labels, split_fields, to_batches
from ctxlm_ds.data.stream.loader import EvalLoader
from ctxlm_ds.data.stream.preview import preview_rows
from ctxlm_ds.errors import DataError
from ctxlm_ds.objectives.base import LossTerm, Objective, build_objective, fill_token_fields, token_fields
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.sections import DataSection, ObjectiveSection
from ctxlm_ds.registry import OBJECTIVES
from tests.ragged import Rows
from tests.sample_data import FakeTokenizer, random_documents, run_config, train_loader, write_dataset
from tests.sections import objective_section
from tests.unit.objectives.test_span_corruption import ModeTokenizer

NAME = "spans_of_a_test"
SLOTS, DECODER_LENGTH = 3, 11
TOKENIZER = FakeTokenizer(pad_id=0)


class SpanExamples(NamedTuple):
    """Examples with one span each: from its second to its last token but one."""

    tokens: Examples
    shares: NDArray[np.float32]
    """[c] the span's share of its sequence."""

    def example(self, number: int) -> Example:
        return self.tokens.example(number)


class SpanSection(ObjectiveSection):
    """One span of each sequence."""

    name: str = NAME
    weight: float = 0.5


def _count_shares(arrays: Mapping[str, NDArray[Any]]) -> int:
    return int((arrays["share_labels"] >= 0.0).sum())


class Spans(Objective):
    """Says of each sequence how much of it its span takes, and which token stands first in it."""

    section = SpanSection
    outputs = ("span_logits", "shares")

    def __init__(self, section: SpanSection, tokenizer: Any = None) -> None:
        super().__init__(section, tokenizer)
        self.terms = (
            LossTerm("span_start", ("span_logits",), ("span_labels",)),
            LossTerm(
                "span_share", ("shares",), ("share_labels", "span_bounds"), "a_test:squares", section.weight,
                _count_shares, has_accuracy=False,
            ),
        )  # fmt: skip

    def fields(self, data: DataSection) -> tuple[Field, ...]:
        return (
            Field("share_labels", SLOTS, -1.0, "float32", shared="slots"),
            *token_fields(data, self.pad_id),
            Field("span_bounds", 2 * SLOTS, shared="complete"),
            Field("span_labels", SLOTS, IGNORE_LABEL, shared="slots"),
            Field("decoder_ids", DECODER_LENGTH, self.pad_id, shared="positions"),
        )

    def corrupt_batch(self, samples: Samples, key: np.uint64, budgets: NDArray[np.int64]) -> SpanExamples:
        none = np.empty(0, dtype=np.int32)
        examples = Examples(
            samples.input_ids, samples.starts, samples.second_starts, samples.sequence_labels, none, none,
            starts_of(np.zeros(len(samples.lengths), dtype=np.int64)),
        )  # fmt: skip
        return SpanExamples(examples, ((samples.lengths - 2) / samples.lengths).astype(np.float32))

    def fill(self, examples: SpanExamples, row_starts: NDArray[np.int64], arrays: Mapping[str, NDArray[Any]]) -> int:
        tokens = examples.tokens
        row = fill_token_fields(tokens, row_starts, arrays, 0)
        if row != FITS:
            return row
        bounds = arrays["span_bounds"].reshape(len(row_starts) - 1, SLOTS, 2)
        for place in range(len(row_starts) - 1):
            first = row_starts[place]
            for slot, number in enumerate(range(first, row_starts[place + 1])):
                begin, end = tokens.starts[number], tokens.starts[number + 1]
                bounds[place, slot] = begin + 1 - tokens.starts[first], end - 2 - tokens.starts[first]
                arrays["share_labels"][place, slot] = examples.shares[number]
                arrays["span_labels"][place, slot] = tokens.input_ids[begin + 1]
                arrays["decoder_ids"][place, slot] = tokens.input_ids[begin + 1]
        return FITS


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    OBJECTIVES.register(NAME, Spans)
    yield
    OBJECTIVES._added.pop(NAME)
    OBJECTIVES._loaded.pop(NAME, None)


def setup(folder: Path, **data: Any) -> tuple[RowSource, Objective, RunConfig]:
    settings = {"sample_format": "doc_sentences", "seq_length": 32, "max_sequences_per_row": SLOTS} | data
    config = run_config(data=settings).model_copy(update={"objective": SpanSection()})
    objective = build_objective(config.objective, TOKENIZER)
    if not (folder / "d.idx").exists():
        write_dataset(folder / "d", random_documents(40, sentences=2, tokens=6))
    return build_rows([folder / "d"], TOKENIZER, config.row_settings), objective, config


def test_fields_of_every_kind_are_filled_and_become_tensors() -> None:
    objective = build_objective(SpanSection(), TOKENIZER)
    fields = objective.fields(Rows(8, 2))
    ids = np.array([2, 10, 11, 3, 2, 12, 3, 2, 13, 14, 15, 3], dtype=np.int32)
    lengths = np.array([4, 3, 5])
    samples = Samples(
        ids, np.zeros(12, dtype=bool), starts_of(lengths), lengths, np.full(3, -1, dtype=np.int8),
        np.zeros((3, 3), dtype=np.uint64),
    )  # fmt: skip
    examples = objective.corrupt_batch(samples, np.uint64(1), lengths)
    flat = collate_arrays(objective, fields, examples, np.array([0, 2, 2, 3]))
    assert flat.dtype == np.int32
    (batch,) = to_batches(flat, fields, 3)
    shares = torch.tensor([[2 / 4, 1 / 3, -1.0], [-1.0] * 3, [3 / 5, -1.0, -1.0]])
    assert torch.equal(batch.fields["share_labels"], shares)
    assert batch.fields["span_bounds"].tolist() == [[1, 2, 5, 5, 0, 0], [0] * 6, [1, 3, 0, 0, 0, 0]]
    ignored = IGNORE_LABEL
    assert batch.fields["span_labels"].tolist() == [[10, 12, ignored], [ignored] * 3, [13, ignored, ignored]]
    assert batch.fields["decoder_ids"].tolist()[0] == [10, 12] + [0] * 9
    assert batch.fields["sequence_starts"].tolist() == [[0, 4, 7], [0, 8, 8], [0, 5, 8]]
    assert batch.num_tokens == 12 and list(batch.fields)[-1] == "share_labels"
    kinds = {name: tensor.dtype for name, tensor in batch.fields.items()}
    assert kinds.pop("share_labels") == torch.float32 and set(kinds.values()) == {torch.int64}
    assert all(tensor.is_contiguous() for tensor in batch.fields.values())
    counts = {term.name: count_labels(term, split_fields(flat, fields)) for term in objective.terms}
    assert counts == {"span_start": 3, "span_share": 3}
    with pytest.raises(DataError, match=r"row 0 .* does not fit into its fields \(share_labels 3, input_ids 8"):
        collate_arrays(objective, fields, examples, np.array([0, 3]))


def test_micro_batches_share_a_buffer_for_each_kind_of_number() -> None:
    objective = build_objective(SpanSection(), TOKENIZER)
    fields = objective.fields(Rows(8))
    flat = np.arange(4 * sum(field.columns for field in fields), dtype=np.int32)
    batches = to_batches(flat, fields, 2)
    assert [len(batch.fields["decoder_ids"]) for batch in batches] == [2, 2]
    tensors = [tensor for batch in batches for tensor in batch.fields.values()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 2
    arrays = split_fields(flat, fields)
    for field in fields:
        joined = torch.cat([batch.fields[field.name] for batch in batches]).numpy()
        assert joined.shape == (4, field.columns)
        assert np.array_equal(joined.astype(arrays[field.name].dtype).view(np.int32), arrays[field.name].view(np.int32))


@pytest.mark.parametrize("packing", [False, True])
def test_the_loader_counts_each_term_in_its_own_way_with_and_without_workers(tmp_path: Path, packing: bool) -> None:
    seen = []
    for workers in (0, 1):
        loader = train_loader(*setup(tmp_path, packing=packing, num_workers=workers))
        steps = list(itertools.islice(loader, 3))
        loader.close()
        for step in steps:
            shares = torch.cat([batch.fields["share_labels"] for batch in step.micro_batches])
            labels = torch.cat([batch.fields["span_labels"] for batch in step.micro_batches])
            sequences = sum(int(batch.fields["sequence_ids"].amax(dim=1).sum()) for batch in step.micro_batches)
            assert step.counts == {"span_start": sequences, "span_share": sequences}
            assert ((shares >= 0) == (labels != IGNORE_LABEL)).all()
            assert step.num_tokens == sum(batch.num_tokens for batch in step.micro_batches)
        seen.append([batch.fields for step in steps for batch in step.micro_batches])
    for here, there in zip(*seen, strict=True):
        assert all(torch.equal(here[name], there[name]) for name in here)


def test_held_out_batches_and_preview(tmp_path: Path) -> None:
    rows, objective, config = setup(tmp_path)
    assert {
        tuple(batch.fields["decoder_ids"].shape)
        for batch in EvalLoader(rows, objective, config.data, config.training, config.evaluation)
    } == {(2, 11)}
    (shown,) = preview_rows(rows, objective, TOKENIZER, config.data, config.training, 1)  # type: ignore[arg-type]
    title, text = shown.plain.splitlines()
    assert title.endswith("of 32 positions, 0 predictions")
    assert text.startswith("  [CLS] ") and text.endswith(" [SEP]")


def test_a_made_up_batch_has_the_shapes_and_kinds_of_a_real_one() -> None:
    for section in (SpanSection(), *(OBJECTIVES.get(name).section() for name in OBJECTIVES.shipped_names())):
        objective = build_objective(section, ModeTokenizer())
        fields = objective.fields(Rows(16, 2))
        made = Batch.example(fields, 3, np.random.default_rng(0), 50)
        for field in fields:
            tensor = made.fields[field.name]
            assert tuple(tensor.shape) == (3, field.columns)
            assert str(tensor.dtype) == f"torch.{field.dtype}" and tensor.is_contiguous()
        assert made.num_tokens == 3 * 16 and made.fields["sequence_starts"].tolist() == [[0, 16, 16]] * 3
        positions = made.fields.get("prediction_positions")
        if positions is not None:
            assert (positions.diff(dim=1) > 0).all() and int(positions.max()) < 16


def test_the_z_loss_is_a_term_of_each_loss_over_words() -> None:
    plain = build_objective(objective_section(name="masked_lm_nsp", boundary_weight=0.5))
    objective = build_objective(objective_section(name="masked_lm_nsp", boundary_weight=0.5, z_loss=0.1))
    added = [term for term in objective.terms if term not in plain.terms]
    assert [(term.name, term.outputs, term.labels, term.weight) for term in added] == [
        ("masked_lm_z", ("predicted_logits",), ("masked_lm_labels",), 0.1),
        ("span_boundary_z", ("boundary_logits",), ("boundary_labels",), 0.05),
    ]
    assert objective.word_labels == plain.word_labels and not any(term.has_perplexity for term in added)
