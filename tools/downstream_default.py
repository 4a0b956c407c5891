"""Run the default downstream job (`make downstream`): raw text to a table of scores, in minutes on a CPU.

The model of `make pretrain` is fine-tuned on two tasks made of the same corpus: the package that a sentence documents,
and whether a sentence follows another. Development sentences come from modules that were held out of pretraining. The
same model with random weights shows what pretraining is worth. Steps whose result exists are skipped.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path

from ctxlm_ds.apps.demo.pretrain_default import CTXLM, run_step
from ctxlm_ds.atomic import output_folder, write_text
from ctxlm_ds.console import at_least, run_command, setup_logging
from ctxlm_ds.data.preprocess.sentences import split_sentences
from ctxlm_ds.errors import DataError
from ctxlm_ds.installed import checkout
from ctxlm_ds.recipe.yaml_source import write_yaml

PACKAGES = 6
WORDS = range(6, 30)
"""Words of a sentence."""
SIZES = {"train": 3000, "dev": 600}
CORPUS = {"train": "train.jsonl", "dev": "heldout.jsonl"}
SEED = 1
RATE = 5e-4
"""Learning rate of small models; published ones take 2e-5 to 5e-5."""
STARTS: dict[str, list[str]] = {"pretrained": [], "random": ["--random"]}
"""Names in the table, and further options."""
Row = tuple[str, ...]
Documents = Sequence[tuple[str, list[str]]]
"""Package and sentences of each module."""


def main() -> None:
    """Parse the command line and run every step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--family", help="as of make pretrain")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="default: runs/default[-FAMILY]")
    parser.add_argument("--seeds", type=at_least(1), default=3, help="runs of each model and task")
    parser.add_argument("--epochs", type=at_least(1), default=3)
    arguments = parser.parse_args()
    setup_logging()
    family = [] if arguments.family is None else ["--family", arguments.family]
    source = (arguments.folder or (checkout() or Path.cwd()) / "runs" / "-".join(["default", *family[1:]])).absolute()
    if not (source / "hf" / "config.json").is_file():
        run_step(CTXLM, "demo", *family, "--output-dir", source)
    folder = source / "downstream"
    write_tasks(source / "corpus", folder / "tasks")
    tasks = sorted((folder / "tasks").glob("*.yaml"))
    for task, start in product(tasks, STARTS):
        run_step(
            CTXLM, "finetune", "--task", task, "--model", source / "hf", "--data", task.with_suffix(""),
            "--output", folder / task.stem / start, "--seeds", *range(1, arguments.seeds + 1),
            "--learning-rates", RATE, "--epochs", arguments.epochs, *STARTS[start],
        )  # fmt: skip
    outputs = (f"{start}={folder / task.stem / start}" for task, start in product(tasks, STARTS))
    run_step(CTXLM, "compare", *outputs, "--output", folder)
    print(f"reports: {folder}/report.html, {folder}/TASK/*/report.html")


def write_tasks(corpus: Path, folder: Path) -> None:
    """Write descriptions and files of both tasks, unless they exist."""
    if folder.exists():
        return
    documents = {part: list(read_documents(corpus / name)) for part, name in CORPUS.items()}
    sizes = Counter[str]()
    for package, sentences in documents["train"]:
        sizes[package] += len(sentences)
    names = sorted(sizes, key=lambda name: (-sizes[name], name))[:PACKAGES]
    tasks: dict[str, tuple[str, Callable[[Documents], list[Row]]]] = {
        "package": ("the package that a sentence documents", partial(package_rows, names=names)),
        "follows": ("whether a sentence follows another", following_rows),
    }
    with output_folder(folder) as unfinished:
        for task, (title, rows_of) in tasks.items():
            for part, size in SIZES.items():
                rows = rows_of(documents[part])
                random.Random(SEED).shuffle(rows)
                lines = ["\t".join(("text", "pair", "label")), *map("\t".join, rows[:size])]
                write_text(unfinished / task / f"{part}.tsv", "\n".join(lines) + "\n")
            columns = {"text": "text", "label": "label"} | ({"pair": "pair"} if task == "follows" else {})
            write_text(unfinished / f"{task}.yaml", write_yaml({
                "title": title, "kind": "classification", "train": "train.tsv", "dev": "dev.tsv", "format": "tsv",
                "columns": columns, "metrics": ["accuracy"], "max_length": 64,
            }))  # fmt: skip


def read_documents(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield package and sentences of each module of the corpus."""
    if not path.is_file():
        raise DataError(f"{path}: the corpus of make pretrain is missing; remove {path.parent.parent} and start again")
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        document = json.loads(line)
        if "title" not in document:
            raise DataError(f"{path}: no package names; the tasks need the corpus of make pretrain")
        parts = [part for paragraph in document["text"].split("\n") for part in split_sentences(paragraph)]
        words = [part.split() for part in parts]
        yield document["title"].split(".")[0], [" ".join(one) for one in words if len(one) in WORDS]


def package_rows(documents: Documents, names: Sequence[str]) -> list[Row]:
    """Return (sentence, empty, package), as many of each package."""
    found: dict[str, list[Row]] = {name: [] for name in names}
    for package, sentences in documents:
        if package in found:
            # The name of a package would give it away.
            found[package] += [(one, "", package) for one in sentences if package not in one.lower()]
    generator = random.Random(SEED)
    least = min(map(len, found.values()))
    return [row for rows in found.values() for row in generator.sample(rows, least)]


def following_rows(documents: Documents) -> list[Row]:
    """Return (sentence, another, label): the next one of the module, or one of another module of the same package."""
    generator = random.Random(SEED)
    modules: dict[str, list[list[str]]] = {}
    for package, sentences in documents:
        if sentences:
            modules.setdefault(package, []).append(sentences)
    rows: list[Row] = []
    for several in modules.values():
        for at, sentences in enumerate(several):
            others = several[:at] + several[at + 1 :]
            for first, second in pairwise(sentences):
                if generator.random() < 0.5:
                    rows.append((first, second, "follows"))
                elif others:
                    rows.append((first, generator.choice(generator.choice(others)), "another"))
    return rows


if __name__ == "__main__":
    run_command(main)
