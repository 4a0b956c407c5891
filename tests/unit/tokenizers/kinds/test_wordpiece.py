"""BERT's WordPiece: merges equal the plain algorithm and the `tokenizers` library, and are on record."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, trainers

from ctxlm_ds.tokenizers.kinds.wordpiece import WordPieceSettings, learn_tokens
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.text import make_documents

TEXTS = make_documents(120, seed=11)


def test_merge_score_and_settings_are_recorded(tmp_path: Path) -> None:
    train_tokenizer("wordpiece", TEXTS, 500, tmp_path / "t", lowercase=False)
    record = json.loads((tmp_path / "t" / "ctxlm_tokenizer.json").read_text())
    assert record["merge_score"] == "frequency"
    assert record["lowercase"] is False
    assert record["fingerprint"] == load_tokenizer(tmp_path / "t").fingerprint


def _first_names(words: dict[str, int]) -> list[str]:
    letters = sorted(set("".join(words)))
    return letters + [f"##{letter}" for letter in letters]


def _plain_merges(words: dict[str, int], num_new: int, min_frequency: int) -> list[str]:
    """The new tokens: all counted again before each merge."""
    names = _first_names(words)
    given = len(names)
    split = {word: [letter if not place else f"##{letter}" for place, letter in enumerate(word)] for word in words}
    while len(names) < given + num_new:
        numbers = {name: number for number, name in enumerate(names)}
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in zip(split[word], split[word][1:], strict=False):
                pairs[pair] += count
        ranked = [
            (count, -numbers[a], -numbers[b], (a, b))
            for (a, b), count in pairs.items()
            if count >= min_frequency
        ]
        if not ranked:
            break
        left, right = max(ranked)[-1]
        result = left + right[2:]
        for word in words:
            parts, merged = split[word], []
            while parts:
                is_pair = parts[:2] == [left, right]
                merged.append(result if is_pair else parts[0])
                parts = parts[2:] if is_pair else parts[1:]
            split[word] = merged
        if result not in numbers:
            names.append(result)
    return names[given:]


def _merges(words: dict[str, int], num_new: int, min_frequency: int) -> list[str]:
    names = _first_names(words)
    settings = WordPieceSettings(len(names) + num_new, min_frequency=min_frequency)
    return learn_tokens(words, [], settings)[len(names) :]


def _random_words(seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    letters = "ab" if seed % 3 == 0 else "abcdef"
    lengths = (1, 1, 2, 3, 5, 8, 13)
    words = {"".join(rng.choices(letters, k=rng.choice(lengths))) for _ in range(60)}
    return {word: rng.choice((1, 1, 2, 3, 50)) for word in sorted(words)}


@pytest.mark.parametrize("seed", range(12))
def test_merges_are_those_of_the_plain_algorithm(seed: int) -> None:
    words = _random_words(seed)
    for min_frequency in (1, 2, 7):
        expected = _plain_merges(words, 60, min_frequency)
        assert _merges(words, 60, min_frequency) == expected


@pytest.mark.parametrize("lowercase", [True, False])
def test_merges_give_the_vocabulary_of_the_tokenizers_library(tmp_path: Path, lowercase: bool) -> None:
    ours = train_tokenizer("wordpiece", TEXTS, 900, tmp_path / "ours", lowercase=lowercase)
    characters = sorted(
        {ours.id_to_token(number) for number in range(5, ours.vocab_size)} & set(map(chr, range(0x250)))
    )
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    fixed = specials + characters + [f"##{character}" for character in characters]
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=900, min_frequency=2, special_tokens=fixed, limit_alphabet=len(characters), show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    theirs = backend.get_vocab(with_added_tokens=False)
    assert [ours.id_to_token(number) for number in range(ours.vocab_size)] == sorted(
        theirs, key=lambda token: theirs[token]
    )
