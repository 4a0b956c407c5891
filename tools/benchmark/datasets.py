"""Preprocessing against the tokenizer alone, and merging against a flushed copy of the files."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ctxlm_ds.atomic import fsync_path
from ctxlm_ds.data.dataset.merge import merge_datasets
from ctxlm_ds.data.dataset.reader import dataset_file
from ctxlm_ds.data.preprocess.job import PreprocessConfig, preprocess
from ctxlm_ds.data.sources.parsing import parse_chunk
from ctxlm_ds.data.sources.reading import find_sources, read_chunks, total_bytes
from ctxlm_ds.data.sources.types import BadRecord
from tools.benchmark.timing import compare

TEXTS_PER_CALL = 1000


def compare_preprocess(
    inputs: Sequence[str], tokenizer_path: str, split_sentences: bool, workers: int | None, rounds: int
) -> list[str]:
    """Compare bytes of input per second of preprocessing and of `encode_batch_fast`.

    The library only encodes: it gets the texts of the key "text" in memory, with as many threads as we have workers.
    Call this before anything starts the library's threads.
    """
    workers = workers or len(os.sched_getaffinity(0))
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if workers > 1 else "false"
    from tokenizers import Tokenizer as Backend

    sources = find_sources(inputs)
    num_bytes = total_bytes(sources)
    chunks = read_chunks(sources)
    documents = (document for chunk in chunks for document in parse_chunk(chunk, ("text",)))
    texts = [document["text"] for document in documents if not isinstance(document, BadRecord)]
    backend = Backend.from_file(str(Path(tokenizer_path) / "tokenizer.json"))
    config = PreprocessConfig(split_sentences=split_sentences, workers=workers)
    logging.getLogger("ctxlm_ds").setLevel(logging.WARNING)

    def ours() -> int:
        with tempfile.TemporaryDirectory() as folder:
            preprocess(inputs, tokenizer_path, Path(folder) / "data", config)
        return num_bytes

    def theirs() -> int:
        for first in range(0, len(texts), TEXTS_PER_CALL):
            backend.encode_batch_fast(texts[first : first + TEXTS_PER_CALL], add_special_tokens=False)
        return num_bytes

    return compare(ours, theirs, rounds, "bytes/s", "encode_batch_fast")


def compare_merge(prefixes: Sequence[str], output_dir: str, rounds: int) -> list[str]:
    """Compare bytes of .bin and .idx per second of merging and of copying, on the disk of `output_dir`."""
    files = [dataset_file(prefix, extension) for prefix in prefixes for extension in ("bin", "idx")]
    num_bytes = sum(path.stat().st_size for path in files)
    logging.getLogger("ctxlm_ds").setLevel(logging.WARNING)

    def ours() -> int:
        with tempfile.TemporaryDirectory(dir=output_dir) as folder:
            merge_datasets(prefixes, Path(folder) / "joined")
        return num_bytes

    def theirs() -> int:
        with tempfile.TemporaryDirectory(dir=output_dir) as folder:
            for number, path in enumerate(files):
                fsync_path(Path(shutil.copyfile(path, Path(folder) / str(number))))
        return num_bytes

    return compare(ours, theirs, rounds, "bytes/s", "copy")
