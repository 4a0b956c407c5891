"""Rerun a comparison of the field: arms under one budget, several seeds, a table with intervals, and a verdict.

    ctxlm study NAME --output DIR                    # the tiny size, on docstrings of this environment
    ctxlm study FILE.yaml --size small --corpus TEXT --jobs 2
    ctxlm study NAME --output DIR --point I          # only run number I: a task of a Slurm array

The same command again continues and repeats nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ctxlm_ds.apps.downstream.task import shipped
from ctxlm_ds.apps.study.definition import SIZES, STUDY_DIR, load_study
from ctxlm_ds.console import at_least, setup_logging
from ctxlm_ds.errors import ConfigError, CtxlmError
from ctxlm_ds.process.run_lock import RunLock

PREPARATION_S = 3600.0
"""How long a task of an array waits for another one that makes the data."""


def main(argv: Sequence[str] | None = None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="ctxlm study", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("study", metavar="NAME", help=f"a YAML description, or one of {', '.join(shipped(STUDY_DIR))}")
    add("--size", choices=SIZES, default="tiny", help="shape and budget; default: tiny")
    add("--output", type=Path, metavar="DIR", help="folder of the runs and the report; default: runs/study-NAME-SIZE")
    add("--corpus", nargs="+", default=[], metavar="FILE", help="your text (files or globs) in place of docstrings")
    add("--data", type=Path, metavar="DIR", help="files of the study's measures: blimp/ and conll2003/")
    add("--jobs", type=at_least(1), default=1, metavar="N", help="runs at a time on this machine; default: 1")
    add("--point", type=at_least(0), metavar="I", help="only run number I, without a report")
    arguments = parser.parse_args(argv)
    setup_logging()
    path, study = load_study(arguments.study)
    if arguments.size not in study.sizes:
        raise ConfigError(f"--size {arguments.size}: {path} has the sizes {', '.join(study.sizes)}")
    from ctxlm_ds.apps.study.report import write_report
    from ctxlm_ds.apps.study.runs import StudyRuns
    from ctxlm_ds.apps.study.scores import folder_of

    if arguments.data and study.measures and not any(folder_of(one, arguments.data).is_dir() for one in study.measures):
        raise ConfigError(f"--data {arguments.data}: no folder of {' or '.join(study.measures)}; see --help")

    output = arguments.output or Path("runs") / f"study-{path.stem}-{arguments.size}"
    runs = StudyRuns(output, study, study.sizes[arguments.size])
    lock = RunLock(output / "data", remedy="choose another --output").acquire(PREPARATION_S)
    try:
        runs.prepare(path, arguments.corpus)
    finally:
        lock.release()
    if arguments.point is not None:
        jobs = runs.search + (runs.compared() if arguments.point >= len(runs.search) else [])
        if arguments.point >= len(jobs):
            raise ConfigError(f"--point {arguments.point}: the study has the points 0 to {len(jobs) - 1}")
        job = jobs[arguments.point]
        runs.train([job], 1)
        if runs.figures(job) is None:
            raise CtxlmError(f"{job.name} has no result; {runs.log(job)} says why")
        return
    runs.train(runs.search, arguments.jobs)
    runs.train(runs.compared(), arguments.jobs)
    if arguments.data is not None:
        runs.score(runs.compared(), arguments.data, arguments.jobs)
    print("\n".join(write_report(runs)))
    print(f"\nreport: {output / 'report.html'}")
