"""Local Hugging Face folders of other makers, and folders in which something is missing."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import transformers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from ctxlm_ds.apps.downstream import prepare
from ctxlm_ds.apps.text.preprocess_data import check_merges
from ctxlm_ds.atomic import partial_path
from ctxlm_ds.errors import TokenizerError
from ctxlm_ds.tokenizers.load import find_vocabulary, load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.text import make_documents

TEXTS = make_documents(100, seed=5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    train_tokenizer("wordpiece", TEXTS, 400, tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.mark.parametrize("kind", ["Unigram", "WordLevel"])
def test_models_with_pieces_of_their_special_names_split_them_in_texts(tmp_path: Path, kind: str) -> None:
    pieces = ["<unk>", "</s>", "▁a", "▁", "<", "/", "s", ">"]
    model = models.Unigram([(piece, 0.0 if piece == "</s>" else -2.0) for piece in pieces], unk_id=0)
    if kind == "WordLevel":
        model = models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="<unk>")
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    names = {"eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(tmp_path)
    split = load_tokenizer(tmp_path, split_special_tokens=True)
    (ids,), ((again, offsets),) = split.encode_batch(["a a</s>"]), split.encode_with_offsets(["a a</s>"])
    assert ids == again and split.eod_id not in ids and offsets[-1][1] == 7
    assert kind == "WordLevel" or [split.id_to_token(number) for number in ids] == ["▁a", "▁a", "<", "/", "s", ">"]
    whole = load_tokenizer(tmp_path)
    assert whole.encode_batch(["a a</s>"])[0][-1] == whole.eod_id and whole.fingerprint == split.fingerprint


def test_a_tokenizer_that_draws_its_ids_is_refused(tmp_path: Path) -> None:
    train_tokenizer("bpe", TEXTS, 400, tmp_path / "t")
    file = tmp_path / "t" / "tokenizer.json"
    model = json.loads(file.read_text())["model"]
    edit(file, model=model | {"dropout": 0.5})
    edit(tmp_path / "t" / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")  # keeps tokenizer.json
    transformers.RobertaConfig().save_pretrained(tmp_path / "t")
    for load in (load_tokenizer, partial(prepare.load_tokenizer, splits_words=False)):
        with pytest.raises(
            TokenizerError, match=r"model\.dropout 0\.5, so that a text gives other ids each time; set it"
        ):
            load(tmp_path / "t")
    edit(file, model=model | {"dropout": None})
    load_tokenizer(tmp_path / "t")


def test_tokens_of_other_makers_folders_are_shown_with_their_blanks(tmp_path: Path) -> None:
    """What the decoder does with a token decides, not the name of the tokenizer's kind."""
    sentence = TEXTS[0].split(".")[0]
    for kind, size in (("unigram", 400), ("gpt2", 400)):
        train_tokenizer(kind, TEXTS, size, tmp_path / kind)
        saved = transformers.AutoTokenizer.from_pretrained(tmp_path / kind)
        saved.save_pretrained(tmp_path / f"{kind}-saved")
        read = load_tokenizer(tmp_path / f"{kind}-saved")
        shown = "".join(space + text for space, text in map(read.shown, read.encode_batch([sentence])[0]))
        assert shown.strip() == sentence
        own = load_tokenizer(tmp_path / kind)
        assert list(map(read.shown, range(size))) == list(map(own.shown, range(size)))


def test_word_starts_and_leading_spaces_follow_the_layers(tmp_path: Path) -> None:
    train_tokenizer("gpt2", TEXTS, 400, tmp_path / "t")
    own, split = load_tokenizer(tmp_path / "t"), pre_tokenizers.Split(Regex(r" ?\S+"), "isolated")
    backend = Backend.from_file(str(tmp_path / "t" / "tokenizer.json"))
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    ends = {"eos_token": "<|endoftext|>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **ends).save_pretrained(tmp_path / "layers")
    read = load_tokenizer(tmp_path / "layers")
    assert read.kind == "huggingface" and read.sentence_prefix == own.sentence_prefix == " "
    assert (read.word_start_mask() == own.word_start_mask()).all()

    pieces = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "a": 4, "b": 5, "▁a": 6, "▁b": 7, "ab": 8}
    llama = Backend(models.BPE(pieces, [("▁", "a"), ("▁", "b"), ("a", "b")], unk_token="<unk>", fuse_unk=True))
    llama.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    llama.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    ends = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=llama, **ends).save_pretrained(tmp_path / "llama")
    read = load_tokenizer(tmp_path / "llama")
    assert read.sentence_prefix == ""
    assert [read.id_to_token(number) for number in np.flatnonzero(read.word_start_mask())] == [
        "<unk>", "<s>", "</s>", "▁", "▁a", "▁b"
    ]  # fmt: skip
    assert "".join(space + text for space, text in map(read.shown, read.encode_batch(["a ab b"])[0])) == " a ab b"


