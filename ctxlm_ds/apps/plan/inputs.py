"""What a run reads: opened before the run starts, or before its job is queued."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ctxlm_ds.console import counted
from ctxlm_ds.errors import ConfigError, CtxlmError
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.sections import DataSection, RowSettings

if TYPE_CHECKING:
    from ctxlm_ds.data.index.build import IndexPlace


def input_lines(config: RunConfig, must_exist: bool = False) -> list[str]:
    """Return how many documents a run reads, or which inputs are not here yet.

    Raises ConfigError with everything that the run would refuse; what is not here counts if it `must_exist`.
    """
    data = config.data
    named = [("tokenizer.path", config.tokenizer.path), *([] if data.train else [("data.train", None)])]
    named += [("data.train", f"{source.path}.idx") for source in data.train]
    named += [("data.validation", f"{source.path}.idx") for source in data.validation]
    folders = ("initialize_from", config.initialize_from), ("teacher.path", config.teacher.path)
    named += [(setting, path) for setting, path in folders if path is not None]
    missing = {f"{name} {path or '(not set)'}": name for name, path in named if not path or not Path(path).exists()}
    lines = [f"  not found from {Path.cwd()}: {', '.join(missing)}"] if missing else []
    if not must_exist and {"tokenizer.path", "data.train", "data.validation"} & set(missing.values()):
        return [*lines, "  tokenizer and data: not checked, for they are not all here"]
    try:
        places = list(index_places(config.row_settings, config.tokenizer.path, config.model.vocab_size))
    except ImportError as error:
        return [*lines, f"  tokenizer and data: not checked, {error.name} is not installed here"]
    problems = dict.fromkeys(str(place) for place in places if isinstance(place, CtxlmError))
    if must_exist and "initialize_from" in missing.values():
        problems[f"initialize_from: {config.initialize_from} is not a folder"] = None
    if problems:
        raise ConfigError("\n  ".join([f"{config.name}: the run would end at its beginning", *problems]))
    built = [place for place in places if not isinstance(place, CtxlmError)]
    counts = [place.documents[1] - place.documents[0] for place in built]
    train, held_out = sum(counts[: len(data.train)]), sum(counts[len(data.train) :])
    lines.append(f"  tokenizer and data: found, {counted(train, 'document')} to train on, {held_out:,} held out")
    return [*lines, *_word_lines(data, config.training.max_words, built[: len(data.train)])]


def _word_lines(data: DataSection, budget: int | None, places: Sequence[IndexPlace]) -> list[str]:
    """Return how many words a run may read and how often it reads them, if its budget is in words.

    Raises ConfigError if that is more often than data.max_epochs. Shares by weight are known at the start of the run.
    """
    from ctxlm_ds.data.stream.word_budget import refuse_epochs, words_of

    sources = data.train
    counts = [words_of(place.dataset, place.documents) for place in places]
    words = [count * (source.epochs or 1.0) for count, source in zip(counts, sources, strict=True) if count is not None]
    if budget is None or data.blend != "concatenate" or len(words) < len(sources):
        return []
    epochs = budget / max(1.0, sum(words))
    for source in sources:
        refuse_epochs(data, source.path, epochs * (source.epochs or 1.0))
    return [f"  words: {sum(words):,.0f} an epoch, {epochs:.2f} epochs"]


def index_places(
    rows: RowSettings, tokenizer_path: str | None, vocab_size: int | None
) -> Iterator[IndexPlace | CtxlmError]:
    """Yield the place of the sample index of each part of a dataset that a run reads, or what is wrong with it."""
    from ctxlm_ds.data.index.build import FEWEST_DOCUMENTS, IndexPlace
    from ctxlm_ds.data.stream.run_datasets import held_out_parts, train_parts
    from ctxlm_ds.objectives.base import build_objective
    from ctxlm_ds.tokenizers.load import open_tokenizer

    try:
        tokenizer, _ = open_tokenizer(tokenizer_path, vocab_size)
        build_objective(rows.objective, tokenizer)
        train, held_out = train_parts(rows.data, copies=False), held_out_parts(rows.data, copies=False)
    except CtxlmError as error:
        yield error
        return
    for part, is_held_out in [*((part, False) for part in train), *((part, True) for part in held_out.values())]:
        try:
            place = IndexPlace.of(part, tokenizer, rows, is_held_out)
            first, after = place.documents
            few = replace(place, documents=(first, min(after, first + FEWEST_DOCUMENTS)))
            next(few.make(tokenizer).pieces, None)
            yield place
        except CtxlmError as error:
            yield error
