"""Judge models on a suite of tasks: minimal pairs, tasks of lm-evaluation-harness, and fine-tuning; one table.

    ctxlm evaluate MODEL... --suite NAME_OR_YAML --data DIR --output DIR
    ctxlm evaluate surprisal FILE --model DIR

The same command again continues an interrupted one and repeats nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.apps.downstream.examples import grouped
from ctxlm_ds.apps.downstream.results import PREDICTIONS, RESULT_NAME, is_done, summarize, write_point
from ctxlm_ds.apps.evaluate.compare import name_of, read_run, show
from ctxlm_ds.apps.evaluate.suite import HARNESS, NAME, Entry, entries_of, load_suite
from ctxlm_ds.atomic import is_same, output_folder, read_object, write_text
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, find_verified, list_checkpoints
from ctxlm_ds.checkpoint.manifest import MANIFEST_NAME
from ctxlm_ds.console import at_least, logger, setup_logging
from ctxlm_ds.errors import ConfigError, CtxlmError, ExportError
from ctxlm_ds.export.hf_config import EXPORT_RECORD
from ctxlm_ds.process.launch import quiet_libraries
from ctxlm_ds.process.launchers import die_with_launcher
from ctxlm_ds.registry import load_object

EXPORTS, EXPORTED = "exports", "hf"
PAIR_RESAMPLES, TASK_RESAMPLES = 1000, 200
INTERVAL = (2.5, 97.5)
"""Percentiles of the resampled scores at its ends."""
Places = NDArray[np.int64]


@dataclass(frozen=True)
class Model:
    """A model by its name in the table; `folder` is in Hugging Face's form, once `checkpoint` is exported to it."""

    name: str
    folder: Path
    checkpoint: Path | None = None
    step: int | None = None
    """Step of the checkpoint, if all of its run are judged."""


@dataclass(frozen=True)
class Job:
    """A model on a task, with the results in a folder."""

    model: Model
    entry: Entry
    output: Path
    definition: str
    way: str | None


