"""Filter settings as flags, and the lines that tools/prepare_corpus.py prints. Imports no numpy (a fast --help)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError

from ctxlm_ds.console import aligned
from ctxlm_ds.data.hygiene.corpora import CorpusRecipe, FilterConfig, load_corpus, shipped_corpora
from ctxlm_ds.errors import ConfigError


def add_filter_flags(parser: argparse._ActionsContainer) -> None:
    """Add `--min-words N`, `--exact-duplicates`, ...; a flag that is not given leaves the recipe's setting."""
    for name, field in FilterConfig.model_fields.items():
        explanation = " ".join((field.description or "").replace("`", "").replace("%", "%%").split())
        off = field.default in (None, False, [])
        options: dict[str, Any] = {"metavar": "N", "type": float if field.annotation is float else int}
        if field.annotation is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif get_origin(field.annotation) is list:
            options = {"nargs": "+", "metavar": "NAME"}
        explanation += f" [{'off' if off else field.default}]"
        parser.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, help=explanation, **options)


def with_filter_flags(recipe: CorpusRecipe, args: argparse.Namespace) -> CorpusRecipe:
    """Return the recipe with the flags' filters. Raises ConfigError for a value out of range."""
    given = {name: getattr(args, name) for name in FilterConfig.model_fields if hasattr(args, name)}
    try:
        filters = FilterConfig.model_validate(recipe.filters.model_dump() | given)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        flag = f"--{str(found['loc'][0]).replace('_', '-')}"
        raise ConfigError(f"{flag} {found['input']}: {found['msg']}") from error
    return recipe.model_copy(update={"filters": filters})


def corpora_lines() -> list[str]:
    """Return a table of the shipped data recipes with one line per source, and the title of each."""
    rows = [("corpus", "size", "source", "now", "published counts")]
    titles: list[str] = []
    for name in shipped_corpora():
        recipe = load_corpus(name.replace("-LANG", "-en"))
        titles.append(f"{name}: {recipe.title}")
        first_columns = (name, recipe.size)
        for source in recipe.sources:
            where = source.input[0] + (f" and {len(source.input) - 1} more" if len(source.input) > 1 else "")
            counts = "; ".join(f"{count.count:,} {count.measure}" for count in source.expected)
            rows.append((*first_columns, where, source.status, counts))
            first_columns = ("", "")
    return [*aligned(rows, left=range(len(rows[0])), indent=""), "", *titles]


def report_lines(recipe: CorpusRecipe, report: dict[str, Any]) -> list[str]:
    """Return notes on sources that are not the originals, what was read, dropped and written, and published counts."""
    lines = [f"{source.name} ({source.status}): {source.note}" for source in recipe.sources if source.note]
    for source in report["sources"]:
        read, written = source["read"], source["written"]
        unreadable = sum(source["unreadable"].values())
        lines.append(
            f"{source['name']}: {source['records']:,} records ({unreadable:,} unreadable), read "
            f"{read['documents']:,} documents, {read['words']:,} words; wrote {written['documents']:,} documents, "
            f"{written['words']:,} words, {written['bytes'] / 1e6:,.1f} MB of text in {len(source['files'])} file(s)"
        )
    rows = [("stage", "documents in", "dropped", "share", "most frequent reasons")]
    for stage in report["stages"]:
        if stage["stage"] == "cleaning":
            taken = ", ".join(f"{rule} {count:,}" for rule, count in stage["removed_characters"].items())
            lines.append(f"cleaning removed characters: {taken or 'none'}")
            continue
        reasons = sorted(stage["reasons"].items(), key=lambda reason: (-reason[1], reason[0]))[:2]
        dropped, arrived = stage["dropped_documents"], stage["documents_in"]
        why = ", ".join(f"{reason} {count:,}" for reason, count in reasons)
        rows.append((stage["stage"], f"{arrived:,}", f"{dropped:,}", f"{dropped / max(1, arrived):.1%}", why))
    lines += aligned(rows, left=range(len(rows[0])), indent="")
    for check in report["expected"]:
        verdict = "not checked" if not check["checked"] else "as published" if check["met"] else "NOT AS PUBLISHED"
        deviation = f"{check['found'] / check['count'] - 1:+.1%}, allowed {check['tolerance']:.0%}"
        what = f"{check['found']:,} {check['measure'].replace('_', ' ')}"
        lines.append(f"{check['source']}: {what}, published {check['count']:,} ({deviation}): {verdict}")
    return lines


def empty_warnings(report: dict[str, Any]) -> list[str]:
    """Return a warning for each source of which no document is left, or one if nothing is left at all."""
    empty = [source for source in report["sources"] if not source["files"]]
    if len(empty) < len(report["sources"]):
        text = "none of its {:,} records was left; see dropped.jsonl"
        return [f"{source['name']}: {text.format(source['records'])}" for source in empty]
    counts = {stage["stage"]: stage.get("dropped_documents") for stage in report["stages"]}
    dropped = ", ".join(f"{stage} {count:,}" for stage, count in counts.items() if count)
    no_text = "the input holds no text; check --input and --json-keys"
    why = f"dropped by {dropped}; loosen these stages" if dropped else no_text
    records = sum(source["records"] for source in empty)
    return [f"no document was left of {records:,} records ({why}): there is nothing to train on"]


def next_lines(report: dict[str, Any], directory: Path) -> list[str]:
    """Return the commands that come next; none if no document is left."""
    sources = [source["name"] for source in report["sources"] if source["files"]]
    commands = [
        f"next: python tools/preprocess_data.py --input '{directory}/{source}-*.jsonl.zst' --tokenizer TOKENIZER "
        f"--split-sentences --output-prefix PREFIX-{source}"
        for source in sources
    ]
    return [*commands, f"then copy {directory}/blend.yaml into the training recipe"] if sources else []
