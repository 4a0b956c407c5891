"""Pairs as a format: ends of documents, datasets that have no pairs, other pairs in every pass, ELECTRA's rows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from ctxlm_ds.data.formats.pairs import longest_first
from ctxlm_ds.data.preprocess.job import PreprocessConfig, preprocess
from ctxlm_ds.data.sample import NO_LABEL
from ctxlm_ds.data.stream.blend import PlannedRows
from ctxlm_ds.data.stream.collate import split_fields
from ctxlm_ds.data.stream.loader import BatchBuilder
from ctxlm_ds.data.stream.run_datasets import build_run_rows
from ctxlm_ds.errors import DataError
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.load import load_tokenizer
from tests.checkpoints import WORDS, make_tokenizer
from tests.sample_data import FakeTokenizer, build_sample_index, random_documents, sample_of, write_dataset
from tests.unit.data.formats.bert_reference import Document, Draws
from tests.unit.data.formats.pairs import KernelDraws
from tests.unit.data.index.test_index import BERT, CLS, SEP, config_of, damaged_indexes, forget_record, ids_of


class ExampleBuilder:
    """Makes the examples of one document.

    The original draws the target length of an example after the example before it, also across documents; `rng` is the
    draws of this document, so that the first one is drawn here.
    """

    def __init__(
        self, max_length: int, rng: Draws, short_seq_prob: float = 0.05, one_segment_prob: float = 0.1
    ) -> None:
        self.current_sentences: list[list[int]] = []
        self.current_length = 0
        self.max_length, self.rng = max_length, rng
        self.short_seq_prob, self.one_segment_prob = short_seq_prob, one_segment_prob
        self.draw_target_length()

    def draw_target_length(self) -> None:
        if self.rng.random() < self.short_seq_prob:
            self.target_length = self.rng.randint(5, self.max_length)
        else:
            self.target_length = self.max_length

    def examples(self, document: Document) -> list[tuple[list[int], list[int]]]:
        made = []
        for number, sentence in enumerate(document):
            self.current_sentences.append(sentence)
            self.current_length += len(sentence)
            if self.current_length >= self.target_length or number == len(document) - 1:
                made.append(self.create_example())
                if number < len(document) - 1:
                    self.draw_target_length()
        return made

    def create_example(self) -> tuple[list[int], list[int]]:
        if self.rng.random() < self.one_segment_prob:
            first_segment_target_length = 100000
        else:
            first_segment_target_length = (self.target_length - 3) // 2
        first_segment: list[int] = []
        second_segment: list[int] = []
        for sentence in self.current_sentences:
            if (
                len(first_segment) == 0
                or len(first_segment) + len(sentence) < first_segment_target_length
                or (
                    len(second_segment) == 0
                    and len(first_segment) < first_segment_target_length
                    and self.rng.random() < 0.5
                )
            ):
                first_segment = first_segment + sentence
            else:
                second_segment = second_segment + sentence
        first_segment = first_segment[: self.max_length - 2]
        second_segment = second_segment[: max(0, self.max_length - len(first_segment) - 3)]
        self.current_sentences, self.current_length = [], 0
        return first_segment, second_segment


def test_end_of_document_tokens_of_pairs(tmp_path: Path) -> None:
    documents = random_documents(30, seed=1)
    plain = build_sample_index(write_dataset(tmp_path / "plain", documents), BERT, config_of("segment_pair"))
    ended = build_sample_index(write_dataset(tmp_path / "e", documents, eod_id=SEP), BERT, config_of("segment_pair"))
    assert ids_of(ended) == ids_of(plain)


@pytest.mark.parametrize("sample_format", ["segment_pair", "sentence_pair"])
def test_pairs_need_sentences_and_two_documents(tmp_path: Path, sample_format: str) -> None:
    documents = random_documents(5)
    unsplit = write_dataset(tmp_path / "unsplit", documents, split_sentences=False)
    with pytest.raises(DataError, match="--split-sentences"):
        build_sample_index(unsplit, BERT, config_of(sample_format))
    forget_record(unsplit)
    with pytest.raises(DataError, match="--split-sentences"):
        build_sample_index(unsplit, BERT, config_of(sample_format))
    with pytest.raises(DataError, match="there is only 1"):
        build_sample_index(write_dataset(tmp_path / "one", documents[:1]), BERT, config_of(sample_format))
    assert not list(tmp_path.glob("*.samples-*"))


def test_every_pass_draws_other_pairs(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(60))
    for sample_format in ("segment_pair", "sentence_pair"):
        one = build_sample_index(prefix, BERT, config_of(sample_format))
        two = build_sample_index(prefix, BERT, config_of(sample_format, num_duplicates=2))
        passes = ids_of(two)[: len(one.records)], ids_of(two)[len(one.records) :]
        assert passes[0] == ids_of(one)
        shared = {tuple(ids) for ids in passes[0]} & {tuple(ids) for ids in passes[1]}
        assert len(shared) < 0.6 * len(one.records)


@pytest.mark.parametrize("share", [0.0, 1 / 6, 1.0])
def test_the_share_of_random_next_segments(tmp_path: Path, share: float) -> None:
    """A document's last sentence alone has a random one in any case."""
    prefix = write_dataset(tmp_path / "d", random_documents(400))
    plain = build_sample_index(prefix, BERT, config_of("segment_pair"))
    index = build_sample_index(prefix, BERT, config_of("segment_pair", random_next_prob=share))
    assert "random_next_prob" not in plain.meta["settings"]  # indexes that exist keep their names
    lone = build_sample_index(prefix, BERT, config_of("segment_pair", random_next_prob=0.0)).records["is_random"].mean()
    found, wanted = index.records["is_random"].mean(), lone + (1 - lone) * share
    assert abs(found - wanted) < 0.05 and (share < 1.0 or found == 1.0)


