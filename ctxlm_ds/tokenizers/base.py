"""The interface of all tokenizers, over the `tokenizers` library.

In: text. Out: ids without special tokens.
Not here: special-token templates (samples insert them), files (load.py, save.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.errors import TokenizerError

SPECIAL_ROLES = ("pad", "unk", "cls", "sep", "mask")
DECODER_ROLES = ("pad", "unk", "cls", "sep")
"""Roles of a tokenizer without a mask token (GPT); the end-of-document token by default."""
MAX_ID = 1 << 22
END_OF_DOCUMENT = "<eod>"
"""XLNet's token for the end of a document."""
_BYTE_LEVEL_SPACES = ("Ġ", "Ċ", "č", "ĉ")
"""Byte-level BPE's characters for a leading space, newline, carriage return and tab."""


def missing_role(folder: str | Path, role: str) -> str:
    """Return the message for a tokenizer that lacks a special token."""
    return (
        f"{folder}: the tokenizer has no {role} token, which masked language models need; "
        f"name one as {role}_token in {Path(folder) / 'tokenizer_config.json'}, "
        "or train a tokenizer with ctxlm tokenizer"
    )


IdsAndOffsets = tuple[list[int], list[tuple[int, int]]]
"""Ids of a text, and of each the first character and the one after its last."""


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """The content of a tokenizer folder other than its tokenizer.json."""

    kind: str
    """`wordpiece`, `byte_bpe`, `character_bpe`, `sentencepiece`, `characters` or `huggingface` (any other)."""
    special_tokens: dict[str, str]
    """Role (pad, unk, cls, sep, mask) to token; a decoder's has no mask."""
    config: dict[str, Any] = field(default_factory=dict)
    """tokenizer_config.json as loaded or to be written."""
    training: dict[str, Any] = field(default_factory=dict)
    """ctxlm_tokenizer.json: how the vocabulary was made; empty for a tokenizer made elsewhere."""
    source: str = ""
    """Folder it was loaded from, for messages."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Further files of the folder that belong to it, by name."""


