"""How a run goes on after a bad batch: without it, or from an earlier checkpoint and past it.

In: the policy, ways back to a checkpoint and to another row. Out: the state and the steps to go on with.
Not here: what is bad (anomalies.py, engine.py), what is written (anomaly_log.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.errors import TrainingError
from ctxlm_ds.process.run_history import ANOMALY, ROLLBACK, SKIP
from ctxlm_ds.training.anomalies import AnomalyPolicy, LossJudge
from ctxlm_ds.training.anomaly_log import AnomalyLog
from ctxlm_ds.training.figures import StepResult
from ctxlm_ds.training.state import TrainState


class Recovery:
    """Answers anomalies; every rank makes one and calls its methods together.

    Args:
        policy: what is to be done.
        log: where it is recorded.
        load_last_good: puts weights, moments and counters back to the newest intact checkpoint, or to what they were
            at the run's beginning, and gives the state of that moment.
        steps_from: the training steps from a row on; those of before end.
    """

    def __init__(
        self,
        policy: AnomalyPolicy,
        log: AnomalyLog,
        load_last_good: Callable[[], TrainState],
        steps_from: Callable[[int], Iterable[Step]],
    ) -> None:
        self._policy = policy
        self._log = log
        self._load_last_good = load_last_good
        self._steps_from = steps_from

    def judge(self, state: TrainState) -> LossJudge:
        """The judge of the step that comes after `state`."""
        return self._policy.judge(state)

    def must_go_back(self, state: TrainState, step: Step, result: StepResult) -> bool:
        """Look at the step after `state`: note a good one, record one that is skipped or that ends the run.

        Raises:
            TrainingError: the run must stop.
        """
        if result.anomaly is None:
            if not result.skipped:
                self._policy.note_good(state, result.loss)
            return False
        decision = self._policy.decide(state, result.anomaly)
        number, batch = state.step + 1, (state.rows_consumed, step.rows_consumed)
        if decision.action == "stop":
            self._log.warn(decision.why, "the update was not applied, the run stops", *batch)
            self._log.record(ANOMALY, number, decision.why, result, *batch)
            raise TrainingError(decision.why)
        if decision.action == "skip":
            state.skips_in_a_row += 1
            self._log.warn(decision.why, "the batch is skipped", *batch)
            self._log.record(SKIP, number, decision.why, result, *batch)
        return decision.action == "rollback"

    def go_back(self, state: TrainState, step: Step, result: StepResult) -> tuple[TrainState, Iterable[Step]]:
        """From the bad step after `state` to the last good checkpoint: its state and the steps from there, of which
        the first begins behind the bad batch.

        Raises:
            CheckpointError: no checkpoint can be read.
        """
        assert result.anomaly is not None
        why, batch = result.anomaly.why, (state.rows_consumed, step.rows_consumed)
        self._log.warn(why, "the run goes back to its last good checkpoint and passes over the rows since", *batch)
        good = self._load_last_good()
        first_passed, next_row = good.rows_consumed, state.rows_consumed + step.rows_consumed
        good.rows_consumed = next_row
        good.rollbacks = state.rollbacks + 1
        passed = {"first": first_passed, "count": next_row - first_passed}
        self._log.record(ROLLBACK, state.step + 1, why, result, *batch, to_step=good.step, passed_over=passed)
        return good, self._steps_from(next_row)
