"""The default job: text every installation carries -> tokenizer -> dataset -> BERT -> Hugging Face -> filled masks.

Each step is one of the project's own commands, printed before it runs, and is not redone when its result is there.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ctxlm_ds import atomic
from ctxlm_ds.console import format_duration
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.preprocess.sentences import split_sentences
from ctxlm_ds.data.sources.corpus import Corpus
from ctxlm_ds.errors import CtxlmError, DataError

HELDOUT_EVERY = 10
NUM_FILLED_SENTENCES = 5


@dataclass(frozen=True, slots=True)
class QuickstartSettings:
    """What the default job works on and where."""

    output_dir: Path
    corpus: tuple[str, ...] = ()
    """The user's own files or globs; empty takes the docstrings."""
    recipe: str = "bert-docstrings"
    vocab_size: int = 8192
    num_ranks: int = 2
    overrides: tuple[str, ...] = ()


class Quickstart:
    """Runs the route step by step under one folder."""

    def __init__(self, settings: QuickstartSettings, tools_dir: Path) -> None:
        self.settings = settings
        self._tools = tools_dir
        self._out = settings.output_dir
        self._started_s = time.monotonic()

    def run(self) -> None:
        """The whole route.

        Raises:
            CtxlmError: a step failed; its own message stands above.
        """
        self._corpus()
        self._tokenizer()
        for split in ("train", "heldout"):
            self._dataset(split)
        self._pretrain()
        self._export()
        self._report()

    def _corpus(self) -> None:
        if (self._out / "corpus" / "train.jsonl").exists():
            return
        if self.settings.corpus:
            split_corpus(self.settings.corpus, self._out / "corpus")
        else:
            self._tool("extract_docstrings.py", "--output-dir", self._out / "corpus")

    def _tokenizer(self) -> None:
        if not (self._out / "tokenizer" / "tokenizer.json").exists():
            self._tool(
                "train_tokenizer.py", "--input", self._out / "corpus" / "train.jsonl", "--type", "wordpiece",
                "--vocab-size", self.settings.vocab_size, "--output-dir", self._out / "tokenizer",
            )  # fmt: skip

    def dataset_prefix(self, split: str) -> Path:
        """Prefix of a split's indexed dataset, named as Megatron names it."""
        return self._out / "data" / f"{split}_text_sentence"

    def _dataset(self, split: str) -> None:
        if not self.dataset_prefix(split).with_suffix(".json").exists():
            self._tool(
                "preprocess_data.py", "--input", self._out / "corpus" / f"{split}.jsonl", "--json-keys", "text",
                "--tokenizer", self._out / "tokenizer", "--output-prefix", self._out / "data" / split,
                "--split-sentences", "--workers", self.settings.num_ranks, "--overwrite",
            )  # fmt: skip

    def _pretrain(self) -> None:
        launcher = [Path(sys.executable).with_name("deepspeed"), "--num_gpus", self.settings.num_ranks]
        validation = f"data.validation=[{{name: heldout, path: {self.dataset_prefix('heldout')}}}]"
        self._command(
            *launcher, "--module", "ctxlm_ds.pretrain", "--config", self.settings.recipe, "--deepspeed_config", "zero1",
            "--set", f"run_dir={self._out / 'run'}", f"tokenizer.path={self._out / 'tokenizer'}",
            f"data.train=[{self.dataset_prefix('train')}]", validation, *self.settings.overrides,
        )  # fmt: skip

    def _export(self) -> None:
        places = ("--checkpoint", self._out / "run", "--output", self._out / "hf")
        self._tool("convert_checkpoint.py", "to-hf", *places, "--overwrite")

    def _report(self) -> None:
        loss = final_heldout_loss(self._out / "run" / "metrics.jsonl")
        unigram = unigram_loss(self.dataset_prefix("train"), self.dataset_prefix("heldout"))
        self._say("")
        self._say(f"held-out masked-LM loss      {loss:.3f} nats (perplexity {math.exp(loss):.0f})")
        self._say(f"unigram distribution's loss  {unigram:.3f} nats (perplexity {math.exp(unigram):.0f})")
        self._say("")
        self._say(f"masks in held-out sentences, filled by transformers' fill-mask pipeline with {self._out / 'hf'}:")
        for line in fill_masks(self._out / "hf", heldout_sentences(self._out / "corpus" / "heldout.jsonl")):
            self._say(line)
        self._say("")
        self._say(f"done in {format_duration(time.monotonic() - self._started_s)}; the model: {self._out / 'hf'}")

    def _tool(self, script: str, *arguments: object) -> None:
        self._command(sys.executable, self._tools / script, *arguments)

    def _command(self, *words: object) -> None:
        command = [_shown(word) for word in words]
        self._say("$ " + shlex.join(command))
        environment = dict(os.environ, TOKENIZERS_PARALLELISM="false")
        status = subprocess.run([str(word) for word in words], env=environment, check=False).returncode
        if status != 0:
            raise CtxlmError(f"the step above failed (exit status {status}); mend it and run the same command again")

    def _say(self, line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def _shown(word: object) -> str:
    """Paths below the working folder are shown (and may be typed) relative to it."""
    path = Path(str(word))
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else str(word)


def split_corpus(inputs: Sequence[str], output_dir: Path) -> None:
    """Write train.jsonl and heldout.jsonl; every tenth document is held out.

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
    """Masked-LM loss of the last held-out evaluation in metrics.jsonl."""
    losses = [
        line["eval/heldout/masked_lm_loss"]
        for line in map(json.loads, metrics.read_text().splitlines())
        if "eval/heldout/masked_lm_loss" in line
    ]
    return float(losses[-1])


def unigram_loss(train_prefix: Path, heldout_prefix: Path) -> float:
    """Cross-entropy in nats of held-out tokens under the training tokens' (add-one) unigram distribution."""
    train, heldout = IndexedDataset(train_prefix), IndexedDataset(heldout_prefix)
    size = int(max(train.tokens.max(), heldout.tokens.max())) + 1
    counts = np.bincount(train.tokens, minlength=size) + 1.0
    log_probabilities = np.log(counts / counts.sum())
    return float(-log_probabilities[heldout.tokens].mean())


def heldout_sentences(corpus: Path) -> list[tuple[str, str]]:
    """A few (sentence with one word cut out as `{}`, the word) from different held-out documents."""
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
    """What transformers' own pipeline puts in place of each cut word, with probabilities."""
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
