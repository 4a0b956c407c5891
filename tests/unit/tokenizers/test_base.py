"""A tokenizer's ids, special tokens, text and word starts."""

from __future__ import annotations

from pathlib import Path

from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.unit.tokenizers.conftest import TEXTS


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
