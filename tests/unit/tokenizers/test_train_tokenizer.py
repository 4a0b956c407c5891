"""Trained tokenizers: ids, special tokens, determinism, and what transformers makes of the folder."""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from ctxlm_ds.errors import ConfigError, TokenizerError
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import MOST_UNKNOWN, TOKENIZER_TYPES, train_tokenizer
from ctxlm_ds.tokenizers.training_words import cut_long_words
from tests.text import make_documents

TEXTS = make_documents(150, seed=3)
MIXED = ["Café naïve ÜBER  tabs\tand\n lines", "日本語 text", "emoji 🙂 end", "don't re-enter 3.14!", "x" * 150]
SETTINGS = {
    "uncased": ("wordpiece", {"lowercase": True}),
    "cased": ("wordpiece", {"lowercase": False}),
    "bpe": ("bpe", {"add_prefix_space": False}),
    "bpe_prefix": ("bpe", {"add_prefix_space": True}),
}


@pytest.fixture(scope="module", params=list(SETTINGS))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Tokenizer]:
    kind, settings = SETTINGS[request.param]
    folder = tmp_path_factory.mktemp("tokenizer") / request.param
    return request.param, folder, train_tokenizer(kind, TEXTS, 600, folder, **settings)


def test_special_ids(trained: tuple[str, Path, Tokenizer]) -> None:
    name, _, tokenizer = trained
    ids = (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id)
    if name.startswith("bpe"):
        assert ids == (1, 3, 0, 2, tokenizer.vocab_size - 1)
        assert tokenizer.double_separator
    else:
        assert ids == (0, 1, 2, 3, 4)
        assert not tokenizer.double_separator
    assert tokenizer.special_ids == frozenset(ids)
    assert tokenizer.vocab_size == 600


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


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizer") / "gpt2"
    return folder, train_tokenizer("gpt2", TEXTS, 600, folder)


def test_gpt2_has_the_bytes_the_merges_and_the_end_of_text_last(gpt2: tuple[Path, Tokenizer]) -> None:
    folder, tokenizer = gpt2
    assert tokenizer.vocab_size == 600 and tokenizer.special_ids == {599} and tokenizer.sep_id == 599
    assert tokenizer.id_to_token(599) == "<|endoftext|>" and not tokenizer.double_separator
    assert len((folder / "merges.txt").read_text().splitlines()) == 1 + 600 - 256 - 1
    (ids,) = load_tokenizer(folder, split_special_tokens=True).encode_batch(["a <|endoftext|> b"])
    assert 599 not in ids and tokenizer.decode(ids) == "a <|endoftext|> b"
    (ids,) = tokenizer.encode_batch(["a <|endoftext|> b"])
    assert 599 in ids and tokenizer.decode(ids) == "a <|endoftext|> b"


