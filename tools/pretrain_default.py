"""Run the default job (`make pretrain`): raw text to a Hugging Face model that fills masks, in minutes on a CPU.

Each step is one of the project's commands, printed before it runs. Steps whose result exists are skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ctxlm_ds import atomic
from ctxlm_ds.console import format_duration, run_command, setup_logging
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.preprocess.sentences import split_sentences
from ctxlm_ds.data.sources.corpus import Corpus
from ctxlm_ds.errors import CtxlmError, DataError
from ctxlm_ds.recipe.load import load_config

ROOT = Path(__file__).resolve().parent.parent
HELDOUT_EVERY = 10
NUM_FILLED_SENTENCES = 5


def main() -> None:
    """Parse the command line and run every step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", nargs="+", default=[], help="your text (files or globs) instead of the docstrings")
    parser.add_argument("--output-dir", type=Path, help="default: runs/default, with --corpus runs/NAME-OF-CORPUS")
    parser.add_argument("--recipe", default="bert-docstrings", help="recipe: a path or the name of a shipped one")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=2, help="DeepSpeed ranks")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="override settings")
    arguments = parser.parse_args()
    setup_logging()
    load_config(arguments.recipe, arguments.set, arguments.ranks)  # mistakes are reported before the first step
    started_s = time.monotonic()
    name = Path(arguments.corpus[0]).name.split(".")[0].strip("*") or "corpus" if arguments.corpus else "default"
    folder = (arguments.output_dir or ROOT / "runs" / name).absolute()
    make_datasets(arguments, folder)
    pretrain(arguments, folder)
    run_tool("convert_checkpoint.py", "to-hf", "--checkpoint", folder / "run", "--output", folder / "hf", "--overwrite")
    report(folder)
    say(f"done in {format_duration(time.monotonic() - started_s)}; the model: {folder / 'hf'}")


def dataset_prefix(folder: Path, split: str) -> Path:
    """Return the prefix of a split's indexed dataset, as Megatron names it."""
    return folder / "data" / f"{split}_text_sentence"


def make_datasets(arguments: argparse.Namespace, folder: Path) -> None:
    """Make corpus, tokenizer and datasets if they are missing."""
    corpus = folder / "corpus"
    if not (corpus / "train.jsonl").exists():
        if arguments.corpus:
            split_corpus(arguments.corpus, corpus)
        else:
            run_tool("extract_docstrings.py", "--output-dir", corpus)
    if not (folder / "tokenizer" / "tokenizer.json").exists():
        run_tool(
            "train_tokenizer.py", "--input", corpus / "train.jsonl", "--type", "wordpiece",
            "--vocab-size", arguments.vocab_size, "--output-dir", folder / "tokenizer",
        )  # fmt: skip
    for split in ("train", "heldout"):
        if not dataset_prefix(folder, split).with_suffix(".json").exists():
            run_tool(
                "preprocess_data.py", "--input", corpus / f"{split}.jsonl", "--json-keys", "text",
                "--tokenizer", folder / "tokenizer", "--output-prefix", folder / "data" / split,
                "--split-sentences", "--workers", arguments.ranks, "--overwrite",
            )  # fmt: skip


def pretrain(arguments: argparse.Namespace, folder: Path) -> None:
    """Train under the deepspeed launcher."""
    run(
        Path(sys.executable).with_name("deepspeed"), "--num_gpus", arguments.ranks,
        "--module", "ctxlm_ds.pretrain", "--config", arguments.recipe, "--deepspeed_config", "zero1",
        "--set", f"run_dir={folder / 'run'}", f"tokenizer.path={folder / 'tokenizer'}",
        f"data.train=[{dataset_prefix(folder, 'train')}]",
        f"data.validation=[{{name: heldout, path: {dataset_prefix(folder, 'heldout')}}}]", *arguments.set,
    )  # fmt: skip


def report(folder: Path) -> None:
    """Print the held-out loss next to that of the unigram distribution, and some filled masks."""
    loss = final_heldout_loss(folder / "run" / "metrics.jsonl")
    unigram = unigram_loss(dataset_prefix(folder, "train"), dataset_prefix(folder, "heldout"))
    say(f"\nheld-out masked-LM loss      {loss:.3f} nats (perplexity {math.exp(loss):.0f})")
    say(f"unigram distribution's loss  {unigram:.3f} nats (perplexity {math.exp(unigram):.0f})")
    say(f"\nmasks in held-out sentences, filled by transformers' fill-mask pipeline with {folder / 'hf'}:")
    for line in fill_masks(folder / "hf", heldout_sentences(folder / "corpus" / "heldout.jsonl")):
        say(line)
    say("")


