"""BPE: over bytes (Radford 2019) with RoBERTa's or GPT-2's special tokens, and GPT-1's over characters (Radford 2018).

RoBERTa: <s> <pad> </s> <unk> as ids 0 to 3 and <mask> the last id. GPT-2: <|endoftext|> alone, the last id.

GPT-1: lower-cased characters; `</w>` ends the last symbol of a word. Normalizer and words are BERT's, as in
transformers' OpenAIGPTTokenizer. For texts that the cleaning rules `fix_text`, `gpt_standard` and `gpt_words` made, as
the released code does with ftfy and spaCy, words are line ends and runs without white space. Ids: <unk> = 0,
characters, merges, further special tokens, and the line end (a newline and </w>) last. The released vocabulary has no
end-of-document token. Its line end, which is no word of BERT's, ends documents.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ctxlm_ds.errors import TokenizerError
from ctxlm_ds.tokenizers.base import (
    DECODER_ROLES,
    GENERIC_CLASS,
    MAX_ID,
    Tokenizer,
    TokenizerFacts,
    TokenizerKind,
    TokenizerType,
    check_tokens,
    write_lines,
)
from ctxlm_ds.tokenizers.training_words import (
    ALPHABET_ADVICE,
    count_words,
    cut_long_words,
    frequent_characters,
    learn,
    learn_from_counts,
    settings_record,
)
from ctxlm_ds.untrusted_json import read_json_object, read_text

FIRST_SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
MASK_TOKEN = "<mask>"
ROLES = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": MASK_TOKEN}
END_OF_TEXT = "<|endoftext|>"
NORMALIZATIONS = ("none", "nfc", "nfd", "nfkc", "nfkd")


class BpeTokenizer(Tokenizer):
    """A tokenizer whose vocabulary other programs read as vocab.json and merges.txt."""

    def write_vocabulary(self, folder: Path, model: dict[str, Any]) -> None:
        vocab = {token: model["vocab"][token] for token in sorted(model["vocab"], key=model["vocab"].get)}
        (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
        merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"])
        write_lines(folder / "merges.txt", ["#version: 0.2", *merges])


class ByteBpeTokenizer(BpeTokenizer):
    """RoBERTa's tokenizer if it has a mask token, else GPT-2's; transformers has classes of these names."""

    kind = "byte_bpe"
    names_ends = True

    def class_settings(self, content: dict[str, Any], special: dict[str, Any]) -> dict[str, Any]:
        template = content.get("post_processor") or {}
        is_roberta = template.get("type", "RobertaProcessing") == "RobertaProcessing" and self.double_separator
        settings = {**GENERIC_CLASS, "add_prefix_space": content["pre_tokenizer"]["add_prefix_space"]}
        if self.has_mask:
            settings["trim_offsets"] = template.get("trim_offsets", True)
        if not content["normalizer"] and (is_roberta or not self.has_mask):
            settings["tokenizer_class"] = "RobertaTokenizer" if self.has_mask else "GPT2Tokenizer"
        return {**settings, "errors": "replace", **special}


@dataclass(frozen=True, slots=True)
class ByteBpeSettings:
    """Settings of a byte-level BPE vocabulary."""

    vocab_size: int
    add_prefix_space: bool = False
    """Put a space before each text, so that its first word is like any other (RoBERTa: no)."""
    min_frequency: int = 2
    """Least number of occurrences of a pair to be merged."""
    normalization: str = "none"
    """`none`, or a Unicode form: `nfc`, `nfd`, `nfkc`, `nfkd`."""
    special_tokens: tuple[str, ...] = ()
    """Further special tokens. RoBERTa: after <unk>; GPT-2: before <|endoftext|>."""


def train(texts: Iterable[str], settings: ByteBpeSettings, is_roberta: bool) -> Tokenizer:
    """Train on `texts` (iterated once): RoBERTa's vocabulary, or GPT-2's of 256 bytes, the merges and <|endoftext|>."""
    from tokenizers import normalizers, pre_tokenizers, trainers

    first = (*FIRST_SPECIAL_TOKENS, *settings.special_tokens) if is_roberta else ()
    last = (MASK_TOKEN,) if is_roberta else (*settings.special_tokens, END_OF_TEXT)
    normalizer = None
    if settings.normalization != "none":
        normalizer = getattr(normalizers, settings.normalization.upper())()
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=settings.add_prefix_space)
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size - len(last),
        min_frequency=settings.min_frequency,
        special_tokens=list(first),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    vocab, merges = learn(cut_long_words(texts), trainer, pre_tokenizer, normalizer)
    vocab |= {token: len(vocab) + number for number, token in enumerate(last)}
    backend = build_backend(vocab, merges, (*first, *last), settings.add_prefix_space, normalizer)
    return with_template(backend, is_roberta, settings_record(settings, "frequency"))


def with_template(backend: Any, is_roberta: bool, training: dict[str, Any]) -> Tokenizer:
    """Return a tokenizer with RoBERTa's roles and template, or whose only role is GPT-2's end of a document."""
    from tokenizers import processors

    roles = ROLES if is_roberta else dict.fromkeys(DECODER_ROLES, END_OF_TEXT)
    tokenizer = ByteBpeTokenizer(backend, TokenizerFacts(dict(roles), training=training))
    if is_roberta:
        backend.post_processor = processors.RobertaProcessing(
            ("</s>", tokenizer.sep_id), ("<s>", tokenizer.cls_id), trim_offsets=True,
            add_prefix_space=backend.pre_tokenizer.add_prefix_space,
        )  # fmt: skip
    else:
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def build_backend(
    vocab: dict[str, int], merges: list[tuple[str, str]], special_tokens: Iterable[str], add_prefix_space: bool,
    normalizer: Any = None,
) -> Any:  # fmt: skip
    """Return the `tokenizers.Tokenizer` without a template; the vocabulary has the special tokens."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    # As in the released model, <mask> includes the space before it: "a <mask>" is "a", "<mask>".
    backend.add_special_tokens([
        AddedToken(token, lstrip=token == MASK_TOKEN, normalized=token != MASK_TOKEN, special=True)
        for token in special_tokens
    ])  # fmt: skip
    return backend


