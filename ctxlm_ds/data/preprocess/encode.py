"""The work of a preprocessing worker: parse a chunk of records, split it into sentences, tokenize them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.dataset.reader import token_dtype
from ctxlm_ds.data.preprocess.config import PreprocessConfig
from ctxlm_ds.data.preprocess.sentences import split_sentences
from ctxlm_ds.data.sources.parsing import parse_chunk
from ctxlm_ds.data.sources.types import BadRecord, Chunk, Position
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.word_cache import flat_encoder

EncodedDocuments = tuple[NDArray[np.int32] | NDArray[np.uint16], NDArray[np.int64], NDArray[np.int64]]
"""[tokens] flat, [sequences] tokens of each, [documents] sequences of each."""


@dataclass(slots=True)
class EncodedChunk:
    """The result of a worker."""

    position: Position
    bytes_read: int
    keys: list[EncodedDocuments] = field(default_factory=list)
    records: int = 0
    characters: int = 0
    empty_documents: int = 0
    bad_records: list[BadRecord] = field(default_factory=list)


class ChunkEncoder:
    """Encoder of one chunk at a time; a worker process makes one."""

    def __init__(self, tokenizer_path: Path, config: PreprocessConfig) -> None:
        tokenizer = load_tokenizer(tokenizer_path, config.split_special_tokens or None)
        self.config = config
        self._encode_flat = flat_encoder(tokenizer)
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._end_id = tokenizer.sep_id if config.append_eod else None
        self._sentence_prefix = encoded_prefix(config, tokenizer)

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        """Return the documents of a chunk as tokens."""
        documents: list[dict[str, str]] = []
        result = EncodedChunk(chunk.position, chunk.bytes_read)
        for document in parse_chunk(chunk, self.config.json_keys):
            if isinstance(document, BadRecord):
                result.bad_records.append(document)
            else:
                documents.append(document)
                result.characters += sum(map(len, document.values()))
        result.records = len(documents) + len(result.bad_records)
        encoded = [self._encode([document[key] for document in documents]) for key in self.config.json_keys]
        # A document is left out if it is empty under every key. Otherwise the datasets of all keys keep it, since
        # Megatron pairs titles and texts by number.
        kept = np.any([sizes > 0 for _, _, sizes in encoded], axis=0)
        result.keys = [(tokens, lengths, sizes[kept]) for tokens, lengths, sizes in encoded]
        result.empty_documents = int(kept.size - np.count_nonzero(kept))
        return result

    def _encode(self, texts: Sequence[str]) -> EncodedDocuments:
        """Encode all texts; one without any token has no sequences."""
        split = [self._split(text) for text in texts]
        tokens, lengths = self._encode_flat([sequence for sequences in split for sequence in sequences])
        filled = lengths > 0
        owners = np.repeat(np.arange(len(texts)), list(map(len, split)))[filled]
        lengths, sizes = lengths[filled], np.bincount(owners, minlength=len(texts))
        if self._end_id is not None and lengths.size:
            last = np.cumsum(sizes)[sizes > 0] - 1
            tokens = np.insert(tokens, np.cumsum(lengths)[last], self._end_id)
            lengths[last] += 1
        return tokens.astype(self._dtype), lengths, sizes

    def _split(self, text: str) -> list[str]:
        if not text or text.isspace():
            return []
        if not self.config.split_sentences:
            return [text]
        sentences = split_sentences(text, self.config.keep_newlines)
        return sentences[:1] + [self._sentence_prefix + sentence for sentence in sentences[1:]]


def encoded_prefix(config: PreprocessConfig, tokenizer: Tokenizer) -> str:
    """Return the text that is encoded before a sentence that follows another one.

    Byte-level BPE writes the space before a word into its token. Rows that join sentences need it; without
    `leading_space` each sentence is encoded by itself, as fairseq encodes lines.
    """
    return tokenizer.sentence_prefix if config.leading_space or not config.split_sentences else ""