def test_damaged_files_are_named_before_a_text_is_encoded(tmp_path: Path) -> None:
    train_tokenizer("unigram", TEXTS, 400, tmp_path / "t")
    model, rng = (tmp_path / "t" / "spiece.model").read_bytes(), random.Random(1)
    for number in range(30):
        damaged = bytearray(model)
        for _ in range(rng.choice([1, 3, 20])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        file = (tmp_path / "t" / "spiece.model", tmp_path / "bare.model")[number % 2]
        file.write_bytes(damaged)
        with contextlib.suppress(TokenizerError):
            load_tokenizer(file.parent if number % 2 == 0 else file).encode_batch(["a é 한"])
    transformers.AutoTokenizer.from_pretrained(tmp_path / "t").save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "tokenizer.json"
    content = json.loads(file.read_text())
    edit(file, model=content["model"] | {"unk_id": None})
    with pytest.raises(TokenizerError, match="a file of the tokenizer is damaged .*unk_id"):
        load_tokenizer(tmp_path / "saved")
    edit(file, model=content["model"])
    edit(tmp_path / "saved" / "tokenizer_config.json", mask_token="\ud800")
    with pytest.raises(TokenizerError, match="a file of the tokenizer is damaged"):
        load_tokenizer(tmp_path / "saved")


@pytest.mark.parametrize("name", ["do_lower_case", "strip_accents", "tokenize_chinese_chars"])
def test_a_setting_of_a_wrong_type_next_to_a_vocabulary_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({name: "yes"}))
    with pytest.raises(TokenizerError, match="tokenizer_config.json: a value has a wrong type"):
        load_tokenizer(tmp_path)


def edit(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text())
    for key, value in changes.items():
        content.pop(key, None)
        if value is not None:
            content[key] = value
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("", None, "no such tokenizer folder"),
        ("tokenizer.json", None, "no tokenizer.json"),
        *(("tokenizer.json", content, "tokenizer.json") for content in ("{", '{"model": 3}', "[]", "")),
        *(("tokenizer_config.json", content, "tokenizer_config.json") for content in ("{", "[]")),
    ],
)
def test_missing_and_damaged_files(folder: Path, name: str, content: str | None, message: str) -> None:
    if not name:
        shutil.rmtree(folder)
    elif content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(TokenizerError, match=message):
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
    """As XLM-R or ALBERT have it."""
    from transformers import AutoTokenizer

    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    roles = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
    names = {f"{role}_token": name for role, name in roles.items()}
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=list(names.values()), unk_token="<unk>")
    backend.train_from_iterator(TEXTS, trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(tmp_path / "unigram")
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


@pytest.mark.parametrize(
    ("words", "text", "tokens"),
    [
        (["नदी", "में", "##ी", "नद"], "नदी में", ["नदी", "में"]),
        (["물", "강", "##은", "##이"], "강은 물이", ["강", "##은", "물", "##이"]),
        (["été", "##s", "nu"], "Étés NU", ["été", "##s", "nu"]),
        (["ete", "##s", "nu"], "Étés NU", ["ete", "##s", "nu"]),
        (["Été", "##s", "nu"], "Étés nu", ["Été", "##s", "nu"]),
    ],
)
def test_a_vocab_txt_is_not_read_by_a_normalizer_that_changes_its_tokens(
    tmp_path: Path, words: list[str], text: str, tokens: list[str]
) -> None:
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n", encoding="utf-8")
    read = load_tokenizer(file)
    assert [read.id_to_token(number) for number in read.encode_batch([text])[0]] == tokens
    read.save(tmp_path / "saved")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "saved").tokenize(text) == tokens


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


def test_a_damaged_character_map_is_refused(tmp_path: Path) -> None:
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "normalizer": normalizer, "model": model}))
    with pytest.raises(TokenizerError, match=r"not a readable tokenizer.json \(Precompiled: "):
        load_tokenizer(tmp_path)