@pytest.mark.parametrize("weights", ["documents", "sentences"])
def test_documents_of_random_segments(tmp_path: Path, weights: str) -> None:
    """Documents of 1, 2, 4, ... sentences; BERT draws each equally often, TinyBERT in proportion to its sentences."""
    sizes = np.array([1, 2, 4, 8, 16, 32])
    documents = [[[5 + number] * 3] * size for number, size in enumerate(sizes.tolist())]
    prefix, settings = write_dataset(tmp_path / "d", documents), {"random_next_weights": weights, "num_duplicates": 60}
    index = build_sample_index(prefix, BERT, config_of("segment_pair", random_next_prob=1.0, **settings))
    assert ("random_next_weights" in index.meta["settings"]) == (weights == "sentences")
    tokens = index.dataset.tokens
    first, second = (tokens[index.records[name]] - 5 for name in ("a_start", "b_start"))
    assert index.records["is_random"].all() and (first != second).all()
    for own in range(len(sizes)):
        drawn = np.bincount(second[first == own], minlength=len(sizes))
        shares = (sizes if weights == "sentences" else np.ones(len(sizes))) * (np.arange(len(sizes)) != own)
        wanted = drawn.sum() * shares / shares.sum()
        assert (np.abs(drawn - wanted) <= 4 * np.sqrt(wanted) + 1e-9).all(), own


LENGTH, PAIRS = 24, 120


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer("wordpiece", tmp_path_factory.mktemp("tokenizer") / "wordpiece")


def text_pairs() -> list[tuple[str, str]]:
    rng = random.Random(3)
    return [
        (" ".join(rng.choices(WORDS, k=rng.randint(1, 20))), " ".join(rng.choices(WORDS, k=rng.randint(1, 20))))
        for _ in range(PAIRS)
    ]


