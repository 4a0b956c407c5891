"""Write docs/parts.md from the code of the modules that a package may import; `--check` only compares."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from ctxlm_ds.console import run_command
from ctxlm_ds.data.fields import Field
from ctxlm_ds.data.sample import DECODER, Batch
from ctxlm_ds.models.meter import CPU
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.check import fit_problems
from ctxlm_ds.recipe.choices import DATA, OBJECTIVE
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.registry import FAMILIES
from ctxlm_ds.training.measure import describe
from tools.write_config_docs import ROOT, write_or_compare

ROWS, POSITIONS, WORDS = 3, 28, 307
"""Sizes with letters in the tables; no other size is equal to one of them."""
LONGEST_VALUE = 60
"""Characters of a constant that the page shows."""
ROOMS: dict[str, dict[str, tuple[str, ...]]] = {
    "Entries": {"recipe.sections": (), "families.base": (), "objectives.base": (), "data.formats.base": ()},
    "Layers": {
        "models.layers": ("LayerDescription", "ModelBuild"), "models.parts.embeddings": (),
        "models.parts.transformer": (), "models.parts.rotary": (), "models.parts.norms": (), "models.parts.encoder": (),
        "models.parts.decoder": (), "models.parts.heads": (), "models.parts.distillation": ("is_tap",),
        "models.parts.comparison": ("Comparison", "projection", "token_error_sums", "pair_error_sums"),
        "parallel.layers": (), "parallel.parameters": ("Constant", "Normal", "Uniform", "ParameterFacts", "declare"),
        "parallel.context": ("CONTEXT", "TrafficCounter", "ParallelContext"), "parallel.mappings": (),
    },
    "Losses": {"parallel.cross_entropy": ()},
    "Batches and samples": {"data.fields": (), "data.sample": (), "data.stream.row_filling": ()},
    "Exports": {"export.base": (), "export.key_maps": ("Change", "Row", "KeyMap", "stacked", "expand")},
    "Kernels": {"kernels.implementation": (), "kernels.attention_spec": (), "kernels.dispatch": ("KernelSet",)},
    "Optimizers and schedules": {
        "training.optimizers.base": (), "training.optimizers.matrix_work": (),
        "training.schedules.schedule": ("Decay",),
    },
    "Hooks and tasks": {
        "training.hooks.hooks": ("RunStart", "StepMetrics", "RunEnd", "Hook", "IntervalHook"),
        "apps.downstream.kinds.entries": (), "apps.downstream.kinds.base": (),
    },
}  # fmt: skip
"""Modules of ctxlm_ds by title, each with the names that the page has; none for all public ones."""
INTRODUCTION = """# Parts

Written from annotations and docstrings by `tools/write_parts_docs.py`; `make check` compares the two.

