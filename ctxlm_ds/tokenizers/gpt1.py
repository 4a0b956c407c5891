"""GPT-1's BPE over lower-cased characters (Radford 2018); `</w>` ends the last symbol of a word.

Normalizer and words are BERT's, as in transformers' OpenAIGPTTokenizer; the released code uses ftfy and spaCy for them.
Ids: <unk> = 0, characters, merges, further special tokens, and the line end (a newline and </w>) last. The released
vocabulary has no end-of-document token. Its line end never comes out of a text here, so it ends documents.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ctxlm_ds.tokenizers.base import DECODER_ROLES, FastTokenizer, TokenizerFacts
from ctxlm_ds.tokenizers.byte_bpe import cut_long_words

KIND = "character_bpe"
DEFAULT_VOCAB_SIZE = 40_478
UNK, WORD_END, LINE_END = "<unk>", "</w>", "\n</w>"
ROLES = dict.fromkeys(DECODER_ROLES, LINE_END) | {"unk": UNK}


@dataclass(frozen=True, slots=True)
class Gpt1Settings:
    """Settings of a GPT-1 vocabulary."""

    vocab_size: int = DEFAULT_VOCAB_SIZE
    min_frequency: int = 2
    """Least number of occurrences of a pair to be merged."""
    limit_alphabet: int = 1000
    """Largest number of different characters; rarer ones become <unk>."""
    special_tokens: tuple[str, ...] = ()


def train_gpt1(texts: Iterable[str], settings: Gpt1Settings) -> FastTokenizer:
    """Train on `texts` (iterated once); memory grows with the number of different words."""
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    last = (*settings.special_tokens, LINE_END)
    backend = Backend(models.BPE(unk_token=UNK, end_of_word_suffix=WORD_END))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder(suffix=WORD_END)
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size - len(last),
        min_frequency=settings.min_frequency,
        special_tokens=[UNK],
        limit_alphabet=settings.limit_alphabet,
        end_of_word_suffix=WORD_END,
        show_progress=False,
    )
    backend.train_from_iterator(cut_long_words(texts), trainer)
    model = json.loads(backend.to_str())["model"]
    vocab = model["vocab"] | {token: len(model["vocab"]) + number for number, token in enumerate(last)}
    merges = [(left, right) for left, right in model["merges"]]
    backend.model = models.BPE(vocab=vocab, merges=merges, unk_token=UNK, end_of_word_suffix=WORD_END)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in (UNK, *last)])
    training: dict[str, Any] = {"merge_score": "frequency", **asdict(settings)}
    training["requested_vocab_size"] = training.pop("vocab_size")
    return FastTokenizer(backend, TokenizerFacts(KIND, dict(ROLES), training=training))
