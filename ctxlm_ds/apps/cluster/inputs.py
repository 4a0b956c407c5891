"""What a run reads, opened before its job is queued: tokenizer, datasets, the weights that it starts from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ctxlm_ds.errors import CtxlmError
from ctxlm_ds.recipe.schema import RunConfig


def input_problems(config: RunConfig) -> list[str]:
    """Return a line for each input that is missing, damaged or made with another tokenizer.

    Raises:
        ImportError: numpy or tokenizers is not installed here.
    """
    problems = list(_data_problems(config))
    start = config.initialize_from
    if start is not None and not Path(start).is_dir():
        problems.append(f"initialize_from: {start} is not a folder")
    return problems


def _data_problems(config: RunConfig) -> Iterator[str]:
    from ctxlm_ds.data.index.build import IndexPlace
    from ctxlm_ds.data.stream.run_datasets import held_out_parts, train_parts
    from ctxlm_ds.tokenizers.load import load_tokenizer

    if config.tokenizer.path is None or not config.data.train:
        yield "tokenizer.path and data.train are needed; name them in the recipe or with --set"
        return
    try:
        tokenizer = load_tokenizer(config.tokenizer.path)
        parts = [(part, False) for part in train_parts(config.data)]
        parts += [(part, True) for part in held_out_parts(config.data).values()]
    except CtxlmError as error:
        yield str(error)
        return
    for part, held_out in parts:
        try:
            IndexPlace.of(part, tokenizer, config.row_settings, held_out)
        except CtxlmError as error:
            yield str(error)
