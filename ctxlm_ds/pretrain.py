"""Pretrain a model: `deepspeed --module ctxlm_ds.pretrain --config RECIPE.yaml`, or under torchrun, srun or python -m.

Heavy libraries are imported only after the recipe has been checked.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.apps.init.recipes import print_recipes
from ctxlm_ds.apps.plan.check_run import MODULE, check_only, deepspeed_settings, parse_arguments
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, find_newest_intact
from ctxlm_ds.checkpoint.saved_state import phase_to_train
from ctxlm_ds.console import logger, run_command, setup_logging
from ctxlm_ds.errors import EXIT_UNEXPECTED, TrainingError
from ctxlm_ds.installed import check_installed
from ctxlm_ds.process.failure import FailureReport, Watchdog, Watched
from ctxlm_ds.process.launch import RankInfo, discover_ranks, prepare_process
from ctxlm_ds.process.launchers import LOCAL_RANKS, run_ranks
from ctxlm_ds.process.run_files import OutputLog, update_status
from ctxlm_ds.process.run_history import own_job_id
from ctxlm_ds.process.run_lock import RunLock, make_run_dir
from ctxlm_ds.process.signals import StopSignal
from ctxlm_ds.recipe.check import schedule_warnings, unused_settings
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.phases import RunPhase, run_phases
from ctxlm_ds.recipe.schema import DownstreamTask, ParallelConfig, RunConfig, TrainingConfig
from ctxlm_ds.recipe.zero import ZeroSettings
from ctxlm_ds.registry import LAUNCHERS

if TYPE_CHECKING:
    from ctxlm_ds.parallel.topology import Topology
    from ctxlm_ds.training.hooks.hooks import RunEnd
    from ctxlm_ds.training.loop.trainer import Trainer


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; a user's mistake ends with one message and exit status 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    arguments = parse_arguments(argv)
    if arguments.list:
        return run_command(print_recipes)
    is_rank = os.environ.get(LOCAL_RANKS) == str(os.getppid())  # of the process that --ranks has started
    if arguments.ranks > 1 and not arguments.check and not is_rank:
        run_command(lambda: sys.exit(run_ranks(_this_command(sys.argv[1:] if argv is None else argv), arguments.ranks)))
    if arguments.check:
        setup_logging()
        return run_command(lambda: check_only(arguments))
    # Before torch is imported: until then SIGUSR1, Slurm's notice before a time limit, would end the process.
    stop_signal = StopSignal().install()
    stop_signal.starting = True
    report = FailureReport(stop_signal)
    setup_logging(report.rank)
    try:
        check_installed()
        output_log = OutputLog() if report.rank == 0 else None
        report.ranks = discover_ranks()
        launcher = LAUNCHERS.get(report.ranks.launcher)
        stop_signal.second_interrupts = launcher.second_interrupts
        stopped_by = pretrain(arguments, report.ranks, stop_signal, report, output_log)
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(report.end(error))
    finally:
        if report.ranks is not None:
            launcher.finish(report.ranks, stop_signal.name == "SIGINT")
    # Launchers and jobs would take another status than 0 for a failure.
    if stopped_by and launcher.returns_status:
        sys.exit(128 + stopped_by)


def _this_command(words: Sequence[str]) -> list[str]:
    by_name = sys.argv[0].startswith("ctxlm ")
    start = [str(Path(sys.executable).with_name("ctxlm")), "pretrain"] if by_name else [sys.executable, "-m", MODULE]
    return [*start, *words]


def pretrain(
    arguments: argparse.Namespace, ranks: RankInfo, stop_signal: StopSignal, report: FailureReport,
    output_log: OutputLog | None = None,
) -> int:  # fmt: skip
    """Check the recipe, join the other ranks, and train under the watchdog while holding the run lock.

    Returns the number of the signal that stopped the run before it was complete; 0 if none did. Raises CtxlmError for a
    mistake of the user, or if the training failed.
    """
    config = load_config(arguments.config, arguments.set, ranks.world_size)
    report.run_dir = config.directory
    phases = run_phases(config, ranks.world_size)
    settings = [deepspeed_settings(arguments, phase.config, ranks.world_size) for phase in phases]
    for one in phases:
        for line in unused_settings(one.config):
            logger.info("note: %s", line)
        for line in schedule_warnings(one.config.schedule, one.config.training.max_steps) if ranks.rank == 0 else []:
            logger.warning("%s", line)
    with Watchdog(config.watchdog, make_run_dir(config.directory), ranks) as watchdog:
        topology = join_ranks(config.parallel, config.training, settings[0], ranks)

        from torch import distributed

        from ctxlm_ds.training.engine.runtime import leave_waiting_to_watchdog, print_communication

        leave_waiting_to_watchdog()
        # If another process takes the lock, this one must not write any more.
        lock = RunLock(config.directory, on_loss=lambda: os._exit(EXIT_UNEXPECTED))
        try:
            topology.run_on_rank_0(lambda: lock.acquire(wait_s=arguments.wait_for_lock))
            if topology.is_main:
                watchdog.clear_old_evidence()
                if output_log is not None:
                    output_log.open(lock.run_dir)
                update_status(lock.run_dir, state="starting", why=None, job_id=own_job_id(), verdict=None)
            check_judged_tasks(config.evaluation.downstream, config.model.family, topology)
            end = train_phases(config, list(zip(phases, settings, strict=True)), lock, topology, stop_signal, watchdog)
            print_communication(settings[0])
        finally:
            lock.release()
        distributed.destroy_process_group()
    return end.signal_number


def train_phases(
    config: RunConfig, phases: Sequence[tuple[RunPhase, dict[str, Any]]], lock: RunLock, topology: Topology,
    stop_signal: StopSignal, watchdog: Watchdog,
) -> RunEnd:  # fmt: skip
    """Train the phase that is due, with its DeepSpeed settings, and those after it, until one ends the run.

    Engine and groups of a phase are removed before those of the next are built.
    """
    from ctxlm_ds.run import build_run
    from ctxlm_ds.training.engine.runtime import explain_out_of_memory, leave_waiting_to_watchdog

    def first_phase() -> int:
        several = len(phases) > 1
        newest = find_newest_intact(lock.run_dir / CHECKPOINTS_DIR, speaks=False)[0] if several else None
        return phase_to_train(newest, [phase for phase, _ in phases])

    first, began_s = topology.compute_on_rank_0(first_phase), 0.0
    for phase, settings in phases[first:]:
        topology = _topology_of(phase.config.parallel, topology)
        with explain_out_of_memory(phase.config):
            trainer = build_run(config, settings, lock, topology, stop_signal, phase)
            trainer.began_s = began_s
            trainer.start = replace(trainer.start, begins_phase=phase.number > first)
            judge_checkpoints(trainer, lock.run_dir)
            leave_waiting_to_watchdog()
            end = train(trainer, watchdog, lock.run_dir, watchdog.ranks)
        began_s = trainer.began_s
        if not end.phase_over:
            break
        watchdog.beat("start")
        watchdog.writing_age_s = lambda: None  # of this trainer, whose engine must not live on
        trainer.close()
        del trainer
        gc.collect()
    return end


def _topology_of(layout: ParallelConfig, topology: Topology) -> Topology:
    """Return this rank's place in the layout of a phase."""
    if layout.context_parallel_size == topology.context_parallel_size:
        return topology
    from ctxlm_ds.parallel.topology import build_topology

    sizes = layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.context_parallel_size
    return build_topology(topology.local_rank, topology.local_world_size, *sizes)


