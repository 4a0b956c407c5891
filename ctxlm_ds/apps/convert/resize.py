"""Weights of a checkpoint for a model of another vocabulary, or for a larger model.

Rows of tokens that both vocabularies have stay, others are made from rows of other tokens. A larger model's layers
repeat those of the source, and wider ones tile its weights from the middle, as ModernBERT-large began from
ModernBERT-base (Warner 2024, arXiv:2412.13663, section 2.2.2).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import torch

from ctxlm_ds.atomic import output_folder
from ctxlm_ds.checkpoint.chunk_index import write_weights
from ctxlm_ds.checkpoint.folders import check_output
from ctxlm_ds.checkpoint.ledger import join_ledgers
from ctxlm_ds.console import logger
from ctxlm_ds.data.sources.corpus import Corpus
from ctxlm_ds.errors import ConfigError, ExportError
from ctxlm_ds.export.base import own_format_of
from ctxlm_ds.export.weights import FRESH_SEED, CheckpointSource, check_finite, open_checkpoint
from ctxlm_ds.installed import check_extra
from ctxlm_ds.models.program import Program, plain_program
from ctxlm_ds.recipe.load import dump_config, load_config
from ctxlm_ds.recipe.schema import ParallelConfig
from ctxlm_ds.recipe.sections import ModelSection
from ctxlm_ds.tokenizers.base import SPECIAL_ROLES, Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer

UNDECODABLE = "\N{REPLACEMENT CHARACTER}"
HEADS = "num_attention_heads"
SIZES = ("layers", "heads", "size", "groups")
Axis = tuple[tuple[int, ...], tuple[int, ...]]
"""Parts of the source's and of the grown dimension, the outer first: heads of keys, queries of each, elements."""


class Origin(NamedTuple):
    """What a row of the new vocabulary is made of."""

    kind: str
    """`special`, `equal`, `static`, `pieces` or `initial`."""
    rows: tuple[int, ...] = ()
    """Ids of the old vocabulary, whose rows are averaged."""
    weights: tuple[float, ...] = ()
    """Weight of each; empty for equal ones."""


def change_tokenizer(
    checkpoint: Path, tokenizer: Path, output: Path, method: str = "pieces",
    vectors: Path | None = None, corpus: Path | None = None,
) -> list[str]:  # fmt: skip
    """Write the weights of a checkpoint with rows for the tokens of another tokenizer; return lines to print.

    Special tokens keep the row of their role or name, and tokens of equal text theirs. With `pieces` another token's
    row is the mean of the rows of the old tokens that its text has, with `random` an initial value, with `static` that
    of static_origins, whose vectors are in the file `vectors` or trained on the text file `corpus`. This holds for each
    parameter with a row for each word: tables of embeddings, untied and factorised ones, and biases of outputs.

    Raises:
        CheckpointError, TokenizerError, DataError: a folder or file is missing or damaged.
        ConfigError: `static` has no vectors, two sources of them, or none of a token that both tokenizers have.
        ExportError: the family reads words by their characters.
    """
    if [vectors, corpus].count(None) != (1 if method == "static" else 2):
        raise ConfigError(f"--method {method}: static needs either --vectors or --corpus, the others neither")
    check_output(output, checkpoint)
    source, new = open_checkpoint(checkpoint), load_tokenizer(tokenizer)
    if own_format_of(source.model.family) is not None:
        raise ExportError(f"model.family {source.model.family} reads characters, so no tokenizer has its rows")
    origins = trace(load_tokenizer(source.folder / "tokenizer"), new, method)
    if method == "static":
        origins = static_origins(origins, new, token_vectors(new, vectors, corpus))
    model = source.model.model_copy(update={"vocab_size": new.vocab_size})
    program = plain_program(model, source.outputs)
    counts = Counter(origin.kind for origin in origins)
    logger.info("rows for %d tokens instead of %d", new.vocab_size, source.model.vocab_size)

    def read(name: str) -> torch.Tensor:
        value = check_finite(name, source.reader.read_full(name), source.folder)
        if source.program.facts[name].grows != "vocabulary":
            return value
        result = program.initial_value(name, FRESH_SEED)
        for row, origin in enumerate(origins):
            if origin.rows:
                found = value[list(origin.rows)].double()
                weights = found.new_tensor(origin.weights or [1 / len(found)] * len(found))
                result[row] = torch.tensordot(weights, found, dims=1)
        return result

    shares = [f"{kind}: {count:,} ({count / len(origins):.1%})" for kind, count in counts.most_common()]
    return shares + write_model(output, source, model, new, program, read)


