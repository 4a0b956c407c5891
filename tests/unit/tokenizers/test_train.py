"""Trained tokenizers: ids, determinism, impossible settings, what transformers makes of the folder, and the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer as Backend

from ctxlm_ds.data.dataset.inspection import unknown_advice
from ctxlm_ds.data.preprocess.job import PreprocessConfig, preprocess
from ctxlm_ds.data.sources.corpus import Corpus
from ctxlm_ds.errors import ConfigError, DataError, TokenizerError
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import MOST_UNKNOWN, KeyedSample, sampled_texts, tokenizer_report, train_tokenizer
from tests.text import make_documents
from tests.unit.tokenizers.conftest import TEXTS

MIXED = ["Café naïve ÜBER  tabs\tand\n lines", "日本語 text", "emoji 🙂 end", "don't re-enter 3.14!", "x" * 150]


def test_ids_equal_the_library_called_directly(trained: tuple[str, Path, Tokenizer]) -> None:
    _, folder, tokenizer = trained
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    texts = TEXTS[:30] + MIXED
    assert tokenizer.encode_batch(texts) == [backend.encode(text, add_special_tokens=False).ids for text in texts]


def test_autotokenizer_gives_the_same_ids_class_and_templates(trained: tuple[str, Path, Tokenizer]) -> None:
    from transformers import AutoTokenizer

    name, folder, tokenizer = trained
    loaded = AutoTokenizer.from_pretrained(folder)
    for text, ids in zip(TEXTS[:30] + MIXED, tokenizer.encode_batch(TEXTS[:30] + MIXED), strict=True):
        assert loaded(text, add_special_tokens=False)["input_ids"] == ids
    first, second = tokenizer.encode_batch(["a", "b"])
    cls, sep = [tokenizer.cls_id], [tokenizer.sep_id]
    pair = loaded("a", "b")
    if name.startswith("bpe"):
        assert type(loaded).__name__ == "RobertaTokenizer"
        assert pair["input_ids"] == cls + first + sep + sep + second + sep
        masked = loaded.convert_ids_to_tokens(loaded("a <mask> b", add_special_tokens=False)["input_ids"])
        assert masked[1:] == ["<mask>", "Ġb"]  # <mask> swallows the space before it, as in the released model
    else:
        assert type(loaded).__name__ == "BertTokenizer"
        assert pair["input_ids"] == cls + first + sep + second + sep
        assert pair["token_type_ids"] == [0, 0, 0, 1, 1]
    assert (loaded.mask_token_id, loaded.pad_token_id) == (tokenizer.mask_id, tokenizer.pad_id)
    assert len(loaded) == tokenizer.vocab_size


NAMED = "an [MASK] or <mask>, [SEP]or</s> and <s> in <unk> text [UNK] <|endoftext|> [mask]"


def test_names_of_special_tokens_inside_text_are_what_transformers_makes_of_them(
    trained: tuple[str, Path, Tokenizer],
) -> None:
    from transformers import AutoTokenizer

    _, folder, tokenizer = trained
    loaded = AutoTokenizer.from_pretrained(folder)
    (ids,) = tokenizer.encode_batch([NAMED])
    assert {tokenizer.mask_id, tokenizer.sep_id, tokenizer.unk_id} <= set(ids)
    assert loaded(NAMED, add_special_tokens=False)["input_ids"] == ids
    split = load_tokenizer(folder, split_special_tokens=True)
    (ids,) = split.encode_batch([NAMED])
    assert not {tokenizer.mask_id, tokenizer.sep_id, tokenizer.cls_id, tokenizer.pad_id} & set(ids)
    assert loaded(NAMED, add_special_tokens=False, split_special_tokens=True)["input_ids"] == ids


@pytest.mark.long
def test_the_same_text_gives_the_same_vocabulary_in_every_process(tmp_path: Path) -> None:
    code = (
        "import sys; from ctxlm_ds.tokenizers.train import train_tokenizer; from tests.text import make_documents\n"
        "for kind, settings in eval(sys.argv[2]):\n"
        "    folder = sys.argv[1] + kind\n"
        "    print(train_tokenizer(kind, make_documents(150, seed=3), 700, folder, **settings).fingerprint)"
    )
    cases: list[tuple[str, dict[str, object]]] = [
        ("wordpiece", {}), ("bpe", {}), ("gpt1", {"limit_alphabet": 20}), ("sentencepiece-bpe", {}),
        ("unigram", {"normalization": "whitespace"}), ("elmo", {}),
    ]  # fmt: skip
    root = Path(__file__).parents[3]
    outputs = set()
    for run in range(2):
        command = [sys.executable, "-c", code, str(tmp_path / f"run{run}-"), repr(cases)]
        environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": str(run)}
        environment |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(run + 1)}
        outputs.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(outputs) == 1 and len(outputs.pop().split()) == len(cases)


def test_impossible_settings(tmp_path: Path) -> None:
    sizes = "bpe needs at least 261 tokens, at most 4,194,304"
    for kind, size, settings, message in [
        ("wordlevel", 500, {}, "'wordlevel' is not known; choose one of wordpiece, bpe, gpt2, gpt1"),
        ("bpe", 500, {"lowercase": True}, "lowercase is no setting of bpe, which has add_prefix_space, min_frequency"),
        *(("wordpiece", 500, {"special_tokens": names}, "special_tokens: .* cannot be one")
          for names in (["[MASK]"], ["<a>", "<a>"], ["a b"], ["x"])),
        ("gpt2", 500, {"normalization": "lower"}, "normalization 'lower' is not known to gpt2"),
        ("bpe", 500, {"max_sample_bytes": 0}, "a sample of 0 bytes"),
        *(("bpe", size, {}, f"--vocab-size {size}: {sizes}") for size in (200, 999_999_999_999)),
        ("elmo", 4, {"special_tokens": ["<a>", "<b>"]}, "--vocab-size 4: elmo needs at least 6 tokens"),
        ("elmo", None, {"input_words": 4_000_000}, "size 793471: elmo needs at least 4 tokens, at most 194,304"),
        *(("wordpiece", 500, {name: value}, f"--{name.replace('_', '-')} {value}: a number from 1 to ")
          for name in ("min_frequency", "limit_alphabet") for value in (0, 10**20)),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            train_tokenizer(kind, TEXTS, size, tmp_path / "a", **settings)
    with pytest.raises(TokenizerError, match="no text"):
        train_tokenizer("bpe", ["", "  "], 500, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    (tmp_path / "b").mkdir()
    with pytest.raises(TokenizerError, match="exists already"):
        train_tokenizer("bpe", TEXTS, 500, tmp_path / "b")


@pytest.mark.parametrize(("vocab_size", "warns"), [(30, True), (500, False)])
def test_many_unknown_tokens_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, vocab_size: int, warns: bool
) -> None:
    train_tokenizer("wordpiece", TEXTS, vocab_size, tmp_path / "t")
    rate = json.loads((tmp_path / "t" / "ctxlm_tokenizer.json").read_text())["report"]["all"]["unknown_rate"]
    assert (rate > MOST_UNKNOWN) == warns
    warning = f"{100 * rate:.1f} % of the tokens of the training text are unknown; raise --vocab-size"
    assert (warning in caplog.text) == warns


@pytest.mark.parametrize(
    ("text", "cased", "told"),
    [
        ("plain words of a text", False, ["INFO the tokenizer lower-cases and strips accents; --cased keeps them"]),
        ("tiếng Việt có dấu", False, ["WARNING the tokenizer lower-cases and strips accents; --cased keeps them: "
                                      "100 % of the words have accents or vowel signs, which are lost"]),
        ("हिन्दी भाषा", False, ["WARNING the tokenizer lower-cases and strips accents; --cased keeps them: "
                            "50 % of the words have accents or vowel signs, which are lost"]),
        ("tiếng Việt có dấu", True, []),
    ],
)  # fmt: skip
def test_a_tokenizer_that_strips_accents_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, cased: bool, told: list[str]
) -> None:
    caplog.set_level("INFO", "ctxlm_ds")
    train_tokenizer("wordpiece", [text] * 4, 60, tmp_path / "t", lowercase=not cased)
    lines = [f"{record.levelname} {record.getMessage()}" for record in caplog.records]
    assert [line for line in lines if "accents" in line] == told


@pytest.mark.parametrize("kind", ["bpe", "unigram", "t5", "elmo"])
def test_a_tokenizer_that_keeps_accents_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level("INFO", "ctxlm_ds")
    train_tokenizer(kind, ["tiếng Việt có dấu", *TEXTS], 600, tmp_path / "t")
    assert "accents" not in caplog.text


def test_an_error_of_the_text_source_comes_through(tmp_path: Path) -> None:
    class Broken:
        def __iter__(self):
            yield "some text"
            raise TokenizerError("line 2 is damaged")

    with pytest.raises(TokenizerError, match="line 2 is damaged"):
        train_tokenizer("wordpiece", Broken(), 500, tmp_path / "t")


@pytest.mark.parametrize(("kind", "ids"), [("wordpiece", [5, 6]), ("bpe", [4, 5]), ("gpt2", [597, 598])])
def test_further_special_tokens_have_ids_of_their_own(tmp_path: Path, kind: str, ids: list[int]) -> None:
    from transformers import AutoTokenizer

    tokenizer = train_tokenizer(kind, TEXTS, 600, tmp_path / "t", special_tokens=["[E1]", "<speaker>"])
    assert tokenizer.vocab_size == 600 and tokenizer.special_ids >= set(ids)
    assert [tokenizer.id_to_token(number) for number in ids] == ["[E1]", "<speaker>"]
    split = load_tokenizer(tmp_path / "t", split_special_tokens=True)
    assert not set(split.encode_batch(["an [E1] of the <speaker>"])[0]) & set(ids)
    (text_ids,) = tokenizer.encode_batch(["an [E1] of the <speaker>"])
    assert [token for token in text_ids if token in ids] == ids
    loaded = AutoTokenizer.from_pretrained(tmp_path / "t")
    assert [token for token in loaded("[E1] the <speaker>")["input_ids"] if token in ids] == ids
    assert [loaded(text, add_special_tokens=False)["input_ids"] for text in TEXTS] == tokenizer.encode_batch(TEXTS)


def test_a_finished_folder_is_recognised_and_another_is_refused_by_name(tmp_path: Path) -> None:
    folder, source = tmp_path / "made", {"json_keys": ["text"], "input": "abc"}

    def unread() -> Iterator[str]:
        raise AssertionError("the texts are not read again")
        yield

    trained = train_tokenizer("wordpiece", TEXTS, 600, folder, source=source)
    assert train_tokenizer("wordpiece", unread(), 600, folder, source=source).fingerprint == trained.fingerprint
    train_tokenizer("wordpiece", unread(), 600, folder, source=source, lowercase=True)  # a default that is given
    trained.save(tmp_path / "copy")
    train_tokenizer("wordpiece", unread(), 600, tmp_path / "copy", source=source)
    for kind, size, changed, told in [
        ("wordpiece", 500, source, "vocab_size 600 -> 500"),
        ("wordpiece", 600, {**source, "input": "xyz"}, "input abc -> xyz"),
        ("bpe", 600, source, "type wordpiece -> bpe"),
    ]:
        with pytest.raises(TokenizerError, match=told):
            train_tokenizer(kind, unread(), size, folder, source=changed)
    train_tokenizer("wordpiece", TEXTS, 600, tmp_path / "unsaid")
    with pytest.raises(TokenizerError, match="already exists without a record of how it was made"):
        train_tokenizer("wordpiece", unread(), 600, tmp_path / "unsaid", source=source)


def _numbers(num_documents: int, max_bytes: int, seed: int) -> list[int]:
    return [int(text) for text in sampled_texts((f"{number:06}" for number in range(num_documents)), max_bytes, seed)]


def test_a_sample_is_the_same_each_time_and_another_for_another_seed() -> None:
    first = _numbers(2000, 3000, seed=1)
    assert first == _numbers(2000, 3000, seed=1) == sorted(first)
    assert len(first) == len(set(first)) == 300  # ten bytes each as they are written
    assert first != _numbers(2000, 3000, seed=2)


def test_what_is_kept_of_a_beginning_does_not_depend_on_the_limit() -> None:
    """Smaller samples are parts of larger ones, so a vocabulary can be compared over sizes."""
    assert set(_numbers(1000, 1000, seed=3)) < set(_numbers(1000, 4000, seed=3))


def test_every_part_of_the_corpus_has_its_share() -> None:
    tenths = Counter(number // 100 for seed in range(30) for number in _numbers(1000, 2000, seed))
    assert sum(tenths.values()) == 30 * 200
    assert min(tenths.values()) > 500 and max(tenths.values()) < 700  # 600 each, deviation about 22


def test_documents_of_all_sizes_come_back_whole() -> None:
    documents = make_documents(50, seed=1) + ["", "é\x00🙂\n", "x" * 100_000]
    assert list(sampled_texts(documents, 10**9)) == documents
    assert len(list(sampled_texts(["a" * 1000], 10))) == 1
    assert list(sampled_texts([], 10)) == []


def test_a_sample_can_be_read_twice_and_added_to() -> None:
    sample = KeyedSample(10**6)
    sample.add(["en", "one"])
    assert list(sample) == list(sample) == [["en", "one"]]
    sample.add(["de", "zwei"])
    assert list(sample) == [["en", "one"], ["de", "zwei"]]
    assert (sample.num_seen, len(sample)) == (2, 2)


def test_training_on_a_sample_is_training_on_its_texts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = make_documents(300, seed=8)
    sampled = train_tokenizer("wordpiece", texts, 500, tmp_path / "a", max_sample_bytes=60_000, sample_seed=4)
    direct = train_tokenizer("wordpiece", list(sampled_texts(texts, 60_000, 4)), 500, tmp_path / "b")
    whole = train_tokenizer("wordpiece", texts, 500, tmp_path / "c")
    assert sampled.fingerprint == direct.fingerprint != whole.fingerprint
    record = json.loads((tmp_path / "a" / "ctxlm_tokenizer.json").read_text())
    assert (record["max_sample_bytes"], record["sample_seed"]) == (60_000, 4)


def test_figures_of_a_vocabulary_known_by_heart(tmp_path: Path) -> None:
    tokenizer = train_tokenizer("elmo", ["a a a b b c"], 6, tmp_path / "t")
    report = tokenizer_report(tokenizer, [("x", "a b zz, a"), ("y", "c c"), ("x", "b")])
    assert list(report) == ["x", "y", "all"]
    assert report["x"] == {
        "documents": 2, "words": 6, "tokens": 6, "fertility": 1.0, "characters_per_token": round(10 / 6, 4),
        "unknown_rate": round(2 / 6, 6), "whole_words": round(4 / 6, 4),
    }  # fmt: skip
    assert (report["y"]["unknown_rate"], report["all"]["words"], report["all"]["unknown_rate"]) == (0.0, 8, 0.25)


@pytest.mark.parametrize(
    ("words", "text", "cause"),
    [
        (["é", "a", "t"], "e\u0301 a t", "decomposed accents (NFD): compose them"),
        (["강", "물"], "강 물", "the normalizer changes letters that the vocabulary has (강 물)"),
        (["a", "t"], "a ж t ж я", "the vocabulary lacks ж я: train a tokenizer"),
        (["a", "t"], "a t aaaa", ""),
    ],
)
def test_the_cause_of_unknown_tokens_is_looked_for(tmp_path: Path, words: list[str], text: str, cause: str) -> None:
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": "강" in words}))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    (result,) = preprocess([str(tmp_path / "text.txt")], tmp_path / "vocab.txt", tmp_path / "set", PreprocessConfig())
    found = result.metadata["unknown_cause"]
    assert found.startswith(cause) and bool(found) == bool(cause)
    advice = unknown_advice(result.metadata["unknown_tokens"], result.metadata["tokens"], result.metadata)
    assert advice.endswith(found or "their text is lost")


@pytest.mark.parametrize(
    ("keys", "flag"), [({"key_flags": "--json-key and --language-key"}, "--language-key"), ({}, "--json-keys")]
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_missing_key_is_told_by_its_flag(tmp_path: Path, keys: dict[str, str], flag: str, kind: str) -> None:
    file = tmp_path / f"x.{kind}"
    if kind == "jsonl":
        file.write_text('{"text": "x", "lang": "de"}\n')
    else:
        parquet.write_table(pyarrow.table({"text": ["x"], "lang": ["de"]}), file)
    with pytest.raises(DataError, match=f"has no (key|column) 'lung'.*lang, text; see .*{flag}\\b(?!s)"):
        list(Corpus([str(file)], ["text", "lung"], **keys).documents())
