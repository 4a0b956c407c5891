"""Measure what a new vocabulary gives a model in another language: bits per character over tokens (docs/studies.md).

The model is continued on text with its old tokenizer, and with a new one whose rows are made by each method of `ctxlm
convert tokenizer`. Each step is one of the project's commands, printed before it runs; repeated, it continues.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from ctxlm_ds.apps.demo.pretrain_default import CTXLM, run_step
from ctxlm_ds.atomic import write_text
from ctxlm_ds.console import aligned, at_least, run_command, setup_logging
from ctxlm_ds.process.run_files import METRICS_NAME, read_lines
from ctxlm_ds.recipe.yaml_source import read_yaml, write_yaml

LOSS = "eval/heldout/masked_lm_loss"
METHODS = ("pieces", "static", "random")


def prepare(folder: Path, tokenizer: Path, texts: dict[str, Path]) -> float:
    """Encode the texts in a folder; return the characters of a token of the held-out text."""
    for name, text in texts.items():
        run_step(CTXLM, "preprocess", "--input", text, "--tokenizer", tokenizer, "--output-prefix", folder / name,
                 "--document", "line", "--split-sentences")  # fmt: skip
    made = json.loads((folder / "heldout_text_sentence.json").read_text(encoding="utf-8"))
    heldout = texts["heldout"].read_text(encoding="utf-8")
    return float(len(heldout.replace("\n", "")) / made["tokens"])


def recipe(folder: Path, weights: Path, steps: int) -> Path:
    """Write the recipe of a run on the texts of a folder that begins with these weights."""
    model = read_yaml((weights / "config.yaml").read_text(encoding="utf-8"), "config.yaml").data["model"]
    prefixes = {name: str(folder / f"{name}_text_sentence") for name in ("train", "heldout")}
    settings = {
        "extends": "bert-laptop",
        "model": {**model, "vocab_size": None},
        "tokenizer": {"path": str(weights / "tokenizer")},
        "initialize_from": str(weights),
        "data": {
            "sample_format": "doc_sentences", "packing": True, "train": [prefixes["train"]],
            "validation": [{"name": "heldout", "path": prefixes["heldout"]}],
        },
        "objective": {"name": "masked_lm", "masking": "dynamic"},
        "optimizer": {"learning_rate": 3e-4},
        "training": {"global_batch_size": 16, "micro_batch_size": 16, "max_steps": steps},
        "evaluation": {"interval_steps": steps // 3, "max_rows": 512},
        "checkpoint": {"interval_steps": steps, "interval_minutes": None, "keep_last": 1},
        "logging": {"interval_steps": 50, "tensorboard": False},
    }  # fmt: skip
    path = weights.with_name(f"{weights.name}.yaml")
    write_text(path, write_yaml(settings))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="Hugging Face folder of a BERT")
    add("--train", type=Path, required=True, metavar="FILE", help="text of the other language, a document a line")
    add("--heldout", type=Path, required=True, metavar="FILE", help="held-out text")
    add("--vocab-size", type=at_least(300), default=8192, help="size of the new vocabulary (8,192)")
    add("--steps", type=at_least(3), default=300, help="steps of 16 rows of 128 (300)")
    add("--output-dir", type=Path, required=True, metavar="DIR", help="folder of the runs")
    args = parser.parse_args()
    setup_logging()
    folder, texts = args.output_dir.absolute(), {"train": args.train.absolute(), "heldout": args.heldout.absolute()}
    old, new = folder / "old", folder / "tokenizer"
    if not old.exists():
        run_step(CTXLM, "convert", "from-hf", "--new-head", "--model", args.model, "--output", old)
    run_step(CTXLM, "tokenizer", "--input", texts["train"], "--document", "line", "--type", "wordpiece",
             "--vocab-size", args.vocab_size, "--output-dir", new)  # fmt: skip
    for method in METHODS:
        corpus = ["--corpus", texts["train"]] if method == "static" else []
        if not (folder / method).exists():
            given = ["--checkpoint", old, "--tokenizer", new, "--method", method, *corpus]
            run_step(CTXLM, "convert", "tokenizer", *given, "--output", folder / method)
    characters = {"old": prepare(folder / "data-old", old / "tokenizer", texts)}
    characters |= dict.fromkeys(METHODS, prepare(folder / "data-new", new, texts))
    rows: list[tuple[str, ...]] = [("rows", "characters a token", "at the start", "third", "two thirds", "end")]
    for name, each in characters.items():
        run_dir = folder / f"run-{name}"
        path = recipe(folder / ("data-old" if name == "old" else "data-new"), folder / name, args.steps)
        run_step(CTXLM, "pretrain", "--config", path, "--set", f"run_dir={run_dir}")
        losses = [float(line[LOSS]) for line in read_lines(run_dir / METRICS_NAME) if LOSS in line]
        rows.append((name, f"{each:.2f}", *(f"{loss / each / math.log(2):.3f}" for loss in losses)))
    print("\n".join(aligned(rows)))


if __name__ == "__main__":
    run_command(main)