def write_model(
    output: Path, source: CheckpointSource, model: ModelSection, tokenizer: Tokenizer, program: Program,
    read: Callable[[str], torch.Tensor],
) -> list[str]:  # fmt: skip
    """Write weights made of a source, with recipe, tokenizer and ledger; return lines to print."""
    with output_folder(output) as folder:
        tokenizer.save(folder / "tokenizer")
        config = source.config.with_values("tokenizer", path=str(output / "tokenizer"))
        teacher = config.teacher.model_copy(update={"model": None})  # nothing of a run fits the new shape by itself
        config = config.model_copy(update={"model": model, "teacher": teacher, "parallel": ParallelConfig()})
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        join_ledgers(folder, [source.folder])
        write_weights(folder, 0, program.shapes, read)
    next_step = f"--set initialize_from={output} tokenizer.path={output / 'tokenizer'} with its model section"
    return [f"wrote {output}", f"next: {next_step}"]


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
    pieces = pieces_of(old, *shown) if method != "random" and is_text else ()
    return Origin("pieces", tuple(pieces)) if pieces else Origin("initial")


def pieces_of(old: Tokenizer, space: str, text: str) -> Sequence[int]:
    """Return the old tokens of a token's text, behind another letter if it continues a word; none if one is unknown."""
    alone, ids = old.encode_batch(["x", f"x{space}{text}"])
    ids = ids[len(alone) :] if ids[: len(alone)] == alone else old.encode_batch([space + text])[0]
    return () if old.unk_id in ids else ids


def static_origins(origins: Sequence[Origin], new: Tokenizer, vectors: Mapping[str, Any]) -> list[Origin]:
    """Give each new token that has a vector the rows of near known tokens (FOCUS, Dobler and de Melo 2023).

    Its row is the sum of the rows of the tokens of equal text, with the sparsemax of the cosines of their vectors as
    weights. A token without a vector keeps its origin. Raises ConfigError if no token of equal text has one.
    """
    names = {number: new.id_to_token(number) for number in range(len(origins))}
    found = {number: torch.tensor(vectors[name]).double() for number, name in names.items() if name in vectors}
    units = {number: vector / vector.norm() for number, vector in found.items() if bool(vector.any())}
    known = [number for number in units if origins[number].kind == "equal"]
    if not known:
        raise ConfigError("--method static: no token that both tokenizers have has a vector; is it of this tokenizer?")
    table, result = torch.stack([units[number] for number in known]), list(origins)
    for number in units.keys() - set(known) - new.special_ids:
        weights = sparsemax(table @ units[number])
        kept = weights.nonzero().flatten().tolist()
        rows = tuple(origins[known[at]].rows[0] for at in kept)
        result[number] = Origin("static", rows, tuple(weights[kept].tolist()))
    return result


def sparsemax(scores: torch.Tensor) -> torch.Tensor:
    """Return the probabilities [n] that are nearest to scores [n] (Martins and Astudillo 2016, arXiv:1602.02068)."""
    ordered = scores.sort(descending=True).values
    bounds = (ordered.cumsum(0) - 1) / torch.arange(1, len(scores) + 1)
    return (scores - bounds[(ordered > bounds).sum() - 1]).clamp_min(0.0)


def token_vectors(new: Tokenizer, path: Path | None, corpus: Path | None) -> Mapping[str, Any]:
    """Read vectors of tokens by name from a file of word2vec, or train fastText's on a text as FOCUS's code does."""
    if path is not None:
        from ctxlm_ds.apps.downstream.features.sources import read_static

        source = read_static(path, {new.id_to_token(number) for number in range(new.vocab_size)})
        return {name: source.table[row] for name, row in source.rows.items()}
    check_extra("downstream", ["gensim"])
    from gensim.models import FastText

    settings = {"vector_size": 100, "sg": 0, "negative": 10, "epochs": 3, "min_count": 10}
    with NamedTemporaryFile("w", encoding="utf-8", suffix=".txt") as file:
        for text in Corpus([str(corpus)], document="lines:1"):
            file.write(" ".join(map(new.id_to_token, new.encode_batch([text])[0])) + "\n")
        file.flush()
        rows = min(2_000_000, 20 * new.vocab_size)  # of parts of words; fastText has 2 million
        found = FastText(corpus_file=file.name, **settings, workers=1, seed=0, bucket=rows).wv
    return {name: found[name] for name in found.index_to_key}


def grow(checkpoint: Path, settings: Sequence[str], output: Path) -> list[str]:
    """Write the weights of a checkpoint for a larger model of its family; return lines to print.

    `settings` are sizes, such as `model.num_layers=28`. Layer i of n is the source's layer round(i m / n) of m. A
    parameter that the source's layer lacks has its initial value.

    Raises:
        ConfigError: a setting is no size, is smaller, or is refused by the model's own checks.
        CheckpointError: the source is missing or damaged, or `output` exists.
    """
    check_output(output, checkpoint)
    source = open_checkpoint(checkpoint)
    any_layout = [f"parallel.{name}={json.dumps(value)}" for name, value in ParallelConfig().model_dump().items()]
    config = load_config(source.folder / "config.yaml", [*settings, *any_layout])
    model = config.model.model_copy(update={"vocab_size": config.model.vocab_size or source.model.vocab_size})
    _check_settings(source.model, model, settings)
    program, axes = plain_program(model, source.outputs), list(_head_axes(source.model, model))
    names = source_names(source.program, program)

    def read(name: str) -> torch.Tensor:
        if (there := names[name]) not in source.reader:
            return program.initial_value(name, FRESH_SEED)
        value = check_finite(there, source.reader.read_full(there), source.folder)
        splits = (source.program.facts[there].split, program.facts[name].split)
        return tiled(value, program.shapes[name], axes, [split.blocks if split else () for split in splits])

    tokenizer = load_tokenizer(source.folder / "tokenizer")
    written = write_model(output, source, model, tokenizer, program, read)
    return [f"{source.program.num_parameters:,} parameters became {program.num_parameters:,}", *written]