def _recognizes(content: dict[str, Any], training: dict[str, Any]) -> bool:
    normalizer, layers = (content.get("normalizer") or {}).get("type"), content.get("pre_tokenizer") or {}
    is_byte_level = content["model"]["type"] == "BPE" and layers.get("type") == "ByteLevel"
    return is_byte_level and normalizer in (None, "NFC", "NFD", "NFKC", "NFKD") and layers.get("use_regex", True)


def merges_of(file: Path) -> Path:
    """Return the merges of a vocabulary: X-merges.txt for X-vocab.json if there is one, else merges.txt."""
    named = file.with_name(file.name.removesuffix("vocab.json") + "merges.txt")
    return named if file.name.endswith("vocab.json") and named.is_file() else file.with_name("merges.txt")


def _read(file: Path, config: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of a vocab.json and its merges: RoBERTa's if it has a mask token, else GPT-2's."""
    merges_file = merges_of(file)
    if not merges_file.is_file():
        names = " or ".join(dict.fromkeys([file.name.removesuffix("vocab.json") + "merges.txt", "merges.txt"]))
        raise TokenizerError(f"{file}: {names} is missing next to it; put both files into one folder")
    vocab = read_json_object(file, TokenizerError)
    lines = read_text(merges_file, TokenizerError).split("\n")
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version:")]
    is_roberta = MASK_TOKEN in vocab
    special = list(ROLES.values()) if is_roberta else [END_OF_TEXT]
    check_tokens(file, special, vocab)
    lost = next((pair for pair in pairs if len(pair) != 2 or "".join(pair) not in vocab), None)
    if lost is not None or not all(type(number) is int and 0 <= number < MAX_ID for number in vocab.values()):
        raise TokenizerError(f"{merges_file} and {file.name} do not belong together ({lost}); restore both")
    merges = [(left, right) for left, right in pairs]
    backend = build_backend(vocab, merges, special, bool(config.get("add_prefix_space", False)))
    return with_template(backend, is_roberta, {})


_CHOICES = {"normalization": NORMALIZATIONS}
BYTE_BPE = TokenizerKind(
    ByteBpeTokenizer, _recognizes, vocabulary=".json", read=_read,
    types={
        "bpe": TokenizerType(partial(train, is_roberta=True), ByteBpeSettings, 50_265, 5 + 256, choices=_CHOICES),
        "gpt2": TokenizerType(partial(train, is_roberta=False), ByteBpeSettings, 50_257, 1 + 256, choices=_CHOICES),
    },
)  # fmt: skip

UNK, WORD_END, LINE_END = "<unk>", "</w>", "\n</w>"
_PIPELINES = (("BPE", "BertNormalizer", "BertPreTokenizer"), ("BPE", "Lowercase", "Split"))
"""Types of model, normalizer and pre-tokenizer: with BERT's words, and with those of `gpt_words`."""
_GPT1_ROLES = dict.fromkeys(DECODER_ROLES, LINE_END) | {"unk": UNK}


class Gpt1Tokenizer(BpeTokenizer):
    """GPT-1's tokenizer; transformers has it as OpenAIGPTTokenizer, with BERT's words."""

    kind = "character_bpe"

    def class_settings(self, content: dict[str, Any], special: dict[str, Any]) -> dict[str, Any]:
        takes_text = content["pre_tokenizer"]["type"] == "BertPreTokenizer"
        return {"tokenizer_class": "OpenAIGPTTokenizer", **special} if takes_text else special | GENERIC_CLASS


@dataclass(frozen=True, slots=True)
class Gpt1Settings:
    """Settings of a GPT-1 vocabulary."""

    vocab_size: int
    min_frequency: int = 2
    """Least number of occurrences of a pair to be merged."""
    limit_alphabet: int = 1000
    """Largest number of different characters; rarer ones become <unk>."""
    special_tokens: tuple[str, ...] = ()


def read_words(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer with the same vocabulary for texts of the cleaning rule `gpt_words`."""
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.normalizer, backend.pre_tokenizer = _given_words()
    return Gpt1Tokenizer(backend, tokenizer.facts)


def _bert_words() -> tuple[Any, Any]:
    from tokenizers import normalizers, pre_tokenizers

    return normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()


def _given_words() -> tuple[Any, Any]:
    """Return a normalizer, and a pre-tokenizer whose words are line ends and runs without white space."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    return normalizers.Lowercase(), pre_tokenizers.Split(Regex(r"\n|\S+"), behavior="removed", invert=True)


def train_gpt1(texts: Iterable[str], settings: Gpt1Settings, words: Callable[[], tuple[Any, Any]]) -> Tokenizer:
    """Train on `texts` (iterated once); memory grows with the number of different words."""
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Backend

    normalizer, pre_tokenizer = words()
    counts = count_words(cut_long_words(texts), pre_tokenizer, normalizer)
    counts.pop(LINE_END.removesuffix(WORD_END), None)
    last = (*settings.special_tokens, LINE_END)
    # Each character may have two ids; a tiny vocabulary shrinks the alphabet.
    room = max(1, (settings.vocab_size - 1 - len(last)) // 2)
    alphabet = frequent_characters(counts, min(settings.limit_alphabet, room))
    ends = sorted({word[-1] for word in counts}.intersection(alphabet))
    vocab, merges = learn_from_counts(
        counts, [UNK, *alphabet, *(character + WORD_END for character in ends)], alphabet,
        vocab_size=settings.vocab_size - len(last), min_frequency=settings.min_frequency, end_of_word_suffix=WORD_END,
    )  # fmt: skip
    vocab |= {token: len(vocab) + number for number, token in enumerate(last)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token=UNK, end_of_word_suffix=WORD_END))
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
    backend.decoder = decoders.BPEDecoder(suffix=WORD_END)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in (UNK, *last)])
    return Gpt1Tokenizer(backend, TokenizerFacts(dict(_GPT1_ROLES), training=settings_record(settings, "frequency")))


def _recognizes_gpt1(content: dict[str, Any], training: dict[str, Any]) -> bool:
    model, normalizer, layers = (content.get(layer) or {} for layer in ("model", "normalizer", "pre_tokenizer"))
    is_gpt1 = (model["type"], normalizer.get("type"), layers.get("type")) in _PIPELINES
    return is_gpt1 and normalizer.get("lowercase", True) and model.get("end_of_word_suffix") == WORD_END


GPT1 = TokenizerKind(
    Gpt1Tokenizer, _recognizes_gpt1,
    types={
        name: TokenizerType(partial(train_gpt1, words=words), Gpt1Settings, 40_478, 2 + 2, ALPHABET_ADVICE)
        for name, words in (("gpt1", _bert_words), ("gpt1-words", _given_words))
    },
)  # fmt: skip
