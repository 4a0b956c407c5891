"""Give a model another vocabulary: rows of tokens that both have stay, others are made from the old pieces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ctxlm_ds.atomic import output_folder
from ctxlm_ds.checkpoint.chunk_index import write_weights
from ctxlm_ds.checkpoint.folders import check_output
from ctxlm_ds.console import logger
from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.base import own_format_of
from ctxlm_ds.export.weights import FRESH_SEED, CheckpointSource, check_finite, open_checkpoint
from ctxlm_ds.models.program import plain_program
from ctxlm_ds.recipe.load import dump_config
from ctxlm_ds.tokenizers.base import SPECIAL_ROLES, Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer

if TYPE_CHECKING:
    import torch

UNDECODABLE = "\N{REPLACEMENT CHARACTER}"


class Origin(NamedTuple):
    """What a row of the new vocabulary is made of."""

    kind: str
    """`special`, `equal`, `pieces` or `initial`."""
    rows: tuple[int, ...] = ()
    """Ids of the old vocabulary, whose rows are averaged."""


def change_tokenizer(checkpoint: Path, tokenizer: Path, output: Path, method: str = "pieces") -> list[str]:
    """Write the weights of a checkpoint with rows for the tokens of another tokenizer; return lines to print.

    Special tokens keep the row of their role or name, and tokens of equal text theirs. With `pieces` another token's
    row is the mean of the rows of the old tokens that its text has, with `random` an initial value. This holds for each
    parameter with a row for each word: tables of embeddings, untied and factorised ones, and biases of outputs.

    Raises:
        CheckpointError, TokenizerError: a folder is missing or damaged.
        ExportError: the family reads words by their characters.
    """
    check_output(output, checkpoint)
    source, new = open_checkpoint(checkpoint), load_tokenizer(tokenizer)
    if own_format_of(source.model.family) is not None:
        raise ExportError(f"model.family {source.model.family} reads characters, so no tokenizer has its rows")
    origins = trace(load_tokenizer(source.folder / "tokenizer"), new, method)
    model = source.model.model_copy(update={"vocab_size": new.vocab_size})
    program = plain_program(model, source.outputs)
    counts = Counter(origin.kind for origin in origins)
    logger.info("rows for %d tokens instead of %d", new.vocab_size, source.model.vocab_size)
    read = _reader(source, origins, lambda name: program.initial_value(name, FRESH_SEED))
    with output_folder(output) as folder:
        new.save(folder / "tokenizer")
        tokens = source.config.tokenizer.model_copy(update={"path": str(output / "tokenizer")})
        config = source.config.model_copy(update={"model": model, "tokenizer": tokens})
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        write_weights(folder, 0, program.shapes, read)
    return [
        *(f"{kind}: {count:,} ({count / len(origins):.1%})" for kind, count in counts.most_common()),
        f"wrote {output}",
        f"next: --set initialize_from={output} tokenizer.path={output / 'tokenizer'} with its model section",
    ]


def trace(old: Tokenizer, new: Tokenizer, method: str) -> list[Origin]:
    """Return the origin of each row of the new vocabulary."""
    roles = {getattr(new, f"{role}_id"): getattr(old, f"{role}_id") for role in SPECIAL_ROLES
             if role != "mask" or (old.has_mask and new.has_mask)}  # fmt: skip
    known = {old.shown(number): number for number in reversed(range(old.vocab_size)) if number not in old.special_ids}
    return [_origin(number, old, new, roles, known, method) for number in range(new.vocab_size)]


def _origin(
    number: int, old: Tokenizer, new: Tokenizer, roles: dict[int, int], known: dict[tuple[str, str], int], method: str
) -> Origin:
    if number in roles:
        return Origin("special", (roles[number],))
    if number in new.special_ids:
        same = old.token_to_id(new.id_to_token(number))
        return Origin("initial") if same is None else Origin("special", (same,))
    shown = new.shown(number)
    is_text = bool(shown[1]) and UNDECODABLE not in shown[1]  # a token may be a part of a character's bytes
    same = known.get(shown) if is_text else old.token_to_id(new.id_to_token(number))
    if same is not None:
        return Origin("equal", (same,))
    pieces = pieces_of(old, *shown) if method == "pieces" and is_text else ()
    return Origin("pieces", tuple(pieces)) if pieces else Origin("initial")


def pieces_of(old: Tokenizer, space: str, text: str) -> Sequence[int]:
    """Return the old tokens of a token's text, behind another letter if it continues a word; none if one is unknown."""
    alone, ids = old.encode_batch(["x", f"x{space}{text}"])
    ids = ids[len(alone) :] if ids[: len(alone)] == alone else old.encode_batch([space + text])[0]
    return () if old.unk_id in ids else ids


def _reader(
    source: CheckpointSource, origins: Sequence[Origin], initial: Callable[[str], torch.Tensor]
) -> Callable[[str], torch.Tensor]:
    """Return the function that makes a parameter of the new model."""

    def read(name: str) -> torch.Tensor:
        value = check_finite(name, source.reader.read_full(name), source.folder)
        if source.program.facts[name].grows != "vocabulary":
            return value
        result = initial(name)
        for row, origin in enumerate(origins):
            if origin.rows:
                result[row] = value[list(origin.rows)].double().mean(dim=0)
        return result

    return read