def check_judged_tasks(tasks: Sequence[DownstreamTask], family: str, topology: Topology) -> None:
    """Raise ConfigError or DataError, on every rank, if the family cannot do the tasks of evaluation.downstream."""
    if tasks:
        from ctxlm_ds.apps.evaluate.during_run import check_tasks

        topology.run_on_rank_0_first(lambda: check_tasks(tasks, family))


def judge_checkpoints(trainer: Trainer, run_dir: Path) -> None:
    """Add the hook that judges checkpoints on the tasks of evaluation.downstream, on rank 0."""
    if trainer.evaluation.downstream and trainer.engine.topology.is_main:
        from ctxlm_ds.apps.evaluate.during_run import DownstreamHook

        save_minutes, signal = trainer.start.config.watchdog.save_minutes, trainer.stop_signal
        judge = DownstreamHook(
            trainer.evaluation.downstream, save_minutes, run_dir, trainer.hooks.call, lambda: bool(signal.number)
        )
        trainer.hooks.prepend(judge)


def join_ranks(
    layout: ParallelConfig, training: TrainingConfig, deepspeed_config: dict[str, Any], ranks: RankInfo
) -> Topology:
    """Prepare the process and join the other ranks' process group.

    Raises ConfigError if the device lacks the precision, or the ranks do not fill the layout.
    """
    # ZeRO 3 gathers weights during the computation and needs more than one queue.
    one_queue = layout.tensor_parallel_size > 1 and ZeroSettings.of_json(deepspeed_config).stage < 3
    logger.info("importing torch")
    prepare_process(ranks, training.deterministic, one_queue)

    from ctxlm_ds.parallel.topology import build_topology
    from ctxlm_ds.training.engine.runtime import check_precision, init_process_group

    check_precision(training)
    init_process_group()
    return build_topology(
        ranks.local_rank, ranks.local_world_size, layout.tensor_parallel_size, layout.pipeline_parallel_size,
        layout.context_parallel_size,
    )  # fmt: skip


def train(trainer: Trainer, watchdog: Watchdog, run_dir: Path, ranks: RankInfo) -> RunEnd:
    """Train to the end, with progress reported to the watchdog and in the history.

    Raises TrainingError, which names the last good checkpoint and what to do.
    """
    from ctxlm_ds.apps.evaluate.verdict import Predictions, VerdictHook
    from ctxlm_ds.apps.report.run_report import ReportHook
    from ctxlm_ds.training.hooks.status import RecordHook, WatchdogHook, environment

    trainer.hooks.append(WatchdogHook(watchdog))
    watchdog.writing_age_s = trainer.saves.pending_age_s
    if trainer.engine.topology.is_main:
        facts = environment(trainer.engine, trainer.training)
        trainer.hooks.append(RecordHook(run_dir, ranks, facts, trainer.saves.saver.last_good))
        trainer.hooks.append(VerdictHook(partial(Predictions.of, trainer.start.config), run_dir))
        trainer.hooks.append(ReportHook(run_dir))
    trainer.validation = {name: Watched(batches, watchdog) for name, batches in trainer.validation.items()}
    if trainer.continuations is not None:
        trainer.continuations.on_pass = watchdog.beat
    try:
        return trainer.run()
    except TrainingError as error:
        good = trainer.saves.saver.last_good()
        kept = f"the last good checkpoint {good} is intact" if good else "no checkpoint has been written"
        raise TrainingError(f"{error}.\nTraining stopped; {kept}.") from error


if __name__ == "__main__":
    main()
