"""Clean, filter and deduplicate a corpus, a published one by name or any files; writes JSON lines in zstd.

DIR gets SOURCE-00000.jsonl.zst ..., corpus.json (what each stage dropped and why), dropped.jsonl (a sample of it) and
blend.yaml, complete or not at all. Exit status 1 if counts are not as published or nothing is left.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from ctxlm_ds.console import aligned, at_least, format_duration, logger, setup_logging
from ctxlm_ds.data.hygiene.corpora import (
    CleaningRule,
    CorpusRecipe,
    FilterConfig,
    input_corpus,
    load_corpus,
    shipped_corpora,
)
from ctxlm_ds.data.sources.bad_records import unreadable_text
from ctxlm_ds.errors import ConfigError


def _megabytes(text: str) -> int:
    """Return bytes: `1.5` -> 1,500,000."""
    size = float(text)
    if not 0 < size < 1e12:
        raise argparse.ArgumentTypeError(f"{text}: a number of megabytes above 0 is needed")
    return max(1, int(size * 1e6))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("input").add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="list the published corpora and their sources")
    what.add_argument("--corpus", metavar="NAME", help="a data recipe: a shipped name, or a path of a YAML file")
    what.add_argument("--input", nargs="+", metavar="FILE", help="files as for ctxlm preprocess")
    source = parser.add_argument_group("input, in detail")
    pair: dict[str, Any] = {"nargs": "+", "action": "append", "default": [], "metavar": ("SOURCE", "FILE")}
    source.add_argument("--downloaded", **pair, help="read a source of the data recipe from your copy of its files")
    source.add_argument("--replace", **pair, help="read other files instead of a source (its counts are not checked)")
    source.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="with --input: keys")
    source.add_argument("--input-format", default="auto", help="with --input: as for ctxlm preprocess")
    source.add_argument("--clean", nargs="+", default=[], choices=get_args(CleaningRule), help="with --input: rules")
    source.add_argument("--join-rows", type=int, default=0, metavar="N", help="with --input: N rows are a document")
    source.add_argument("--limit", type=_megabytes, metavar="MB", help="read this much of each source, for a trial")
    skipped_help = "skip up to N damaged records (default: 0)"
    source.add_argument("--max-bad-records", type=at_least(0), default=0, metavar="N", help=skipped_help)
    output = parser.add_argument_group("output")
    output.add_argument("--output-dir", metavar="DIR", help="folder to write")
    output.add_argument("--part-size", type=_megabytes, default="512", metavar="MB", help="text per file (512)")
    output.add_argument("--overwrite", action="store_true", help="replace an existing folder")
    cores = len(os.sched_getaffinity(0))
    output.add_argument("--workers", type=int, default=cores, metavar="N", help="processes (default: one per core)")
    filters = "stages, each off unless the data recipe or a flag turns it on; defaults in brackets"
    add_filter_flags(parser.add_argument_group(filters))
    return parser


def recipe_of(args: argparse.Namespace) -> tuple[CorpusRecipe, tuple[str, ...]]:
    """Return the data recipe with the flags' settings, and the sources whose files were replaced."""
    if args.input:
        keys = ("input", "json_keys", "input_format", "clean", "join_rows")
        recipe = input_corpus(Path(args.output_dir).name or "corpus", {key: getattr(args, key) for key in keys})
        return with_filter_flags(recipe, args), ()
    recipe = load_corpus(args.corpus)
    files = {name: paths for name, *paths in args.downloaded + args.replace}
    unknown = [name for name in files if not files[name] or name not in [source.name for source in recipe.sources]]
    if unknown:
        names = ", ".join(source.name for source in recipe.sources)
        raise ConfigError(f"{unknown[0]}: name a source of {recipe.name} ({names}) and its files")
    sources = [
        source.model_copy(update={"input": files[source.name]}) if source.name in files else source
        for source in recipe.sources
    ]
    replaced = tuple(sorted(name for name, *_ in args.replace))
    return with_filter_flags(recipe.model_copy(update={"sources": sources}), args), replaced


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
    unreadable: Counter[str] = Counter()
    for source in empty:
        unreadable.update(source.get("unreadable", {}))
    if records and unreadable.total() == records:
        why = unreadable_text(unreadable, records)
    return [f"no document was left of {records:,} records ({why}): there is nothing to train on"]


def next_lines(report: dict[str, Any], directory: Path) -> list[str]:
    """Return the commands that come next; none if no document is left."""
    sources = [source["name"] for source in report["sources"] if source["files"]]
    commands = [
        f"next: ctxlm preprocess --input '{directory}/{source}-*.jsonl.zst' --tokenizer TOKENIZER "
        f"--split-sentences --output-prefix PREFIX-{source}"
        for source in sources
    ]
    return [*commands, f"then copy {directory}/blend.yaml into the training recipe"] if sources else []


def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    setup_logging()
    if args.list:
        print("\n".join(corpora_lines()))
        return
    if not args.output_dir:
        parser.error("--output-dir is needed")
    recipe, replaced = recipe_of(args)
    from ctxlm_ds.data.hygiene.prepare import PrepareOptions, prepare_corpus

    options = PrepareOptions(
        workers=args.workers,
        overwrite=args.overwrite,
        replaced=replaced,
        max_bad_records=args.max_bad_records,
        limit_bytes=args.limit,
        part_bytes=args.part_size,
    )
    directory = Path(args.output_dir)
    start_s = time.monotonic()
    report = prepare_corpus(recipe, directory, options)
    print("\n".join([*report_lines(recipe, report), *next_lines(report, directory)]))
    print(f"in {format_duration(time.monotonic() - start_s)}")
    for warning in empty_warnings(report):
        logger.warning("%s", warning)
    is_empty = not any(source["files"] for source in report["sources"])
    if is_empty or not all(check["met"] for check in report["expected"]):
        sys.exit(1)
