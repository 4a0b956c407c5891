"""Run the default job (`make pretrain`): raw text to a Hugging Face model that fills masks, in minutes on a CPU.

`make pretrain FAMILY=gpt2` trains another family by its recipe, which also decides what the model does at the end. Each
step is one of the project's commands, printed before it runs. Steps whose result exists are skipped.
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds import atomic
from ctxlm_ds.console import format_duration, setup_logging
from ctxlm_ds.data.preprocess.sentences import split_sentences
from ctxlm_ds.errors import CtxlmError, DataError
from ctxlm_ds.installed import checkout
from ctxlm_ds.objectives.encoder_decoder import EncoderDecoder
from ctxlm_ds.process.launch import free_port
from ctxlm_ds.process.run_files import METRICS_NAME, read_lines
from ctxlm_ds.recipe.load import load_config, shipped_recipes
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.sections import ObjectiveSection
from ctxlm_ds.registry import FAMILIES, FORMATS, OBJECTIVES, load_object

if TYPE_CHECKING:
    from ctxlm_ds.tokenizers.base import Tokenizer

Rows = list[tuple[str, str, str]]
SUFFIX = "-docstrings"
"""Recipes of this job are called FAMILY-docstrings."""
DEFAULT_FAMILY = "bert-docstrings".removesuffix(SUFFIX)
HELDOUT = "heldout"
HELDOUT_EVERY = 10
NUM_SENTENCES = 5
NUM_GUESSES = 5
SMALLEST_VOCABULARY = 8192
SPAN = "<extra_id_0>"
"""T5's first sentinel, in the place of a gap."""
SPAN_TOKENS = 12
MASK = "[MASK]"


def main() -> None:
    """Parse the command line and run every step."""
    families = [name.removesuffix(SUFFIX) for name in shipped_recipes() if name.endswith(SUFFIX)]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--family", choices=families, default=DEFAULT_FAMILY, help=f"default: {DEFAULT_FAMILY}")
    parser.add_argument("--corpus", nargs="+", default=[], help="your text (files or globs) instead of the docstrings")
    parser.add_argument("--output-dir", type=Path, help="default: runs/default, with --corpus runs/NAME-OF-CORPUS")
    parser.add_argument("--recipe", help=f"a path or the name of a shipped recipe; default: FAMILY{SUFFIX}")
    parser.add_argument("--vocab-size", type=int, help="default: the recipe's")
    parser.add_argument("--ranks", type=int, default=2, help="DeepSpeed ranks")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="override settings")
    arguments = parser.parse_args()
    setup_logging()
    recipe = arguments.recipe or arguments.family + SUFFIX
    config = load_config(recipe, arguments.set, arguments.ranks)  # mistakes are reported before the first step
    started_s = time.monotonic()
    job = Job(arguments.output_dir or default_folder(arguments.corpus, arguments.family), config)
    job.make_datasets(arguments.corpus, arguments.vocab_size, arguments.ranks)
    job.pretrain(recipe, arguments.set, arguments.ranks)
    job.run_command("convert", "to-hf", "--checkpoint", job.run_dir, "--output", job.model, "--overwrite")
    job.run_command("report", job.run_dir)
    show_results(job)
    say(f"done in {format_duration(time.monotonic() - started_s)}; the model: {job.model}")


def default_folder(corpus: Sequence[str], family: str) -> Path:
    """Return runs/default or runs/NAME-OF-CORPUS, with the family at the end if it is another one."""
    name = Path(corpus[0]).name.split(".")[0].strip("*") or "corpus" if corpus else "default"
    return (checkout() or Path.cwd()) / "runs" / (name if family == DEFAULT_FAMILY else f"{name}-{family}")


