"""GPT-1's BPE over lower-cased characters (Radford 2018); `</w>` ends the last symbol of a word.

Normalizer and words are BERT's, as in transformers' OpenAIGPTTokenizer. For texts that the cleaning rules `fix_text`,
`gpt_standard` and `gpt_words` made, as the released code does with ftfy and spaCy, words are line ends and runs without
white space.
Ids: <unk> = 0, characters, merges, further special tokens, and the line end (a newline and </w>) last. The released
vocabulary has no end-of-document token. Its line end, which is no word of BERT's, ends documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ctxlm_ds.tokenizers.base import (
    DECODER_ROLES,
    GENERIC_CLASS,
    Tokenizer,
    TokenizerFacts,
    TokenizerKind,
    TokenizerType,
)
from ctxlm_ds.tokenizers.kinds.byte_bpe import write_merges
from ctxlm_ds.tokenizers.training_words import (
    ALPHABET_ADVICE,
    count_words,
    cut_long_words,
    frequent_characters,
    learn_from_counts,
    settings_record,
)

UNK, WORD_END, LINE_END = "<unk>", "</w>", "\n</w>"
_PIPELINES = (("BPE", "BertNormalizer", "BertPreTokenizer"), ("BPE", "Lowercase", "Split"))
"""Types of model, normalizer and pre-tokenizer: with BERT's words, and with those of `gpt_words`."""
ROLES = dict.fromkeys(DECODER_ROLES, LINE_END) | {"unk": UNK}


class Gpt1Tokenizer(Tokenizer):
    """GPT-1's tokenizer; transformers has it as OpenAIGPTTokenizer, with BERT's words."""

    kind = "character_bpe"

    def class_settings(self, content: dict[str, Any], special: dict[str, Any]) -> dict[str, Any]:
        takes_text = content["pre_tokenizer"]["type"] == "BertPreTokenizer"
        return {"tokenizer_class": "OpenAIGPTTokenizer", **special} if takes_text else special | GENERIC_CLASS

    def write_vocabulary(self, folder: Path, model: dict[str, Any]) -> None:
        write_merges(folder, model)


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


def train(texts: Iterable[str], settings: Gpt1Settings, words: Callable[[], tuple[Any, Any]]) -> Tokenizer:
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
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.BPEDecoder(suffix=WORD_END)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in (UNK, *last)])
    return Gpt1Tokenizer(backend, TokenizerFacts(dict(ROLES), training=settings_record(settings, "frequency")))


def _recognizes(content: dict[str, Any], training: dict[str, Any]) -> bool:
    model, normalizer, layers = (content.get(layer) or {} for layer in ("model", "normalizer", "pre_tokenizer"))
    is_gpt1 = (model["type"], normalizer.get("type"), layers.get("type")) in _PIPELINES
    return is_gpt1 and normalizer.get("lowercase", True) and model.get("end_of_word_suffix") == WORD_END


GPT1 = TokenizerKind(
    Gpt1Tokenizer, _recognizes,
    types={
        "gpt1": TokenizerType(partial(train, words=_bert_words), Gpt1Settings, 40_478, 2 + 2, ALPHABET_ADVICE),
        "gpt1-words": TokenizerType(partial(train, words=_given_words), Gpt1Settings, 40_478, 2 + 2, ALPHABET_ADVICE),
    },
)  # fmt: skip
