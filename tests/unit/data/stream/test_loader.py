"""The same data whatever the workers, ranks, micro-batches and interruptions."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.index.build import build_rows
from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.numba_random import stream_key
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream import collate as collate_module
from ctxlm_ds.data.stream import loader as loader_module
from ctxlm_ds.data.stream.blend import PlannedRows, RowOrder
from ctxlm_ds.data.stream.loader import TRAIN_MASKS, BatchBuilder, BatchPlan, EvalLoader, Step, TrainLoader
from ctxlm_ds.errors import DataError
from ctxlm_ds.objectives.base import Objective, build_objective
from ctxlm_ds.objectives.masked_lm import MaskedLM
from ctxlm_ds.recipe.schema import RunConfig
from tests.ragged import one_sample
from tests.sample_data import (
    FakeTokenizer,
    eval_loader,
    locate,
    random_documents,
    read_samples,
    run_config,
    samples_of_row,
    train_loader,
    write_dataset,
)  # fmt: skip

TOKENIZER = FakeTokenizer()
Setup = tuple[RowSource, Objective, RunConfig]


def setup(folder: Path, documents: int = 30, **sections: dict[str, Any]) -> Setup:
    """Two datasets, an objective, a recipe of global batch 8."""
    config = run_config(**sections)
    prefixes = [folder / "one", folder / "two"]
    for seed, prefix in enumerate(prefixes):
        if not prefix.with_suffix(".idx").exists():
            write_dataset(prefix, random_documents(documents, sentences=4, seed=seed))
    objective = build_objective(config.objective, TOKENIZER)
    return build_rows(prefixes, TOKENIZER, config.row_settings), objective, config


def steps_of(made: Setup, count: int, rank: int = 0, size: int = 1, start_row: int = 0) -> list[Step]:
    loader = train_loader(*made, ranks=(rank, size), start_row=start_row)
    steps = list(itertools.islice(loader, count))
    loader.close()
    return steps


def rows_of_batch(batch: Batch) -> list[bytes]:
    """Each row with everything that belongs to it, as bytes."""
    tensors = list(batch.fields.values())
    return [b"".join(tensor[row].numpy().tobytes() for tensor in tensors) for row in range(len(tensors[0]))]


def global_rows(parts: list[list[Step]]) -> list[list[bytes]]:
    """The rows of each step in global order, from every rank's steps."""
    steps = []
    for step in zip(*parts, strict=True):
        micro_batches = itertools.chain.from_iterable(zip(*(rank.micro_batches for rank in step), strict=True))
        steps.append([row for batch in micro_batches for row in rows_of_batch(batch)])
    return steps


def test_training_masks_follow_the_seed(tmp_path: Path) -> None:
    """The one row of a dataset in eight epochs, under two seeds and an index that does not change with them."""
    prefix = write_dataset(tmp_path / "d", [[list(range(5, 60))]])
    config = run_config(data={"sample_format": "full_sentences"}, objective={"name": "masked_lm"})
    objective = build_objective(config.objective, TOKENIZER)
    rows = build_rows([prefix], TOKENIZER, config.row_settings)
    masks = []
    for seed in (7, 7, 8):
        training = config.training.model_copy(update={"seed": seed})
        (step,) = steps_of((rows, objective, config.model_copy(update={"training": training})), 1)
        positions = [batch.fields["prediction_positions"] for batch in step.micro_batches]
        masks.append({tuple(row) for batch in positions for row in batch.tolist()})
    assert masks[0] == masks[1] and len(masks[0]) == 8
    assert not masks[0] & masks[2]


@pytest.mark.long
def test_workers_ranks_and_micro_batches_change_nothing(tmp_path: Path) -> None:
    expected = global_rows([steps_of(setup(tmp_path), 12)])
    assert len({row for step in expected for row in step}) == 12 * 8
    for workers, size, micro in ((1, 1, 2), (2, 1, 2), (0, 2, 2), (0, 4, 2), (2, 4, 1), (0, 1, 8), (1, 2, 4)):
        made = setup(tmp_path, data={"num_workers": workers}, training={"micro_batch_size": micro})
        assert global_rows([steps_of(made, 12, rank, size) for rank in range(size)]) == expected


