"""Settings of sentencepiece vocabularies, and the table of their layouts: the tokens around pieces and texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ctxlm_ds.tokenizers.base import GENERIC_CLASS

WHITESPACE = "whitespace"
"""Only replaces every white space of Unicode by a space, as MBartTokenizer of transformers does."""
NORMALIZATIONS = ("nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf", "identity", WHITESPACE)
MBART_CODES = (
    "ar_AR", "cs_CZ", "de_DE", "en_XX", "es_XX", "et_EE", "fi_FI", "fr_XX", "gu_IN", "hi_IN", "it_IT", "ja_XX",
    "kk_KZ", "ko_KR", "lt_LT", "lv_LV", "my_MM", "ne_NP", "nl_XX", "ro_RO", "ru_RU", "si_LK", "tr_TR", "vi_VN",
    "zh_CN",
)  # fmt: skip
"""Codes of mbart-large-cc25, in the order of their ids."""


@dataclass(frozen=True, slots=True)
class SentencePieceSettings:
    """Settings of a sentencepiece vocabulary."""

    vocab_size: int
    """Every id: pieces, special tokens, sentinels, language codes, mask."""
    model_type: str = "unigram"
    """`unigram` or `bpe`."""
    extra_ids: int = 0
    """Number of sentinels <extra_id_i>; above 0 the layout is T5's."""
    language_codes: tuple[str, ...] = ()
    special_tokens: tuple[str, ...] = ()
    normalization: str = "nmt_nfkc"
    character_coverage: float = 0.9995
    """Share of the text's characters that get a piece; the rest becomes <unk> or bytes."""
    byte_fallback: bool = False
    """256 byte pieces spell what is outside the vocabulary."""


def _is_mbart_cc25(settings: SentencePieceSettings) -> bool:
    """Return whether MBartTokenizer has exactly these codes, and normalizes nothing else."""
    is_plain = settings.normalization == WHITESPACE and not settings.special_tokens
    return settings.language_codes == MBART_CODES and is_plain


@dataclass(frozen=True, slots=True)
class Layout:
    """The tokens around the pieces of a vocabulary, and around a text."""

    first_ids: dict[str, Any]
    """Settings of the sentencepiece trainer for the tokens before the pieces."""
    roles: dict[str, str]
    single: str
    """Template of one text; `{code}` is the first language code."""
    pair: str
    last: tuple[str, ...] = ()
    """Tokens after the pieces, special tokens, language codes and sentinels."""
    transformers_class: str = GENERIC_CLASS["tokenizer_class"]
    """Class of transformers 5 that rebuilds a unigram model of this layout with the same ids."""
    suits_class: Callable[[SentencePieceSettings], bool] = lambda settings: settings.normalization.startswith("nmt_")
    """Whether that class has the settings' normalization and tokens; the generic class suits any."""


_XLNET_PIECES = [".", "(", ")", '"', "-", "–", "£", "€"]
"""Pieces of one character that join no other; the comma of the original's list separates its names."""
_XLMR_IDS: dict[str, Any] = {"bos_id": 0, "pad_id": 1, "eos_id": 2, "unk_id": 3}
_XLMR_ROLES = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
LAYOUTS = {
    "albert": Layout(
        {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "control_symbols": ["[CLS]", "[SEP]", "[MASK]"]},
        {"pad": "<pad>", "unk": "<unk>", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1",
    ),
    "xlnet": Layout(
        {
            "unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1,
            "control_symbols": ["<cls>", "<sep>", "<pad>", "<mask>", "<eod>"],
            "user_defined_symbols": ["<eop>", *_XLNET_PIECES],
        },
        {"pad": "<pad>", "unk": "<unk>", "cls": "<cls>", "sep": "<sep>", "mask": "<mask>"},
        "$A <sep> <cls>:2", "$A <sep> $B:1 <sep>:1 <cls>:2",
    ),
    "t5": Layout(
        {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
        {"pad": "<pad>", "unk": "<unk>", "cls": "</s>", "sep": "</s>"},
        "$A </s>", "$A </s> $B </s>", transformers_class="T5Tokenizer",
    ),
    "xlmr": Layout(
        _XLMR_IDS, _XLMR_ROLES, "<s> $A </s>", "<s> $A </s> </s> $B </s>", ("<mask>",), "XLMRobertaTokenizer",
    ),
    "mbart": Layout(
        _XLMR_IDS, _XLMR_ROLES, "$A </s> {code}", "$A $B </s> {code}", ("<mask>",), "MBartTokenizer", _is_mbart_cc25,
    ),
    "plain": Layout({}, {"pad": "</s>", "unk": "<unk>", "cls": "<s>", "sep": "</s>"}, "$A", "$A $B"),
}  # fmt: skip
"""Ids of each layout: the tokens of `first_ids`, pieces, special tokens, language codes, sentinels, `last`."""


def appended_tokens(settings: SentencePieceSettings, layout: Layout) -> list[str]:
    """Return the tokens after the pieces, in the order of their ids."""
    sentinels = (f"<extra_id_{number}>" for number in reversed(range(settings.extra_ids)))
    return [*settings.special_tokens, *settings.language_codes, *sentinels, *layout.last]