class Tokenizer:
    """A tokenizer and its facts for samples, masking and the model.

    `cls_id` is `<s>` and `sep_id` is `</s>` for RoBERTa. `sep_id` is also the end-of-document token (GPT:
    `<|endoftext|>`).

    Raises TokenizerError if a role (mask, cls, …) names a token that the vocabulary lacks.
    """

    def __init__(self, backend: Any, facts: TokenizerFacts) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.split_special_tokens = bool(facts.config.get("split_special_tokens", False))
        """True if the name of a special token inside a text is ordinary text, False if it is that token's id."""
        backend.encode_special_tokens = self.split_special_tokens  # the library's name for splitting them
        self.backend = backend
        self.facts = facts
        self._name = facts.source or "tokenizer"
        self.kind = facts.kind
        ids: dict[str, int] = {role: backend.token_to_id(token) for role, token in facts.special_tokens.items()}
        for role, token_id in ids.items():
            if token_id is None:
                raise TokenizerError(
                    f"{self._name}: the {role} token {facts.special_tokens[role]!r} is not in the vocabulary; "
                    "name one that is in tokenizer_config.json"
                )
        self.pad_id, self.unk_id, self.cls_id, self.sep_id = (ids[role] for role in DECODER_ROLES)
        self._mask_id = ids.get("mask")
        special = {token_id: token for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset({*special, *ids.values()})
        """Ids that are not text."""
        self.special_names = re.compile("|".join(re.escape(token.content) for token in special.values()) or r"(?!)")
        """Pattern of the names of special tokens; one that never matches if there are none."""

    @property
    def has_mask(self) -> bool:
        """True if there is a mask token (GPT has none)."""
        return self._mask_id is not None

    @property
    def mask_id(self) -> int:
        """Id of the mask token. Raises TokenizerError if there is none (GPT)."""
        if self._mask_id is None:
            raise TokenizerError(missing_role(self._name, "mask"))
        return self._mask_id

    @property
    def eod_id(self) -> int:
        """Id that ends a document (ctxlm preprocess --append-eod): `<eod>` if it is special, or sep_id."""
        token_id = self.backend.token_to_id(END_OF_DOCUMENT)
        return token_id if token_id in self.special_ids else self.sep_id

    @cached_property
    def double_separator(self) -> bool:
        """True if the pair template has two separators between A and B (RoBERTa)."""
        if self.backend.post_processor is None:
            return str(self.facts.config.get("tokenizer_class", "")).startswith("Roberta")
        ids = self.backend.encode("a", "a", add_special_tokens=True).ids
        return any(left == right == self.sep_id for left, right in zip(ids, ids[1:], strict=False))

    @cached_property
    def vocab_size(self) -> int:
        """Highest id + 1."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def output_size(self) -> int:
        """Ids that a model predicts; those behind them are only in its input, and their label is `unk_id`."""
        return self.vocab_size

    @property
    def content(self) -> dict[str, Any]:
        """Content of tokenizer.json."""
        return json.loads(self.backend.to_str())

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of everything that decides the ids of text without names of special tokens."""
        content = self.content
        deciding = {key: content.get(key) for key in ("normalizer", "pre_tokenizer", "model")}
        # How names of special tokens are matched in a text is left out: transformers changes it when it saves.
        deciding["added_tokens"] = [
            [token["id"], token["content"]] if token["special"] else token for token in content["added_tokens"]
        ]
        deciding["special_tokens"] = self.facts.special_tokens
        # Without empty settings, so that new defaults of a library change nothing.
        canonical = json.dumps(_without_empty(deciding), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @cached_property
    def sentence_prefix(self) -> str:
        """Text before a sentence that follows another one: a space for byte-level BPE, else nothing."""
        return " " if self.kind == "byte_bpe" and not self.content["pre_tokenizer"].get("add_prefix_space") else ""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without a template of special tokens; as AutoTokenizer gives them."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[IdsAndOffsets]:
        """Return the ids of `encode_batch` for each text, with each token's characters in the text."""
        encodings = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, with special tokens by name."""
        return str(self.backend.decode([int(token_id) for token_id in ids], skip_special_tokens=False))

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token; None if the vocabulary lacks it."""
        token_id: int | None = self.backend.token_to_id(token)
        return token_id

    def id_to_token(self, token_id: int) -> str:
        """Return the token of an id."""
        token = self.backend.id_to_token(int(token_id))
        return f"<id {token_id}>" if token is None else str(token)

    def save(self, directory: Path) -> None:
        """Write a folder that load_tokenizer and transformers' AutoTokenizer load with the same ids."""
        from ctxlm_ds.tokenizers.save import save_tokenizer

        save_tokenizer(self, directory)

    def word_start_mask(self) -> NDArray[np.bool_]:
        """Return [vocab_size]: True if a token begins a word (the first token of a sequence always does)."""
        begins_word = _word_start_rule(self.content)
        if begins_word is None:
            raise TokenizerError(
                f"{self._name}: how this tokenizer marks the beginning of a word is not known; "
                "set objective.whole_word to false"
            )
        mask = np.zeros(self.vocab_size, dtype=np.bool_)
        for token, token_id in self.backend.get_vocab(with_added_tokens=True).items():
            mask[token_id] = token_id in self.special_ids or begins_word(token)
        return mask


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_empty(item) for key, item in value.items() if item not in (None, False, "")}
    return [_without_empty(item) for item in value] if isinstance(value, list) else value


def _word_start_rule(content: dict[str, Any]) -> Callable[[str], bool] | None:
    model, pre_tokenizer = content["model"], json.dumps(content.get("pre_tokenizer"))
    if model["type"] == "WordPiece":
        return lambda token: not token.startswith(model["continuing_subword_prefix"])
    if '"ByteLevel"' in pre_tokenizer:
        return lambda token: token.startswith(_BYTE_LEVEL_SPACES)
    if '"Metaspace"' in pre_tokenizer:
        return lambda token: token.startswith("▁")
    return None
