"""A tokenizer's ids, special tokens, text and word starts."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxlm_ds.errors import TokenizerError
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.unit.tokenizers.conftest import TEXTS
from tests.unit.tokenizers.test_load import edit
from tests.unit.tokenizers.test_train import MIXED, NAMED


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


def test_decode_and_word_starts(trained: tuple[str, Path, Tokenizer]) -> None:
    name, _, tokenizer = trained
    (ids,) = tokenizer.encode_batch(["the quiet harbour watched yesterday"])
    assert tokenizer.decode(ids).strip() == "the quiet harbour watched yesterday"
    starts = tokenizer.word_start_mask()
    assert starts.shape == (tokenizer.vocab_size,)
    assert 1 + int(starts[ids[1:]].sum()) == 5  # the first token begins a word whatever it is
    assert starts[list(tokenizer.special_ids)].all()


def test_fingerprint_tells_tokenizers_apart(tmp_path: Path) -> None:
    fingerprints = {
        train_tokenizer("wordpiece", TEXTS, 400, tmp_path / "a").fingerprint,
        train_tokenizer("wordpiece", TEXTS, 401, tmp_path / "b").fingerprint,
        train_tokenizer("wordpiece", TEXTS, 400, tmp_path / "c", lowercase=False).fingerprint,
        train_tokenizer("bpe", TEXTS, 400, tmp_path / "d").fingerprint,
        train_tokenizer("bpe", TEXTS, 400, tmp_path / "e", add_prefix_space=True).fingerprint,
    }
    assert len(fingerprints) == 5


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


def test_a_folder_that_splits_special_tokens_keeps_it(trained: tuple[str, Path, Tokenizer], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    load_tokenizer(trained[1], split_special_tokens=True).save(tmp_path / "split")
    again = load_tokenizer(tmp_path / "split")
    assert again.split_special_tokens and again.fingerprint == trained[2].fingerprint
    (ids,) = again.encode_batch([NAMED])
    loaded = AutoTokenizer.from_pretrained(tmp_path / "split")
    assert loaded(NAMED, add_special_tokens=False)["input_ids"] == ids


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


def test_a_cased_bert_folder_without_do_lower_case_is_saved_with_it(tmp_path: Path) -> None:
    """tokenizer.json decides; transformers 5 would lower-case by default where tokenizer_config.json says nothing."""
    from transformers import AutoTokenizer

    tokenizer = train_tokenizer("wordpiece", TEXTS, 400, tmp_path / "t", lowercase=False)
    edit(tmp_path / "t" / "tokenizer_config.json", do_lower_case=None, auto_map={"AutoTokenizer": ["x.Y", None]})
    load_tokenizer(tmp_path / "t").save(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert config["do_lower_case"] is False and "auto_map" not in config
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert loaded("Chapter Ada", add_special_tokens=False)["input_ids"] == tokenizer.encode_batch(["Chapter Ada"])[0]