def _check_settings(old: ModelSection, new: ModelSection, settings: Sequence[str]) -> None:
    """Raise ConfigError unless only sizes of a transformer's layers differ, and each has grown."""
    changed = [(name, getattr(old, name, None), now) for name, now in new if getattr(old, name, None) != now]
    wrong = [setting for setting in settings if not setting.startswith("model.")]
    sizes = [name for name, _, _ in changed if name.endswith(SIZES) and not name.endswith("vocab_size")]
    wrong += [f"model.{name}={now} ({before} before)" for name, before, now in changed
              if name not in sizes or not before or not now or now < before]  # fmt: skip
    if wrong or not changed or not hasattr(old, HEADS):
        text = ", ".join(wrong) or f"nothing of model.family {old.family}"
        raise ConfigError(f"{text}: sizes of a transformer's layers may grow, such as --set model.num_layers=28")


def _head_axes(old: ModelSection, new: ModelSection) -> Iterator[Axis]:
    """Yield the dimensions of queries, and of keys and values; raise ConfigError if heads have another size."""
    for prefix in (name.removesuffix(HEADS) for name in type(old).model_fields if name.endswith(HEADS)):
        (queries, keys, size), (more, more_keys, now) = (_heads(model, prefix) for model in (old, new))
        if size != now:
            text = f"{more} makes heads of {now} elements, but they stay complete, of {size}; set more or fewer"
            raise ConfigError(f"model.{prefix}{HEADS}: {text}")
        yield (keys, queries // keys, size), (more_keys, more // more_keys, size)
        yield (keys, size), (more_keys, size)


def _heads(model: Any, prefix: str) -> tuple[int, int, int]:
    """Return the heads of queries, those of keys, and the size of a head."""
    heads: int = getattr(model, f"{prefix}{HEADS}")
    size = getattr(model, "head_size", None) or getattr(model, f"{prefix}hidden_size") // heads
    return heads, getattr(model, f"{prefix}num_key_value_heads", None) or heads, size


def source_names(old: Program, new: Program) -> dict[str, str]:
    """Return the source's name of each parameter; layers of each stack are repeated as Gopher's (Rae 2021).

    Source: init_model_from_pretrained of AnswerDotAI/ModernBERT, src/bert_layers/model.py; it has no bound.
    """
    there, here = (Counter(block.rpartition(".")[0] for block in set(each.block_names)) for each in (old, new))
    names = {name: name for name in new.shapes}
    for name in names:
        if block := next((block for block in new.block_names if name.startswith(f"{block}.")), None):
            stack, _, number = block.rpartition(".")
            at = min(round(int(number) * there[stack] / here[stack]), there[stack] - 1)
            names[name] = f"{stack}.{at}{name.removeprefix(block)}"
    return names


def tiled(
    value: torch.Tensor, shape: Sequence[int], axes: Sequence[Axis] = (), blocks: Sequence[Sequence[int]] = ((), ())
) -> torch.Tensor:
    """Return a parameter with a larger `shape`, tiled from the middle; `blocks` of rows, old and new, on their own.

    Source: tile_weight (tile_weights_from_middle) of AnswerDotAI/ModernBERT, src/bert_layers/initialization.py.
    """
    for dim, size in enumerate(shape):
        before, after = blocks if dim == 0 and blocks[0] else ([value.shape[dim]], [size])
        parts = zip(value.split(list(before), dim), before, after, strict=True)
        value = torch.cat([part.index_select(dim, places(old, new, axes)) for part, old, new in parts], dim)
    return value


def places(old: int, new: int, axes: Sequence[Axis] = ()) -> torch.Tensor:
    """Return the index in a dimension of `old` elements of each of `new`; heads are tiled, those of keys first."""
    parts = next((axis for axis in axes if (prod(axis[0]), prod(axis[1])) == (old, new)), ((old,), (new,)))
    found = torch.zeros(1, dtype=torch.long)
    for before, after in zip(*parts, strict=True):
        wrapped = (torch.arange(after) - (after - before) // 2) % before
        found = (found[:, None] * before + wrapped).flatten()
    return found
