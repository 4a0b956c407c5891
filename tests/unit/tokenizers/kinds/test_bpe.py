"""Byte-level BPE as GPT-2 has it and with a normalization; GPT-1's tokenizer, as in transformers and as released."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.kinds.bpe import read_words
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


def test_gpt1_tokenizer_of_transformers_loads_and_saves(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, OpenAIGPTTokenizer

    letters = sorted({letter for text in TEXTS for letter in text.lower() if letter.isalpha()})
    vocab = {"<unk>": 0, "<end>": 1}
    for token in [*letters, *(letter + "</w>" for letter in letters), "th", "the</w>"]:
        vocab[token] = len(vocab)
    theirs = OpenAIGPTTokenizer(vocab=vocab, merges=[("t", "h"), ("th", "e</w>")], eos_token="<end>")
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer = load_tokenizer(tmp_path / "theirs")
    tokenizer.save(tmp_path / "ours")
    assert load_tokenizer(tmp_path / "ours").fingerprint == tokenizer.fingerprint
    again = AutoTokenizer.from_pretrained(tmp_path / "ours")
    expected = [theirs(text, add_special_tokens=False)["input_ids"] for text in TEXTS[:20]]
    assert tokenizer.encode_batch(TEXTS[:20]) == expected
    assert [again(text, add_special_tokens=False)["input_ids"] for text in TEXTS[:20]] == expected
    assert (tokenizer.sep_id, tokenizer.unk_id, again.eos_token_id) == (1, 0, 1)


def released_ids(folder: Path, words: list[str]) -> list[int]:
    """Encode words as the released code does: the pair of the lowest rank is merged until none is left."""
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")[1:-1]
    ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(lines)}
    ids = []
    for word in words:
        symbols = [*word[:-1], word[-1] + "</w>"]
        while pairs := [pair for pair in zip(symbols, symbols[1:], strict=False) if pair in ranks]:
            best, merged = min(pairs, key=ranks.__getitem__), []
            while symbols:
                size = 2 if tuple(symbols[:2]) == best else 1
                merged.append("".join(symbols[:size]))
                symbols = symbols[size:]
            symbols = merged
        ids += [vocab.get(symbol, 0) for symbol in symbols]
    return ids


def test_texts_of_words_have_the_ids_of_the_released_code(tmp_path: Path) -> None:
    """`n't` is a word, and so is the line end, which has the id that ends documents."""
    from transformers import AutoTokenizer

    texts = ["we do n't know it 's the harbour 's \n quiet #1", *(text.lower() for text in TEXTS)]
    folder = tmp_path / "words"
    tokenizer = train_tokenizer("gpt1-words", texts, 600, folder)
    assert (tokenizer.kind, tokenizer.id_to_token(tokenizer.sep_id)) == ("character_bpe", "\n</w>")
    assert sorted(tokenizer.backend.get_vocab().values()) == list(range(tokenizer.vocab_size))
    plain = train_tokenizer("gpt1", texts, 600, tmp_path / "gpt1")
    for vocabulary in (tokenizer, read_words(plain)):
        vocabulary.save(tmp_path / "saved")
        loaded = load_tokenizer(tmp_path / "saved")
        ids = loaded.encode_batch(texts)
        assert ids == [released_ids(tmp_path / "saved", re.findall(r"\n|\S+", text)) for text in texts]
        assert ids[0].count(loaded.sep_id) == 1
        assert AutoTokenizer.from_pretrained(tmp_path / "saved")(texts)["input_ids"] == ids
        assert loaded.fingerprint == vocabulary.fingerprint
    assert plain.encode_batch(texts[:1]) != ids[:1]
