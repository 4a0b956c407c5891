"""The interface of all tokenizers, and its implementation over the `tokenizers` library.

In: text. Out: ids without special tokens.
Not here: special-token templates (samples insert them), files (load.py, save.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.errors import TokenizerError

SPECIAL_ROLES = ("pad", "unk", "cls", "sep", "mask")
DECODER_ROLES = ("pad", "unk", "cls", "sep")
"""Roles of a tokenizer without a mask token (GPT); the end-of-document token by default."""
_BYTE_LEVEL_SPACES = ("Ġ", "Ċ", "č", "ĉ")
"""Byte-level BPE's characters for a leading space, newline, carriage return and tab."""


class Tokenizer(Protocol):
    """A tokenizer and its facts for samples, masking and the model."""

    kind: str
    """`wordpiece`, `byte_bpe`, `character_bpe`, `sentencepiece`, `characters` or `huggingface` (any other)."""
    pad_id: int
    unk_id: int
    cls_id: int
    """RoBERTa: `<s>`."""
    sep_id: int
    """RoBERTa: `</s>`, GPT: `<|endoftext|>`; also the end-of-document token."""
    special_ids: frozenset[int]
    """Ids that are not text."""
    split_special_tokens: bool
    """True if the name of a special token inside a text is ordinary text, False if it is that token's id."""
    double_separator: bool
    """The pair template has two separators between A and B (RoBERTa)."""

    @property
    def has_mask(self) -> bool:
        """True if there is a mask token (GPT has none)."""

    @property
    def mask_id(self) -> int:
        """Id of the mask token. Raises TokenizerError if there is none (GPT)."""

    @property
    def vocab_size(self) -> int:
        """Highest id + 1."""

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of everything that decides the ids of text without names of special tokens."""

    @property
    def sentence_prefix(self) -> str:
        """Text before a sentence that follows another one: a space for byte-level BPE, else nothing."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without a template of special tokens; as AutoTokenizer gives them."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, with special tokens by name."""

    def id_to_token(self, token_id: int) -> str:
        """Return the token of an id."""

    def save(self, directory: Path) -> None:
        """Write a folder that load_tokenizer and transformers' AutoTokenizer load with the same ids."""

    def word_start_mask(self) -> NDArray[np.bool_]:
        """Return [vocab_size]: True if a token begins a word (the first token of a sequence always does)."""


def missing_role(folder: str | Path, role: str) -> str:
    """Return the message for a tokenizer that lacks a special token."""
    return (
        f"{folder}: the tokenizer has no {role} token, which masked language models need; "
        f"name one as {role}_token in {Path(folder) / 'tokenizer_config.json'}, "
        "or train a tokenizer with tools/train_tokenizer.py"
    )


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys and without empty settings, so that new defaults of a library change nothing."""
    return json.dumps(_without_empty(value), sort_keys=True, separators=(",", ":"))


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_empty(item) for key, item in value.items() if item not in (None, False, "")}
    if isinstance(value, list):
        return [_without_empty(item) for item in value]
    return value


def special_names(backend: Any) -> re.Pattern[str]:
    """Return a pattern of the names of all special tokens; one that never matches if there are none."""
    names = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """The content of a tokenizer folder other than its tokenizer.json."""

    kind: str
    special_tokens: dict[str, str]
    """Role (pad, unk, cls, sep, mask) to token; a decoder's has no mask."""
    config: dict[str, Any] = field(default_factory=dict)
    """tokenizer_config.json as loaded or to be written."""
    training: dict[str, Any] = field(default_factory=dict)
    """ctxlm_tokenizer.json: how the vocabulary was made; empty for a tokenizer made elsewhere."""
    source: str = ""
    """Folder it was loaded from, for messages."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Further files of the folder that belong to it (spiece.model), by name."""