RAMP = {"global_batch_size": 24, "batch_ramp": [8, 8, 60]}
"""Steps of 8, 8, 8, 8, 16, 16 and then 24 rows: half of the 60 rows at each size."""


@pytest.mark.parametrize(("workers", "size", "micro"), [(0, 1, 4), (2, 1, 1), (2, 2, 4), (0, 4, 2)])
def test_a_growing_batch_reads_the_same_rows(tmp_path: Path, workers: int, size: int, micro: int) -> None:
    """In any layout and from any step; the rows are those of a constant batch."""
    plain = global_rows([steps_of(setup(tmp_path), 16)])
    made = setup(tmp_path, data={"num_workers": workers}, training=RAMP | {"micro_batch_size": micro})
    parts = [steps_of(made, 8, rank, size) for rank in range(size)]
    steps = global_rows(parts)
    sizes = [8, 8, 8, 8, 16, 16, 24, 24]
    assert [len(rows) for rows in steps] == [step.rows_consumed for step in parts[0]] == sizes
    assert sum(steps, []) == sum(plain, [])[: sum(sizes)]
    assert {len(batch.fields["input_ids"]) for step in parts[0] for batch in step.micro_batches} == {micro}
    for done in (3, 5, 7):
        again = [steps_of(made, 8 - done, rank, size, start_row=sum(sizes[:done])) for rank in range(size)]
        assert global_rows(again) == steps[done:]
    idle = train_loader(*made, ranks=(0, size), idle=True)
    assert [step.rows_consumed for step in itertools.islice(idle, 8)] == sizes


