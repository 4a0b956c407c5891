"""Local Hugging Face folders of other makers, and folders in which something is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from ctxlm_ds.atomic import partial_path
from ctxlm_ds.errors import TokenizerError
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.text import make_documents

TEXTS = make_documents(100, seed=5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    train_tokenizer("wordpiece", TEXTS, 400, tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def edit(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text())
    for key, value in changes.items():
        content.pop(key, None)
        if value is not None:
            content[key] = value
    file.write_text(json.dumps(content))


def _unigram_folder(folder: Path) -> Backend:
    """A SentencePiece-like tokenizer as XLM-R or ALBERT have it."""
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=specials, unk_token="<unk>")
    backend.train_from_iterator(TEXTS, trainer)
    roles = {"cls": "<s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>"}
    names = {f"{role}_token": name for role, name in roles.items()}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)
    return backend


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no such tokenizer folder"):
        load_tokenizer(tmp_path / "bert-base-uncased")


def test_missing_tokenizer_json(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="no tokenizer.json"):
        load_tokenizer(folder)


@pytest.mark.parametrize("content", ["{", '{"model": 3}', "[]", ""])
def test_damaged_tokenizer_json(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match="tokenizer.json"):
        load_tokenizer(folder)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_config(folder: Path, content: str) -> None:
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(TokenizerError, match="tokenizer_config.json"):
        load_tokenizer(folder)


def _byte_level_folder(folder: Path, names: dict[str, str]) -> None:
    """A tokenizer whose special tokens have unusual names, by role."""
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=list(names.values()))
    backend.train_from_iterator(TEXTS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, **{f"{key}_token": name for key, name in names.items()})
    fast.save_pretrained(folder)


@pytest.mark.parametrize("role", ["cls", "sep", "pad"])
def test_missing_special_token(tmp_path: Path, role: str) -> None:
    names = {"cls": "<CLASS>", "sep": "<END>", "pad": "<EMPTY>", "unk": "<OTHER>", "mask": "<HOLE>"}
    del names[role]
    _byte_level_folder(tmp_path, names)
    with pytest.raises(TokenizerError, match=f"has no {role} token"):
        load_tokenizer(tmp_path)


def test_without_a_mask_token_it_is_a_decoders_until_a_mask_is_needed(tmp_path: Path) -> None:
    _byte_level_folder(tmp_path, {"eos": "<END>"})
    tokenizer = load_tokenizer(tmp_path)
    (end,) = tokenizer.special_ids
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id) == (end,) * 4
    assert tokenizer.id_to_token(end) == "<END>"
    with pytest.raises(TokenizerError, match=r"has no mask token, .* name one as mask_token in"):
        _ = tokenizer.mask_id


def test_without_a_mask_and_an_end_of_document_token_there_is_no_use_for_it(tmp_path: Path) -> None:
    _byte_level_folder(tmp_path, {"unk": "<OTHER>"})
    with pytest.raises(TokenizerError, match="no mask token, .*and no end-of-document token, .* as mask_token or eos"):
        load_tokenizer(tmp_path)


def test_special_token_outside_the_vocabulary(folder: Path) -> None:
    (folder / "ctxlm_tokenizer.json").unlink()
    edit(folder / "tokenizer_config.json", mask_token="[BLANK]")
    with pytest.raises(TokenizerError, match=r"mask token '\[BLANK\]' is not in the vocabulary"):
        load_tokenizer(folder)


def test_a_bare_tokenizer_json_with_the_usual_names_loads(folder: Path) -> None:
    before = load_tokenizer(folder)
    for name in ("tokenizer_config.json", "special_tokens_map.json", "ctxlm_tokenizer.json", "vocab.txt"):
        (folder / name).unlink()
    assert load_tokenizer(folder).fingerprint == before.fingerprint


def test_a_changed_vocabulary_is_noticed(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match="not the one that ctxlm_tokenizer.json describes"):
        load_tokenizer(folder)


def test_baked_in_truncation_and_padding_are_ignored(folder: Path) -> None:
    plain = load_tokenizer(folder).encode_batch(TEXTS)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(8)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).encode_batch(TEXTS) == plain


def test_other_kinds_load_and_save(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    backend = _unigram_folder(tmp_path / "unigram")
    tokenizer = load_tokenizer(tmp_path / "unigram")
    assert tokenizer.kind == "huggingface"
    expected = [backend.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert tokenizer.encode_batch(TEXTS) == expected
    starts = tokenizer.word_start_mask()
    (ids,) = tokenizer.encode_batch(["the quiet harbour"])
    assert int(starts[ids].sum()) == 3
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").fingerprint == tokenizer.fingerprint
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert [loaded(text, add_special_tokens=False)["input_ids"] for text in TEXTS] == expected
    assert loaded.mask_token_id == tokenizer.mask_id


def test_an_unfinished_folder_is_refused(folder: Path) -> None:
    left = partial_path(folder)
    folder.rename(left)
    with pytest.raises(TokenizerError, match="tokenizer.partial-.*: not finished .*; make tokenizer again"):
        load_tokenizer(left)