class FastTokenizer:
    """A Tokenizer over one `tokenizers.Tokenizer`.

    Raises TokenizerError if a role (mask, cls, …) names a token that the vocabulary lacks.
    """

    def __init__(self, backend: Any, facts: TokenizerFacts) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.split_special_tokens = bool(facts.config.get("split_special_tokens", False))
        backend.encode_special_tokens = self.split_special_tokens  # the library's name for splitting them
        self.backend = backend
        self.facts = facts
        self.kind = facts.kind
        role_ids = [self._role_id(role) for role in SPECIAL_ROLES if role in facts.special_tokens]
        self.pad_id, self.unk_id, self.cls_id, self.sep_id = role_ids[: len(DECODER_ROLES)]
        self._mask_id = role_ids[-1] if self.has_mask else None
        added = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(added.union(role_ids))
        self.double_separator = self._has_double_separator()

    @property
    def has_mask(self) -> bool:
        """True if masked language models can be trained with it."""
        return "mask" in self.facts.special_tokens

    @property
    def mask_id(self) -> int:
        if self._mask_id is None:
            raise TokenizerError(missing_role(self.facts.source or "tokenizer", "mask"))
        return self._mask_id

    def _role_id(self, role: str) -> int:
        token = self.facts.special_tokens[role]
        token_id = self.backend.token_to_id(token)
        if token_id is None:
            raise TokenizerError(
                f"{self.facts.source or 'tokenizer'}: the {role} token {token!r} is not in the vocabulary; "
                "name one that is in tokenizer_config.json"
            )
        return int(token_id)

    def _has_double_separator(self) -> bool:
        if self.backend.post_processor is None:
            return str(self.facts.config.get("tokenizer_class", "")).startswith("Roberta")
        ids = self.backend.encode("a", "a", add_special_tokens=True).ids
        return any(left == right == self.sep_id for left, right in zip(ids, ids[1:], strict=False))

    @cached_property
    def vocab_size(self) -> int:
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        content = json.loads(self.backend.to_str())
        deciding = {key: content.get(key) for key in ("normalizer", "pre_tokenizer", "model")}
        # How names of special tokens are matched in a text is left out: transformers changes it when it saves.
        deciding["added_tokens"] = [
            [token["id"], token["content"]] if token["special"] else token for token in content["added_tokens"]
        ]
        deciding["special_tokens"] = self.facts.special_tokens
        return hashlib.sha256(canonical_json(deciding).encode()).hexdigest()

    @cached_property
    def sentence_prefix(self) -> str:
        layers = json.loads(self.backend.to_str())["pre_tokenizer"] if self.kind == "byte_bpe" else None
        return " " if layers is not None and not layers.get("add_prefix_space") else ""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.backend.decode([int(token_id) for token_id in ids], skip_special_tokens=False))

    def id_to_token(self, token_id: int) -> str:
        token = self.backend.id_to_token(int(token_id))
        return f"<id {token_id}>" if token is None else str(token)

    def save(self, directory: Path) -> None:
        from ctxlm_ds.tokenizers.save import save_tokenizer

        save_tokenizer(self, directory)

    def word_start_mask(self) -> NDArray[np.bool_]:
        content = json.loads(self.backend.to_str())
        is_start = _word_start_rule(content)
        if is_start is None:
            raise TokenizerError(
                f"{self.facts.source or 'tokenizer'}: how this tokenizer marks the beginning of a word is not known; "
                "set objective.whole_word to false"
            )
        mask = np.zeros(self.vocab_size, dtype=np.bool_)
        for token, token_id in self.backend.get_vocab(with_added_tokens=True).items():
            mask[token_id] = token_id in self.special_ids or is_start(token)
        return mask


def _word_start_rule(content: dict[str, Any]) -> Any:
    """Return the predicate `token begins a word` for the content of a tokenizer.json, or None."""
    model = content["model"]
    if model["type"] == "WordPiece":
        continuing = model["continuing_subword_prefix"]
        return lambda token: not token.startswith(continuing)
    layers = json.dumps(content.get("pre_tokenizer"))
    if '"ByteLevel"' in layers:
        return lambda token: token.startswith(_BYTE_LEVEL_SPACES)
    if '"Metaspace"' in layers:
        return lambda token: token.startswith("▁")
    return None


def count_words(texts: Iterable[str], normalizer: Any, pre_tokenizer: Any) -> dict[str, int]:
    """Return occurrences by word, in code-point order. Memory grows with the number of different words.

    `pre_tokenizer` cuts the words out of the normalized text.
    """
    from tokenizers import Tokenizer, models, trainers

    counter = Tokenizer(models.BPE())
    if normalizer is not None:
        counter.normalizer = normalizer
    counter.pre_tokenizer = pre_tokenizer
    # A vocabulary of one learns nothing; the words that a trainer has counted are part of its state.
    trainer = trainers.BpeTrainer(vocab_size=1, special_tokens=["<unk>"], limit_alphabet=0, show_progress=False)
    counter.train_from_iterator(iter(texts), trainer)
    words = json.loads(trainer.__getstate__())["BpeTrainer"]["words"]
    return dict(sorted(words.items()))
