"""Bare vocabulary files give the ids of transformers' classes and of the sentencepiece library."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers

from ctxlm_ds.apps.text.preprocess_data import check_merges
from ctxlm_ds.errors import TokenizerError
from ctxlm_ds.tokenizers.load import find_vocabulary, load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.text import make_documents

WORDS = [
    "The", "Café", "naïve", "Straße", "ÉCOLE", "東京", "मान", "한국", "10,5", "e\u0301t\u00e9", "don't", "it's",
    "\u00a0x\u2028y", "\u200dz", "ﬁ", "[…]", "<b>", "🙂",
]  # fmt: skip



def texts(seed: int) -> list[str]:
    """Sentences with words of many scripts, capitals, accents and spaces of other kinds."""
    drawn = random.Random(seed)
    mixed = [" ".join(drawn.choices(WORDS, k=12)) for _ in range(60)]
    return [*make_documents(40, seed=seed), *mixed, "", " ", "  two  spaces ", "\ttab\nline\r\n"]


def trained(folder: Path, kind: str, **settings: Any) -> Path:
    """A folder of train_tokenizer, of which the tests copy the bare files."""
    train_tokenizer(kind, texts(1), 600, folder / kind, **settings)
    return folder / kind


def bare(source: Path, folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        shutil.copyfile(source / name, folder / name)
    return folder


def assert_same_ids(path: Path, theirs: Any) -> None:
    """Also from the folder that is saved, which runs and exports keep."""
    ours = load_tokenizer(path)
    wanted = [theirs(text, add_special_tokens=False)["input_ids"] for text in texts(2)]
    assert ours.encode_batch(texts(2)) == wanted
    ours.save(path.parent / "saved")
    again = load_tokenizer(path.parent / "saved")
    assert again.encode_batch(texts(2)) == wanted and again.fingerprint == ours.fingerprint
    auto = transformers.AutoTokenizer.from_pretrained(path.parent / "saved")
    assert [auto(text, add_special_tokens=False)["input_ids"] for text in texts(2)] == wanted


@pytest.mark.parametrize("cased", [False, True])
@pytest.mark.parametrize("with_config", [False, True])
def test_vocab_txt_is_berts(tmp_path: Path, cased: bool, with_config: bool) -> None:
    source = trained(tmp_path, "wordpiece", lowercase=not cased)
    folder = bare(source, tmp_path / "bare", "vocab.txt")
    if with_config:
        (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": not cased}))
    theirs = transformers.BertTokenizer(vocab=str(folder / "vocab.txt"), do_lower_case=not cased)
    assert_same_ids(folder / "vocab.txt", theirs)
    assert load_tokenizer(folder).fingerprint == load_tokenizer(source).fingerprint


@pytest.mark.parametrize(("kind", "name"), [("gpt2", "GPT2Tokenizer"), ("bpe", "RobertaTokenizer")])
def test_vocab_json_and_merges_are_gpt2s_or_robertas(tmp_path: Path, kind: str, name: str) -> None:
    source = trained(tmp_path, kind)
    folder = bare(source, tmp_path / "bare", "vocab.json", "merges.txt")
    files = {"vocab": str(folder / "vocab.json"), "merges": str(folder / "merges.txt")}
    assert_same_ids(folder / "merges.txt", getattr(transformers, name)(**files))
    assert load_tokenizer(folder).fingerprint == load_tokenizer(source).fingerprint


def test_published_names_of_vocabulary_and_merges_are_read(tmp_path: Path) -> None:
    source = trained(tmp_path, "gpt2")
    folder = bare(source, tmp_path / "bare", "vocab.json", "merges.txt")
    for name in ("vocab.json", "merges.txt"):
        (folder / name).rename(folder / f"gpt2-{name}")
    expected = load_tokenizer(source).fingerprint
    for path in (folder, folder / "gpt2-vocab.json", folder / "gpt2-merges.txt"):
        assert load_tokenizer(path).fingerprint == expected
    check_merges(folder / "gpt2-vocab.json", folder / "gpt2-merges.txt")
    with pytest.raises(TokenizerError, match=r"read next to the vocabulary, .*gpt2-merges.txt; put both files into"):
        check_merges(folder / "gpt2-vocab.json", tmp_path / "merges.txt")
    with pytest.raises(TokenizerError, match="needs no merges"):
        check_merges(source, folder / "gpt2-merges.txt")
    (folder / "gpt2-merges.txt").unlink()
    with pytest.raises(TokenizerError, match="gpt2-merges.txt or merges.txt is missing"):
        load_tokenizer(folder)


def test_a_model_of_t5_gets_its_sentinels(tmp_path: Path) -> None:
    source = trained(tmp_path, "t5")
    folder = bare(source, tmp_path / "bare", "spiece.model")
    ours = load_tokenizer(folder)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(source / "spiece.model"))
    assert ours.encode_batch(texts(2)) == processor.encode(texts(2))
    assert ours.fingerprint == load_tokenizer(source).fingerprint
    assert ours.token_to_id("<extra_id_0>") == ours.vocab_size - 1 == len(processor) + 99


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_plain_model_gives_sentencepieces_ids(tmp_path: Path, kind: str) -> None:
    (tmp_path / "text.txt").write_text("\n".join(text.replace("\n", " ") for text in texts(1)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "mine"), vocab_size=600, model_type=kind,
        byte_fallback=True, character_coverage=0.99, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    ours = load_tokenizer(tmp_path / "mine.model")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "mine.model"))
    assert ours.encode_batch(texts(2)) == processor.encode(texts(2))
    assert (ours.vocab_size, ours.has_mask, ours.sep_id) == (len(processor), False, processor.eos_id())
    ours.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode_batch(texts(2)) == processor.encode(texts(2))


def test_names_of_special_tokens_are_split_if_asked(tmp_path: Path) -> None:
    folder = bare(trained(tmp_path, "wordpiece"), tmp_path / "bare", "vocab.txt")
    (whole,), (split,) = (load_tokenizer(folder, choice).encode_batch(["[MASK]"]) for choice in (None, True))
    assert whole == [load_tokenizer(folder).mask_id] and len(split) > 1


def test_what_does_not_decide_the_ids_is_refused(tmp_path: Path) -> None:
    albert = bare(trained(tmp_path, "albert"), tmp_path / "a", "spiece.model")
    words = tmp_path / "vocab.txt"
    words.write_text("the\nriver\n")
    lonely, broken = tmp_path / "vocab.json", tmp_path / "b.model"
    lonely.write_text('{"<|endoftext|>": 0}')
    broken.write_bytes(b"no model" * 9)
    pair = tmp_path / "pair"
    pair.mkdir()
    (pair / "vocab.json").write_text('{"<|endoftext|>": 0, "a": 1}')
    (pair / "merges.txt").write_text("#version: 0.2\na b\n")
    for path, message in [
        (albert, "save the tokenizer with transformers"), (words, r"lacks \[PAD\]"), (lonely, "merges.txt is missing"),
        (broken, "sentencepiece model"), (pair, "do not belong together"), 
    ]:  # fmt: skip
        with pytest.raises(TokenizerError, match=message):
            load_tokenizer(path)
    with pytest.raises(TokenizerError, match="holds several vocabularies"):
        load_tokenizer(tmp_path)
    (tmp_path / "x.bin").touch()
    with pytest.raises(TokenizerError, match="no tokenizer; give"):
        load_tokenizer(tmp_path / "x.bin")
    assert find_vocabulary(tmp_path / "wordpiece") is None
