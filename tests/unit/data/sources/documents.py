"""Documents and bad records of one source, as the tests of its formats read them."""

from __future__ import annotations

from pathlib import Path

from ctxlm_ds.data.sources.corpus import Corpus
from ctxlm_ds.data.sources.parsing import parse_chunk
from ctxlm_ds.data.sources.reading import find_sources, read_chunks
from ctxlm_ds.data.sources.types import BadRecord


def texts_of(path: Path | str, input_format: str = "auto") -> list[str]:
    return list(Corpus([str(path)], input_format=input_format))


def parsed(path: Path, *keys: str) -> list[dict[str, str] | BadRecord]:
    wanted = keys or ("text",)
    return [item for chunk in read_chunks(find_sources([str(path)]), wanted) for item in parse_chunk(chunk, wanted)]