Work = tuple[Job, int]
"""A job and one of its seeds."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="ctxlm evaluate", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("models", nargs="+", metavar="[NAME=]MODEL", help="runs, checkpoints, folders in Hugging Face's form")
    add("--suite", required=True, metavar="NAME", help="name of a shipped suite, or a YAML description")
    add("--data", required=True, type=Path, metavar="DIR", help="folder of the suite's files")
    add("--output", required=True, type=Path, metavar="DIR", help="folder of the results")
    add("--tasks", nargs="+", default=[], metavar="NAME", help="only these tasks of the suite")
    add("--every-step", action="store_true", help="judge all checkpoints of a run: a curve")
    add("--definition", default="babylm", metavar="NAME", help="of a sentence's score; default: babylm")
    add("--way", metavar="NAME", help="what a model sums, if it has several ways (docs/minimal-pairs.md)")
    parallel = parser.add_mutually_exclusive_group().add_argument
    parallel("--jobs", type=at_least(1), default=1, metavar="N", help="processes on this machine; default: 1")
    parallel("--point", type=at_least(0), metavar="I", help="only model, task and seed number I, without a table")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == ["surprisal"]:
        from ctxlm_ds.apps.evaluate.surprisal import main as write_surprisals

        return write_surprisals(given[1:])
    arguments = parse_arguments(given)
    setup_logging()
    quiet_libraries()
    entries = entries_of(*load_suite(arguments.suite), arguments.data, arguments.tasks)
    models = find_models(arguments.models, arguments.every_step, arguments.output)
    jobs = [
        Job(model, entry, arguments.output / model.name / entry.name, arguments.definition, arguments.way)
        for entry in entries for model in models
    ]  # fmt: skip
    points = [(job, seed) for job in jobs for seed in job.entry.seeds]
    if arguments.point is not None:
        if arguments.point >= len(points):
            raise ConfigError(f"--point {arguments.point}: the suite has the points 0 to {len(points) - 1}")
        points = [points[arguments.point]]
        jobs = [points[0][0]]
    examples = check(jobs)
    if arguments.point is not None:
        return run(points[0])
    if arguments.jobs > 1:
        run_parallel(points, arguments.jobs)
    for number, job in enumerate(jobs, 1):
        logger.info("%s on %s (%d of %d)", job.model.name, job.entry.name, number, len(jobs))
        finish(job, examples[job.entry.name])
    show([read_run(job.output) for job in jobs], arguments.output, f"{arguments.suite}: {', '.join(arguments.models)}")


def find_models(given: Sequence[str], every_step: bool, output: Path) -> list[Model]:
    """Return the models of some arguments [NAME=]PATH, with the folder below `output` to which each is exported.

    Raises ConfigError for two models of a name and a path that is no model; CheckpointError for damaged checkpoints.
    """
    models = []
    for text in given:
        name, _, path = ("", "", text) if Path(text).is_dir() else text.rpartition("=")
        models += _models_at(Path(path), name, every_step, output / EXPORTS)
    names = [model.name for model in models]
    for model in models:
        if not NAME.fullmatch(model.name) or names.count(model.name) > 1 or model.name == EXPORTS:
            raise ConfigError(f"{model.name}: no name, or that of two models; give another: NAME=PATH")
    return models


def _models_at(path: Path, name: str, every_step: bool, exports: Path) -> list[Model]:
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; give a run, a checkpoint or a model in Hugging Face's form")
    checkpoints = list_checkpoints(path / CHECKPOINTS_DIR)
    if every_step and not checkpoints:
        raise ConfigError(f"{path}: --every-step is for runs, and there is no {CHECKPOINTS_DIR}/step-…")
    place = path.resolve()
    run = name or (place if checkpoints else place.parent.parent).name
    if every_step:
        names = {step: f"{run}-{one.name}" for step, one in checkpoints.items()}
        return [Model(names[step], exports / names[step] / EXPORTED, one, step) for step, one in checkpoints.items()]
    if checkpoints:
        checkpoint, name = find_verified(path)[0], run
    elif (path / MANIFEST_NAME).is_file():
        checkpoint, name = place, name or f"{run}-{place.name}"
    else:
        return [Model(name or name_of({"model": place}), path)]
    folder = exports / f"{run}-{checkpoint.name}" / EXPORTED
    if checkpoints and not folder.exists() and _is_export(path / EXPORTED, checkpoint):
        return [Model(name, path / EXPORTED)]
    return [Model(name, folder, checkpoint)]


def _is_export(folder: Path, checkpoint: Path) -> bool:
    from ctxlm_ds.export.huggingface import is_exported
    from ctxlm_ds.export.safetensors_files import DEFAULT_SHARD_BYTES

    with suppress(ExportError):
        return is_exported(checkpoint, folder, "fp32", DEFAULT_SHARD_BYTES)
    return False


def check(jobs: Sequence[Job]) -> dict[str, Any]:
    """Read all data, then export the models and check that they can do the tasks; return the examples by task.

    Raises ConfigError, ExportError or TokenizerError if a model cannot do a task, DataError with file and line.
    """
    from ctxlm_ds.apps.downstream.metrics import check_packages
    from ctxlm_ds.apps.downstream.prepare import check_class, kind_class
    from ctxlm_ds.apps.evaluate.scorers import choose_scorer

    if any(job.entry.task for job in jobs):
        check_packages()
    examples = {entry.name: read_examples(entry) for entry in {job.entry.name: job.entry for job in jobs}.values()}
    for model in dict.fromkeys(job.model for job in jobs):
        export(model)
    for job in jobs:
        if job.entry.settings.task == HARNESS:
            choose_scorer(job.model.folder, HARNESS, None)  # refuses all but causal models
        elif job.entry.task is None:
            choose_scorer(job.model.folder, job.definition, job.way)
        else:
            check_class(job.model.folder, job.entry.task, kind_class(job.entry.task, job.entry.task.entry.always))
        # Results of another export are refused, so what was exported is recorded with them.
        now, before = (read_object(folder / EXPORT_RECORD) for folder in (job.model.folder, job.output))
        if now is not None and before is not None and any(job.output.glob(f"points/*/{RESULT_NAME}")):
            is_same(job.output, before, now, "choose another --output or remove it", ConfigError)
        elif now is not None:
            write_text(job.output / EXPORT_RECORD, json.dumps(now, indent=1) + "\n")
    return examples


def read_examples(entry: Entry) -> Any:
    """Return the pairs of an entry, the harness's tasks, or the parts of a task (DataError names file and line)."""
    if entry.task is not None:
        from ctxlm_ds.apps.downstream.prepare import read_parts

        return read_parts(entry.task, entry.data, entry.settings.max_train_examples)
    if entry.settings.task == HARNESS:
        return entry.harness_tasks()
    from ctxlm_ds.apps.evaluate.pairs import read_pairs

    kept = grouped((pair.paradigm, pair) for pair in read_pairs(entry.data))
    return [pair for pairs in kept.values() for pair in pairs[: entry.settings.first_pairs]]


