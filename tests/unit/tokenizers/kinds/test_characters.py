"""ELMo's vocabulary and character ids beside a transcription of bilm-tf's UnicodeCharsVocabulary."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.errors import ConfigError, TokenizerError
from ctxlm_ds.tokenizers.kinds.characters import CharacterTokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.text import make_documents

TEXTS = make_documents(60, seed=7)
WORDS = ["the", "naïve", "日本語", "a" * 47, "b" * 48, "c" * 49, "d" * 300, "é" * 40, "🙂", "<S>", "</S>", "<UNK>", ""]


class BilmUnicodeChars:
    """allenai/bilm-tf, bilm/data.py: UnicodeCharsVocabulary (without its vocabulary), and the `+ 1` of Batcher."""

    max_word_length = 50
    bos_char = 256
    eos_char = 257
    bow_char = 258
    eow_char = 259
    pad_char = 260

    def _make_bos_eos(self, c: int) -> np.ndarray:
        r = np.zeros([self.max_word_length], dtype=np.int32)
        r[:] = self.pad_char
        r[0] = self.bow_char
        r[1] = c
        r[2] = self.eow_char
        return r

    def _convert_word_to_char_ids(self, word: str) -> np.ndarray:
        code = np.zeros([self.max_word_length], dtype=np.int32)
        code[:] = self.pad_char
        word_encoded = word.encode("utf-8", "ignore")[: (self.max_word_length - 2)]
        code[0] = self.bow_char
        for k, chr_id in enumerate(word_encoded, start=1):
            code[k] = chr_id
        code[len(word_encoded) + 1] = self.eow_char
        return code

    def encode(self, words: list[str]) -> np.ndarray:
        special = {"<S>": self._make_bos_eos(self.bos_char), "</S>": self._make_bos_eos(self.eos_char)}
        rows = [special[word] if word in special else self._convert_word_to_char_ids(word) for word in words]
        return np.vstack(rows) + 1


@pytest.fixture(scope="module")
def elmo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CharacterTokenizer]:
    folder = tmp_path_factory.mktemp("elmo") / "tok"
    tokenizer = train_tokenizer("elmo", TEXTS, 200, folder)
    assert isinstance(tokenizer, CharacterTokenizer)
    return folder, tokenizer


def test_characters_are_bilms(elmo: tuple[Path, CharacterTokenizer]) -> None:
    _, tokenizer = elmo
    ours = tokenizer.char_ids(WORDS)
    assert ours.shape == (len(WORDS), 50) and ours.min() >= 1 and ours.max() <= 261
    np.testing.assert_array_equal(ours, BilmUnicodeChars().encode(WORDS))
    assert tokenizer.char_ids([]).shape == (0, 50)


def test_words_stand_by_frequency_behind_the_three_of_bilm(elmo: tuple[Path, CharacterTokenizer]) -> None:
    from tokenizers.pre_tokenizers import BertPreTokenizer

    folder, tokenizer = elmo
    counts = Counter(word for text in TEXTS for word, _ in BertPreTokenizer().pre_tokenize_str(text))
    ordered = sorted(counts, key=lambda word: (-counts[word], word))
    lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert lines == ["<S>", "</S>", "<UNK>", *ordered[:197]]
    assert [tokenizer.id_to_token(number) for number in range(200)] == lines
    np.testing.assert_array_equal(tokenizer.char_ids(tokenizer.words), BilmUnicodeChars().encode(lines))


def test_ids_behind_the_protocol(elmo: tuple[Path, CharacterTokenizer], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder, tokenizer = elmo
    assert tokenizer.kind == "characters" and tokenizer.special_ids == {0, 1, 2}
    assert (tokenizer.cls_id, tokenizer.sep_id, tokenizer.unk_id, tokenizer.pad_id) == (0, 1, 2, 1)
    (ids,) = tokenizer.encode_batch(["the quiet harbour, zzzz </S>"])
    assert tokenizer.decode(ids[:4]) == "the quiet harbour ," and ids[4:] == [2, 1]
    assert tokenizer.word_start_mask().all()
    with pytest.raises(TokenizerError, match="no mask token"):
        _ = tokenizer.mask_id
    again = AutoTokenizer.from_pretrained(folder)
    expected = [again(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert tokenizer.encode_batch(TEXTS) == expected
    tokenizer.save(tmp_path / "copy")
    copy = load_tokenizer(tmp_path / "copy")
    assert isinstance(copy, CharacterTokenizer) and copy.fingerprint == tokenizer.fingerprint


def test_text_that_is_tokenized_already_is_cut_at_spaces(tmp_path: Path) -> None:
    text = ["The U.S. team 's 3.5 points -LRB- don't"]
    tokenizer = train_tokenizer("elmo", text, 50, tmp_path / "w", words="whitespace")
    (ids,) = tokenizer.encode_batch(text)
    assert [tokenizer.id_to_token(number) for number in ids] == text[0].split()
    with pytest.raises(ConfigError, match="words 'moses' is not known to elmo"):
        train_tokenizer("elmo", text, 50, tmp_path / "m", words="moses")
