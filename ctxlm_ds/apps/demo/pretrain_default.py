"""Run the default job (`make pretrain`): raw text to a Hugging Face model that fills masks, in minutes on a CPU.

`make pretrain FAMILY=gpt2` trains another family by its recipe, which also decides what the model does at the end. Each
step is one of the project's commands, printed before it runs. Steps whose result exists are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ctxlm_ds import atomic
from ctxlm_ds.console import at_least, format_duration, setup_logging
from ctxlm_ds.data.preprocess.sentences import split_sentences
from ctxlm_ds.errors import ConfigError, CtxlmError, DataError
from ctxlm_ds.installed import checkout
from ctxlm_ds.process.cgroups import available_cores
from ctxlm_ds.process.run_files import read_status, read_verdict
from ctxlm_ds.process.signals import STOP_SIGNALS
from ctxlm_ds.recipe.load import load_config, shipped_recipes
from ctxlm_ds.recipe.sections import DataSection, ModelSection, ObjectiveSection
from ctxlm_ds.registry import FAMILIES, FORMATS, OBJECTIVES, load_object

if TYPE_CHECKING:
    from ctxlm_ds.tokenizers.base import Tokenizer

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


def main() -> None:
    families = [name.removesuffix(SUFFIX) for name in shipped_recipes() if name.endswith(SUFFIX)]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--family", choices=families, default=DEFAULT_FAMILY, help=f"default: {DEFAULT_FAMILY}")
    add("--corpus", nargs="+", default=[], help="your text (files or globs) instead of the docstrings")
    add("--output-dir", type=Path, help="default: runs/default, with --corpus runs/NAME-OF-CORPUS")
    add("--recipe", help=f"a path or the name of a shipped recipe; default: FAMILY{SUFFIX}")
    add("--vocab-size", type=int, help="default: the recipe's")
    add("--ranks", type=at_least(1), default=1, help="ranks that train (default: one)")
    add("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="override settings")
    arguments = parser.parse_args()
    setup_logging()
    recipe = arguments.recipe or arguments.family + SUFFIX
    config = load_config(recipe, arguments.set, arguments.ranks)  # mistakes are reported before the first step
    started_s = time.monotonic()
    job = Job(arguments.output_dir or default_folder(arguments.corpus, arguments.family), config.model, config.data)
    job.make_datasets(arguments.corpus, arguments.vocab_size)
    job.pretrain(recipe, arguments.set, arguments.ranks)
    run_step(CTXLM, "convert", "to-hf", "--checkpoint", job.run_dir, "--output", job.model, "--overwrite")
    run_step(CTXLM, "report", job.run_dir)
    job.show_results(config.objective)
    print(f"\ndone in {format_duration(time.monotonic() - started_s)}; the model: {job.model}")


def default_folder(corpus: Sequence[str], family: str) -> Path:
    """Return runs/default or runs/NAME-OF-CORPUS, with the family at the end if it is another one."""
    name = Path(corpus[0]).name.split(".")[0].strip("*") or "corpus" if corpus else "default"
    return (checkout() or Path.cwd()) / "runs" / (name if family == DEFAULT_FAMILY else f"{name}-{family}")


class Job:
    """The folder of the job, and the commands that fill it."""

    def __init__(self, folder: Path, model: ModelSection, data: DataSection) -> None:
        folder, self._model, self._data = folder.absolute(), model, data
        self.corpus, self.tokenizer, self.data = folder / "corpus", folder / "tokenizer", folder / "data"
        self.run_dir, self.model = folder / "run", folder / "hf"
        form = "sentence" if data.by_sentence else "document"
        # Megatron's names.
        self.train, self.heldout = (self.data / f"{split}_text_{form}" for split in ("train", HELDOUT))

    def make_datasets(self, inputs: Sequence[str], vocab_size: int | None) -> None:
        """Make corpus, tokenizer and datasets if they are missing, as family and sample format need them."""
        from ctxlm_ds.apps.init.start import preprocess_options
        from ctxlm_ds.data.sources.reading import find_sources, source_signature

        record, text = self.corpus.with_name("made_of.json"), source_signature(find_sources(inputs)) if inputs else None
        made_of = {"text": text, "vocab_size": vocab_size}
        if (before := atomic.read_object(record)) is not None:
            atomic.is_same(record.parent, before, made_of, "choose another --output-dir or remove it", ConfigError)
        if not (self.corpus / "train.jsonl").exists():
            if inputs:
                split_corpus(inputs, self.corpus)
            else:
                run_step(CTXLM, "docstrings", "--output-dir", self.corpus)
            atomic.write_text(record, json.dumps(made_of) + "\n")
        if not (self.tokenizer / "tokenizer.json").exists():
            run_step(
                CTXLM, "tokenizer", "--input", self.corpus / "train.jsonl",
                "--type", FAMILIES.get(self._model.family).tokenizer,
                "--vocab-size", vocab_size or self._model.vocab_size or SMALLEST_VOCABULARY,
                "--output-dir", self.tokenizer,
            )  # fmt: skip
        from ctxlm_ds.tokenizers.load import load_tokenizer

        joins = self._data.by_sentence and FORMATS.get(self._data.sample_format)().joins_sentences(self._data)
        space = joins and bool(load_tokenizer(self.tokenizer).sentence_prefix)
        form = [*preprocess_options(self._data), *(["--leading-space"] if space else [])]
        for split, prefix in (("train", self.train), (HELDOUT, self.heldout)):
            if not prefix.with_suffix(".json").exists():
                run_step(
                    CTXLM, "preprocess", "--input", self.corpus / f"{split}.jsonl", "--json-keys", "text",
                    "--tokenizer", self.tokenizer, "--output-prefix", self.data / split,
                    *form, "--workers", available_cores(), "--overwrite",
                )  # fmt: skip

    def pretrain(self, recipe: str, overrides: Sequence[str], ranks: int) -> None:
        run_step(
            CTXLM, "pretrain", "--config", recipe, *(["--ranks", ranks] if ranks > 1 else []), "--set",
            f"run_dir={self.run_dir}", f"tokenizer.path={self.tokenizer}", f"data.train=[{self.train}]",
            f"data.validation=[{{name: {HELDOUT}, path: {self.heldout}}}]", *overrides,
        )  # fmt: skip

    def show_results(self, objective: ObjectiveSection) -> None:
        """Print what the run says of its loss, and what the model does."""
        from ctxlm_ds.apps.downstream.kinds.base import quiet_transformers
        from ctxlm_ds.tokenizers.load import load_tokenizer

        quiet_transformers()
        print("\n".join(read_verdict(read_status(self.run_dir))))
        folder, task = demonstrated_model(self._model.family, objective)
        tokenizer, corpus = load_tokenizer(self.tokenizer), self.corpus / "heldout.jsonl"
        print(f"\nheld-out sentences, {task}:")
        for text, truth, found in DEMONSTRATIONS[task](corpus, str(self.model / folder), tokenizer):
            print(f"  {text}\n    was: {truth}   {found}")


CTXLM = Path(sys.executable).with_name("ctxlm")


def run_step(*words: object) -> None:
    """Print and run a command; SystemExit with 128 and the signal that stopped it, CtxlmError if it failed."""
    command = list(map(str, words))
    print(f"$ {shlex.join(word.replace(f'{Path.cwd()}/', '') for word in command)}", flush=True)
    # In so small a model threads wait for each other: with one other program, two took 0.3 to 1.4 s a step, one 0.19.
    defaults = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    status = run_process(command, defaults | os.environ)
    number = status - 128 if status > 128 else -status
    if number in STOP_SIGNALS:
        sys.exit(128 + number)
    if status != 0:
        raise CtxlmError(f"the step above failed (exit status {status}); fix it and run the same command again")


def run_process(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command, which gets the signals that ask a run to stop, and return its exit status."""
    process = subprocess.Popen(command, env=environ)

    def pass_on(number: int, _: object) -> None:
        if number != signal.SIGINT:  # the terminal sends it to every process
            process.send_signal(number)

    own = {number: signal.signal(number, pass_on) for number in STOP_SIGNALS}
    try:
        return process.wait()
    finally:
        for number, handler in own.items():
            signal.signal(number, handler)


