"""The runs of a study: corpus, recipes and settings of each, and their execution as processes. What exists is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from ctxlm_ds.apps.demo.pretrain_default import Job as Datasets
from ctxlm_ds.apps.demo.pretrain_default import run_step, split_corpus
from ctxlm_ds.apps.init.start import preprocess_options
from ctxlm_ds.apps.study.definition import LOSS, Size, Study
from ctxlm_ds.apps.study.measure import EXPORT, FIGURES, TRILLION
from ctxlm_ds.apps.study.scores import SCORES
from ctxlm_ds.atomic import is_same, read_object, write_text
from ctxlm_ds.console import counted, logger
from ctxlm_ds.data.stream.run_datasets import build_run_rows
from ctxlm_ds.data.stream.run_plan import words_per_row
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.process.cgroups import available_cores
from ctxlm_ds.process.signals import STOP_SIGNALS
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.sections import ModelSection
from ctxlm_ds.recipe.words import STEPS_FOLLOW
from ctxlm_ds.recipe.yaml_source import write_yaml
from ctxlm_ds.registry import FAMILIES, FORMATS
from ctxlm_ds.tokenizers.load import open_tokenizer
from ctxlm_ds.training.measure import useful_flops_per_row

MODULE = "ctxlm_ds.apps.study.measure"

SEARCH_SEED = 1000
"""Seed of the search of the learning rate; the comparison has 1, 2, ..."""
RATE_STEPS = 50
"""Steps by whose rate a budget in seconds becomes steps."""
POLL_S = 0.2


@dataclass(frozen=True)
class Job:
    """One run."""

    arm: str
    factor: float
    """Of the learning rates."""
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}/rate-{self.factor:g}/seed-{self.seed}"


class Work(NamedTuple):
    """A process."""

    name: str
    words: list[str]
    log: Path


class StudyRuns:
    """The folder of a study at one size."""

    def __init__(self, folder: Path, study: Study, size: Size) -> None:
        self.folder, self.study, self.size = folder.absolute(), study, size
        self._sources: dict[str, list[str]] = {}
        self._steps: dict[str, int] = {}

    @property
    def search(self) -> list[Job]:
        """Return the runs that search the learning rate; none if there is one factor."""
        factors = self.study.rates if len(self.study.rates) > 1 else []
        return [Job(arm, factor, SEARCH_SEED) for arm in self.study.trained for factor in factors]

    def compared(self) -> list[Job]:
        """Return the runs of the comparison, paired by seed; the search must be complete (ConfigError)."""
        chosen = {arm: self.best_factor(arm) for arm in self.study.trained}
        return [Job(arm, chosen[arm], seed) for seed in range(1, self.size.seeds + 1) for arm in self.study.trained]

    def best_factor(self, arm: str) -> float:
        """Return the factor of the learning rates with the lowest held-out loss; a run that failed has none."""
        jobs = [job for job in self.search if job.arm == arm]
        if missing := [job.name for job in jobs if not (self.figures(job) or failure_mark(self.log(job)).exists())]:
            raise ConfigError(f"{self.folder}: the search of {arm} lacks {', '.join(missing)}; run those points first")
        losses = {job.factor: (self.figures(job) or {"loss": None})["loss"] for job in jobs}
        known = [(loss, factor) for factor, loss in losses.items() if loss is not None]
        return min(known)[1] if known else self.study.rates[0]

    def prepare(self, study_path: Path, corpus: Sequence[str]) -> None:
        """Make the corpus and every arm's tokenizer, datasets and recipe. A folder of another study is refused."""
        # Without defaults, so that a setting which a later version adds changes nothing.
        study, size = (one.model_dump(mode="json", exclude_defaults=True) for one in (self.study, self.size))
        wanted = {"study": study, "size": size, "corpus": [str(Path(one).absolute()) for one in corpus]}
        record = self.folder / "settings.json"
        if record.is_file():
            is_same(self.folder, read_object(record), wanted, "choose another --output or remove it", ConfigError)
        for name, arm in self.study.trained.items():
            base, recipe = self._recipe(f"{name}~size"), arm.recipe or self.study.recipe
            own = study_path.parent / recipe
            extends = str(own.resolve()) if own.suffix == ".yaml" else recipe
            write_text(base, write_yaml({"extends": extends, **self.size.set}))
            write_text(self._recipe(name), write_yaml({"extends": str(base), **arm.set}))
            self._sources[name] = ["tokenizer.path=unused", "data.train=[unused]"]
        self._check()
        write_text(record, json.dumps(wanted, indent=1) + "\n")
        shared = self.folder / "data" / "corpus"
        if corpus and not shared.exists():
            split_corpus(corpus, shared)
        for name in self.study.trained:
            self._make_datasets(name, shared)
            if "seconds" in self.size.budget.given:
                self.steps(name)  # measures its rate, while no other task does

    def _check(self) -> None:
        """Raise ConfigError if a recipe has a mistake, or arms cannot be compared or take each other's weights."""
        configs = {arm: self.config(arm) for arm in self.study.trained}
        for arm, config in configs.items():
            for other in self.study.arms[arm].needs:
                own, theirs = (" of ".join(tokenizer_of(one.model)) for one in (config, configs[other]))
                if own != theirs:
                    raise ConfigError(f"arms.{arm}: its tokenizer is {own}, but {other}, whose weights it needs, has "
                                      f"{theirs}; choose families of one tokenizer")  # fmt: skip
        names = {arm: " of ".join((one.objective.name, *tokenizer_of(one.model))) for arm, one in configs.items()}
        if self.study.compare == LOSS and len(set(names.values())) > 1:
            listed = ", ".join(f"{arm} {name}" for arm, name in names.items())
            raise ConfigError(f"compare: losses of different objectives or tokenizers are not comparable ({listed}); "
                              "name a measure")  # fmt: skip

    def _recipe(self, arm: str) -> Path:
        return self.folder / "recipes" / f"{arm}.yaml"

    def _make_datasets(self, arm: str, corpus: Path) -> None:
        config = self.config(arm)
        joins = not config.data.by_sentence or FORMATS.get(config.data.sample_format)().joins_sentences(config.data)
        kind = "-".join(tokenizer_of(config.model))
        name = kind + "".join(preprocess_options(config.data)) + "-separate" * (not joins)
        data = Datasets(self.folder / "data" / name, config.model, config.data)
        data.corpus = corpus
        data.make_datasets([], None)
        self._sources[arm] = [
            f"tokenizer.path={data.tokenizer}", f"data.train=[{data.train}]",
            f"data.validation=[{{name: heldout, path: {data.heldout}}}]",
        ]  # fmt: skip

    def config(self, arm: str) -> RunConfig:
        """Return the recipe of an arm with its data."""
        return load_config(self._recipe(arm), [*self._sources[arm], *self._weights(arm, lambda other: Path(other))])

    def _weights(self, arm: str, folder_of: Callable[[str], Path]) -> list[str]:
        """Return the settings that take weights from exported runs of other arms."""
        start, teacher = self.study.arms[arm].starts_from, self.study.arms[arm].teacher
        settings = [] if start is None else [f"initialize_from={folder_of(start) / EXPORT}"]
        if teacher is not None:
            model = self.config(teacher).model.model_dump(mode="json", exclude_unset=True)
            settings += [f"teacher.path={folder_of(teacher) / EXPORT}", f"teacher.model={json.dumps(model)}"]
        return settings

    def run_dir(self, job: Job) -> Path:
        return self.folder / "runs" / job.name

    def log(self, job: Job) -> Path:
        return self.folder / "runs" / f"{job.name}.log"

    def figures(self, job: Job) -> dict[str, Any] | None:
        """Return the figures of a run with its scores; None before it is complete."""
        found, scores = (read_object(self.run_dir(job) / name) for name in (FIGURES, SCORES))
        return found and {**found, "scores": scores or {}}

    def command(self, job: Job) -> list[str]:
        """Return the words of the process that trains and measures a run."""
        optimizer = self.config(job.arm).optimizer.model_dump()
        rates = {name: value * job.factor for name, value in optimizer.items()
                 if name.endswith("learning_rate") and value is not None}  # fmt: skip
        settings = [f"run_dir={self.run_dir(job)}", f"training.seed={job.seed}",
                    f"training.max_steps={self.steps(job.arm)}"]  # fmt: skip
        settings += self._weights(job.arm, lambda arm: self.run_dir(self._before(job, arm)))
        settings += [*self._sources[job.arm], *(f"optimizer.{name}={rate!r}" for name, rate in rates.items())]
        return [sys.executable, "-m", MODULE, "--config", str(self._recipe(job.arm)), "--set", *settings]

    def steps(self, arm: str) -> int:
        """Return the steps that the budget gives an arm."""
        if arm not in self._steps:
            ((unit, amount),) = self.size.budget.given.items()
            rows, rows_after = ceil(amount / self._cost_per_row(arm, unit)), self.config(arm).training.rows_after
            self._steps[arm] = max(1, bisect_left(range(STEPS_FOLLOW), rows, key=rows_after))
        return self._steps[arm]

    def _cost_per_row(self, arm: str, unit: str) -> float:
        """Return the words, tokens, seconds or 10^12 operations of a row of training, on average."""
        if unit == "seconds":
            return self._seconds_per_row(arm)
        config = self.config(arm)
        if unit == "flops":
            return useful_flops_per_row(config) / TRILLION
        tokenizer, _ = open_tokenizer(config.tokenizer.path, config.model.vocab_size)
        rows = build_run_rows(config.row_settings, tokenizer, build_objective(config.objective, tokenizer)).train
        if unit == "words":
            return words_per_row(config.data, config.training, rows, [1])
        return sum(index.meta["tokens"] for index in rows.indexes) / len(rows)

    def _seconds_per_row(self, arm: str) -> float:
        """Return the seconds of a row by the first steps of an arm, which are run once and recorded."""
        record = self.folder / "rates.json"
        rates: dict[str, float] = read_object(record) or {}
        if arm not in rates:
            run_dir, config = self.folder / "runs" / arm / "rate", self.config(arm)
            settings = [*self._sources[arm], f"run_dir={run_dir}", f"training.max_steps={RATE_STEPS}"]
            run_step(sys.executable, "-m", MODULE, "--config", self._recipe(arm), "--set", *settings)
            figures = read_object(run_dir / FIGURES) or {}
            rates[arm] = figures["seconds"] / RATE_STEPS / config.training.global_batch_size
            write_text(record, json.dumps(rates, indent=1) + "\n")
        return rates[arm]

    def train(self, jobs: Sequence[Job], parallel: int) -> None:
        """Run the jobs that are not complete, some at a time, after the runs whose weights they take."""
        for depth in sorted({self.study.depth(job.arm) for job in jobs}):
            todo = [job for job in jobs if self.study.depth(job.arm) == depth and not self.figures(job)]
            ready = [job for job in todo if not any(self._lacks(job, name) for name in self.study.arms[job.arm].needs)]
            execute([Work(job.name, self.command(job), self.log(job)) for job in ready], parallel)

    def _lacks(self, job: Job, arm: str) -> bool:
        """Return whether the run of another arm, whose weights a run takes, has no result; this fails as that has."""
        first = self._before(job, arm)
        if self.figures(first) is not None:
            return False
        logger.error("%s: not begun, because %s has no result", job.name, first.name)
        if failure_mark(self.log(first)).exists():
            self.log(job).parent.mkdir(parents=True, exist_ok=True)
            failure_mark(self.log(job)).touch()
        return True

    def _before(self, job: Job, arm: str) -> Job:
        """Return the run of another arm that a run takes weights from: its best rate, and the same seed."""
        return Job(arm, self.best_factor(arm), job.seed)

    def score(self, jobs: Sequence[Job], data: Path, parallel: int) -> None:
        """Score the runs that are complete on the measures of the study for which they have no scores."""
        work = []
        for job in jobs:
            found = self.figures(job)
            readings = sorted({other.reading for other in self.study.arms.values() if other.of == job.arm})
            if found is None or all(_has(found["scores"].get(name), readings) for name in self.study.measures):
                continue
            words = [sys.executable, "-m", "ctxlm_ds.apps.study.scores", str(self.run_dir(job)), "--data", str(data)]
            words += ["--measures", *self.study.measures, "--readings", *readings]
            work.append(Work(job.name, [*words, "--text", str(self.folder / "data/corpus/train.jsonl")], self.log(job)))
        execute(work, parallel)


