"""Show what the weights of a checkpoint have read, through all their ancestors.

    ctxlm ledger RUN                                 # segments and sources
    ctxlm ledger CHECKPOINT --document data/wiki:17  # when and how often a document was read
    ctxlm ledger CHECKPOINT --text FILE              # the same of the documents that have this text

The last two read the sample indexes of the run.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.console import aligned, counted, setup_logging

if TYPE_CHECKING:
    from ctxlm_ds.checkpoint.ledger import Segment

SHOWN = 6
"""Documents, positions and steps that a line has at most."""
Table = list[tuple[str, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint, or a run (its newest one)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--document", metavar="PREFIX:NUMBER", help="a dataset and the number of a document, from 0")
    which.add_argument("--text", type=Path, metavar="FILE", help="the text of a document")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    setup_logging()
    folder, segments = open_ledger(args.checkpoint)
    if args.document is None and args.text is None:
        shown: Any = [segment.model_dump() for segment in segments]
        lines = segment_lines(segments)
    else:
        shown = answers(folder, segments, args.document, args.text)
        lines = [line for answer in shown for line in answer_lines(answer)] or ["no document of a source has this text"]
    print(json.dumps(shown, indent=1) if args.json else "\n".join(lines))


def open_ledger(path: Path) -> tuple[Path, list[Segment]]:
    """Return the folder of a checkpoint and its segments. Raises CheckpointError if there is none, or no ledger."""
    from ctxlm_ds.checkpoint.folders import find_verified
    from ctxlm_ds.checkpoint.ledger import read_ledger
    from ctxlm_ds.checkpoint.manifest import find_changed, refuse_damage, verify
    from ctxlm_ds.errors import CheckpointError

    folder, manifest = find_verified(path, partial(verify, quick=True))
    small = [name for name in manifest.files if name.endswith((".json", ".yaml"))]
    refuse_damage(folder, find_changed(folder, manifest, small))
    if segments := read_ledger(folder):
        return folder, segments
    raise CheckpointError(f"{folder} has no ledger: the weights were imported, so what they have read is not known")


def segment_lines(segments: list[Segment]) -> list[str]:
    """Return a table of the segments, and one of their sources."""
    table: Table = [("segment", "run", "objective", "blend", "seed", "rows", "skipped", "rolled back")]
    sources: Table = [("segment", "source", "documents", "rows", "epochs", "tokens", "words")]
    for number, segment in enumerate(segments):
        lost = (f"{sum(end - start for start, end in ranges):,}" for ranges in (segment.skipped, segment.rolled_back))
        run, rows = segment.run + " (from state.json)" * segment.computed, f"{segment.first:,} to {segment.after - 1:,}"
        config = segment.config
        table.append(
            (str(number), run, config.objective.name, config.data.blend, str(config.training.seed), rows, *lost)
        )
        for source in segment.sources:
            (first, after), read = source["documents"], source["read"]
            rows, *sizes = ("-" if read[name] is None else f"{read[name]:,}" for name in ("rows", "tokens", "words"))
            sources.append(
                (str(number), source["path"], f"{first:,} to {after - 1:,}", rows, f"{read['epochs']:.2f}", *sizes)
            )
    began = segments[0].initialized_from
    unknown = [f"  began with the weights of {began}, of which it is not known what they have read"] if began else []
    return [*aligned(table, left=(0, 1, 2, 3)), *unknown, "", *aligned(sources, left=(0, 1))]


def answers(folder: Path, segments: list[Segment], document: str | None, text: Path | None) -> list[dict[str, Any]]:
    """Return when a document was read, or the documents of each source that have the text of a file."""
    from ctxlm_ds.checkpoint.ledger import document_reads, documents_of_text, places_of
    from ctxlm_ds.data.dataset.reader import IndexedDataset
    from ctxlm_ds.data.index.sentence_table import ends_with_eod
    from ctxlm_ds.errors import ConfigError, DataError
    from ctxlm_ds.tokenizers.load import load_tokenizer
    from ctxlm_ds.untrusted_json import read_text

    prefix, _, number = (document or "").rpartition(":")
    if text is None and not (prefix and number.isdecimal()):
        raise ConfigError(f"--document {document}: give a dataset and the number of a document: data/wiki:17")
    paths = [prefix] if text is None else dict.fromkeys(source["path"] for one in segments for source in one.sources)
    content, tokenizer = "" if text is None else read_text(text, DataError), load_tokenizer(folder / "tokenizer")
    found = []
    for dataset in map(IndexedDataset, paths):
        places_of(segments, dataset)
        documents = [int(number)] if text is None else documents_of_text(dataset, content, folder / "tokenizer")
        if not documents:
            continue
        reads = document_reads(segments, dataset, documents, tokenizer)
        listed = [read._asdict() | {"places": read.places.tolist()} for read in reads]
        tokens = int(dataset.document_tokens(documents[0], documents[0] + 1)[0])
        tokens -= ends_with_eod(dataset, tokenizer.sep_id)
        found.append({"dataset": dataset.prefix, "documents": documents, "tokens": tokens, "reads": listed})
    return found


def answer_lines(answer: dict[str, Any]) -> list[str]:
    """Return a line of whether and how often a document was read, and a table of when, by segment and epoch."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for read in answer["reads"]:
        part = "second segment" if read["second"] else "text"
        groups[str(read["segment"]), str(read["epoch"]), part].append(read)
    size, numbers = answer["tokens"], ", ".join(map(str, answer["documents"][:SHOWN]))
    title = f"{counted(len(answer['documents']), 'document')} of {answer['dataset']} ({numbers}), {size:,} tokens: "
    places = [place for read in answer["reads"] for place in read["places"]]
    if not places:
        return [title + "not read"]
    table: Table = [("segment", "epoch", "as", "rows", "tokens", "positions", "steps")]
    for key, reads in groups.items():
        covered = f"{len({place for read in reads for place in read['places']}):,} of {size:,}"
        when = (list(dict.fromkeys(read[name] for read in reads)) for name in ("position", "step"))
        rows, steps = (
            ", ".join("-" if one is None else f"{one:,}" for one in each[:SHOWN]) + ", …" * (len(each) > SHOWN)
            for each in when
        )
        table.append((*key, str(len({read["position"] for read in reads})), covered, rows, steps))
    times = f"{len(set(places)):,} of its tokens were read, {len(places) / size:.2f} times the document in all"
    return [title + times, *aligned(table, left=(0, 1, 2))]
