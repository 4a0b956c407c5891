"""Given spans: from the record to the flags of the tokens, through every sample format, and into the masks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxlm_ds.data.dataset.inspection import describe, verify_dataset
from ctxlm_ds.data.dataset.merge import merge_datasets
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.index.build import build_rows
from ctxlm_ds.data.numba_random import stream_key
from ctxlm_ds.data.preprocess.encode import continuations
from ctxlm_ds.data.preprocess.job import PreprocessConfig, preprocess
from ctxlm_ds.data.sources.types import InputShard
from ctxlm_ds.errors import DataError
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.ragged import one_sample
from tests.sample_data import read_samples, run_config
from tests.text import make_documents

DOCUMENTS = make_documents(60, seed=3)
KINDS = ("wordpiece", "bpe", "unigram")


def given_spans(text: str, rng: random.Random) -> list[list[int]]:
    """Runs of one to four words, some touching, in any order."""
    words, begin, spans = text.split(" "), 0, []
    place = 0
    while place < len(words):
        length = rng.randint(1, 4)
        end = begin + len(" ".join(words[place : place + length]))
        if rng.random() < 0.5 and text[begin:end].strip():
            spans.append([begin, end])
        place, begin = place + length, end + 1
    rng.shuffle(spans)
    return spans


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    for kind in KINDS:
        every_character = {"character_coverage": 1.0} if kind == "unigram" else {}
        train_tokenizer(kind, DOCUMENTS, 300, folder / kind, **every_character)
    return {kind: folder / kind for kind in KINDS}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, path = random.Random(5), tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    records = [{"text": text, "spans": given_spans(text, rng)} for text in DOCUMENTS]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def made(corpus: Path, tokenizer: Path, output: Path, **settings: Any) -> IndexedDataset:
    config = PreprocessConfig(spans_key="spans", **settings)
    (result,) = preprocess([str(corpus)], tokenizer, output / "set", config)
    return IndexedDataset(result.prefix)


@pytest.fixture(scope="module")
def in_sentences(
    corpus: Path, tokenizers: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> IndexedDataset:  # fmt: skip
    output = tmp_path_factory.mktemp("sentences")
    return made(corpus, tokenizers["wordpiece"], output, split_sentences=True, append_eod=True)


def characters_of(dataset: IndexedDataset, tokenizer: Tokenizer) -> list[list[str]]:
    """The text of each token by sequence, without its white space and WordPiece's marks."""
    return [
        [tokenizer.decode([token]).replace("##", "").strip() for token in dataset.sequence(number).tolist()]
        for number in range(len(dataset))
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [False, True])
def test_flags_are_those_of_the_given_spans(
    corpus: Path, tokenizers: dict[str, Path], tmp_path: Path, kind: str, split: bool
) -> None:
    """Count characters of the tokens along the text without white space; spans are counted there too."""
    tokenizer = load_tokenizer(tokenizers[kind])
    plain = preprocess(
        [str(corpus)], tokenizers[kind], tmp_path / "plain", PreprocessConfig(split_sentences=split, append_eod=True)
    )
    workers = 2 if split and kind == "bpe" else 1
    dataset = made(corpus, tokenizers[kind], tmp_path, split_sentences=split, append_eod=True, workers=workers)
    assert np.array_equal(dataset.tokens, IndexedDataset(plain[0].prefix).tokens)
    records = [json.loads(line) for line in corpus.read_text().splitlines()]
    flags, pieces = dataset.continues_span, characters_of(dataset, tokenizer)
    joined = 0
    for number, record in enumerate(records):
        first, after = dataset.document_indices[number : number + 2]
        spans = sorted((len("".join(record["text"][:begin].split())), len("".join(record["text"][:end].split())))
                       for begin, end in record["spans"])  # fmt: skip
        place = 0
        for sequence in range(first, after):
            start, before = int(dataset.first_tokens(np.array([sequence]))[0]), None
            texts = pieces[sequence][: len(pieces[sequence]) - (sequence == after - 1)]
            for offset, piece in enumerate(texts):
                owner = next((span for span in spans if span[0] < place + len(piece) and place < span[1]), None)
                # Sentencepiece has a token of a space alone, which may count as the character before or behind it.
                if piece and (offset == 0 or texts[offset - 1]):
                    assert bool(flags[start + offset]) == (owner is not None and owner == before), (number, piece)
                    joined += int(flags[start + offset])
                if piece:
                    before = owner
                place += len(piece)
        assert place == len("".join(record["text"].split()))
        assert flags[int(dataset.first_tokens(np.array([after]))[0]) - 1] == 0
    assert joined > 100