@dataclass
class Job:
    """The folder of the job, and the commands that fill it."""

    folder: Path
    config: RunConfig

    def __post_init__(self) -> None:
        self.folder = self.folder.absolute()
        self.corpus, self.tokenizer = self.folder / "corpus", self.folder / "tokenizer"
        self.run_dir, self.model = self.folder / "run", self.folder / "hf"

    def dataset(self, split: str) -> Path:
        """Return the prefix of a split's indexed dataset, as Megatron names it."""
        form = "sentence" if self.config.data.by_sentence else "document"
        return self.folder / "data" / f"{split}_text_{form}"

    def make_datasets(self, inputs: Sequence[str], vocab_size: int | None, workers: int) -> None:
        """Make corpus, tokenizer and datasets if they are missing, as family and sample format need them."""
        if not inputs:
            done = (self.corpus / "train.jsonl").exists()
            self.run_command("docstrings", "--output-dir", self.corpus, done=done)
        elif not (self.corpus / "train.jsonl").exists():
            split_corpus(inputs, self.corpus)
        self.run_command(
            "tokenizer", "--input", self.corpus / "train.jsonl",
            "--type", FAMILIES.get(self.config.model.family).tokenizer,
            "--vocab-size", vocab_size or self.config.model.vocab_size or SMALLEST_VOCABULARY,
            "--output-dir", self.tokenizer, done=(self.tokenizer / "tokenizer.json").exists(),
        )  # fmt: skip
        for split in ("train", HELDOUT):
            self.run_command(
                "preprocess", "--input", self.corpus / f"{split}.jsonl", "--json-keys", "text",
                "--tokenizer", self.tokenizer, "--output-prefix", self.folder / "data" / split,
                *self._form(), "--workers", workers, "--overwrite",
                done=self.dataset(split).with_suffix(".json").exists(),
            )  # fmt: skip

    def _form(self) -> list[str]:
        """Return the options of ctxlm preprocess that the sample format needs."""
        from ctxlm_ds.apps.init.start import preprocess_options
        from ctxlm_ds.tokenizers.load import load_tokenizer

        data = self.config.data
        joins = data.by_sentence and FORMATS.get(data.sample_format)().joins_sentences(data)
        space = joins and bool(load_tokenizer(self.tokenizer).sentence_prefix)
        return [*preprocess_options(data), *(["--leading-space"] if space else [])]

    def pretrain(self, recipe: str, overrides: Sequence[str], ranks: int) -> None:
        """Train under the deepspeed launcher."""
        run_step(
            # Not the launcher's usual port: another job may run on this machine.
            Path(sys.executable).with_name("deepspeed"), "--num_gpus", ranks, "--master_port", free_port(),
            "--module", "ctxlm_ds.pretrain", "--config", recipe, "--deepspeed_config", "zero1",
            "--set", f"run_dir={self.run_dir}", f"tokenizer.path={self.tokenizer}",
            f"data.train=[{self.dataset('train')}]",
            f"data.validation=[{{name: {HELDOUT}, path: {self.dataset(HELDOUT)}}}]", *overrides,
        )  # fmt: skip

    def run_command(self, name: str, *arguments: object, done: bool = False) -> None:
        """Run a command of ctxlm, unless it is done."""
        if not done:
            run_step(Path(sys.executable).with_name("ctxlm"), name, *arguments)


def run_step(*words: object) -> None:
    """Print and run a command.

    Raises:
        CtxlmError: it failed; its error message is above.
    """
    say(f"$ {shlex.join(_relative(word) for word in words)}")
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


def show_results(job: Job) -> None:
    """Print the held-out figures next to those of the unigram distribution, and what the model does."""
    from ctxlm_ds.tokenizers.load import load_tokenizer

    term = OBJECTIVES.get(job.config.objective.name).terms[0].name
    title = term.replace("_lm", "-LM").replace("_", " ")
    names = [f"eval/{HELDOUT}/{term}_{figure}" for figure in ("loss", "accuracy")]
    model = [record for record in read_lines(job.run_dir / METRICS_NAME) if names[0] in record][-1]
    figures = {
        f"held-out {title} loss": (model[names[0]], model[names[1]]), "unigram distribution's loss": unigram_of(job)
    }  # fmt: skip
    for name, (loss, accuracy) in figures.items():
        say(f"{name:<28} {loss:.3f} nats (perplexity {math.exp(loss):.0f}), top-1 accuracy {accuracy:.1%}")
    folder, task = demonstrated_model(job.config.model.family, job.config.objective)
    shown, rows = DEMONSTRATIONS[task](job, job.model / folder, load_tokenizer(job.tokenizer))
    say(f"\n{shown}:")
    for text, truth, found in rows:
        say(f"  {text}\n    was: {truth}   {found}")
    say("")


def split_corpus(inputs: Sequence[str], output_dir: Path) -> None:
    """Write train.jsonl and heldout.jsonl, with every tenth document held out.

    Raises:
        DataError: too few documents to hold any out.
    """
    from ctxlm_ds.data.sources.corpus import Corpus

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


def unigram_of(job: Job) -> tuple[float, float]:
    """Return `unigram_figures` of what the model predicts: if it has targets, of all their tokens, sentinels too."""
    if not issubclass(OBJECTIVES.get(job.config.objective.name), EncoderDecoder):
        from ctxlm_ds.data.stream.held_out import unigram_figures

        return unigram_figures(job.dataset("train"), job.dataset(HELDOUT))
    from ctxlm_ds.apps.evaluate.targets import Targets

    every, _ = Targets.of(load_config(job.run_dir / "config.yaml")).unigram_figures()
    return every.loss, every.accuracy


def demonstrated_model(family: str, objective: ObjectiveSection) -> tuple[str, str]:
    """Return the folder of an export that holds a language model, and its task in transformers.

    Raises:
        CtxlmError: the family has none.
    """
    export = load_object(FAMILIES.get(family).export)
    outputs = OBJECTIVES.get(objective.name)(objective).outputs
    for part in export.models():
        card = part.card(part.shared_outputs(outputs), "")
        task = card.task or card.tag
        if task in DEMONSTRATIONS:
            return part.folder, task
    raise CtxlmError(f"model.family {family}: no task of transformers shows what it predicts")