@pytest.mark.parametrize("masking", ["dynamic", "static"])
def test_a_resume_goes_on_exactly(tmp_path: Path, masking: str) -> None:
    """Across an epoch's end, with another global batch too."""
    made = setup(tmp_path, documents=8, objective={"masking": masking})
    num_rows = len(made[0])
    steps = steps_of(made, 3 * num_rows // 8)
    expected = [row for step in global_rows([steps]) for row in step]
    for consumed in (8, 8 * (num_rows // 8), num_rows + 3, 2 * num_rows - 1):
        resumed = global_rows([steps_of(made, 2, start_row=consumed)])
        assert sum(resumed, []) == expected[consumed : consumed + 16]
    assert all(step.rows_consumed == 8 for step in steps)
    assert [step.epoch for step in steps] == [8 * number // num_rows for number in range(len(steps))]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_restarts_at_another_row(tmp_path: Path, workers: int) -> None:
    """As one that was made for it; the workers of before are gone."""
    made = setup(tmp_path, data={"num_workers": workers})
    loader = train_loader(*made)
    list(itertools.islice(loader, 3))
    pids = [worker.pid for worker in loader._arrays._workers] if workers else []  # type: ignore[union-attr]
    again = list(itertools.islice(loader.restart(41), 2))
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert global_rows([again]) == global_rows([steps_of(made, 2, start_row=41)])
    assert [step.epoch for step in again] == [step.epoch for step in steps_of(made, 2, start_row=41)]
    loader.close()
    idle = train_loader(*made, idle=True)
    assert [step.epoch for step in itertools.islice(idle.restart(41), 2)] == [step.epoch for step in again]


def test_every_epoch_has_every_row_once_under_new_masks(tmp_path: Path) -> None:
    rows, objective, config = setup(tmp_path, documents=8, training={"global_batch_size": 1, "micro_batch_size": 1})
    steps = steps_of((rows, objective, config), 3 * len(rows))
    epochs = [steps[epoch * len(rows) : (epoch + 1) * len(rows)] for epoch in range(3)]
    originals, masked = [], []
    for epoch in epochs:
        batches = [step.micro_batches[0] for step in epoch]
        restored = []
        for batch in batches:
            ids = batch.fields["input_ids"][0].clone()
            used = batch.fields["masked_lm_labels"][0] != IGNORE_LABEL
            ids[batch.fields["prediction_positions"][0][used]] = batch.fields["masked_lm_labels"][0][used]
            restored.append(tuple(ids.tolist()))
        originals.append(restored)
        seen = [tuple(batch.fields["input_ids"][0].tolist()) for batch in batches]
        masked.append(dict(zip(restored, seen, strict=True)))
    assert sorted(originals[0]) == sorted(originals[1]) == sorted(originals[2])
    assert originals[0] != originals[1]
    long_rows = [text for text in masked[0] if len(set(text)) > 30]
    assert sum(masked[0][text] == masked[1][text] for text in long_rows) == 0


def test_small_micro_batches_are_made_together_and_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of 1, of 3 and 1, of all 4 micro-batches of a step."""
    expected = global_rows([steps_of(setup(tmp_path), 6)])
    for positions in (1, 3 * 2 * 64, 4 * 2 * 64):
        monkeypatch.setattr(loader_module, "POSITIONS_AT_ONCE", positions)
        for workers in (0, 2):
            steps = steps_of(setup(tmp_path, data={"num_workers": workers}), 6)
            assert [len(step.micro_batches) for step in steps] == [4] * 6
            assert global_rows([steps]) == expected


@pytest.mark.parametrize("has_gpu", [False, True])
def test_micro_batches_are_sent_to_a_gpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_gpu: bool) -> None:
    """One int32 array in one copy for each piece of work; the loaders' own device decides, not the machine's."""
    made = setup(tmp_path, data={"num_workers": 1})
    steps, held_out = steps_of(made, 3), list(eval_loader(*made))
    sent: list[torch.Tensor] = []
    waits: list[Any] = []
    kernels = SimpleNamespace(wait_stream=waits.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: kernels)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(collate_module, "_copy_stream", lambda device: "copies")
    monkeypatch.setattr(collate_module, "_send", lambda packed, device: (sent.append(packed), packed)[1])
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    loader = train_loader(*made, device=device)
    found = list(itertools.islice(loader, 3))
    loader.close()
    found_held_out = list(eval_loader(*made, device=device))
    assert len(sent) == len(waits) == (3 + len(held_out) if has_gpu else 0)
    assert all(packed.dtype == torch.int32 for packed in sent)
    assert global_rows([found]) == global_rows([steps])
    assert [rows_of_batch(batch) for batch in found_held_out] == [rows_of_batch(batch) for batch in held_out]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_micro_batches_on_a_gpu_are_those_of_the_cpu(tmp_path: Path) -> None:
    made = setup(tmp_path)
    there, here = (
        list(itertools.islice(train_loader(*made, device=torch.device(name)), 3)) for name in ("cuda", "cpu")
    )
    for one, other in zip(there, here, strict=True):
        for sent, kept in zip(one.micro_batches, other.micro_batches, strict=True):
            assert all(sent.fields[name].is_cuda for name in kept.fields)
            assert all(torch.equal(sent.fields[name].cpu(), kept.fields[name]) for name in kept.fields)


@pytest.mark.parametrize("packing", [False, True])
def test_static_masks_depend_on_the_sample_alone(tmp_path: Path, packing: bool) -> None:
    """They are those of its index alone, whatever rows share a batch, and differ between samples and passes."""
    rows, objective, config = setup(
        tmp_path, data={"num_duplicates": 3, "packing": packing},
        objective={"masking": "static", "whole_word": True},
    )  # fmt: skip
    wanted = np.random.default_rng(0).permutation(len(rows))
    builder = BatchBuilder(rows, objective, config.data, config.training.seed, TRAIN_MASKS)
    examples, row_starts = builder.examples(PlannedRows(wanted, np.arange(len(rows))))
    masks = set()
    for place, row in enumerate(wanted.tolist()):
        index, local = locate(rows, row)
        numbers = np.array(samples_of_row(index, local))
        samples = read_samples(index.reader, numbers)
        budgets = objective.budgets(samples.lengths, config.data)
        alone = objective.corrupt_batch(samples, stream_key(config.training.seed, "static_mask"), budgets)
        for number, slot in enumerate(range(row_starts[place], row_starts[place + 1])):
            ours, theirs, sample = examples.example(slot), alone.example(number), one_sample(samples, number)
            for name in ("input_ids", "token_type_ids", "prediction_positions", "prediction_labels"):
                assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
            restored = ours.input_ids.copy()
            restored[ours.prediction_positions] = ours.prediction_labels
            assert np.array_equal(restored, sample.input_ids) and ours.sequence_label == sample.sequence_label
            masks.add((len(restored), tuple(ours.prediction_positions.tolist())))
    assert len(masks) > 0.5 * sum(len(index.records) for index in rows.indexes)


def test_shapes_are_constant_and_counts_are_local(tmp_path: Path) -> None:
    for data in ({}, {"packing": True, "max_sequences_per_row": 4}):
        made = setup(tmp_path, data=data)
        parts = [steps_of(made, 5, rank, 2) for rank in range(2)]
        shapes = set()
        for step in itertools.chain(*parts):
            shapes |= {tuple(tuple(tensor.shape) for tensor in batch.fields.values()) for batch in step.micro_batches}
            for term in ("masked_lm", "next_sentence"):
                labels = [(batch.fields[f"{term}_labels"] != IGNORE_LABEL).sum().item() for batch in step.micro_batches]
                assert step.counts[term] == sum(labels) > 0
            assert step.num_tokens == sum(batch.num_tokens for batch in step.micro_batches)
        assert len(shapes) == 1
        whole = steps_of(made, 5)
        assert [a.counts["masked_lm"] + b.counts["masked_lm"] for a, b in zip(*parts, strict=True)] == [
            step.counts["masked_lm"] for step in whole
        ]


def test_loading_leaves_the_runs_random_numbers_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    expected = torch.rand(4).tolist(), np.random.rand(4).tolist()
    for workers in (0, 1):
        made = setup(tmp_path, data={"num_workers": workers})
        torch.manual_seed(3)
        np.random.seed(3)
        steps_of(made, 2)
        assert (torch.rand(4).tolist(), np.random.rand(4).tolist()) == expected


def test_evaluation_is_always_the_same_and_covers_its_rows_once(tmp_path: Path) -> None:
    limits = {"evaluation": {"max_rows": 21}}
    whole = [list(eval_loader(*setup(tmp_path, **limits)))]
    again = [list(eval_loader(*setup(tmp_path, **limits, data={"num_workers": 1})))]
    expected = [row for batch in whole[0] for row in rows_of_batch(batch)]
    assert [row for batch in again[0] for row in rows_of_batch(batch)] == expected
    assert len(expected) == 22 and len(set(expected)) == 22
    for size, micro in ((2, 2), (4, 4), (3, 1)):
        made = setup(tmp_path, **limits, training={"micro_batch_size": micro, "global_batch_size": 48})
        ranks = [list(eval_loader(*made, ranks=(rank, size))) for rank in range(size)]
        assert len({len(batches) for batches in ranks}) == 1
        rows = [row for group in zip(*ranks, strict=True) for batch in group for row in rows_of_batch(batch)]
        assert rows[:21] == expected[:21]
        assert set(rows[21:]) <= {expected[21]}
    empty = whole[0][-1]
    assert empty.fields["sequence_ids"][1].sum() == 0 and (empty.fields["masked_lm_labels"][1] == IGNORE_LABEL).all()


def test_evaluation_masks_do_not_depend_on_the_seed(tmp_path: Path) -> None:
    rows, objective, config = setup(tmp_path)
    other = run_config(training={"seed": 99})
    one = [
        rows_of_batch(batch) for batch in EvalLoader(rows, objective, config.data, config.training, config.evaluation)
    ]
    assert one == [
        rows_of_batch(batch) for batch in EvalLoader(rows, objective, other.data, other.training, other.evaluation)
    ]


def test_evaluation_has_its_own_share_of_masks(tmp_path: Path) -> None:
    rows, objective, config = setup(tmp_path, objective={"mask_prob": 0.5}, evaluation={"mask_prob": 0.15})
    plain = setup(tmp_path, objective={"mask_prob": 0.15})

    def labels(made: Setup) -> list[list[int]]:
        fields = torch.cat([batch.fields["masked_lm_labels"] for batch in eval_loader(*made)])
        return [row[row != IGNORE_LABEL].tolist() for row in fields]

    assert labels((rows, objective, config)) == labels(plain)
    step = steps_of((rows, objective, config), 1)[0]
    assert 0.45 < step.counts["masked_lm"] / step.num_tokens < 0.55


def test_no_rows_are_refused() -> None:
    config = run_config()
    objective = build_objective(config.objective, TOKENIZER)
    for loader in (train_loader, eval_loader):
        with pytest.raises(DataError, match="no rows"):
            loader(RowSource([]), objective, config)


def test_a_killed_worker_is_reported(tmp_path: Path) -> None:
    made = setup(tmp_path, data={"num_workers": 1, "prefetch_steps": 1})
    loader = train_loader(*made)
    steps = iter(loader)
    next(steps)
    workers = loader._arrays._workers  # type: ignore[union-attr]
    os.kill(workers[0].pid, signal.SIGKILL)
    with pytest.raises(DataError, match=r"worker process died .*data\.num_workers"):
        list(itertools.islice(steps, 100))


def test_workers_leave_signals_to_the_training_process(tmp_path: Path) -> None:
    """srun and Ctrl-C signal every process; the step that is under way must still get its data."""
    made = setup(tmp_path, data={"num_workers": 1, "prefetch_steps": 1})
    loader = train_loader(*made)
    steps = iter(loader)
    next(steps)
    pid = loader._arrays._workers[0].pid  # type: ignore[union-attr]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(pid, number)
    assert len(list(itertools.islice(steps, 20))) == 20
    loader.close()
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.long
def test_workers_end_with_the_training_process(tmp_path: Path) -> None:
    """Also where nobody closed the loader: no hang at exit, no worker left behind, however the process ends."""
    setup(tmp_path, data={"num_workers": 2})
    program = f"""
import os, signal, sys
from pathlib import Path
from tests.unit.data.stream.test_loader import setup
from tests.sample_data import train_loader
for ending in ("sys.exit(3)", "raise ValueError('x')", "os.kill(os.getpid(), signal.SIGKILL)"):
    if os.fork() == 0:
        break
    os.wait()
else:
    sys.exit()
loader = train_loader(*setup(Path({str(tmp_path)!r}), data={{"num_workers": 2}}))
steps = iter(loader)
next(steps)
print(*(worker.pid for worker in loader._arrays._workers), flush=True)
exec(ending)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=False, cwd=Path.cwd()
    )
    pids = done.stdout.split()
    assert len(pids) == 6 and "ValueError: x" in done.stderr, done.stderr
    deadline_s = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_a_worker_that_starts_after_the_training_process_died_ends() -> None:
    pid = os.fork()
    if pid == 0:
        loader_module._init_worker(1 << 22, 0)  # no process has this number
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


class Refusing(MaskedLM):
    """An objective whose data turns out to be bad."""

    def corrupt_batch(self, samples: Any, key: Any, budgets: Any) -> Any:
        raise DataError("samples.npy: damaged; build it again")


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_workers_keep_their_message(tmp_path: Path, workers: int) -> None:
    rows, _, config = setup(tmp_path, data={"num_workers": workers})
    with pytest.raises(DataError) as caught:
        next(iter(TrainLoader(rows, Refusing(config.objective), config.data, config.training)))
    assert str(caught.value) == "samples.npy: damaged; build it again"


def test_order_of_a_huge_row_space_needs_no_memory() -> None:
    plan = BatchPlan(64, 8, 3, 4)
    stream, steps = RowOrder(10**12, 1), itertools.islice(plan.steps(7 * 10**12 + 5), 2)
    planned = [stream.at(first_row + step.offsets()) for first_row, step in steps]
    assert {int(epoch) for step in planned for epoch in step.epochs.flat} == {7}
    assert all(0 <= row < 10**12 for step in planned for row in step.rows.flat)


@pytest.mark.parametrize(("size", "start_row"), [(1, 0), (2, 8), (4, 72)])
def test_a_rank_without_data_keeps_step_with_the_others(tmp_path: Path, size: int, start_row: int) -> None:
    """A pipeline stage between the first and the last: the same rows and epochs a step, the same number of batches."""
    rows, objective, config = made = setup(tmp_path, data={"num_workers": 0}, training={"micro_batch_size": 2})
    loader = train_loader(*made, ranks=(0, size), start_row=start_row, idle=True)
    idle = itertools.islice(loader, 40)
    real = steps_of(made, 40, 0, size, start_row)
    assert real[-1].epoch > real[0].epoch
    for ours, theirs in zip(idle, real, strict=True):
        assert (ours.rows_consumed, ours.epoch) == (theirs.rows_consumed, theirs.epoch)
        assert not ours.micro_batches and not ours.num_tokens and not any(ours.counts.values())
        assert ours.counts.keys() == theirs.counts.keys()
    held_out = EvalLoader(rows, objective, config.data, config.training, config.evaluation, (0, size))
    assert len(held_out) == len(list(held_out)) > 0