def test_a_span_inside_of_tokens_covers_them() -> None:
    offsets = np.array([[0, 3], [3, 5], [6, 9], [9, 12]])
    for spans, wanted in (
        ([[0, 5]], [0, 1, 0, 0]),
        ([[1, 4]], [0, 1, 0, 0]),
        ([[4, 7]], [0, 0, 1, 0]),
        ([[0, 5], [6, 12]], [0, 1, 0, 1]),
        ([[0, 12]], [0, 1, 1, 1]),
        ([[5, 6]], [0, 0, 0, 0]),
        ([], [0, 0, 0, 0]),
    ):
        assert continuations(offsets, np.array(spans, dtype=np.int64).reshape(-1, 2)).tolist() == wanted


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([[0, 3], [2, 5]], "spans that overlap"),
        ([[0, 99]], "outside of the text"),
        ([[3, 3]], "outside of the text"),
        ([[0, 2.5]], "not a list of"),
        ([[3, 4]], "white space"),
        (5, "'spans' is not a list of"),
        (True, "'spans' is not a list of"),
        ("missing", "has no key 'spans'"),
    ],
)
def test_wrong_spans_are_bad_records(
    tokenizers: dict[str, Path], tmp_path: Path, spans: Any, message: str
) -> None:  # fmt: skip
    record = {"text": "Ada saw it"} | ({} if spans == "missing" else {"spans": spans})
    (tmp_path / "corpus.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError, match=message):
        made(tmp_path / "corpus.jsonl", tokenizers["wordpiece"], tmp_path)


def test_spans_need_json_lines_and_one_key(corpus: Path, tokenizers: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("Ada saw it.\n")
    with pytest.raises(DataError, match="--spans-key needs JSON lines"):
        made(tmp_path / "plain.txt", tokenizers["wordpiece"], tmp_path)
    with pytest.raises(DataError, match="--json-keys must name the one text"):
        made(corpus, tokenizers["wordpiece"], tmp_path, json_keys=("text", "title"))


def test_shards_are_joined_with_their_spans(corpus: Path, tokenizers: dict[str, Path], tmp_path: Path) -> None:
    whole = made(corpus, tokenizers["wordpiece"], tmp_path, split_sentences=True)
    parts = [
        made(corpus, tokenizers["wordpiece"], tmp_path, split_sentences=True, shard=InputShard(number, 3)).prefix
        for number in range(3)
    ]
    joined = merge_datasets(parts, tmp_path / "joined").dataset
    assert np.array_equal(joined.continues_span, whole.continues_span)
    assert (tmp_path / "joined.sha256").read_text().count(".spans") == 1
    assert merge_datasets(parts, tmp_path / "joined").complete_already
    (line,) = [line for line in verify_dataset(joined) if line.startswith("spans: ")]
    assert "of two or more tokens" in line
    assert "given spans   from the key spans" in list(describe(joined))
    plain = preprocess(
        [str(corpus)], tokenizers["wordpiece"], tmp_path / "plain", PreprocessConfig(split_sentences=True)
    )
    with pytest.raises(DataError, match="spans_key"):
        merge_datasets([parts[0], plain[0].prefix], tmp_path / "mixed")


def test_damaged_spans_are_found(corpus: Path, tokenizers: dict[str, Path], tmp_path: Path) -> None:
    dataset = made(corpus, tokenizers["wordpiece"], tmp_path)
    path = Path(f"{dataset.prefix}.spans")
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"set_text_document.spans: sha256"):
        verify_dataset(IndexedDataset(dataset.prefix))
    path.write_bytes(bytes(content[:-1]))
    with pytest.raises(DataError, match="tokens need as many"):
        _ = IndexedDataset(dataset.prefix).continues_span
    path.unlink()
    with pytest.raises(DataError, match=r"set_text_document.spans: no such file"):
        _ = IndexedDataset(dataset.prefix).continues_span


FORMATS = (
    {"sample_format": "segment_pair"},
    {"sample_format": "sentence_order"},
    {"sample_format": "sentence_pair"},
    {"sample_format": "full_sentences"},
    {"sample_format": "full_sentences", "separate_sentences": False, "packing": True},
    {"sample_format": "doc_sentences"},
)


@pytest.mark.parametrize("data", FORMATS, ids=lambda data: f"{data['sample_format']}-{len(data)}")
def test_every_format_masks_whole_spans(
    in_sentences: IndexedDataset, tokenizers: dict[str, Path], data: dict[str, Any]
) -> None:
    """Units found again by plain Python from the dataset are predicted completely or not at all."""
    tokenizer, dataset = load_tokenizer(tokenizers["wordpiece"]), in_sentences
    section = {"name": "masked_lm", "spans": "given", "whole_word": True, "mask_prob": 0.3}
    config = run_config(data=data, objective=section)
    objective = build_objective(config.objective, tokenizer)
    (index,) = build_rows([dataset.prefix], tokenizer, config.row_settings).indexes
    numbers = np.arange(len(index.records))
    samples = read_samples(index.reader, numbers)
    flags = {}
    for number in range(len(dataset)):
        start = int(dataset.first_tokens(np.array([number]))[0])
        flags[start] = dataset.continues_span[start : start + len(dataset.sequence(number))]
    assert samples.continues_span.any()
    budgets = objective.budgets(samples.lengths, config.data)
    examples = objective.corrupt_batch(samples, stream_key(1, "mask"), budgets)
    starts, whole, long_units = tokenizer.word_start_mask(), 0, 0
    for number, record in enumerate(index.records):
        sample = one_sample(samples, number)
        text = np.flatnonzero(~sample.special_mask)
        # The same tokens of the dataset, range by range: their flags must have come along.
        stream = [range(record["a_start"], record["a_end"]), range(record["b_start"], record["b_end"])]
        if data["sample_format"] in ("segment_pair", "sentence_order", "sentence_pair"):
            places = [place for part in stream for place in part]
            got = samples.continues_span[samples.starts[number] : samples.starts[number + 1]]
            assert got[text].tolist() == dataset.continues_span[places].tolist()
            assert not got[sample.special_mask].any()
        units: list[list[int]] = []
        begin = int(samples.starts[number])
        for position in text.tolist():
            continues = samples.continues_span[begin + position] or not starts[sample.input_ids[position]]
            if units and units[-1][-1] == position - 1 and continues:
                units[-1].append(position)
            else:
                units.append([position])
        first, after = examples.prediction_starts[number : number + 2]
        predicted = set(examples.prediction_positions[first:after].tolist())
        broken = [unit for unit in units if predicted & set(unit) and not set(unit) <= predicted]
        assert not broken or (len(broken) == 1 and predicted < set(broken[0]))
        whole += not broken
        long_units += sum(len(unit) > 3 and set(unit) <= predicted for unit in units)
    assert whole > 0.9 * len(numbers) and long_units > 10


def test_without_whole_words_other_tokens_are_units(
    corpus: Path, tokenizers: dict[str, Path], tmp_path: Path
) -> None:  # fmt: skip
    tokenizer = load_tokenizer(tokenizers["wordpiece"])
    dataset = made(corpus, tokenizers["wordpiece"], tmp_path, split_sentences=True)
    config = run_config(data={"sample_format": "full_sentences"}, objective={"name": "masked_lm", "spans": "given"})
    objective = build_objective(config.objective, tokenizer)
    (index,) = build_rows([dataset.prefix], tokenizer, config.row_settings).indexes
    samples = read_samples(index.reader, np.arange(len(index.records)))
    budgets = objective.budgets(samples.lengths, config.data)
    examples = objective.corrupt_batch(samples, stream_key(1, "mask"), budgets)
    starts, parts_of_words = tokenizer.word_start_mask(), 0
    for number in range(len(index.records)):
        example, flags = examples.example(number), samples.continues_span[samples.starts[number] :]
        predicted = set(example.prediction_positions.tolist())
        for position in sorted(predicted):
            if not flags[position] and not starts[one_sample(samples, number).input_ids[position]]:
                parts_of_words += position - 1 not in predicted
    assert parts_of_words > 10


def test_masks_of_given_spans_need_a_dataset_that_has_them(
    corpus: Path, tokenizers: dict[str, Path], tmp_path: Path
) -> None:  # fmt: skip
    tokenizer = load_tokenizer(tokenizers["wordpiece"])
    config = run_config(data={"sample_format": "full_sentences"}, objective={"name": "masked_lm", "spans": "given"})
    (plain,) = preprocess(
        [str(corpus)], tokenizers["wordpiece"], tmp_path / "set", PreprocessConfig(split_sentences=True)
    )
    with pytest.raises(DataError, match="gives no spans.*--spans-key"):
        build_rows([plain.prefix], tokenizer, config.row_settings)