def fill_masks(job: Job, model: Path, tokenizer: Tokenizer) -> tuple[str, Rows]:
    """Fill a mask in held-out sentences, next to the most frequent tokens."""

    def guesses(words: Iterable[str], shares: Iterable[float]) -> str:
        return ", ".join(f"{word.strip()} {share:.2f}" for word, share in zip(words, shares, strict=True))

    from ctxlm_ds.data.stream.held_out import unigram

    pipeline = quiet_transformers().pipeline("fill-mask", model=str(model), top_k=NUM_GUESSES)
    rows = []
    sentences = heldout_sentences(job.corpus / "heldout.jsonl", lambda word: len(encode_next(tokenizer, word)) == 1)
    for text, word in sentences:
        found = pipeline(text.replace("{}", pipeline.tokenizer.mask_token))
        filled = guesses([guess["token_str"] for guess in found], [guess["score"] for guess in found])
        rows.append((text.replace("{}", MASK), word, f"filled: {filled}"))
    shares = unigram(job.dataset("train"))
    frequent = (-shares).argsort()[:NUM_GUESSES]
    always = guesses([tokenizer.decode([int(token)]) for token in frequent], shares[frequent].tolist())
    return f"masks in held-out sentences (by frequency alone, every one would be filled with {always})", rows


def continue_texts(job: Job, model: Path, tokenizer: Tokenizer) -> tuple[str, Rows]:
    """Continue the first half of held-out sentences with the most probable tokens."""
    pipeline = quiet_transformers().pipeline("text-generation", model=str(model))
    rows = []
    for text, word in heldout_sentences(job.corpus / "heldout.jsonl"):
        prompt, rest = text.split(" {}")
        length = len(encode_next(tokenizer, f"{word}{rest}"))
        written = pipeline(prompt, max_new_tokens=length, do_sample=False, return_full_text=False)
        continued = " ".join(written[0]["generated_text"].split())
        rows.append((f"{prompt} …", f"{word}{rest}", f"continued: {continued}"))
    return "held-out sentences, continued from their first half", rows


def fill_spans(job: Job, model: Path, tokenizer: Tokenizer) -> tuple[str, Rows]:
    """Fill a gap in held-out sentences with the most probable tokens of a decoder."""
    transformers = quiet_transformers()
    writer = transformers.AutoModelForSeq2SeqLM.from_pretrained(model).eval()
    loaded = transformers.AutoTokenizer.from_pretrained(model)
    has_sentinels = tokenizer.token_to_id(SPAN) is not None
    gap = SPAN if has_sentinels else loaded.mask_token
    rows = []
    for text, word in heldout_sentences(job.corpus / "heldout.jsonl"):
        ids = loaded(text.replace("{}", gap), return_tensors="pt").input_ids
        most = SPAN_TOKENS + (0 if has_sentinels else ids.shape[1])
        (tokens,) = writer.generate(ids, max_new_tokens=most, do_sample=False)
        if has_sentinels:
            found = loaded.decode(tokens).partition(SPAN)[2].partition("<")[0]
        else:
            found = words_in_gap(text, loaded.decode(tokens, skip_special_tokens=True))
        rows.append((text.replace("{}", MASK), word, f"filled: {' '.join(found.split())}"))
    return "gaps in held-out sentences", rows


def words_in_gap(text: str, written: str) -> str:
    """Return what a complete text has in the place of `{}`; all of it if the rest is not that of `text`."""
    before, after = (part.split() for part in text.split("{}"))
    words = written.split()
    inside = words[len(before) : len(words) - len(after)]
    return " ".join(inside) if [*before, *inside, *after] == words else written


DEMONSTRATIONS: dict[str, Callable[[Job, Path, Tokenizer], tuple[str, Rows]]] = {
    "fill-mask": fill_masks,
    "text-generation": continue_texts,
    "text2text-generation": fill_spans,
}
"""By pipeline of transformers, or by the card's tag if there is none: return a title, and rows of held-out text, what
it lacks, and what the model says."""


def quiet_transformers() -> Any:
    """Return the module transformers, which then prints errors only."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def encode_next(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text that follows another one."""
    return tokenizer.encode_batch([tokenizer.sentence_prefix + text])[0]


def heldout_sentences(corpus: Path, is_good: Callable[[str], bool] = bool) -> list[tuple[str, str]]:
    """Return a few pairs (sentence with one good word replaced by `{}`, the word) from documents far apart."""
    found = [
        pair
        for line in corpus.read_text(encoding="utf-8").splitlines()
        if (pair := _sentence_without_word(json.loads(line)["text"], is_good)) is not None
    ]
    return found[:: max(1, len(found) // NUM_SENTENCES)][:NUM_SENTENCES]


def _sentence_without_word(text: str, is_good: Callable[[str], bool]) -> tuple[str, str] | None:
    for sentence in split_sentences(text):
        words = sentence.split()
        middle = len(words) // 2
        word = words[middle] if 8 <= len(words) <= 16 and "{" not in sentence else ""
        if word.isalpha() and len(word) > 2 and is_good(word):
            return " ".join([*words[:middle], "{}", *words[middle + 1 :]]), word
    return None