def recipe(prefix: str, tokenizer: Path, family: str = "tinybert") -> RunConfig:
    objective = {"name": "tinybert", "prediction_weight": 1.0} if family == "tinybert" else {"name": "masked_lm"}
    return RunConfig.model_validate({
        "model": {"family": family}, "objective": objective, "tokenizer": {"path": str(tokenizer)},
        "data": {"sample_format": "given_pairs", "seq_length": LENGTH, "train": [prefix]},
    })  # fmt: skip


def written(folder: Path, tokenizer: Path, records: list[dict[str, Any]], **settings: Any) -> str:
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = PreprocessConfig(json_keys=("premise", "hypothesis"), join_keys=True, **settings)
    (result,) = preprocess([str(folder / "pairs.jsonl")], tokenizer, folder / "mnli", config)
    return result.prefix


def test_rows_are_those_of_transformers(tmp_path: Path, tokenizer: Path) -> None:
    pairs = text_pairs()
    records = [{"premise": a, "hypothesis": b, "label": 1} for a, b in pairs]
    records += [{"premise": "", "hypothesis": "alone"}, {"premise": "alone", "hypothesis": " "}]
    prefix = written(tmp_path, tokenizer, records)
    assert prefix.endswith("mnli_premise-hypothesis_document")
    words = sum(len(f"{a} {b}".split()) for a, b in pairs)
    assert json.loads(Path(f"{prefix}.json").read_text())["words"] == words  # without records that lack a text
    config, own = recipe(prefix, tokenizer), load_tokenizer(tokenizer)
    objective = build_objective(config.objective, own)
    rows = build_run_rows(config.row_settings, own, objective).train
    assert len(rows) == PAIRS
    builder = BatchBuilder(rows, objective, config.data, 0, "test")
    numbers = np.arange(PAIRS, dtype=np.int64)
    found = split_fields(builder(PlannedRows(numbers, np.zeros_like(numbers))), builder.fields)
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer)
    wanted = theirs(
        [a for a, _ in pairs], [b for _, b in pairs], truncation="longest_first", max_length=LENGTH,
        padding="max_length", return_tensors="np", return_token_type_ids=True,
    )  # fmt: skip
    lengths = [len(theirs(a)["input_ids"]) + len(theirs(b)["input_ids"]) - 1 for a, b in pairs]
    assert min(lengths) < LENGTH < max(lengths) and any(found["input_ids"][:, -1] == own.pad_id)
    assert np.array_equal(found["input_ids"], wanted["input_ids"])
    assert np.array_equal(found["sequence_ids"], wanted["attention_mask"])
    assert np.array_equal(found["token_type_ids"] * found["sequence_ids"], wanted["token_type_ids"])


def test_the_longer_text_is_cut_first_as_tokenizers_cuts_it(tokenizer: Path) -> None:
    backend = load_tokenizer(tokenizer).backend.from_file(str(tokenizer / "tokenizer.json"))
    word = next(word for word in WORDS if len(backend.encode(word, add_special_tokens=False).ids) == 1)
    lengths = np.array([(a, b) for a in range(1, 12) for b in range(1, 12)])
    for room in range(2, 14):
        backend.enable_truncation(room + 3, strategy="longest_first")
        kept = longest_first(lengths, room)
        for (a, b), ours in zip(lengths.tolist(), kept.tolist(), strict=True):
            encoded = backend.encode(" ".join([word] * a), " ".join([word] * b))
            of = [[s for s in encoded.sequence_ids if s is not None].count(number) for number in (0, 1)]
            assert of == ours, (a, b, room)


