"""Tokenizers that are given as bare vocabulary files, as Megatron-LM and older releases have them.

vocab.txt (BERT's WordPiece), vocab.json with merges.txt (GPT-2's or RoBERTa's byte-level BPE; also as
gpt2-vocab.json with gpt2-merges.txt), and *.model
(sentencepiece: T5's layout, which gets 100 sentinels as in transformers, or any with <unk>, <s> and </s>).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import PARTIAL_MARK
from ctxlm_ds.errors import TokenizerError
from ctxlm_ds.tokenizers import byte_bpe, sentence_piece, wordpiece
from ctxlm_ds.tokenizers.base import MAX_ID, Tokenizer, TokenizerFacts
from ctxlm_ds.untrusted_json import read_json_object, read_text

WORDPIECE, BPE, MERGES, SENTENCEPIECE = "vocab.txt", "vocab.json", "merges.txt", "*.model"
CONFIG = "tokenizer_config.json"
WHOLE = ("tokenizer.json", "ctxlm_tokenizer.json")
"""Files of a complete tokenizer; a folder that has lost one of them is not a bare vocabulary."""


def find_vocabulary(path: Path) -> Path | None:
    """Return the vocabulary file that a path names or that its folder holds; None if the folder has more than that.

    Raises:
        TokenizerError: the folder has several of them.
    """
    if path.is_file():
        return path.with_name(path.name.removesuffix(MERGES) + BPE) if path.name.endswith(MERGES) else path
    if not path.is_dir() or PARTIAL_MARK in path.resolve().name or any((path / name).exists() for name in WHOLE):
        return None
    found = [path / name for name in (WORDPIECE, BPE) if (path / name).is_file()]
    found += sorted([*path.glob(f"*-{BPE}"), *path.glob(SENTENCEPIECE)])
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise TokenizerError(f"{path}: holds several vocabularies ({names}) and no tokenizer.json; name one of them")
    return found[0] if found else None


def merges_of(file: Path) -> Path:
    """Return the merges of a vocabulary: X-merges.txt for X-vocab.json if there is one, else merges.txt."""
    named = file.with_name(file.name.removesuffix(BPE) + MERGES)
    return named if file.name.endswith(BPE) and named.is_file() else file.with_name(MERGES)


def check_merges(file: Path, merges: Path) -> None:
    """Check that a merges file which is named separately is the one that is read with a vocabulary.

    Raises:
        TokenizerError: it is another file.
    """
    vocabulary = find_vocabulary(file)
    if vocabulary is None or vocabulary.suffix != ".json":
        raise TokenizerError(f"{merges}: {file} needs no merges; name the vocab.json that they belong to")
    if merges_of(vocabulary).resolve() != merges.resolve():
        raise TokenizerError(
            f"{merges}: the merges are read next to the vocabulary, {merges_of(vocabulary)}; put both files into one "
            f"folder as {BPE} and {MERGES}"
        )


def load_vocabulary(file: Path, split_special_tokens: bool | None = None) -> Tokenizer:
    """Return the tokenizer of a vocabulary file, which gives the ids that its original gives.

    A tokenizer_config.json next to it counts. Without one a vocab.txt without a capital letter lower-cases.
    `split_special_tokens` is that of `load_tokenizer`.

    Raises:
        TokenizerError: the file is of no known kind or damaged, or its neighbour is missing.
    """
    readers = {".txt": _wordpiece, ".json": _byte_bpe, ".model": _sentence_piece}
    if file.suffix not in readers:
        raise TokenizerError(f"{file}: no tokenizer; give a folder, a vocab.txt, vocab.json or *.model (sentencepiece)")
    config_file = file.with_name(CONFIG)
    config = read_json_object(config_file, TokenizerError) if config_file.exists() else {}
    found = readers[file.suffix](file, config)
    split = config.get("split_special_tokens", False) if split_special_tokens is None else split_special_tokens
    kept = found.facts.config | ({"split_special_tokens": True} if split else {})
    return type(found)(found.backend, replace(found.facts, config=kept, source=str(file)))


def _wordpiece(file: Path, config: dict[str, Any]) -> Tokenizer:
    from tokenizers import normalizers

    # Lines end with a newline only: a vocabulary may have tokens that are other separators of lines.
    tokens = read_text(file, TokenizerError).removesuffix("\n").split("\n")
    vocab = {token.removesuffix("\r"): number for number, token in enumerate(tokens)}
    _check_tokens(file, wordpiece.SPECIAL_TOKENS.values(), vocab)
    words = (token for token in vocab if not token.startswith("["))
    normalizer = normalizers.BertNormalizer(
        lowercase=config.get("do_lower_case", not any(word != word.lower() for word in words)),
        strip_accents=config.get("strip_accents"),
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
    )
    backend = wordpiece.build_backend(vocab, wordpiece.SPECIAL_TOKENS.values(), normalizer)
    return Tokenizer(backend, TokenizerFacts("wordpiece", dict(wordpiece.SPECIAL_TOKENS)))


def _byte_bpe(file: Path, config: dict[str, Any]) -> Tokenizer:
    merges_file = merges_of(file)
    if not merges_file.is_file():
        names = " or ".join(dict.fromkeys([file.name.removesuffix(BPE) + MERGES, MERGES]))
        raise TokenizerError(f"{file}: {names} is missing next to it; put both files into one folder")
    vocab = read_json_object(file, TokenizerError)
    lines = read_text(merges_file, TokenizerError).split("\n")
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version:")]
    merges = [(pair[0], pair[-1]) for pair in pairs]
    is_roberta = byte_bpe.MASK_TOKEN in vocab
    special = list(byte_bpe.ROLES.values()) if is_roberta else [byte_bpe.END_OF_TEXT]
    _check_tokens(file, special, vocab)
    lost = next((pair for pair in pairs if len(pair) != 2 or "".join(pair) not in vocab), None)
    if lost is not None or not all(type(number) is int and 0 <= number < MAX_ID for number in vocab.values()):
        raise TokenizerError(f"{merges_file} and {file.name} do not belong together ({lost}); restore both")
    backend = byte_bpe.build_backend(vocab, merges, special, bool(config.get("add_prefix_space", False)))
    return (byte_bpe.roberta_tokenizer if is_roberta else byte_bpe.gpt2_tokenizer)(backend, {})


def _sentence_piece(file: Path, _: dict[str, Any]) -> Tokenizer:
    return sentence_piece.read_sentencepiece(file.read_bytes(), str(file))


def _check_tokens(file: Path, tokens: Iterable[str], vocab: dict[str, Any]) -> None:
    missing = [token for token in tokens if token not in vocab]
    if missing:
        raise TokenizerError(
            f"{file}: the vocabulary lacks {', '.join(missing)}, so its original is not known; save the tokenizer with "
            "transformers (AutoTokenizer.from_pretrained(...).save_pretrained(...)) and give that folder"
        )
