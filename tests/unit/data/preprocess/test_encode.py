"""What a worker makes of a chunk: the library's ids, also from remembered words, spaces, special tokens, line ends."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ctxlm_ds.data.dataset.inspection import verify_dataset
from ctxlm_ds.data.preprocess import encode as encode_module
from ctxlm_ds.data.preprocess.encode import BertWords, ByteLevelWords, FlatIds, flat_encoder
from ctxlm_ds.data.preprocess.sentences import split_sentences
from ctxlm_ds.tokenizers.base import Tokenizer, TokenizerFacts
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.text import make_documents, write_corpus
from tests.unit.data.conftest import DOCUMENTS
from tests.unit.data.dataset.test_reader import read_documents
from tests.unit.data.preprocess.test_job import run


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus.jsonl", 120, seed=7)
    return tmp_path / "corpus.jsonl"


@pytest.mark.parametrize("name", ["wordpiece", "bpe", "bpe_prefix"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("leading_space", [False, True])
def test_ids_equal_the_library_called_directly(
    corpus: Path, tokenizers: dict[str, Path], name: str, split: bool, append_eod: bool, leading_space: bool
) -> None:
    settings = {"split_sentences": split, "append_eod": append_eod, "leading_space": leading_space}
    dataset = run(corpus, tokenizers[name], **settings)
    backend = Backend.from_file(str(tokenizers[name] / "tokenizer.json"))
    end = [backend.token_to_id("[SEP]" if name == "wordpiece" else "</s>")]
    expected = []
    for document in DOCUMENTS:
        pieces = split_sentences(document) if split else [document]
        if name == "bpe" and leading_space:  # the space before a sentence is part of its first token
            pieces = pieces[:1] + [" " + piece for piece in pieces[1:]]
        ids = [backend.encode(piece, add_special_tokens=False).ids for piece in pieces]
        if append_eod:
            ids[-1] = ids[-1] + end
        expected.append(ids)
    assert read_documents(dataset) == expected
    assert dataset.metadata is not None
    assert dataset.metadata["sentence_prefix"] == (" " if name == "bpe" and (leading_space or not split) else "")
    assert Path(dataset.prefix).name == f"set_text_{'sentence' if split else 'document'}"


@pytest.mark.parametrize("append_eod", [False, True])
def test_a_token_of_its_own_begins_each_document(corpus: Path, tokenizers: dict[str, Path], append_eod: bool) -> None:
    settings = {"split_sentences": True, "append_eod": append_eod}
    plain = read_documents(run(corpus, tokenizers["bpe"], **settings))
    dataset = run(corpus, tokenizers["bpe"], prepend_bos=True, overwrite=True, **settings)
    begin = load_tokenizer(tokenizers["bpe"]).token_to_id("<s>")
    assert read_documents(dataset) == [[[begin, *document[0]], *document[1:]] for document in plain]
    assert verify_dataset(dataset)[-1].startswith("text: 61 of 61 sampled sequences")


def test_byte_level_sentences_add_up_to_the_paragraph(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    text = "The old river opened. It was quiet! Ada remembered."
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": text}))
    tokenizer = load_tokenizer(tokenizers["bpe"])
    joined = run(tmp_path / "corpus.jsonl", tokenizers["bpe"], split_sentences=True, leading_space=True)
    assert joined.num_sequences == 3
    assert joined.tokens.tolist() == tokenizer.encode_batch([text])[0]
    alone = run(tmp_path / "corpus.jsonl", tokenizers["bpe"], split_sentences=True, overwrite=True)
    assert read_documents(alone) == [tokenizer.encode_batch(split_sentences(text))]


@pytest.mark.parametrize("split", [False, True])
def test_names_of_special_tokens_are_encoded_as_transformers_does(
    tmp_path: Path, tokenizers: dict[str, Path], split: bool
) -> None:
    from transformers import AutoTokenizer

    text = "The old <unk> river </s> opened.<mask> It was <s> quiet"
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": text}))
    dataset = run(tmp_path / "corpus.jsonl", tokenizers["bpe"], split_special_tokens=split)
    loaded = AutoTokenizer.from_pretrained(tokenizers["bpe"])
    expected = loaded(text, add_special_tokens=False, split_special_tokens=split)
    assert read_documents(dataset) == [[expected["input_ids"]]]
    assert dataset.metadata is not None and dataset.metadata["split_special_tokens"] is split


def test_kept_newlines_reach_a_byte_level_tokenizer(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"text": "First line.\nSecond line."}))
    plain = run(path, tokenizers["bpe"], split_sentences=True)
    tokenizer = load_tokenizer(tokenizers["bpe"])
    assert tokenizer.decode(plain.tokens) == "First line.Second line."
    kept = run(path, tokenizers["bpe"], split_sentences=True, keep_newlines=True, overwrite=True)
    assert "First line.\n" in tokenizer.decode(kept.tokens)


TEXTS = make_documents(60, seed=3)
KINDS = {
    "wordpiece": ("wordpiece", {}),
    "cased": ("wordpiece", {"lowercase": False}),
    "bpe": ("bpe", {}),
    "bpe_prefix": ("bpe", {"add_prefix_space": True}),
    "gpt2": ("gpt2", {}),
    "gpt1": ("gpt1", {}),
}
# Every class of white space, control, combining, ideograph, digit, letter and punctuation that a rule tells apart.
ALPHABET = [
    *" " * 12, *"\n\t\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u2028\u2029\u3000\u200b\u200d\ufeff\x00\x07\ufffd\U0010fffe",
    *"''''.,;:!?-(){}[]<>/\\|_`~^$#@&*+=%\"", *"abcdesStTvVlLmMrRE0123", *"éÉßΣσςİıǅſẛﬁ中文字㐀豈٣½²₂ⅣＡ𝟙😀“”’—…≠≮;",
    "\u0301", "\u0300", "\u0338", "\u0e33", "[MASK]", "</s>", "<|endoftext|>", "<mask>", "<unk>",
    "'s", "'re", " 'll", "the", " The", " ,",
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    for name, (kind, options) in KINDS.items():
        train_tokenizer(kind, TEXTS, 500, root / name, **options)  # type: ignore[arg-type]
    return {name: root / name for name in KINDS}


def _texts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    texts = ["".join(rng.choices(ALPHABET, k=rng.randint(0, 24))) for _ in range(count)]
    return ["", " ", "  ", "\n", " a", "a ", "a  b", " \n a", "a \n", "a" * 150, "中" * 200, *texts, *TEXTS[:5]]


def _expect(encode: Callable[[Sequence[str]], FlatIds], tokenizer: Tokenizer, seed: int) -> None:
    texts = _texts(seed, 2000)
    tokens, lengths = encode(texts)
    expected = tokenizer.encode_batch(texts)
    assert tokens.dtype == np.int32 and lengths.tolist() == [len(ids) for ids in expected]
    ends = np.cumsum(lengths)
    for text, start, end, ids in zip(texts, ends - lengths, ends, expected, strict=True):
        assert tokens[start:end].tolist() == ids, repr(text)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_ids_equal_the_library(folders: dict[str, Path], name: str, split: bool) -> None:
    tokenizer = load_tokenizer(folders[name], split_special_tokens=split)
    encode = flat_encoder(tokenizer)
    assert isinstance(encode, BertWords if KINDS[name][0] in ("wordpiece", "gpt1") else ByteLevelWords)
    for seed in (3, 4) if split else (1, 2):  # the second time most words are known
        _expect(encode, tokenizer, seed)


@pytest.mark.parametrize("name", ["wordpiece", "bpe_prefix"])
def test_a_cache_that_forgets_gives_the_same_ids(
    folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_module, "MAX_CACHED_CHARACTERS", 300)
    tokenizer = load_tokenizer(folders[name])
    encode = flat_encoder(tokenizer)
    for document in TEXTS[:20]:
        assert encode([document])[0].tolist() == tokenizer.encode_batch([document])[0]
        known = sum(len(word) for table in encode._tables for word in table)  # type: ignore[attr-defined]
        assert known <= 300


def test_no_texts_and_texts_without_tokens(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        encode = flat_encoder(load_tokenizer(folder))
        assert [part.tolist() for part in encode([])] == [[], []]
    tokens, lengths = flat_encoder(load_tokenizer(folders["wordpiece"]))(["\x07", "a", " "])
    assert lengths.tolist() == [0, tokens.size, 0]


def _facts() -> TokenizerFacts:
    return TokenizerFacts({"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]"})


def _others() -> list[Backend]:
    """Tokenizers whose pieces are not divided by spaces alone."""
    vocabulary = {token: number for number, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "a b"])}
    wordpiece = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    wordpiece.normalizer = normalizers.BertNormalizer()
    wordpiece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    wordpiece.add_tokens([AddedToken("a b", normalized=False)])
    whole_text = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    bigrams = Backend(models.BPE(vocabulary, [], unk_token="[UNK]"))
    bigrams.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [wordpiece, whole_text, bigrams]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_other_tokenizers_go_through_the_library(number: int) -> None:
    tokenizer = Tokenizer(_others()[number], _facts())
    encode = flat_encoder(tokenizer)
    assert not isinstance(encode, BertWords | ByteLevelWords)
    _expect(encode, tokenizer, 5)
