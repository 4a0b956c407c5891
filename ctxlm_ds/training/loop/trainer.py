"""The training loop: steps, evaluations and saves until a limit, a signal or an error."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ctxlm_ds.console import logger
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream.loader import Step, TrainLoader
from ctxlm_ds.errors import TrainingError
from ctxlm_ds.process.signals import STOP_SIGNALS, StopSignal
from ctxlm_ds.recipe.schema import EvaluationConfig, TrainingConfig
from ctxlm_ds.training.engine.losses import word_perplexity
from ctxlm_ds.training.hooks.hooks import Hooks, RunEnd, RunStart, StepMetrics
from ctxlm_ds.training.loop.recovery import Recovery
from ctxlm_ds.training.loop.saves import Saves
from ctxlm_ds.training.loop.state import Ahead, StepInterrupted, StepResult, TrainState
from ctxlm_ds.training.schedules.schedule import LearningRateSchedule

if TYPE_CHECKING:
    from ctxlm_ds.training.continuations import Continuations
    from ctxlm_ds.training.engine.engine import Engine

INTERRUPT_CHECK_S = 5.0
"""Within a step the ranks agree about a stop this often; steps that are shorter are never interrupted."""


@dataclass
class Trainer:
    """Runs steps until a limit or a signal, with evaluations and saves."""

    start: RunStart
    """What hooks receive before the first step."""
    training: TrainingConfig
    evaluation: EvaluationConfig
    engine: Engine
    schedule: LearningRateSchedule
    steps: Iterable[Step]
    validation: Mapping[str, Iterable[Batch | None]]
    """Held-out batches of this rank by source name; None per batch if a pipeline stage reads no data."""
    saves: Saves
    recovery: Recovery
    hooks: Hooks
    stop_signal: StopSignal
    state: TrainState = field(default_factory=TrainState)
    tokens_per_word: Mapping[str, float] = field(default_factory=dict)
    """Of held-out sources whose words are known."""
    words_per_row: float = 0.0
    """White-space words that a row of the stream reads; 0 if not known."""
    continuations: Continuations | None = None
    """Texts to continue after an evaluation."""
    phase_hours: float | None = None
    """Length of the phase if it is in hours."""
    is_last_phase: bool = True
    began_s: float = 0.0
    """Monotonic time at which the process began to train; 0 if it has not yet."""
    _last_evaluation_step: int = -1
    _stopped_by_signal: bool = False
    _signal_number: int = 0
    """Signal that a rank has received; this and what follows is the same on every rank."""
    _is_late: bool = False
    """True if a rank is past the wall-time limit."""
    _hours_are_over: bool = False
    """True if the phase has had its hours by rank 0's clock."""
    _check_every: int = 1
    """Micro-batches between two agreements within a step."""
    _micro_batch_s: float = 0.0
    """This rank's time per micro-batch of the last step; 0 before the first, and if a pipeline stage reads none."""

    _used_s: float = 0.0
    """Rank 0's wall time in the phase: in steps before this start, and all since; if the schedule has a budget."""

    def begin(self) -> None:
        """Prepare for the first step; run() calls this."""
        self.began_s = self.began_s or time.monotonic()
        self.engine.first_step = self.state.first_step
        spent_s = self.state.seconds - self.state.first_seconds
        self._phase_began_s = time.monotonic() - spent_s
        self._hours_are_over = self.phase_hours is not None and spent_s >= self.phase_hours * 3600
        # A resumed step has been evaluated, unless the notice of a signal was too short for it.
        self._last_evaluation_step = self.state.step or -1
        self.saves.start(self.state.step, lambda phase: self.hooks.call("on_phase", phase))
        # The history gets a start here; from now on a Ctrl-C must also give it an end.
        self.stop_signal.starting = False
        self.hooks.call("on_run_start", self.start)
        self._iterator = StepsAhead(self.steps)
        self.engine.passes.interrupted = self._interrupted

    def run(self) -> RunEnd:
        """Train to the end; the last step is always evaluated and saved."""
        self.begin()
        try:
            reason = self._train()
        except BaseException as error:
            self.end("an error", error)
            raise
        return self.end(reason)

    def end(self, reason: str, error: BaseException | None = None) -> RunEnd:
        """Call the hooks' on_run_end; after an error, complete or abandon a pending save."""
        if isinstance(error, TrainingError):
            # Raised on every rank together. What is still being written belongs to a good step.
            self.saves.settle()
        if error is not None:
            # This rank may end alone.
            self.saves.abandon()
        state, over, failed = self.state, self.phase_is_over(), error is not None
        completed = (over and self.is_last_phase) or self._tokens_reached()
        next_phase = over and not completed and not failed and not self._signal_number
        stopped_by = 0 if completed or failed else self._signal_number
        end = RunEnd(reason, state.step, state.tokens, state.seconds, completed, failed, stopped_by, next_phase)
        self.hooks.call("on_run_end", end)
        return end

    def close(self) -> None:
        """End the loader's processes and release the engine, of which this trainer was the only user."""
        if isinstance(self.steps, TrainLoader):
            self.steps.close()
        self.engine.close()

    def _train(self) -> str:
        """Train until there is a reason to stop; return it."""
        reason = self._limit_reached()
        if reason is None:
            logger.info("the first step also prepares the kernels, which may take half a minute")
        elif not self.state.decay:
            logger.info("nothing is left to train; a larger %s continues the run", reason.partition(" ")[0])
        from_weights = self.state.step == 0 and self.start.config.initialize_from is not None
        if reason is None and from_weights:
            is_to_stop = self.engine.topology.all_reduce_max([float(self.stop_signal.requested)])[0]
            if not is_to_stop:
                self.evaluate()
        while reason is None:
            metrics = self.step()
            if metrics is None:
                reason = self._asked_to_stop()
                continue
            reason = self.stop_reason()
            self.hooks.call("on_step_end", metrics)
            if self._signal_number:  # an evaluation may take longer than the notice
                self.saves.last(self.state)
            interval_steps = self.evaluation.interval_steps
            if interval_steps and self.state.step % interval_steps == 0:
                self._evaluate_once()
            if reason is None:
                self.saves.after_step(self.state)
        # What the ranks agreed on: a signal may have reached some of them only by now.
        if not self._stopped_by_signal:
            self._evaluate_once()
        if self.state.step:
            self.saves.last(self.state)
        return reason

    def _evaluate_once(self) -> None:
        if self._last_evaluation_step != self.state.step:
            self.evaluate()

    def evaluate(self) -> dict[str, float]:
        """Evaluate every held-out source; return its figures as `eval/SOURCE/FIGURE`."""
        self._last_evaluation_step = self.state.step
        self.hooks.call("on_phase", "evaluation")
        found: dict[str, float] = {}
        for name, batches in self.validation.items():
            figures = {f"eval/{name}/{key}": value for key, value in self.engine.evaluate(batches).items()}
            if name in self.tokens_per_word:
                by_word = word_perplexity(figures[f"eval/{name}/perplexity"], self.tokens_per_word[name])
                figures[f"eval/{name}/word_perplexity"] = by_word
            if self.engine.average.is_kept:
                with self.engine.average.in_place_of_the_weights():
                    averaged = self.engine.evaluate(batches)
                figures |= {f"eval/{name}/ema_{key}": value for key, value in averaged.items()}
            self.hooks.call("on_evaluation", self.state.step, figures)
            found |= figures
        if self.continuations is not None:
            self.hooks.call("on_continuations", self.state.step, self.continuations.write(self.engine, self.state.step))
        self.hooks.call("on_phase", "training")
        return found

    def step(self) -> StepMetrics | None:
        """Take one step without calling on_step_end; None if it was interrupted, or bad and the run went back."""
        started_s = time.monotonic()
        step = self._iterator.take()
        learning_rate = self.schedule.at(self.state.step - self.state.first_step, self.state.decay)
        find_spike = partial(self.recovery.find_spike, self.state)
        try:
            result = self.engine.train_step(step, self.state.step, learning_rate, find_spike, self._look_ahead)
        except StepInterrupted:
            return None
        self._agree(result.flags)
        if self.recovery.must_go_back(self.state, step, result):
            self._go_back(step, result)
            return None
        seconds = time.monotonic() - started_s
        self._micro_batch_s = seconds / len(step.micro_batches) if step.micro_batches else 0.0
        self.state.step += 1
        self.state.rows_consumed += step.rows_consumed
        self.state.tokens += result.num_tokens
        rows = self.state.rows_consumed - self.state.first_row
        before, self.state.words = self.state.words, self.state.first_words + round(rows * self.words_per_row)
        marks = self.start.config.checkpoint.at_words
        self.state.reached_words = max((mark for mark in marks if before < mark <= self.state.words), default=0)
        self.state.skipped_steps += result.skipped
        self.state.seconds += seconds
        if self.schedule.budget_s and not self.state.decay:
            first = self.state.first_step
            self.state.decay = self.schedule.plan(self.state.step - first, self._used_s)
            for begin, end in [self.state.decay] if self.state.decay else []:
                said = "schedule.until_hours: the learning rate decays from step %d to %d, the last"
                logger.info(said, first + begin, first + end)
        return self._metrics(result, learning_rate, seconds, step)

    def _go_back(self, step: Step, result: StepResult) -> None:
        """Go back to the last good checkpoint and continue with the rows after the bad step's."""
        # A pending save belongs to an earlier, good step. Once complete it may be the one to go back to.
        self.saves.settle()
        self.hooks.call("on_phase", "saving")
        self.state, steps = self.recovery.go_back(self.state, step, result)
        self._iterator = StepsAhead(steps)
        self.saves.rolled_back(self.state.step)
        self._last_evaluation_step = self.state.step or -1
        self.hooks.call("on_rollback", self.state.step)
        self.hooks.call("on_phase", "training")

    def _metrics(self, result: StepResult, learning_rate: float, seconds: float, step: Step) -> StepMetrics:
        return StepMetrics(
            step=self.state.step,
            loss=result.loss,
            terms=result.terms,
            accuracy=result.accuracy,
            learning_rate=learning_rate,
            grad_norm=result.grad_norm,
            tokens=self.state.tokens,
            step_tokens=result.num_tokens,
            step_seconds=seconds,
            total_seconds=self.state.seconds,
            epoch=step.epoch,
            skipped_steps=self.state.skipped_steps,
            rollbacks=self.state.rollbacks,
            loss_scale=result.loss_scale if self.training.precision == "fp16" else None,
            step_rows=step.rows_consumed,
        )

    def stop_reason(self) -> str | None:
        """Return the limit or the signal that ends the training now; the same on every rank."""
        return self._limit_reached() or self._asked_to_stop()

    def _limit_reached(self) -> str | None:
        limits = self.training
        if self.phase_is_over():
            if not self.is_last_phase:
                return f"phase {self.state.phase + 1} is over at step {self.state.step}"
            if self._hours_are_over:
                return f"phases[{self.state.phase}].hours ({self.phase_hours:g}) reached"
            if self.state.decay:
                return f"schedule.until_hours ({self.schedule.budget_s / 3600:g}) reached"
            return f"training.max_steps ({self.start.last_step}) reached"
        return f"training.max_tokens ({limits.max_tokens}) reached" if self._tokens_reached() else None

    def _tokens_reached(self) -> bool:
        return self.training.max_tokens is not None and self.state.tokens >= self.training.max_tokens

    def phase_is_over(self) -> bool:
        """Return whether the phase has had its steps or hours; the same on every rank."""
        _, last = self.state.decay or (0, self.training.max_steps)
        return self._hours_are_over or self.state.step - self.state.first_step >= last

    def _look_ahead(self) -> Ahead:
        """Return the next step and this rank's flags, for the agreement at the end of a step's passes."""
        signals = (float(self.stop_signal.number == number) for number in STOP_SIGNALS)
        limit_hours = self.training.max_hours
        late = limit_hours is not None and time.monotonic() - self.began_s >= limit_hours * 3600
        phase_s = self.state.seconds - self.state.first_seconds
        over = self.phase_hours is not None and self.engine.topology.is_main and phase_s >= self.phase_hours * 3600
        used_s = [time.monotonic() - self._phase_began_s] if self.engine.topology.is_main else [0.0]
        used_s *= self.schedule.budget_s > 0.0
        flags = (*signals, float(late), float(over), self._micro_batch_s, *used_s, *self.saves.flags())
        return Ahead(self._iterator.look(), flags)

    def _agree(self, flags: Sequence[float]) -> None:
        count = len(STOP_SIGNALS)
        late, over, micro_batch_s, *saves = flags[count:]
        if self.schedule.budget_s:
            self._used_s, *saves = saves
        self._signal_number = next((int(n) for n, sent in zip(STOP_SIGNALS, flags, strict=False) if sent), 0)
        self._is_late, self._hours_are_over = bool(late), bool(over)
        self.saves.agree(saves)
        if micro_batch_s:
            self._check_every = max(1, int(INTERRUPT_CHECK_S * self.engine.topology.world_size / micro_batch_s))

    def _asked_to_stop(self) -> str | None:
        """Return why to stop if any rank had a signal or was past the wall-time limit; the same on every rank."""
        if self._signal_number:
            self._stopped_by_signal = self.stop_signal.requested = True
            return f"stopped by signal {signal.Signals(self._signal_number).name}"
        return f"training.max_hours ({self.training.max_hours}) reached" if self._is_late else None

    def _interrupted(self, index: int) -> bool:
        """Return True, on all ranks together, if a rank has been asked to stop; before some micro-batches only."""
        asked_in_last_step = index == 0 and self._micro_batch_s > 0.0
        if index % self._check_every or asked_in_last_step:
            return False
        self._signal_number = int(self.engine.topology.all_reduce_max([float(self.stop_signal.number)])[0])
        return bool(self._signal_number)


class StepsAhead:
    """Steps of which the next one is made before it is taken."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self._steps = iter(steps)
        self._made: Step | Exception | None = None

    def look(self) -> Step | None:
        """Return the next step; None if making it failed, which take() raises."""
        if self._made is None:
            try:
                self._made = next(self._steps)
            except Exception as error:
                self._made = error
        return None if isinstance(self._made, Exception) else self._made

    def take(self) -> Step:
        step, self._made = self._made, None
        if isinstance(step, Exception):
            raise step
        return next(self._steps) if step is None else step
