"""Check a pretraining job, then queue it: `sbatch slurm/pretrain.sbatch`, named after the run, with its log in the run.

Checked are the recipe for the nodes and ranks, its tokenizer and datasets, what the run has done already, and sbatch's
own opinion (--test-only).
Further options are sbatch's: --partition=gpu --account=me --time=24:00:00. `ctxlm check` takes the same words, and
submits nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from ctxlm_ds.apps.cluster.job import refuse_run_of_another
from ctxlm_ds.apps.cluster.job_context import RUN_DIR, SWEEP_NAME, SWEEP_OPTION, SweepTask, read_sweep, tasks_of_array
from ctxlm_ds.apps.cluster.slurm_commands import show_job
from ctxlm_ds.apps.plan.check_run import check_only, input_lines
from ctxlm_ds.checkpoint.saved_state import read_progress
from ctxlm_ds.console import at_least, counted
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.installed import checkout
from ctxlm_ds.process.run_files import update_status
from ctxlm_ds.process.run_lock import make_run_dir
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.phases import run_phases
from ctxlm_ds.recipe.problems import shortened
from ctxlm_ds.untrusted_json import read_text

WAITS = ("--dependency", "-d")
PATIENCE_S = 5.0  # with Slurm's controller, for a question that the job asks again
TRIAL_NUMBER = re.compile(r"Job \d+ to start")
PROFILE_LINE = re.compile(r"^#SBATCH\s+(.*)$", re.MULTILINE)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command; what it does not know is sbatch's."""
    parser = argparse.ArgumentParser(
        prog=f"{sys.argv[0]}" if sys.argv[0].startswith("ctxlm ") else "ctxlm submit",
        usage="%(prog)s RECIPE [OPTIONS] [--SWEEP_OPTION=VALUE of sbatch ...]",
        description=__doc__,
        allow_abbrev=False,
        parents=[_sizes_parser()],
    )
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="a path, or the name of a shipped recipe")
    add("--profile", metavar="NAME", help="settings of a cluster: slurm/profiles/NAME.sh, or a path (slurm/env.sh)")
    add("--sweep", type=Path, metavar="FILE", help="a line of settings for each task of an array; its runs are RUN/N")
    add("--deepspeed_config", metavar="JSON", help="DeepSpeed JSON: a path or a name in ds_configs/")
    add("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="override settings")
    return parser


def _sizes_parser() -> argparse.ArgumentParser:
    """Return the parser of sbatch's options that the check needs; a profile may have them too."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("--nodes", type=at_least(1), default=1, metavar="N")
    add("--ranks", "--ntasks-per-node", type=at_least(1), metavar="N", help="of each node (default: its GPUs, or one)")
    add("--gpus-per-node", metavar="[TYPE:]N")
    add(
        "--array", "-a", metavar="TASKS", help="of a sweep (default: all): 0-7%%2; or 1-10%%1, jobs that follow another"
    )
    return parser


def main(argv: Sequence[str] | None = None, submits: bool = True) -> None:
    words = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser()
    args, _ = parser.parse_known_args(words)
    scripts = scripts_folder()
    profile = find_profile(args.profile, scripts)
    sizes, options = _sizes_parser().parse_known_args(read_profile(profile))
    args, own_options = parser.parse_known_args(words, sizes)  # the command line wins, and comes last
    options += own_options
    number = (args.gpus_per_node or "1").rpartition(":")[2]  # of h100:8 or 8
    args.ranks = args.ranks or max(1, int(number) if number.isdigit() else 1)
    # As it is before torch is imported for the check.
    environ = {**os.environ, "CTXLM_ENV": str(profile), "CTXLM_HOME": str(scripts.parent)}
    base = load_config(args.recipe, args.set, args.nodes * args.ranks)
    run_dir, tasks = base.directory, [] if args.sweep is None else _sweep_tasks(args.sweep, args.array)
    gpus = [] if args.gpus_per_node is None else [f"--gpus-per-node={args.gpus_per_node}"]
    array = args.array or (f"0-{tasks[-1].number}" if tasks else None)
    arrays = [] if array is None else [f"--array={array}"]
    # sbatch replaces what follows a percent sign.
    log = str(run_dir).replace("%", "%%") + ("/%a/slurm-%A.log" if tasks else "/slurm-%j.log")
    job = [f"--job-name={run_dir.name}", f"--output={log}", f"--nodes={args.nodes}", f"--ntasks-per-node={args.ranks}"]
    job += [*gpus, *arrays, *options, str(scripts / "pretrain.sbatch"), args.recipe]
    job += [] if args.deepspeed_config is None else ["--deepspeed_config", args.deepspeed_config]
    job += [SWEEP_OPTION, str(run_dir / SWEEP_NAME)] if tasks else []
    job += ["--set", *args.set] if args.set else []
    is_asked = shutil.which("sbatch") is not None
    if submits and not is_asked:
        raise ConfigError("sbatch: not found; submit on a login node of the cluster")
    # Before what takes minutes. The number of its trial is not that of the job.
    trial = TRIAL_NUMBER.sub("to start", _sbatch("--test-only", job, environ).strip()) if is_asked else ""
    is_complete = check(args, run_dir, tasks, waits=any(word.startswith(WAITS) for word in options))
    print(f"  {trial}" if is_asked else "  sbatch: not asked, it is not installed here")
    if gpus:
        each = f"--gpus {args.nodes * args.ranks} --gpus-per-node {args.ranks}"
        print(f"  more can be proved without a GPU: ctxlm verify {args.recipe} {each} --gpu NAME")
    if submits and is_complete:
        print("not queued, there is nothing to train; a larger training.max_steps continues a run")
    elif submits:
        queue(args, run_dir, tasks, job, environ)


def check_main(argv: Sequence[str] | None = None) -> None:
    main(argv, submits=False)


def check(args: argparse.Namespace, run_dir: Path, tasks: list[SweepTask], waits: bool = False) -> bool:
    """Check the recipe of every task, what it reads and what it has done, and describe the first.

    `run_dir` is that of the recipe without a sweep of these tasks. Returns whether all runs are complete. A job that
    `waits` for others may find them in its run.

    Raises:
        ConfigError: a setting is wrong, an input is missing or does not fit, or another job has the run.
        CheckpointError: a run cannot be continued with these settings.
    """
    world_size = args.nodes * args.ranks
    common = [setting for setting in args.set if not (tasks and setting.startswith(RUN_DIR))]
    runs = [(task.settings_in(run_dir), task.place) for task in tasks] or [([], "")]
    configs = [load_config(args.recipe, [*common, *own], world_size, dict.fromkeys(own, place)) for own, place in runs]
    first = argparse.Namespace(**vars(args), config=args.recipe, world_size=world_size, print=False)
    first.set = [*common, *runs[0][0]]
    kept = run_dir / SWEEP_NAME
    if tasks and kept.exists() and read_text(kept, ConfigError) != read_text(args.sweep, ConfigError):
        raise ConfigError(f"{kept} has other settings than {args.sweep}; set run_dir to another folder")
    for config in configs:  # before what takes minutes
        try:
            refuse_run_of_another(config.directory, None, partial(show_job, patience_s=PATIENCE_S))
        except ConfigError as error:
            if not waits:
                raise
            print(f"warning: {error}")
    check_only(first)
    begun = [each for config in configs if (each := read_progress(config.directory, config)) is not None]
    num_complete = sum(each.complete for each in begun)
    if len(runs) > 1 and begun:
        print(f"  {len(runs)} tasks: {num_complete} complete already, {len(begun) - num_complete} to resume")
    for phase in (phase for config in configs for phase in run_phases(config)):
        input_lines(phase.config, must_exist=True)
    return num_complete == len(runs)


def _sweep_tasks(sweep: Path, array: str | None) -> list[SweepTask]:
    every = read_sweep(sweep)
    wanted = [range(len(every))] if array is None else tasks_of_array(array)
    tasks = [task for task in every if any(task.number in numbers for numbers in wanted)]
    if not tasks:
        raise ConfigError(f"--array: {sweep} has none of these tasks")
    return tasks


def scripts_folder() -> Path:
    """Return the folder of the batch scripts: of CTXLM_HOME, of this folder, or of the checkout."""
    homes = [os.environ.get("CTXLM_HOME"), Path.cwd(), checkout()]
    folders = [Path(home).resolve() / "slurm" for home in homes if home]
    found = next((folder for folder in folders if (folder / "pretrain.sbatch").is_file()), None)
    if found is None:
        raise ConfigError("no slurm/pretrain.sbatch here; `ctxlm init --slurm slurm` copies the scripts")
    return found


def find_profile(name: str | None, scripts: Path) -> Path:
    """Return the file with a cluster's settings. Raises ConfigError if it does not exist."""
    default = os.environ.get("CTXLM_ENV") or scripts / "env.sh"
    places = [Path(default)] if name is None else [scripts / "profiles" / f"{name}.sh", Path(name)]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        known = ", ".join(sorted(path.stem for path in scripts.glob("profiles/*.sh"))) or "none yet"
        raise ConfigError(f"--profile {name}: no {places[0]} (copy {scripts / 'env.sh'} there); there are: {known}")
    return found.resolve()


def read_profile(path: Path) -> list[str]:
    """Return sbatch's options in a file of settings. Raises ConfigError for a line that is not a list of words."""
    words = []
    for line in PROFILE_LINE.findall(read_text(path, ConfigError)):
        try:
            words += shlex.split(line, comments=True)
        except ValueError as error:
            raise ConfigError(f"{path}: #SBATCH {shortened(line)}: {error}") from error
    return words


def queue(
    args: argparse.Namespace, run_dir: Path, tasks: list[SweepTask], words: list[str], environ: Mapping[str, str]
) -> None:
    """Queue a checked job, and name it in its runs. Raises ConfigError if sbatch refuses it."""
    make_run_dir(run_dir)  # Slurm needs it for the log
    if tasks:
        (run_dir / SWEEP_NAME).write_text(read_text(args.sweep, ConfigError), encoding="utf-8")
    for task in read_sweep(args.sweep) if tasks else ():
        (run_dir / str(task.number)).mkdir(exist_ok=True)
    job_id = _sbatch("--parsable", words, environ).strip().split(";")[0]
    size = f"{counted(args.nodes, 'node')} x {counted(args.ranks, 'rank')}"
    of_sweep, logs = (f"{counted(len(tasks), 'task')} of ", f"{run_dir}/*") if tasks else ("", str(run_dir))
    print(f"job {job_id}: {run_dir.name}, {of_sweep}{size}; log: {logs}/slurm-{job_id}.log")
    print(f"next: watch -n 60 ctxlm status {shlex.quote(shlex.quote(str(run_dir)))}")  # watch calls a shell
    print(f"next: scancel --signal=INT {job_id}          (save and stop)", flush=True)
    # Name the job in its run, so that a second one is refused before this one begins.
    if not tasks:
        update_status(run_dir, submitted=job_id)
    for task in tasks:
        update_status(run_dir / str(task.number), submitted=f"{job_id}_{task.number}")


def _sbatch(mode: str, words: Sequence[str], environ: Mapping[str, str]) -> str:
    command = ["sbatch", mode, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if done.returncode != 0:
        raise ConfigError(f"{shlex.join(command)}: {done.stderr.strip() or 'refused without a message'}")
    return done.stdout or done.stderr