What a family, an objective, a sample format, a kernel, an optimizer, a schedule, a hook or a task may import, with
shapes. [extending.md](extending.md) puts the parts together, [config.md](config.md) has the settings. The first lines
of a module explain its shape letters. In the two tables they are b rows, s positions, t positions of a decoder,
p prediction slots, m sequences of a row, h width, v vocabulary.
"""


def render_parts() -> str:
    """Return the complete page."""
    parts = [INTRODUCTION, *render_tables()]
    for title, modules in ROOMS.items():
        parts += [f"## {title}\n", *(render_module(f"ctxlm_ds.{module}", names) for module, names in modules.items())]
    return "\n".join(parts).rstrip() + "\n"


def recipes_of(objective: str) -> Iterator[RunConfig]:
    """Yield a tiny recipe of each shipped family that an objective goes with."""
    for family in FAMILIES.shipped_names():
        tiny = FAMILIES.get(family).tiny()
        formats = [tiny["data"], *({"sample_format": name} for name in DATA.registry.shipped_names())]
        for data in formats:
            model, precision = tiny["model"] | {"vocab_size": WORDS}, {"precision": "fp32"}
            sections = {"model": model, "objective": {"name": objective}, "training": precision}
            sections["data"] = data | {"seq_length": POSITIONS}
            config = RunConfig.model_validate(sections)
            if not any(fit_problems(config.model, config.data, config.objective)):
                yield config
                break


def render_tables() -> list[str]:
    """Return the tables of fields and outputs."""
    fields: dict[tuple[str, ...], list[str]] = {}
    outputs: dict[str, list[str]] = {}
    shapes: dict[str, str] = {}
    for name in OBJECTIVE.registry.shipped_names():
        config = next(recipes_of(name))
        objective = build_objective(config.objective)
        held = {field.name: field for field in objective.fields(config.data)}
        letters = letters_of(held) | {"m": config.data.sequences_per_row, "h": config.model.width or 0}
        for field in held.values():
            own = {"t": letters["t"]} | letters if field.name.startswith(DECODER) else letters
            key = f"`{field.name}`", f"[b, {in_letters(field.columns, own)}]", field.dtype
            fields.setdefault(key, []).append(name)
        for output in objective.outputs:
            outputs.setdefault(output, []).append(name)
        if shapes.keys() < outputs.keys():
            for output, found in shapes_of(config, list(held.values())).items():
                shapes[output] = ", ".join(in_letters(size, letters | {"b": ROWS}, exact=True) for size in found)
    families = {name: FAMILIES.get(name).outputs for name in FAMILIES.shipped_names()}
    able = {output: [name for name, given in families.items() if output in given] for output in outputs}
    written = [[f"`{name}`", f"[{shapes[name]}]", ", ".join(able[name]), ", ".join(outputs[name])] for name in outputs]
    given = [[*key, ", ".join(names)] for key, names in sorted(fields.items())]
    return [
        table("Fields of a batch", ["Field", "Shape", "Type", "Objectives"], given),
        table("Outputs of models", ["Output", "Shape", "Families", "Objectives"], written),
    ]


def letters_of(fields: Mapping[str, Field]) -> dict[str, int]:
    """Return sizes of fields by letter."""
    named = {"s": "sequence_ids", "t": f"{DECODER}sequence_ids", "p": "prediction_positions"}
    found = {letter: fields[name].columns for letter, name in named.items() if name in fields} | {"v": WORDS}
    return found | ({"p": fields["target_positions"].columns} if "target_positions" in fields else {})


def in_letters(size: int, letters: Mapping[str, int], exact: bool = False) -> str:
    """Return the letter of a size or, unless `exact`, of the size before it, or the positions in it; else the size."""
    named = {of: letter for letter, of in reversed(list(letters.items()))}
    if size in named or exact:
        return named.get(size, str(size))
    return f"{named[size - 1]} + 1" if size - 1 in named else f"{size // POSITIONS} s"


def shapes_of(config: RunConfig, fields: Sequence[Field]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's outputs for ROWS rows."""
    program = describe(config, platform=CPU)
    with torch.no_grad():
        found = program.module(seed=0).eval().run(Batch.example(fields, ROWS, np.random.default_rng(0), WORDS).fields)
    return {name: tuple(value.shape) for name, value in found.items()}


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table under its title."""
    lines = [" | ".join(row) for row in [list(head), ["---"] * len(head), *rows]]
    return f"## {title}\n\n" + "".join(f"| {line} |\n" for line in lines)


def render_module(module: str, names: Sequence[str]) -> str:
    """Return the classes, functions and constants of a module, in its order: those of `names`, or all public ones."""
    source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    tree, lines = ast.parse(source), source.splitlines()
    parts = [f"### `{module}`\n", f"{one_line(ast.get_docstring(tree))}\n"]
    for node, after in itertools.zip_longest(tree.body, tree.body[1:]):
        name = ast.unparse(node.targets[0]).strip("()") if isinstance(node, ast.Assign) else getattr(node, "name", "_")
        if name.startswith("_") or names and name not in names:
            continue
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            parts.append(f"- {described(node)}")
        elif isinstance(node, ast.Assign):
            value = ast.unparse(node.value)
            # Versions of Python quote the parts of a formatted string in different ways.
            is_long = len(value) > LONGEST_VALUE or isinstance(node.value, ast.JoinedStr)
            shown = name if is_long else f"{name} = {value}"
            parts.append(f"- `{shown}` {one_line(string_of(after))}".rstrip())
        parts += [f"    - {line}" for line in members(node, lines)] if isinstance(node, ast.ClassDef) else []
    return "\n".join(parts) + "\n"


def members(node: ast.ClassDef, lines: Sequence[str]) -> Iterator[str]:
    """Yield a line for each public field and method of a class."""
    for member, after in itertools.zip_longest(node.body, node.body[1:]):
        if isinstance(member, ast.AnnAssign) and not (name := ast.unparse(member.target)).startswith("_"):
            default = "" if member.value is None else f" = {ast.unparse(member.value)}"
            text = string_of(after) or comment_of(lines, member.end_lineno or member.lineno)
            yield f"`{name}: {ast.unparse(member.annotation)}{default}`" + (f" {one_line(text)}" if text else "")
        elif isinstance(member, ast.FunctionDef) and member.name[0] != "_" and ast.get_docstring(member):
            yield described(member)


def comment_of(lines: Sequence[str], number: int) -> str:
    """Return the comment at the end of a line, or in the line after it."""
    after = lines[number] if number < len(lines) else ""
    found = re.search(r"  # (.*)", lines[number - 1]) or re.match(r"\s+# (.*)", after)
    return found[1] if found else ""


def described(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return name, arguments and docstring; those of a class are its constructor's."""
    text = one_line(ast.get_docstring(node))
    if isinstance(node, ast.FunctionDef):
        if any(ast.unparse(each) in ("property", "cached_property") for each in node.decorator_list):
            return f"`{node.name}: {result_of(node)}` {text}"
        return f"`{node.name}({arguments_of(node)}) -> {result_of(node)}` {text}"
    made = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    if made is None:
        return f"`{node.name}` {text}"
    return f"`{node.name}({arguments_of(made)})` {text} {one_line(ast.get_docstring(made))}".rstrip()


def arguments_of(node: ast.FunctionDef) -> str:
    """Return the arguments of a function without `self`."""
    return re.sub(r"^(self|cls)(, |$)", "", ast.unparse(node.args))


def result_of(node: ast.FunctionDef) -> str:
    """Return the annotation of a function's result."""
    return "None" if node.returns is None else ast.unparse(node.returns)


def string_of(node: ast.stmt | None) -> str | None:
    """Return the string that a statement is, which describes the one before it."""
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def one_line(text: str | None) -> str:
    """Return a docstring in one line of Markdown."""
    parts = " ".join((text or "").split()).split("`")
    parts[::2] = [part.replace("*", "\\*").replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


if __name__ == "__main__":
    run_command(lambda: write_or_compare(render_parts, "parts.md", Path(__file__).name))
