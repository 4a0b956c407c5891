"""Saving and resuming of a run: its complete state to a checkpoint, which any layout reads, and back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ctxlm_ds.checkpoint.chunk_index import CARRIED_KIND, WEIGHT_KIND, merge_index
from ctxlm_ds.checkpoint.ledger import Segment, first_weights, open_segment, read_ledger, write_ledger
from ctxlm_ds.checkpoint.manager import CheckpointManager, Write
from ctxlm_ds.checkpoint.rank_states import RankStates
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.checkpoint.saved_state import (
    RECIPE_NAME,
    STATE_NAME,
    read_saved_state,
    refuse_changed_data,
    refuse_changed_settings,
    report_resume,
)
from ctxlm_ds.console import logger
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.recipe.load import dump_config, load_saved_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.sections import EMA_KIND
from ctxlm_ds.training.engine.engine import Engine
from ctxlm_ds.training.hooks.status import environment
from ctxlm_ds.training.loop.saves import PendingSave, Saver
from ctxlm_ds.training.loop.state import TrainState

FREE_SPACE_SLACK_BYTES = 16 * 2**20

UNSPLIT = {
    "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "context_parallel_size": 1, "sequence_parallel": False,
}  # fmt: skip
"""Layout of the checkpoints that do not record a part of it."""


class TrainingCheckpoints(Saver):
    """The checkpoints of one run in training."""

    def __init__(
        self,
        manager: CheckpointManager,
        engine: Engine,
        config: RunConfig,
        tokenizer_dir: Path,
        data: Mapping[str, Any],
        recipe_text: str | None = None,
    ) -> None:
        """Take what a checkpoint consists of: the recipe of a phase, and the text of the run's if it has several.

        `data` (RunRows.describe) describes the training rows; of its `sources` a resume compares the index alone.
        """
        self._manager = manager
        self.engine = engine
        self._config, self._recipe_text = config, recipe_text
        self._tokenizer_dir = tokenizer_dir
        self._data = dict(data)
        self._topology: Topology = engine.topology
        self._states = RankStates(engine)
        self._read: list[Segment] = []
        """Ledger of the weights when they were last saved or loaded."""
        self.beginning: Path | None = None
        """What `initialize_from` names, once a run begins."""
        self.changed_settings: list[str] = []
        """Settings of the recipe that the last resume found changed, as `name old -> new`."""

    def save(self, state: TrainState) -> None:
        pending = self._begin(state, lambda: self._states.write, background=False)
        while pending is not None and not pending.over:
            pending.advance()

    def begin(self, state: TrainState) -> PendingSave | None:
        """Copy this state and write it in the background; without `checkpoint.overlap` or enough memory, `save` it."""
        if self._config.checkpoint.overlap and self._states.can_be_copied():
            return self._begin(state, self._states.copy, background=True)
        self.save(state)
        return None

    def _begin(self, state: TrainState, take: Callable[[], Write], background: bool) -> PendingSave | None:
        needed_bytes = self._states.bytes_of_all_ranks() + FREE_SPACE_SLACK_BYTES
        return self._manager.begin(state.step, take, self._finisher(state), needed_bytes, background)

    def abandon(self) -> None:
        self._states.given_up.set()

    def last_good(self) -> str | None:
        folder = self._manager.last_good()
        return None if folder is None else str(folder)

    def _finisher(self, state: TrainState) -> Callable[[Path, list[Any]], None]:
        """Return the function by which rank 0 adds the other files, all of this moment."""
        now = TrainState.from_dict(asdict(state))
        scalars, made_by = self.engine.scalars(), environment(self.engine, self._config.training)
        document = {"train_state": asdict(state), "data": self._data, "environment": made_by}
        described = json.dumps(document | {"deepspeed": self.engine.json_optimizer}, indent=1)

        def finish(folder: Path, chunks_by_rank: list[Any]) -> None:
            merge_index(folder, chunks_by_rank, scalars)
            (folder / STATE_NAME).write_text(described, encoding="utf-8")
            self._read = [*self._read[:-1], *(last.up_to(now) for last in self._read[-1:])]
            write_ledger(folder, self._read)
            (folder / "config.yaml").write_text(dump_config(self._config), encoding="utf-8")
            if self._recipe_text is not None:
                (folder / RECIPE_NAME).write_text(self._recipe_text, encoding="utf-8")
            shutil.copytree(self._tokenizer_dir, folder / "tokenizer")

        return finish

    def resume(self, folder: Path | None) -> TrainState | None:
        """Load a checkpoint of this run (CheckpointManager.find_resumable) and return its state; None without one.

        Raises CheckpointError if the checkpoint is damaged, or belongs to another model, data or seed.
        """
        if folder is None:
            source = self._config.initialize_from
            if source is not None and self.beginning is None:
                # Once: the newest checkpoint of a run that trains is soon another one.
                self.beginning = self._topology.compute_on_rank_0(lambda: first_weights(source))
            self._read = read_ledger(self.beginning) if self.beginning else []
            self._read = open_segment(self._read, self._config, self._data, 0)
            return None
        described = read_saved_state(folder)
        if not described:
            raise CheckpointError(
                f"{folder}: no {STATE_NAME}, so this run cannot be resumed; start a new run from its weights: "
                f"--set initialize_from={folder} run_dir=NEW_FOLDER"
            )
        refuse_changed_settings(folder, self._config)
        refuse_changed_data(folder, described["data"], self._data)
        reader = CheckpointReader(folder)
        scalars = reader.scalars
        self._load_chunks(reader, int(scalars.get("optimizer_updates", 0)))
        self.engine.restore_scalars(scalars)
        load_carried(self.engine, reader, described["environment"])
        state = TrainState.from_dict(described["train_state"])
        self.read_on(folder, state)
        saved_config = load_saved_config(folder / "config.yaml")
        differences = self._changed_environment(described["environment"])
        run_dir, last_step = folder.parent.parent, state.first_step + self._config.training.max_steps
        logger.info("resuming %s at step %s of %s", run_dir, f"{state.step:,}", f"{last_step:,}")
        of_json = json.loads(json.dumps(self.engine.json_optimizer))
        before = described.get("deepspeed") or of_json  # older checkpoints have none
        self.changed_settings = report_resume(
            saved_config, self._config, state.step, differences, (before, of_json), log=self._topology.is_main,
            first_step=state.first_step,
        )  # fmt: skip
        return state

    def read_on(self, folder: Path, state: TrainState) -> None:
        """Continue the ledger of a checkpoint with the rows from `state` on, in which a phase begins."""
        self._read = open_segment(read_ledger(folder), self._config, self._data, state.rows_consumed, state.step)

    def _load_chunks(self, reader: CheckpointReader, updates: int) -> None:
        kinds = reader.moment_kinds()
        if kinds:
            self.engine.prepare_optimizer_state(updates, kinds)
        for fragment in self.engine.fragments():
            held = (fragment.start, fragment.length, fragment.shard)
            fragment.weight().copy_(reader.read(fragment.name, WEIGHT_KIND, *held))
            state = self.engine.optimizer_state(fragment.owner)
            own = reader.kinds(fragment.name)
            # The average of a parameter that was not trained is its weight.
            for kind in (kind for kind in kinds if kind in state and kind in (*own, EMA_KIND)):
                view = fragment.moment(state, kind)
                view.copy_(reader.read(fragment.name, kind if kind in own else WEIGHT_KIND, *held))
        self.engine.weights_changed()

    def _changed_environment(self, saved: Mapping[str, Any]) -> list[str]:
        """Return what keeps the resume from being bitwise, as `name old -> new`."""
        now = environment(self.engine, self._config.training)
        before = {**UNSPLIT, **saved}
        different = [f"{key} {before.get(key)} -> {value}" for key, value in now.items() if before.get(key) != value]
        if now["device"] == "cuda" and not self._config.training.deterministic:
            different.append("training.deterministic is false on CUDA")
        return different


def load_carried(engine: Engine, reader: CheckpointReader, environment: Mapping[str, Any]) -> None:
    """Give the engine what its micro-batches carried when a run with this environment wrote the checkpoint.

    Raises CheckpointError if its micro-batches had another size, so that their rows carry other lanes.
    """
    if not reader.carried_names():
        engine.load_carried({})
        return
    before, now = environment.get("micro_batch_size"), engine.config.training.micro_batch_size
    if before != now:
        raise CheckpointError(
            f"{reader.path}: the model carries a state from step to step for each row of a micro-batch, and it was "
            f"saved for micro-batches of {before} rows; set training.micro_batch_size back from {now} to {before}, or "
            f"start a new run from its weights: --set initialize_from={reader.path} run_dir=NEW_FOLDER"
        )
    engine.load_carried({name: reader.read_full(name, CARRIED_KIND) for name in engine.carried_names()})