def _has(score: dict[str, Any] | None, readings: Sequence[str]) -> bool:
    """Return whether a score is complete; a score without sentences (minimal pairs) has no readings."""
    items = None if score is None else score["items"]
    return items is not None and (not isinstance(items, dict) or set(readings) <= set(items))


def execute(work: Sequence[Work], parallel: int) -> None:
    """Run processes, some at a time; one that fails is reported, and the others continue."""
    waiting, running = list(work), dict[subprocess.Popen[bytes], Work]()
    environ = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(max(1, available_cores() // parallel))}
    with passed_on(running):
        while waiting or running:
            while waiting and len(running) < parallel:
                one = waiting.pop(0)
                one.log.parent.mkdir(parents=True, exist_ok=True)
                failure_mark(one.log).unlink(missing_ok=True)
                with open(one.log, "ab") as log:
                    process = subprocess.Popen(
                        one.words, stdout=log, stderr=log, env=environ | os.environ, start_new_session=True
                    )
                running[process] = one
                logger.info("%s: begun; %s after it", one.name, counted(len(waiting), "run"))
            time.sleep(POLL_S)
            for process in [process for process in running if process.poll() is not None]:
                one = running.pop(process)
                if process.returncode:
                    failure_mark(one.log).touch()
                    logger.error("%s: failed (exit status %d); %s", one.name, process.returncode, one.log)


def failure_mark(log: Path) -> Path:
    """Return the file that says that a process has failed, not only been stopped."""
    return log.with_name(f"{log.name}.failed")


@contextmanager
def passed_on(running: Mapping[subprocess.Popen[bytes], Work]) -> Iterator[None]:
    """Pass signals that ask a run to stop on to the processes inside and theirs, then exit as the signal asks.

    A second signal kills them.
    """
    received: list[int] = []

    def stop(number: int, _: object) -> None:
        received.append(number)
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number if len(received) == 1 else signal.SIGKILL)
        if len(received) > 1:
            return  # to the wait of the first call, which holds a lock of the process
        for process in running:
            process.wait()
        sys.exit(128 + number)

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tokenizer_of(model: ModelSection) -> tuple[str, str]:
    """Return kind and size of the tokenizer that an arm's model needs."""
    return FAMILIES.get(model.family).tokenizer, str(model.vocab_size)
