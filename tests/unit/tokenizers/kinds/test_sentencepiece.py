"""sentencepiece tokenizers beside the sentencepiece library and beside what transformers loads from the folder."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from transformers.models.mbart.tokenization_mbart import FAIRSEQ_LANGUAGE_CODES as MBART_CODES

from ctxlm_ds.data.preprocess.encode import flat_encoder
from ctxlm_ds.errors import ConfigError, TokenizerError
from ctxlm_ds.tokenizers.kinds.sentencepiece import SentencePieceTokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.text import make_documents

_SCRIPTS = {
    "fr": "Le déjeuner était prêt à l'hôtel ; où êtes-vous allés, chère Zoë ? Ça coûte 3,50 € … n'est-ce pas",
    "de": "Die Straße führt über den Fluß zur größten Mühle , wo Müller 1897 übernachtete – „schön“ sagte er",
    "ru": "Тихая река медленно течёт мимо старого моста и леса , где живёт ёж",
    "zh": "安静的 港口 古老的桥 在 森林 旁边 ，图书馆 。机器 和 花园 ！",
    "ja": "静かな 港 と 古い 橋 、 図書館 の 先生 は ﾊﾝｶｸ カタカナ を 読む 。",
    "hi": "शांत बंदरगाह और पुराना पुल जंगल के पास है , शिक्षक बाग में पढ़ता है",
    "ar": "الميناء الهادئ والجسر القديم قرب الغابة والمكتبة",
    "ko": "조용한 항구 와 오래된 다리 숲 근처 도서관 선생님 이 읽는다",
}
"""Words in several scripts, with characters that NFKC changes."""


def _multilingual(num_lines: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    words = [text.split() for text in _SCRIPTS.values()]
    return [" ".join(rng.choices(rng.choice(words), k=rng.randint(3, 20))) for _ in range(num_lines)]


TEXTS = make_documents(60, seed=4) + _multilingual(400, seed=1)
HELD_OUT = make_documents(30, seed=5) + _multilingual(200, seed=2)
ODD = [
    "",
    " ",
    "  two  spaces  ",
    "tab\tand\nline",
    "ﬁ ① ＡＢＣ ½ ²",
    "nbsp\u00a0and\u3000wide",
    "🙂 unseen ქართული",
    "\x00\x01",
]
CASES: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "t5": ("unigram", 700, {"extra_ids": 20, "special_tokens": ["<doc>"]}, "T5Tokenizer"),
    "xlmr": ("unigram", 600, {}, "XLMRobertaTokenizer"),
    "mbart": ("unigram", 600, {"language_codes": MBART_CODES, "normalization": "whitespace"}, "MBartTokenizer"),
    "codes": ("unigram", 600, {"language_codes": ["en_XX", "de_DE"]}, "TokenizersBackend"),
    "albert": ("albert", 600, {"normalization": "nmt_nfkc_cf"}, "TokenizersBackend"),
    "xlnet": ("xlnet", 600, {}, "TokenizersBackend"),
    "bpe": ("sentencepiece-bpe", 700, {"normalization": "identity"}, "TokenizersBackend"),
    "bytes": (
        "sentencepiece-bpe", 900, {"byte_fallback": True, "character_coverage": 0.98, "extra_ids": 5},
        "TokenizersBackend",
    ),
    "unigram_bytes": ("unigram", 900, {"byte_fallback": True, "normalization": "nfkc"}, "TokenizersBackend"),
}  # fmt: skip


@pytest.fixture(scope="module", params=list(CASES))
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, SentencePieceTokenizer]:
    kind, size, settings, _ = CASES[request.param]
    folder = tmp_path_factory.mktemp("sentencepiece") / request.param
    tokenizer = train_tokenizer(kind, TEXTS, size, folder, **settings)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return request.param, folder, tokenizer


def test_ids_are_those_of_the_sentencepiece_library(trained: tuple[str, Path, SentencePieceTokenizer]) -> None:
    _, folder, tokenizer = trained
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    texts = HELD_OUT + ODD
    expected = [processor.encode(text) for text in texts]
    assert tokenizer.encode_batch(texts) == expected
    tokens, lengths = flat_encoder(tokenizer)(texts)  # as preprocessing encodes
    assert tokens.tolist() == sum(expected, []) and lengths.tolist() == [len(ids) for ids in expected]


def test_transformers_loads_the_folder_with_the_same_ids(trained: tuple[str, Path, SentencePieceTokenizer]) -> None:
    from transformers import AutoTokenizer

    name, folder, tokenizer = trained
    loaded = AutoTokenizer.from_pretrained(folder)
    assert type(loaded).__name__ == CASES[name][3] and len(loaded) == tokenizer.vocab_size
    texts = HELD_OUT + ODD
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert loaded(text, add_special_tokens=False)["input_ids"] == ids, text
    assert (loaded.pad_token_id, loaded.unk_token_id, loaded.eos_token_id) == (
        tokenizer.pad_id, tokenizer.unk_id, tokenizer.sep_id
    )  # fmt: skip
    first, second = tokenizer.encode_batch(["harbour", "bridge"])
    end = [tokenizer.sep_id]
    pair = loaded("harbour", "bridge")["input_ids"]
    if name in ("t5", "bytes"):
        assert pair == first + end + second + end and tokenizer.special_ids >= {0, 1, 2}
    elif name in ("mbart", "codes"):
        assert pair == first + second + end + [loaded.convert_tokens_to_ids({"mbart": "en_XX", "codes": "en_XX"}[name])]
    elif name == "albert":
        names = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
        assert [tokenizer.id_to_token(number) for number in range(5)] == names
        assert pair == [2, *first, 3, *second, 3] and not tokenizer.double_separator
        types = loaded("harbour", "bridge", return_token_type_ids=True)["token_type_ids"]
        assert types == [0] * (len(first) + 2) + [1] * (len(second) + 1)
        assert loaded.mask_token_id == tokenizer.mask_id == 4
    elif name == "xlnet":
        names = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>", ".", "(", ")", '"']
        assert [tokenizer.id_to_token(number) for number in range(13)] == names
        assert pair == [*first, 4, *second, 4, 3] and not tokenizer.double_separator
        types = loaded("harbour", "bridge", return_token_type_ids=True)["token_type_ids"]
        assert types == [0] * (len(first) + 1) + [1] * (len(second) + 1) + [2]
        assert loaded.mask_token_id == tokenizer.mask_id == 6 and tokenizer.eod_id == 7
    else:
        assert pair == [0, *first, 2, 2, *second, 2] and tokenizer.double_separator
        assert loaded.mask_token_id == tokenizer.mask_id == tokenizer.vocab_size - 1


def test_sentinels_are_in_t5s_order_and_codes_in_mbarts(trained: tuple[str, Path, SentencePieceTokenizer]) -> None:
    from transformers import AutoTokenizer

    name, folder, tokenizer = trained
    loaded = AutoTokenizer.from_pretrained(folder)
    if name == "t5":
        sentinels = [tokenizer.id_to_token(699 - number) for number in range(20)]
        assert sentinels == [f"<extra_id_{number}>" for number in range(20)]
        ids = loaded("<extra_id_0> <extra_id_19> <doc>", add_special_tokens=False)["input_ids"]
        assert ids == [699, 680, 679]
        assert [tokenizer.id_to_token(number) for number in range(3)] == ["<pad>", "</s>", "<unk>"]
    elif name == "mbart":
        assert [tokenizer.id_to_token(600 - 26 + number) for number in range(26)] == [*MBART_CODES, "<mask>"]
    names = "</s> <pad> <mask> <extra_id_0> en_XX <0x0A>"
    assert tokenizer.encode_batch(["a", names]) == loaded(["a", names], add_special_tokens=False)["input_ids"]
    (ids,) = load_tokenizer(folder, split_special_tokens=True).encode_batch([names])
    assert not set(ids) & (tokenizer.special_ids - {tokenizer.unk_id})  # names in a text are text


def test_decoding_gives_the_text_back(trained: tuple[str, Path, SentencePieceTokenizer]) -> None:
    name, _, tokenizer = trained
    text = "the quiet harbour watched yesterday"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text
    starts = tokenizer.word_start_mask()
    assert int(starts[ids].sum()) == 5 and tokenizer.marks_blanks
    (ids,) = tokenizer.encode_batch(["🙂 ქ"])
    if name in ("bytes", "unigram_bytes"):
        assert tokenizer.unk_id not in ids and tokenizer.decode(ids) == "🙂 ქ"
    else:
        assert tokenizer.unk_id in ids


def test_saved_again_it_is_the_same(trained: tuple[str, Path, SentencePieceTokenizer], tmp_path: Path) -> None:
    _, folder, tokenizer = trained
    tokenizer.save(tmp_path / "copy")
    again = load_tokenizer(tmp_path / "copy")
    assert again.fingerprint == tokenizer.fingerprint and again.kind == "sentencepiece"
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {path.name for path in folder.iterdir()}


def test_defaults_are_recorded(tmp_path: Path) -> None:
    train_tokenizer("unigram", iter(TEXTS), 500, tmp_path / "a")
    record = json.loads((tmp_path / "a" / "ctxlm_tokenizer.json").read_text())
    assert record["normalization"] == "nmt_nfkc" and record["requested_vocab_size"] == 500
    default = train_tokenizer("sentencepiece-bpe", TEXTS, None, tmp_path / "c", extra_ids=100)
    record = json.loads((tmp_path / "c" / "ctxlm_tokenizer.json").read_text())
    assert record["requested_vocab_size"] == 32_100 and default.vocab_size < 32_100


def test_long_lines_are_learned_from(tmp_path: Path) -> None:
    """sentencepiece would leave out a line beyond its limit."""
    text = " ".join(make_documents(120, seed=9)).replace("\n", " ")
    assert len(text) > 40_000
    tokenizer = train_tokenizer("unigram", [text, "é" * 1_000_000], 300, tmp_path / "t")
    assert tokenizer.unk_id not in tokenizer.encode_batch(["the harbour é"])[0]


def test_a_vocabulary_too_small_for_the_characters_names_the_least_size(tmp_path: Path) -> None:
    settings = {"language_codes": ["en_XX", "de_DE"]}
    with pytest.raises(
        ConfigError, match="^--vocab-size 30: the characters of the text need [0-9]+ ids; raise"
    ) as found:
        train_tokenizer("unigram", TEXTS, 30, tmp_path / "t", **settings)
    least = int(str(found.value).split("need ")[1].split()[0])
    with pytest.raises(ConfigError, match=f"need {least} ids"):
        train_tokenizer("unigram", TEXTS, least - 1, tmp_path / "t", **settings)
    assert train_tokenizer("unigram", TEXTS, least, tmp_path / "t", **settings).vocab_size == least


def test_impossible_settings(tmp_path: Path) -> None:
    for settings, message in (
        ({"normalization": "nfc"}, "normalization 'nfc' is not known to unigram; choose one of nmt_nfkc"),
        ({"extra_ids": 2, "language_codes": ["en_XX"]}, "name one of the two"),
        ({"character_coverage": 0.5}, "character_coverage 0.5 must be at least 0.98"),
        ({"lowercase": True}, "lowercase is no setting of unigram, which has byte_fallback, "),
        ({"special_tokens": ["</s>"]}, "special_tokens: '</s>' cannot be one"),
    ):
        with pytest.raises(ConfigError, match=message):
            train_tokenizer("unigram", TEXTS, 500, tmp_path / "t", **settings)
    with pytest.raises(TokenizerError, match="no text"):
        train_tokenizer("unigram", ["", "\n"], 500, tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_a_model_that_is_not_the_folders_is_noticed(tmp_path: Path) -> None:
    train_tokenizer("unigram", TEXTS, 500, tmp_path / "a")
    train_tokenizer("unigram", TEXTS[:50], 400, tmp_path / "b")
    model = tmp_path / "a" / "spiece.model"
    good = model.read_bytes()
    model.write_bytes((tmp_path / "b" / "spiece.model").read_bytes())
    with pytest.raises(TokenizerError, match="spiece.model numbers|not the one that"):
        load_tokenizer(tmp_path / "a")
    model.write_bytes(good[: len(good) // 2])
    with pytest.raises(TokenizerError, match="spiece.model is damaged|spiece.model numbers|not the one that"):
        load_tokenizer(tmp_path / "a")
    model.unlink()
    with pytest.raises(TokenizerError, match="holds no spiece.model"):
        load_tokenizer(tmp_path / "a")
