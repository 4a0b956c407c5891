"""Train the model of a BabyLM recipe on your copy of the corpus and write the folders of a submission.

Each step is one of the project's commands, printed before it runs. A step that is done does nothing, training resumes.
With --blimp a table compares the model with counts of its training text on minimal pairs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from ctxlm_ds.apps.demo.pretrain_default import CTXLM, SMALLEST_VOCABULARY, run_step
from ctxlm_ds.apps.init.start import preprocess_options
from ctxlm_ds.atomic import write_text
from ctxlm_ds.console import aligned, at_least, run_command, setup_logging
from ctxlm_ds.data.sources.types import DOCUMENT_HELP, text_format
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.registry import FAMILIES

RECIPE = "babylm-10m"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--corpus", nargs="+", required=True, metavar="FILE", help="files, globs, or a folder of files")
    add("--output-dir", type=Path, default=Path("runs/babylm"), help="default: runs/babylm")
    add("--recipe", default=RECIPE, help=f"a path or the name of a shipped recipe; default: {RECIPE}")
    add("--document", default="line", metavar="UNIT", help=f"{DOCUMENT_HELP}; here line if not given")
    add("--type", help="type of the tokenizer; default: of a causal model bpe with <s> before each document, else the "
        "family's")  # fmt: skip
    add("--vocab-size", type=at_least(300), help=f"default: model.vocab_size, or {SMALLEST_VOCABULARY:,}")
    add("--prepend-bos", action="store_true", help="begin each document with the tokenizer's <s>")
    add("--ranks", type=at_least(1), default=1, help="ranks that train (default: one)")
    add("--blimp", type=Path, help="file or folder of minimal pairs (docs/minimal-pairs.md)")
    add("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="override settings")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    arguments = build_parser().parse_args(argv)
    setup_logging()
    config = load_config(
        arguments.recipe, arguments.set, arguments.ranks
    )  # mistakes are reported before the first step
    text_format(arguments.document)
    if arguments.blimp is not None:
        from ctxlm_ds.apps.evaluate.pairs import read_pairs

        read_pairs(arguments.blimp)
    folder, inputs = arguments.output_dir.absolute(), expand(arguments.corpus)
    tokenizer, prefix, run_dir, output = (folder / name for name in ("tokenizer", "data", "run", "submission"))
    read = ["--input", *inputs, "--document", arguments.document]
    begins = arguments.type is None and config.data.ends_documents
    kind = "bpe" if begins else arguments.type or FAMILIES.get(config.model.family).tokenizer
    size = arguments.vocab_size or config.model.vocab_size or SMALLEST_VOCABULARY
    words = ["--type", kind, "--vocab-size", size, *(["--add-prefix-space"] if begins else [])]
    run_step(CTXLM, "tokenizer", *read, *words, "--output-dir", tokenizer)
    options = [*preprocess_options(config.data), *(["--prepend-bos"] if begins or arguments.prepend_bos else [])]
    run_step(CTXLM, "preprocess", *read, "--tokenizer", tokenizer, "--output-prefix", prefix, *options)
    form = "sentence" if config.data.by_sentence else "document"
    settings = [f"run_dir={run_dir}", f"tokenizer.path={tokenizer}", f"data.train=[{prefix}_text_{form}]"]
    ranks = ["--ranks", arguments.ranks] if arguments.ranks > 1 else []
    run_step(CTXLM, "pretrain", "--config", arguments.recipe, *ranks, "--set", *settings, *arguments.set)
    run_step(CTXLM, "convert", "babylm", run_dir, "--output", output)
    if arguments.blimp is not None:
        rows = pair_rows(output / "main", arguments.blimp, inputs, arguments.document)
        write_text(folder / "pairs.json", json.dumps(rows, indent=1) + "\n")
        print("\n".join(aligned(rows)))


def expand(corpus: Iterable[str]) -> list[str]:
    """Return inputs in which each folder is replaced by its files, sorted by name."""
    paths = [(one, sorted(Path(one).iterdir()) if Path(one).is_dir() else [one]) for one in corpus]
    return [str(file) for _, files in paths for file in files]


def pair_rows(model: Path, pairs: Path, inputs: Sequence[str], document: str) -> list[tuple[str, ...]]:
    """Return a table: pairs that a model and counts of words get right, ties half, and the share of ties.

    `known` are the pairs whose words all occur at least twice in the text.
    """
    from ctxlm_ds.apps.evaluate.pairs import accuracies, mean_accuracy, outcomes_of, read_pairs, score_pairs
    from ctxlm_ds.apps.evaluate.scorers import open_scorer
    from ctxlm_ds.apps.evaluate.word_scorers import TrainingWords, WordScorer
    from ctxlm_ds.data.sources.corpus import Corpus

    every, words = read_pairs(pairs), TrainingWords(Corpus(inputs, document=document))
    known = set(words.known_pairs(every))
    is_known = [pair in known for pair in every]
    rows: list[tuple[str, ...]] = [("scorer", "paradigms", "ties", "phenomena, known pairs", "pairs", "known")]
    for name, scorer in (("model", open_scorer(model)), *((way, WordScorer(words, way)) for way in WordScorer.ways)):
        outcomes = outcomes_of(score_pairs(scorer, every))
        paradigms = mean_accuracy(accuracies(outcomes, [pair.paradigm for pair in every]).values())
        phenomena = accuracies(outcomes[is_known], [pair.phenomenon for pair in every if pair in known])
        of_known = f"{mean_accuracy(phenomena.values()).value:.2%}" if phenomena else "-"
        rows.append(
            (name, f"{paradigms.value:.2%}", f"{paradigms.ties:.2%}", of_known, f"{len(every):,}", f"{len(known):,}")
        )
    return rows


if __name__ == "__main__":
    run_command(main)
