"""Byte-level BPE: GPT-2's tokens and ids, and a normalization that is loaded with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.unit.tokenizers.conftest import TEXTS
from tests.unit.tokenizers.test_train import MIXED


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