def split_corpus(inputs: Sequence[str], output_dir: Path) -> None:
    """Write train.jsonl and, with every tenth document, heldout.jsonl. Raises DataError for too few documents."""
    from ctxlm_ds.data.sources.corpus import Corpus

    with atomic.output_folder(output_dir) as folder:
        count = 0
        with open(folder / "train.jsonl", "w") as train, open(folder / "heldout.jsonl", "w") as heldout:
            for count, text in enumerate(Corpus(inputs), 1):
                target = heldout if count % HELDOUT_EVERY == 0 else train
                target.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        if count < HELDOUT_EVERY:
            raise DataError(
                f"{' '.join(inputs)} holds {count} documents; at least {HELDOUT_EVERY} are needed to hold one out (in "
                "plain text a blank line ends a document)"
            )


def demonstrated_model(family: str, objective: ObjectiveSection) -> tuple[str, str]:
    """Return the folder of an export with a language model, and its task. Raises CtxlmError if the family has none."""
    export = load_object(FAMILIES.get(family).export)
    outputs = OBJECTIVES.get(objective.name)(objective).outputs
    for part in export.models():
        card = part.card(part.shared_outputs(outputs), "")
        task = card.task or card.tag
        if task in DEMONSTRATIONS:
            return part.folder, task
    raise CtxlmError(f"model.family {family}: no task of transformers shows what it predicts")