def run_tool(script: str, *arguments: object) -> None:
    """Run one of the scripts in tools/."""
    run(sys.executable, ROOT / "tools" / script, *arguments)


def run(*words: object) -> None:
    """Print a command and run it.

    Raises:
        CtxlmError: it failed; its error message is above.
    """
    say("$ " + shlex.join(_relative(word) for word in words))
    environment = dict(os.environ, TOKENIZERS_PARALLELISM="false")
    status = subprocess.run([str(word) for word in words], env=environment, check=False).returncode
    if status != 0:
        raise CtxlmError(f"the step above failed (exit status {status}); fix it and run the same command again")


def say(line: str) -> None:
    """Print a line before the next command writes."""
    print(line, flush=True)


def _relative(word: object) -> str:
    """Return a word of a command, with paths below the working folder relative to it."""
    path = Path(str(word))
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else str(word)


def split_corpus(inputs: Sequence[str], output_dir: Path) -> None:
    """Write train.jsonl and heldout.jsonl, with every tenth document held out.

    Raises:
        DataError: too few documents to hold any out.
    """
    with atomic.output_folder(output_dir) as folder:
        with open(folder / "train.jsonl", "w") as train, open(folder / "heldout.jsonl", "w") as heldout:
            count = 0
            for text in Corpus(inputs):
                count += 1
                target = heldout if count % HELDOUT_EVERY == 0 else train
                target.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        if count < HELDOUT_EVERY:
            raise DataError(
                f"{' '.join(inputs)} holds {count} documents; at least {HELDOUT_EVERY} are needed to hold one out (in "
                "plain text a blank line ends a document)"
            )


def final_heldout_loss(metrics: Path) -> float:
    """Return the masked-LM loss of the last held-out evaluation in metrics.jsonl."""
    lines = map(json.loads, metrics.read_text().splitlines())
    return float([line["eval/heldout/masked_lm_loss"] for line in lines if "eval/heldout/masked_lm_loss" in line][-1])


def unigram_loss(train_prefix: Path, heldout_prefix: Path) -> float:
    """Return the cross entropy in nats of held-out tokens under the (add-one) unigram distribution of the training."""
    train, heldout = IndexedDataset(train_prefix), IndexedDataset(heldout_prefix)
    size = int(max(train.tokens.max(), heldout.tokens.max())) + 1
    counts = np.bincount(train.tokens, minlength=size) + 1.0
    log_probabilities = np.log(counts / counts.sum())
    return float(-log_probabilities[heldout.tokens].mean())


def heldout_sentences(corpus: Path) -> list[tuple[str, str]]:
    """Return a few pairs (sentence with one word replaced by `{}`, the word) from different documents."""
    found: list[tuple[str, str]] = []
    for line in corpus.read_text(encoding="utf-8").splitlines():
        for sentence in split_sentences(json.loads(line)["text"]):
            words = sentence.split()
            middle = len(words) // 2
            if 8 <= len(words) <= 16 and words[middle].isalpha() and len(words[middle]) > 2 and "{" not in sentence:
                found.append((" ".join([*words[:middle], "{}", *words[middle + 1 :]]), words[middle].lower()))
                break
        if len(found) == NUM_FILLED_SENTENCES:
            break
    return found


def fill_masks(model_dir: Path, sentences: Sequence[tuple[str, str]]) -> list[str]:
    """Return what transformers' pipeline predicts for each removed word, with probabilities."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    pipeline = transformers.pipeline("fill-mask", model=str(model_dir), top_k=5)
    lines = []
    for text, word in sentences:
        guesses = pipeline(text.replace("{}", pipeline.tokenizer.mask_token))
        shown = ", ".join(f"{guess['token_str'].strip()} {guess['score']:.2f}" for guess in guesses)
        lines += [f"  {text.replace('{}', '[MASK]')}", f"    was: {word}   filled: {shown}"]
    return lines


if __name__ == "__main__":
    run_command(main)
