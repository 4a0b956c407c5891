"""Tables of a document between markers, and the measurements that `make bench` writes there."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from ctxlm_ds import atomic
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.deepspeed import DEFAULT_CONFIG
from ctxlm_ds.recipe.load import load_config
from tools.benchmark.packing import compare_packing
from tools.benchmark.steps import StepBenchmark, compare_steps
from tools.benchmark.tables import Table

BEGIN, END = "<!-- begin {} -->", "<!-- end {} -->"
LIBRARIES = ("torch", "deepspeed", "transformers")
ROWS_OF_512 = {"cpu": 2, "cuda": 64}
"""Of a micro-batch; rows of 128 are four times as many."""


def measure_all(threads: int, rounds: int) -> Iterator[tuple[str, list[Table]]]:
    """Yield the tables of each marked place, BERT-base with 512 and 128 positions and short documents."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    benchmark = StepBenchmark(DEFAULT_CONFIG, rounds=rounds, threads=threads)
    rows = ROWS_OF_512[device]
    for place, recipe, micro in (("steps-512", "bert-base-phase2", rows), ("steps-128", "bert-base", 4 * rows)):
        config = load_config(recipe, [f"training.micro_batch_size={micro}"])
        dropouts = benchmark.dropouts if place == "steps-512" else benchmark.dropouts[:1]
        yield place, list(compare_steps(config, replace(benchmark, dropouts=dropouts)))
    config = load_config("bert-base", [f"training.micro_batch_size={rows}"])
    yield "packing", list(compare_packing(config, benchmark))


PLACES = ("steps-512", "steps-128", "packing")


def describe_machine() -> str:
    """Return the processor or GPU, and the versions of the libraries."""
    import torch

    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"{_processor()} ({len(os.sched_getaffinity(0))} cores)"
    return f"{device}; {', '.join(f'{name} {version(name)}' for name in LIBRARIES)}."


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def check_document(path: Path, places: Iterable[str] = PLACES) -> None:
    """Raise ConfigError, before anything is measured, if the document lacks a marked place."""
    replaced(_read(path), dict.fromkeys(places, ""), str(path))


def write_tables(path: Path, place: str, tables: Iterable[Table], machine: str) -> None:
    """Replace what is between the markers of a place; everything else stays."""
    blocks = [machine, *("\n".join(table.markdown()) for table in tables)]
    atomic.write_text(path, replaced(_read(path), {place: "\n\n".join(blocks)}, str(path)))


def replaced(text: str, blocks: Mapping[str, str], name: str) -> str:
    """Return a document with new text between the markers of some places.

    Raises:
        ConfigError: a place has no pair of markers, or several.
    """
    for place, block in blocks.items():
        begin, end = BEGIN.format(place), END.format(place)
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
            raise ConfigError(f"{name} needs one line {begin} and, below it, one line {end}")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{block}\n\n{end}{rest.split(end)[1]}"
    return text


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; name a document with markers") from error