Rows = list[tuple[str, str, str]]


def fill_masks(corpus: Path, model: str, tokenizer: Tokenizer) -> Rows:
    import transformers

    pipeline = transformers.pipeline("fill-mask", model=model, top_k=NUM_GUESSES)
    rows = []
    for text, word in heldout_sentences(corpus, lambda word: len(encode_next(tokenizer, word)) == 1):
        found = pipeline(text.replace("{}", pipeline.tokenizer.mask_token))
        guesses = ", ".join(f"{guess['token_str'].strip()} {guess['score']:.2f}" for guess in found)
        rows.append((text.replace("{}", "[MASK]"), word, f"filled: {guesses}"))
    return rows


def continue_texts(corpus: Path, model: str, tokenizer: Tokenizer) -> Rows:
    """Continue the first half of held-out sentences with the most probable tokens."""
    import transformers

    pipeline = transformers.pipeline("text-generation", model=model)
    rows = []
    for text, word in heldout_sentences(corpus):
        prompt, rest = text.split(" {}")
        length = len(encode_next(tokenizer, f"{word}{rest}"))
        written = pipeline(prompt, max_new_tokens=length, do_sample=False, return_full_text=False)
        continued = " ".join(written[0]["generated_text"].split())
        rows.append((f"{prompt} …", f"{word}{rest}", f"continued: {continued}"))
    return rows


def fill_spans(corpus: Path, model: str, tokenizer: Tokenizer) -> Rows:
    """Fill a gap in held-out sentences with the most probable tokens of a decoder, or write the complete sentence."""
    import transformers

    writer = transformers.AutoModelForSeq2SeqLM.from_pretrained(model).eval()
    loaded = transformers.AutoTokenizer.from_pretrained(model)
    has_sentinels = tokenizer.token_to_id(SPAN) is not None
    rows = []
    for text, word in heldout_sentences(corpus):
        ids = loaded(text.replace("{}", SPAN if has_sentinels else loaded.mask_token), return_tensors="pt").input_ids
        most = SPAN_TOKENS + (0 if has_sentinels else ids.shape[1])
        (tokens,) = writer.generate(ids, max_new_tokens=most, do_sample=False)
        found = loaded.decode(tokens, skip_special_tokens=not has_sentinels)
        found = found.partition(SPAN)[2].partition("<")[0] if has_sentinels else found
        rows.append((text.replace("{}", "[MASK]"), word, f"filled: {' '.join(found.split())}"))
    return rows


DEMONSTRATIONS: dict[str, Callable[[Path, str, Tokenizer], Rows]] = {
    "fill-mask": fill_masks,
    "text-generation": continue_texts,
    "text2text-generation": fill_spans,
}
"""By pipeline of transformers, or by the card's tag if there is none: return rows of held-out text, what it lacks, and
what the model says."""


def encode_next(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text that follows another one."""
    return tokenizer.encode_batch([tokenizer.sentence_prefix + text])[0]


def heldout_sentences(corpus: Path, is_good: Callable[[str], bool] = bool) -> list[tuple[str, str]]:
    """Return a few pairs (sentence with one good word replaced by `{}`, the word) from documents far apart."""
    texts = [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").split("\n")[:-1]]
    found = [pair for text in texts if (pair := _sentence_without_word(text, is_good)) is not None]
    return found[:: max(1, len(found) // NUM_SENTENCES)][:NUM_SENTENCES]


def _sentence_without_word(text: str, is_good: Callable[[str], bool]) -> tuple[str, str] | None:
    for sentence in split_sentences(text):
        words = sentence.split()
        middle = len(words) // 2
        word = words[middle] if 8 <= len(words) <= 16 and "{" not in sentence else ""
        if word.isalpha() and len(word) > 2 and is_good(word):
            return " ".join([*words[:middle], "{}", *words[middle + 1 :]]), word
    return None