def test_gpt2_is_transformers_gpt2_tokenizer(gpt2: tuple[Path, Tokenizer], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder, tokenizer = gpt2
    loaded = AutoTokenizer.from_pretrained(folder)
    assert type(loaded).__name__ == "GPT2Tokenizer" and len(loaded) == 600
    assert (loaded.eos_token_id, loaded.bos_token_id, loaded.pad_token_id, loaded.mask_token_id) == (599,) * 3 + (None,)
    for text, ids in zip(TEXTS[:30] + MIXED, tokenizer.encode_batch(TEXTS[:30] + MIXED), strict=True):
        assert loaded(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == text
    loaded.save_pretrained(tmp_path / "theirs")
    assert load_tokenizer(tmp_path / "theirs").fingerprint == tokenizer.fingerprint
    tokenizer.save(tmp_path / "ours")
    assert load_tokenizer(tmp_path / "ours").fingerprint == tokenizer.fingerprint


def test_saved_again_by_us_and_by_transformers_it_is_the_same(
    trained: tuple[str, Path, Tokenizer], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    _, folder, tokenizer = trained
    tokenizer.save(tmp_path / "ours")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "theirs")
    for copy in ("ours", "theirs"):
        again = load_tokenizer(tmp_path / copy)
        assert again.fingerprint == tokenizer.fingerprint
        assert again.kind == tokenizer.kind
        assert again.encode_batch(MIXED) == tokenizer.encode_batch(MIXED)


def test_case(tmp_path: Path) -> None:
    uncased = train_tokenizer("wordpiece", TEXTS, 400, tmp_path / "uncased", lowercase=True)
    cased = train_tokenizer("wordpiece", TEXTS, 400, tmp_path / "cased", lowercase=False)
    assert uncased.encode_batch(["Chapter É"]) == uncased.encode_batch(["chapter e"])
    assert cased.encode_batch(["Chapter"]) != cased.encode_batch(["chapter"])


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


def test_a_folder_that_splits_special_tokens_keeps_it(trained: tuple[str, Path, Tokenizer], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    load_tokenizer(trained[1], split_special_tokens=True).save(tmp_path / "split")
    again = load_tokenizer(tmp_path / "split")
    assert again.split_special_tokens and again.fingerprint == trained[2].fingerprint
    (ids,) = again.encode_batch([NAMED])
    loaded = AutoTokenizer.from_pretrained(tmp_path / "split")
    assert loaded(NAMED, add_special_tokens=False)["input_ids"] == ids


def test_decode_and_word_starts(trained: tuple[str, Path, Tokenizer]) -> None:
    name, _, tokenizer = trained
    (ids,) = tokenizer.encode_batch(["the quiet harbour watched yesterday"])
    assert tokenizer.decode(ids).strip() == "the quiet harbour watched yesterday"
    starts = tokenizer.word_start_mask()
    assert starts.shape == (tokenizer.vocab_size,)
    assert 1 + int(starts[ids[1:]].sum()) == 5  # the first token begins a word whatever it is
    assert starts[list(tokenizer.special_ids)].all()


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


def test_an_iterator_works_like_a_list(tmp_path: Path) -> None:
    listed = train_tokenizer("wordpiece", TEXTS, 500, tmp_path / "list")
    streamed = train_tokenizer("wordpiece", iter(TEXTS), 500, tmp_path / "iterator")
    assert listed.fingerprint == streamed.fingerprint


def test_merge_score_and_settings_are_recorded(tmp_path: Path) -> None:
    train_tokenizer("wordpiece", TEXTS, 500, tmp_path / "t", lowercase=False)
    record = json.loads((tmp_path / "t" / "ctxlm_tokenizer.json").read_text())
    assert record["merge_score"] == "frequency"
    assert record["lowercase"] is False
    assert record["fingerprint"] == load_tokenizer(tmp_path / "t").fingerprint


def test_default_vocabulary_sizes(tmp_path: Path) -> None:
    for kind, size in (("wordpiece", 30_522), ("bpe", 50_265), ("gpt1", 40_478)):
        train_tokenizer(kind, TEXTS, None, tmp_path / kind)
        record = json.loads((tmp_path / kind / "ctxlm_tokenizer.json").read_text())
        assert record["requested_vocab_size"] == size


def test_impossible_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'wordlevel' is not known; choose one of wordpiece, bpe, gpt2, gpt1"):
        train_tokenizer("wordlevel", TEXTS, 500, tmp_path / "a")
    with pytest.raises(ConfigError, match="lowercase is no setting of bpe, which has add_prefix_space, min_frequency"):
        train_tokenizer("bpe", TEXTS, 500, tmp_path / "a", lowercase=True)
    for names in (["[MASK]"], ["<a>", "<a>"], ["a b"], ["x"]):
        with pytest.raises(ConfigError, match="special_tokens: .* cannot be one"):
            train_tokenizer("wordpiece", TEXTS, 500, tmp_path / "a", special_tokens=names)
    with pytest.raises(ConfigError, match="normalization 'lower' is not known to gpt2"):
        train_tokenizer("gpt2", TEXTS, 500, tmp_path / "a", normalization="lower")
    with pytest.raises(ConfigError, match="a sample of 0 bytes"):
        train_tokenizer("bpe", TEXTS, 500, tmp_path / "a", max_sample_bytes=0)
    for size in (200, 999_999_999_999):
        with pytest.raises(ConfigError, match=f"--vocab-size {size}: bpe needs at least 261 tokens, at most 10,"):
            train_tokenizer("bpe", TEXTS, size, tmp_path / "a")
    for setting in ("min_frequency", "limit_alphabet"):
        for value in (0, 10**20):
            with pytest.raises(ConfigError, match=f"--{setting.replace('_', '-')} {value}: a number from 1 to "):
                train_tokenizer("wordpiece", TEXTS, 500, tmp_path / "a", **{setting: value})
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
    monkeypatch.setattr(logging.getLogger("ctxlm_ds"), "propagate", True)
    train_tokenizer("wordpiece", TEXTS, vocab_size, tmp_path / "t")
    rate = json.loads((tmp_path / "t" / "ctxlm_tokenizer.json").read_text())["report"]["all"]["unknown_rate"]
    assert (rate > MOST_UNKNOWN) == warns
    warning = f"{100 * rate:.1f} % of the tokens of the training text are unknown; raise --vocab-size"
    assert (warning in caplog.text) == warns


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


@pytest.mark.parametrize("kind", ["bpe", "gpt2"])
def test_byte_level_bpe_with_a_normalization_loads_with_it(tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = train_tokenizer(kind, TEXTS, 600, tmp_path / "t", normalization="nfkc")
    composed, decomposed = tokenizer.encode_batch(["caf\u00e9 fi", "cafe\u0301 \ufb01"])
    assert composed == decomposed and tokenizer.kind == "byte_bpe"
    loaded = AutoTokenizer.from_pretrained(tmp_path / "t")
    for text, ids in zip(MIXED + TEXTS, tokenizer.encode_batch(MIXED + TEXTS), strict=True):
        assert loaded(text, add_special_tokens=False)["input_ids"] == ids
    tokenizer.save(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").fingerprint == tokenizer.fingerprint


def test_a_text_with_a_nul_is_one_text(tmp_path: Path) -> None:
    for kind in TOKENIZER_TYPES:
        tokenizer = train_tokenizer(kind, iter(["the quiet\x00harbour " * 30, *TEXTS]), 700, tmp_path / kind)
        assert tokenizer.encode_batch(["the quiet"])[0]


def test_of_several_processes_with_one_folder_the_first_wins(tmp_path: Path) -> None:
    """The same command finds its result; another one is refused and replaces nothing."""
    folder, source = tmp_path / "made", {"input": "abc"}

    def texts(size: int) -> Iterator[str]:
        yield from TEXTS
        if not folder.exists():
            train_tokenizer("bpe", TEXTS, size, folder, source=source)

    with pytest.raises(TokenizerError, match="made differently: vocab_size 500 -> 600"):
        train_tokenizer("bpe", texts(500), 600, folder, source=source)
    assert load_tokenizer(folder).vocab_size == 500
    shutil.rmtree(folder)
    assert train_tokenizer("bpe", texts(600), 600, folder, source=source).vocab_size == 600
    shutil.rmtree(folder)
    with pytest.raises(TokenizerError, match="exists already; choose another --output-dir"):
        train_tokenizer("bpe", texts(600), 600, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


@pytest.mark.parametrize("sample", [None, 10**9])
def test_a_full_disk_is_reported(tmp_path: Path, sample: int | None) -> None:
    texts = [f"{number} " * 50_000 for number in range(400)] if sample else TEXTS
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        with pytest.raises(TokenizerError, match="File too large; nothing was kept, free some space"):
            train_tokenizer("bpe", texts, 600, tmp_path / "t", max_sample_bytes=sample)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["bpe", "gpt2", "gpt1"])
def test_long_words_are_cut_for_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Each of these takes minutes if the trainer sees it complete."""
    monkeypatch.setattr(logging.getLogger("ctxlm_ds"), "propagate", True)
    rng = random.Random(0)
    longs = ["".join(rng.choices("acgt1", k=300_000)), "0123456789" * 30_000, "-=*+" * 75_000, " \t" * 150_000]
    start_s = time.monotonic()
    tokenizer = train_tokenizer(kind, [*TEXTS, *(f"{long} end." for long in longs)], 600, tmp_path / "t")
    assert time.monotonic() - start_s < 60
    assert "words of over 1000 characters were cut for the training" in caplog.text
    assert max(map(len, tokenizer.backend.get_vocab())) <= 1000 + len("</w>")


def test_cut_words_are_those_over_the_limit() -> None:
    words = ["a" * 1000, "a" * 999, "b" * 2500, "word " * 500, "好" * 1500, "12" * 600, " " * 3000 + "x"]
    cut = list(cut_long_words(words))
    assert [len(text) - len(word) for word, text in zip(words, cut, strict=True)] == [1, 0, 2, 0, 1, 1, -2000]
    assert cut[2].split("\n") == ["b" * 1000, "b" * 1000, "b" * 500]


def test_gpt1_is_transformers_openai_gpt_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, OpenAIGPTTokenizer

    folder = tmp_path / "gpt1"
    tokenizer = train_tokenizer("gpt1", TEXTS, 600, folder, special_tokens=["_start_"])
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.has_mask) == ("character_bpe", 600, False)
    assert (tokenizer.unk_id, tokenizer.sep_id, tokenizer.pad_id) == (0, 599, 599)
    assert [tokenizer.id_to_token(number) for number in (0, 598, 599)] == ["<unk>", "_start_", "\n</w>"]
    texts = [*TEXTS, *MIXED, "two\nlines\n\n", "an <unk> name"]
    vocab, merges = str(folder / "vocab.json"), str(folder / "merges.txt")
    for loaded in (AutoTokenizer.from_pretrained(folder), OpenAIGPTTokenizer(vocab, merges)):
        assert type(loaded).__name__ == "OpenAIGPTTokenizer"
        assert loaded(texts)["input_ids"] == tokenizer.encode_batch(texts)
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == 599
    assert not any(599 in ids for ids in tokenizer.encode_batch(texts))
    assert tokenizer.decode(tokenizer.encode_batch(["The quiet harbour"])[0]).strip() == "the quiet harbour"
    tokenizer.save(tmp_path / "ours")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "theirs")
    for copy in ("ours", "theirs"):
        again = load_tokenizer(tmp_path / copy)
        assert (again.fingerprint, again.kind) == (tokenizer.fingerprint, "character_bpe")


def test_the_released_gpt1_folder_ends_documents_with_its_line_end(tmp_path: Path) -> None:
    """It names no special token but <unk>."""
    tokenizer = train_tokenizer("gpt1", TEXTS, 600, tmp_path / "gpt1")
    content = json.loads((tmp_path / "gpt1/tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] == "<unk>"]
    (tmp_path / "released").mkdir()
    (tmp_path / "released/tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "released/tokenizer_config.json").write_text('{"unk_token": "<unk>"}')
    released = load_tokenizer(tmp_path / "released")
    assert (released.kind, released.sep_id, released.unk_id) == ("character_bpe", tokenizer.sep_id, 0)
    assert released.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)


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


def test_the_same_command_again_is_done_at_once(tmp_path: Path) -> None:
    corpus, folder = tmp_path / "corpus.txt", tmp_path / "tokenizer"
    corpus.write_text("\n\n".join(TEXTS))
    tool = Path(__file__).parents[3] / "tools" / "train_tokenizer.py"
    words = ["--input", str(corpus), "--type", "wordpiece", "--vocab-size", "400", "--output-dir", str(folder)]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(tool), *words, *more]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert run().returncode == 0
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = run()
    assert again.returncode == 0 and "complete already" in again.stdout
    other = run("--cased")
    assert other.returncode == 2 and "lowercase true -> false" in other.stderr
    corpus.write_text("another text\n" * 50)
    assert "made differently: input" in run().stderr
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