def test_documents_of_other_sizes_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": "One here. Two there. Three."}) + "\n" for _ in range(3)))
    (result,) = preprocess([str(path)], tokenizer, tmp_path / "plain", PreprocessConfig(split_sentences=True))
    config, own = recipe(result.prefix, tokenizer), load_tokenizer(tokenizer)
    with pytest.raises(DataError, match="needs documents of 2 texts, but one has 3; .* --json-keys A B --join-keys"):
        build_run_rows(config.row_settings, own, build_objective(config.objective, own))


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"split_sentences": True}, "leave out --split-sentences"), ({"append_eod": True}, "leave out --append-eod"),
     ({"json_keys": ("premise",)}, "--json-keys names only premise")],
)  # fmt: skip
def test_flags_that_make_no_pairs_are_refused(
    tmp_path: Path, tokenizer: Path, settings: dict[str, Any], message: str
) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"premise": "a", "hypothesis": "b"}\n')
    keys = {"json_keys": ("premise", "hypothesis"), "join_keys": True}
    with pytest.raises(DataError, match=f"--join-keys: .*{message}"):
        preprocess([str(tmp_path / "pairs.jsonl")], tokenizer, tmp_path / "p", PreprocessConfig(**(keys | settings)))


FORMAT = "doc_segments"


@pytest.mark.parametrize("seq_length", [5, 16, 64, 512])
@pytest.mark.parametrize("shares", [(0.05, 0.1), (1.0, 0.0), (0.5, 1.0)])
def test_same_draws_give_the_originals_rows(tmp_path: Path, seq_length: int, shares: tuple[float, float]) -> None:
    """The original's rules, fed with the kernel's own draws, give every row: ids, special tokens and token types."""
    documents = random_documents(60, sentences=15, tokens=12, seed=seq_length)
    config = config_of(FORMAT, seq_length, short_seq_prob=shares[0], one_segment_prob=shares[1], num_duplicates=2)
    index = build_sample_index(write_dataset(tmp_path / "d", documents, eod_id=SEP), BERT, config)
    expected = []
    for duplicate in range(2):
        for number, document in enumerate(documents):
            draws = KernelDraws(config.training.seed, FORMAT, duplicate, number)
            expected += ExampleBuilder(seq_length, draws, *shares).examples(document)
    assert len(index.records) == len(expected)
    for number, (first, second) in enumerate(expected):
        sample, ids = sample_of(index, number), [CLS, *first, SEP]
        types = [0] * len(ids) + ([1] * (len(second) + 1) if second else [])
        ids += [*second, SEP] if second else []
        assert sample.input_ids.tolist() == ids and len(ids) <= seq_length
        assert sample.token_type_ids.tolist() == types and sample.sequence_label == NO_LABEL
        assert sample.special_mask.tolist() == [token in (CLS, SEP) for token in ids]


def test_roberta_has_two_separators_between_segments(tmp_path: Path) -> None:
    tokenizer = FakeTokenizer(double_separator=True)
    index = build_sample_index(write_dataset(tmp_path / "d", random_documents(20)), tokenizer, config_of(FORMAT, 32))
    divided = 0
    for number, record in enumerate(index.records):
        sample, first = sample_of(index, number), int(record["b_start"])
        assert len(sample.input_ids) == record["num_tokens"] <= 32
        ends = np.flatnonzero(sample.input_ids == SEP).tolist()
        divided += len(ends) == 3
        assert ends in ([first + 1], [first + 1, first + 2, len(sample.input_ids) - 1])
    assert divided > 20


def test_damaged_records_are_refused(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(20), eod_id=SEP)
    index = build_sample_index(prefix, BERT, config_of(FORMAT, 64))
    assert index.records["b_start"][3] + 2 < index.records["num_tokens"][3]
    fields, values = ("a_start", "a_end", "b_start", "num_tokens"), (-1, -(2**62), 2**62, 2**31 - 1, 0, 1)
    for opened in damaged_indexes(index, BERT, 3, fields, values):
        with pytest.raises(DataError, match="sample 3 of its index does not fit the dataset"):
            sample_of(opened, 3)


def test_rows_need_sentences(tmp_path: Path) -> None:
    unsplit = write_dataset(tmp_path / "unsplit", random_documents(5), split_sentences=False)
    with pytest.raises(DataError, match="--split-sentences, or use doc_sentences"):
        build_sample_index(unsplit, BERT, config_of(FORMAT))
