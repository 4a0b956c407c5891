"""The interface of all tokenizers, over the `tokenizers` library, and of a kind of tokenizer (registry TOKENIZERS).

Folders are written by hand, not with transformers' save_pretrained, for two reasons. transformers 5 rebuilds
BertTokenizer and RobertaTokenizer from the vocabulary and tokenizer_config.json and ignores tokenizer.json's own
normalizer and pre-tokenizer, so every setting that decides ids is written in both places. And the same tokenizer gives
the same bytes under any version of transformers.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.atomic import output_folder
from ctxlm_ds.errors import TokenizerError

SPECIAL_ROLES = ("pad", "unk", "cls", "sep", "mask")
DECODER_ROLES = ("pad", "unk", "cls", "sep")
"""Roles of a tokenizer without a mask token (GPT); the end-of-document token by default."""
MAX_ID = 1 << 22
END_OF_DOCUMENT = "<eod>"
"""XLNet's token for the end of a document."""
_BYTE_LEVEL_SPACES = ("Ġ", "Ċ", "č", "ĉ")
"""Byte-level BPE's characters for a leading space, newline, carriage return and tab."""
TRAINING_FILE = "ctxlm_tokenizer.json"
GENERIC_CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}
"""The class of transformers that keeps any tokenizer.json."""
_NEVER_KEPT = ("auto_map", "name_or_path", "tokenizer_file", "special_tokens_map_file", "backend", "is_local")
_OTHER_FILES = ("vocab.txt", "vocab.json", "merges.txt", "added_tokens.json", "spiece.model", "sentencepiece.bpe.model")
_FALSE_BY_DEFAULT = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


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

    kind: ClassVar[str] = "huggingface"
    """Name that the folder records: an entry of TOKENIZERS, or this one for any other tokenizer.json."""
    names_ends: ClassVar[bool] = False
    """True if transformers' class has the tokens at both ends of a text next to a mask token."""

    def __init__(self, backend: Any, facts: TokenizerFacts) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.split_special_tokens = bool(facts.config.get("split_special_tokens", False))
        """True if the name of a special token inside a text is ordinary text, False if it is that token's id."""
        backend.encode_special_tokens = self.split_special_tokens  # the library's name for splitting them
        self.backend = self._encoder = backend
        if self.split_special_tokens:  # `backend` itself stays as its file has it
            self._encoder = split_names(type(backend).from_str(backend.to_str()))
        self.facts = facts
        self._name = facts.source or "tokenizer"
        ids: dict[str, int] = {role: backend.token_to_id(token) for role, token in facts.special_tokens.items()}
        for role, token_id in ids.items():
            if token_id is None:
                raise TokenizerError(
                    f"{self._name}: the {role} token {facts.special_tokens[role]!r} is not in the vocabulary; "
                    "name one that is in tokenizer_config.json"
                )
        self.pad_id, self.unk_id, self.cls_id, self.sep_id = (ids[role] for role in DECODER_ROLES)
        self._mask_id = ids.get("mask")
        special = (number for number, token in backend.get_added_tokens_decoder().items() if token.special)
        self.special_ids = frozenset({*special, *ids.values()})
        """Ids that are not text."""
        self.special_names = special_names(backend)

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
        """Text before a sentence that follows another one: nothing, or a space if the ids depend on it."""
        alone, spaced, both = self.encode_batch(["a", " a", "a a"])
        return " " if alone != spaced and both == alone + spaced else ""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without a template of special tokens; as AutoTokenizer gives them."""
        return [encoding.ids for encoding in self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[IdsAndOffsets]:
        """Return the ids of `encode_batch` for each text, with each token's characters in the text."""
        encodings = self._encoder.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, with special tokens by name."""
        return str(self.backend.decode([int(token_id) for token_id in ids], skip_special_tokens=False))

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token; None if the vocabulary lacks it."""
        return self.backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str:
        token = self.backend.id_to_token(int(token_id))
        return f"<id {token_id}>" if token is None else str(token)

    def shown(self, token_id: int) -> tuple[str, str]:
        """Return the space before a token in its text (or nothing), and the token's text; special tokens by name."""
        if token_id in self.special_ids:
            return " ", self.id_to_token(token_id)
        alone = self.decode([token_id])  # the first token of a text loses the space before it
        text = self.decode([token_id, token_id]).removeprefix(alone).replace("\n", "⏎")
        return (" ", text[1:]) if text.startswith(" ") else ("", text)

    def save(self, directory: Path, replace: bool = True) -> None:
        """Write a folder that load_tokenizer and transformers' AutoTokenizer load with the same ids.

        It is written atomically; an existing folder is replaced once the new one is complete. Raises FileExistsError
        if it exists and may not be replaced.
        """
        content, facts, special = self.content, self.facts, self.special_settings()
        config = {key: value for key, value in facts.config.items() if key not in _NEVER_KEPT}
        config |= self.class_settings(content, special)
        added = {str(token.pop("id")): token for token in content["added_tokens"]}
        config["added_tokens_decoder"] = added
        if self.has_mask:
            plain = {"content": special["mask_token"], **_FALSE_BY_DEFAULT, "special": True}
            mask = added.get(str(self.mask_id), plain)
            config["mask_token"] = {"__type": "AddedToken", **mask}
            special["mask_token"] = mask
        config.setdefault("model_max_length", 512)
        record = {"format": "ctxlm_ds-tokenizer", "version": 1, "kind": self.kind, **facts.training}
        record |= {"vocab_size": self.vocab_size, "fingerprint": self.fingerprint}
        with output_folder(Path(directory), replace) as folder:
            (folder / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
            self.write_vocabulary(folder, content["model"])
            for name, data in facts.files.items():
                (folder / name).write_bytes(data)
            for name, settings in (
                ("tokenizer_config.json", config), ("special_tokens_map.json", special), (TRAINING_FILE, record)
            ):  # fmt: skip
                text = json.dumps(settings, indent=2, ensure_ascii=False)
                (folder / name).write_text(text + "\n", encoding="utf-8")

    def special_settings(self) -> dict[str, Any]:
        """Return the special tokens under the names of transformers' classes."""
        special = {f"{role}_token": token for role, token in self.facts.special_tokens.items()}
        if self.has_mask:
            return special | self.end_tokens() if self.names_ends else special
        return {name: special[name] for name in ("pad_token", "unk_token")} | self.end_tokens()

    def end_tokens(self) -> dict[str, str]:
        """Return the names of the tokens at both ends of a text for transformers."""
        return {"bos_token": self.facts.special_tokens["cls"], "eos_token": self.facts.special_tokens["sep"]}

    def class_settings(self, content: dict[str, Any], special: dict[str, Any]) -> dict[str, Any]:
        """Return the class of transformers that gives the same ids, with its settings."""
        return special | GENERIC_CLASS

    def write_vocabulary(self, folder: Path, model: dict[str, Any]) -> None:
        """Write the vocabulary files that other programs read; here those of the folder that was loaded."""
        for file in (Path(self.facts.source) / name for name in _OTHER_FILES if self.facts.source):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)

    @property
    def marks_blanks(self) -> bool:
        """True if a U+2581 marks the beginning of a word (sentencepiece)."""
        return '"Metaspace"' in json.dumps(self.content.get("pre_tokenizer"))

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