def export(model: Model) -> None:
    """Export a model's checkpoint unless it is; of several processes the first to finish writes the folder."""
    from ctxlm_ds.export.huggingface import to_hf

    is_there = model.folder.exists()  # another process may write it meanwhile
    if model.checkpoint is None or _is_export(model.folder, model.checkpoint):
        return
    if is_there:
        raise ConfigError(f"{model.folder} is the export of another checkpoint; remove it or give another --output")
    with suppress(FileExistsError), output_folder(model.folder.parent, replace=False) as partial:
        to_hf(model.checkpoint, partial / EXPORTED)


def run_parallel(points: Sequence[Work], jobs: int) -> None:
    """Run the points without a result in processes; tasks that start from another one come after all others."""
    missing = [(job, seed) for job, seed in points
               if not any(job.output.glob(f"points/*seed{seed}/{RESULT_NAME}"))]  # fmt: skip
    context, threads = multiprocessing.get_context("spawn"), max(1, len(os.sched_getaffinity(0)) // jobs)
    with ProcessPoolExecutor(jobs, context, _begin_worker, (os.getpid(), threads)) as pool:
        for later in (False, True):
            try:
                list(pool.map(run, [one for one in missing if (one[0].entry.settings.start is not None) is later]))
            except BrokenProcessPool:
                raise CtxlmError(f"--jobs {jobs}: a process was killed, perhaps for memory; with fewer jobs the same "
                                 "command continues") from None  # fmt: skip


def _begin_worker(parent: int, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches all processes, and the first one reports it
    die_with_launcher(watch_grandparent=False, parent=parent)
    import torch

    torch.set_num_threads(threads)
    setup_logging()
    quiet_libraries()


def run(point: Work) -> None:
    """Compute a point unless it has a result."""
    job, seed = point
    score(job) if job.entry.task is None else tune(job, [seed])


def score(job: Job) -> None:
    """Score a job without training unless it has a result."""
    folder, settings = job.output / "points" / "seed0", job.entry.settings
    wanted: dict[str, Any] = {"model": str(job.model.folder.resolve())}
    if settings.task == HARNESS:
        wanted |= {"harness": settings.harness, "files": str(job.entry.data.resolve()), "shots": settings.shots,
                   "metric": job.entry.metric}  # fmt: skip
        if is_done(folder, wanted):
            return
        values, rows = job.entry.judge_by_harness(job.model.folder, read_examples(job.entry))
        result = {"dev": values}
    else:
        pairs = read_examples(job.entry)
        sentences = hashlib.sha256(json.dumps([pair[:3] for pair in pairs]).encode()).hexdigest()
        wanted = {"pairs": str(job.entry.data.resolve()), "first_pairs": settings.first_pairs, "way": job.way, **wanted,
                  "definition": job.definition, "sentences": sentences}  # fmt: skip
        if is_done(folder, wanted):
            return
        from ctxlm_ds.apps.evaluate.pairs import judge_pairs
        from ctxlm_ds.apps.evaluate.scorers import open_scorer

        scorer = open_scorer(job.model.folder, job.definition, job.way)
        kept = job.output / f"scores-{hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:16]}.partial"
        result, rows = judge_pairs(scorer, pairs, kept)
    with output_folder(folder) as partial:
        write_point(partial, wanted, {"task": job.entry.name, "point": {"seed": 0}, **result}, {"dev": rows})


def tune(job: Job, seeds: Sequence[int]) -> None:
    """Fine-tune a job's model with some seeds, as `ctxlm finetune` does, unless they have results."""
    entry, settings = job.entry, job.entry.settings
    options = {"--task": entry.described, "--model": start_of(job) if settings.start else job.model.folder,
               "--data": entry.data, "--output": job.output, "--epochs": settings.epochs,
               "--learning-rates": settings.learning_rate, "--batch-sizes": settings.batch_size,
               "--train-layers": settings.train_layers,
               "--max-train-examples": settings.max_train_examples}  # fmt: skip
    words = [str(part) for name, value in options.items() if value is not None for part in (name, value)]
    with redirect_stdout(sys.stderr):
        words += ["--seeds", *map(str, seeds), *(["--save-model"] if entry.saves else [])]
        load_object("ctxlm_ds.finetune:main")(words)


def start_of(job: Job) -> Path:
    """Return the folder of the fine-tuned model without its head from which a job starts."""
    from transformers import AutoModel

    assert job.entry.settings.start is not None
    earlier = job.output.parent / job.entry.settings.start
    found = next(earlier.glob(f"points/*-seed{job.entry.start_seed}/model"), None)
    if found is None:
        raise ConfigError(f"{job.entry.name} starts from {earlier.name}, which has no model yet: run its point first")
    folder = found.with_name("start")
    if not folder.is_dir():
        with suppress(FileExistsError), output_folder(folder, replace=False) as partial:
            shutil.copytree(found, partial, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
            AutoModel.from_pretrained(found, local_files_only=True, use_safetensors=True).save_pretrained(partial)
    return folder


def finish(job: Job, examples: Any) -> None:
    """Compute what a job lacks, and write its metrics.json: mean, spread and interval."""
    entry, settings = job.entry, job.entry.settings
    before = read_object(job.output / RESULT_NAME) or {}
    if entry.task is None:
        score(job)
        result = read_object(job.output / "points" / "seed0" / RESULT_NAME) or {}
        definition = f"{HARNESS}: {settings.harness}" if settings.task == HARNESS else job.definition
        summary = summarize([result], entry.metric, ()) | {"definition": definition}
    else:
        tune(job, entry.seeds)
        summary = read_object(job.output / RESULT_NAME) or {}
    known = entry.task.published if entry.task is not None else {}
    summary |= {"task": entry.name, "model": job.model.name, "folder": str(job.model.folder), "source": entry.source,
                "published": known if settings.published is None else settings.published, "step": job.model.step,
                "metric": entry.metric}  # fmt: skip
    same = [json.dumps([one.get("chosen"), one.get("metric")]) for one in (before, summary)]
    is_known = before.get("interval") is not None and same[0] == same[1]
    summary["interval"] = before["interval"] if is_known else interval_of(job, examples, summary)
    write_text(job.output / RESULT_NAME, json.dumps(summary, indent=1) + "\n")


def interval_of(job: Job, examples: Any, summary: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the bootstrap interval of the mean over seeds, from the predictions of all; None if it has none."""
    from ctxlm_ds.apps.downstream.kinds.base import Prediction
    from ctxlm_ds.apps.downstream.prepare import kind_class

    seeds = summary["chosen"]["seeds"]
    files = [next(job.output.glob(f"points/*seed{seed}/{PREDICTIONS.format('dev')}")) for seed in seeds]
    rows = [[json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]] for path in files]
    task = job.entry.task
    if job.entry.settings.task == HARNESS:
        values, mean = [row["value"] for row in rows[0]], summary["chosen"]["dev"][summary["metric"]]["mean"]
        if None in values or not np.isclose(np.mean(values), mean):
            return None  # the metric is no mean over examples
        counted = np.array(values)
        return bootstrap(lambda chosen: counted[chosen].mean(), [0] * len(counted), PAIR_RESAMPLES)
    if task is None:
        paradigms = [row["paradigm"] for row in rows[0]]
        sizes = Counter(paradigms)
        shares = np.array([row["right"] / sizes[row["paradigm"]] for row in rows[0]]) / len(sizes)
        return bootstrap(lambda chosen: shares[chosen].sum(), paradigms, PAIR_RESAMPLES)
    judged = task.model_copy(update={"metrics": [summary["metric"]]})
    kind = kind_class(task, task.entry.always)(judged, None, examples.labels, task.max_length)
    predictions = [[Prediction(row["prediction"]) for row in of_seed] for of_seed in rows]

    def mean_score(chosen: Places) -> float:
        right = [examples.dev[at] for at in chosen]
        return float(np.mean([kind.score([one[at] for at in chosen], right)[summary["metric"]] for one in predictions]))

    return bootstrap(mean_score, [0] * len(examples.dev), TASK_RESAMPLES)


def bootstrap(score: Callable[[Places], float], groups: Sequence[object], resamples: int) -> tuple[float, float]:
    """Return the 95 % interval of a score over examples [n], drawn with replacement within groups such as paradigms.

    `score` returns the score of the examples at some places [n]; `groups` [n] has the group of each. The draws are the
    same again.
    """
    generator = np.random.default_rng(1)
    found = [np.array(own) for own in grouped((group, at) for at, group in enumerate(groups)).values()]
    values = [score(np.concatenate([own[generator.integers(len(own), size=len(own))] for own in found]))
              for _ in range(resamples)]  # fmt: skip
    low, high = np.nanpercentile(values, INTERVAL)
    return float(low), float(high)