@dataclass(frozen=True, slots=True)
class TokenizerType:
    """A vocabulary that `ctxlm tokenizer --type` trains."""

    train: Callable[[Iterable[str], Any], Tokenizer]
    settings: type
    """Dataclass with `vocab_size` and the other settings, all with defaults."""
    default_vocab_size: int
    least_vocab_size: int
    against_unknown: str = ""
    """Advice if many tokens are unknown."""
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Values of a setting."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Other defaults than those of the dataclass."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Settings that a user cannot give."""


@dataclass(frozen=True, slots=True)
class TokenizerKind:
    """An entry of the registry TOKENIZERS."""

    tokenizer: type[Tokenizer]
    recognizes: Callable[[dict[str, Any], dict[str, Any]], bool]
    """Whether a folder is of this kind: takes the contents of its tokenizer.json and ctxlm_tokenizer.json."""
    types: Mapping[str, TokenizerType]
    """What can be trained, by the name for --type."""
    files: tuple[str, ...] = ()
    """Files that a folder must hold next to tokenizer.json."""
    vocabulary: str = ""
    """Suffix of a bare vocabulary file that `read` takes; empty if there is none."""
    read: Callable[[Path, dict[str, Any]], Tokenizer] | None = None
    """Takes that file and the content of the tokenizer_config.json next to it."""


def special_names(backend: Any) -> re.Pattern[str]:
    """Return the pattern of the names of special tokens; one that never matches if there are none."""
    names = (token.content for token in backend.get_added_tokens_decoder().values() if token.special)
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")


def check_not_random(backend: Any, name: str | Path) -> None:
    """Raise TokenizerError for BPE dropout, with which the same text has other ids each time."""
    if dropout := getattr(backend.model, "dropout", None):
        raise TokenizerError(
            f"{name}: tokenizer.json has model.dropout {dropout:g}, so that a text gives other ids each time; set it "
            "to null, and make datasets again that were made with it"
        )


def split_names(backend: Any) -> Any:
    """Make the name of a special token inside a text ordinary text to a backend, and return the backend.

    Unigram and word models have these names as pieces, so their words are cut behind the first character of a name.
    """
    from tokenizers import Regex, models, pre_tokenizers

    backend.encode_special_tokens = True
    names = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    pattern = "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in names if name[1:])
    if pattern and isinstance(backend.model, (models.Unigram, models.WordLevel)):
        cut = pre_tokenizers.Split(Regex(pattern), "merged_with_previous")
        steps = [cut] if backend.pre_tokenizer is None else [backend.pre_tokenizer, cut]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return backend


def write_lines(file: Path, lines: Iterable[str]) -> None:
    with open(file, "w", encoding="utf-8", newline="\n") as handle:
        handle.writelines(line + "\n" for line in lines)


def check_tokens(file: Path, tokens: Iterable[str], vocab: Mapping[str, Any]) -> None:
    """Raise TokenizerError if a bare vocabulary lacks special tokens of its kind."""
    missing = [token for token in tokens if token not in vocab]
    if missing:
        raise TokenizerError(
            f"{file}: the vocabulary lacks {', '.join(missing)}, so its original is not known; save the tokenizer with "
            "transformers (AutoTokenizer.from_pretrained(...).save_pretrained(...)) and give that folder"
        )


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_empty(item) for key, item in value.items() if item not in (None, False, "")}
    return [_without_empty(item) for item in value] if isinstance(value, list) else value


def _word_start_rule(content: dict[str, Any]) -> Callable[[str], bool] | None:
    model, layers = content["model"], json.dumps([content.get("pre_tokenizer"), content.get("decoder")])
    if model["type"] == "WordPiece":
        return lambda token: not token.startswith(model["continuing_subword_prefix"])
    if '"ByteLevel"' in layers:
        return lambda token: token.startswith(_BYTE_LEVEL_SPACES)
    if json.dumps("▁") in layers:
        return lambda token: token.startswith("▁")
    return None
