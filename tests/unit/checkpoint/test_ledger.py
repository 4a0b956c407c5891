"""Segments of a ledger: when one continues, what it inherits, which steps and rows it names; older checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxlm_ds.checkpoint.ledger import (
    LEDGER_NAME,
    Ledger,
    Segment,
    first_weights,
    join_ledgers,
    open_segment,
    read_ledger,
    write_ledger,
)
from ctxlm_ds.errors import CheckpointError
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.training.loop.state import TrainState
from tests.checkpoints import make_config, make_tokenizer, random_weights, write_run
from tests.sample_data import run_config

ROWS = (100, 40)


def config_of(weights: tuple[float, float] = (1, 3), **training: Any) -> RunConfig:
    train = [{"path": f"data/{number}", "weight": weight} for number, weight in enumerate(weights)]
    data = {"train": train, "blend": "weighted", "sample_format": "doc_sentences"}
    return run_config(data=data, training=training, objective={"name": "masked_lm"})


def data_of(*keys: str) -> dict[str, Any]:
    facts = {"documents": [0, 9], "tokens": 1000, "words": 500.0, "passes": 2}
    named = zip(keys or ("a", "b"), ROWS, strict=True)
    return {"sources": [{"path": f"data/{key}", "rows": rows, "index": key, **facts} for key, rows in named]}


def grown(segments: list[Segment], step: int, rows: int, **ranges: Any) -> list[Segment]:
    return [*segments[:-1], segments[-1].up_to(TrainState(step=step, rows_consumed=rows, **ranges))]


def test_a_segment_counts_the_rows_of_each_source_whenever_it_is_saved() -> None:
    begun = open_segment([], config_of(), data_of(), 0)
    ranges = {"skipped_rows": [[8, 16]], "rolled_back_rows": [[400, 900]]}
    (whole,) = grown(begun, 200, 2000, **ranges)
    parts = begun
    for step, rows in ((10, 80), (50, 400), (51, 901), (200, 2000)):
        parts = grown(parts, step, rows, **{name: [r for r in own if r[0] < rows] for name, own in ranges.items()})
        parts = Ledger.model_validate_json(Ledger(segments=parts).model_dump_json()).segments
        parts = open_segment(parts, config_of(), data_of(), rows, step)
    assert parts == [whole]
    read = [np.arange(2000)[[not 8 <= row < 16 and not 400 <= row < 900 for row in range(2000)]]]
    planned = whole.stream.at(read[0])
    counts = [int((planned.rows < ROWS[0]).sum()), int((planned.rows >= ROWS[0]).sum())]
    assert [source["read"]["rows"] for source in whole.sources] == counts
    epochs = counts[1] / ROWS[1]
    assert whole.sources[1]["read"] == {
        "rows": counts[1], "epochs": epochs, "tokens": round(epochs * 1000), "words": round(epochs * 500 * 2),
    }  # fmt: skip


def test_what_does_not_change_the_order_continues_a_segment() -> None:
    begun = grown(open_segment([], config_of(), data_of(), 0), 4, 32)
    moved = data_of()
    moved["sources"][0]["path"] = "elsewhere/0"
    same = open_segment(begun, config_of(global_batch_size=16, max_steps=9), moved, 32, 4)
    assert len(same) == 1 and same[0].sources[0]["path"] == "elsewhere/0"
    assert same[0].sources[0]["read"] == begun[0].sources[0]["read"]
    (same,) = grown(same, 6, 64)
    assert same.steps_at([0, 8, 31, 32, 47, 48]) == [1, 2, 4, 5, 5, 6]
    for config, data, rows in (
        (config_of(seed=8), data_of(), 32),
        (config_of((1, 4)), data_of(), 32),
        (config_of(), data_of("a", "c"), 32),
        (config_of(), data_of(), 0),
    ):
        first, second = open_segment(begun, config, data, rows, 4)
        assert first == begun[0] and (second.first, second.after) == (rows, rows)
        (second,) = grown([second], 6, rows + 16)
        assert second.steps_at([rows, rows + 8]) == [5, 6]


def test_steps_follow_a_ramp_and_pass_over_what_was_rolled_back() -> None:
    config = config_of(global_batch_size=24, batch_ramp=(8, 8, 60))
    begun = open_segment([], config, data_of(), 0)
    (segment,) = grown(begun, 6, 140, rolled_back_rows=[[16, 40]], skipped_rows=[[8, 16]])
    # Rows 0, 8, 40, 56 and 72 begin the steps: the size at a row does not know of the rollback.
    assert segment.steps_at([0, 7, 8, 40, 55, 56, 71, 72, 95, 96]) == [1, 1, 2, 3, 3, 4, 4, 5, 5, 6]
    assert np.concatenate(list(segment.positions(0))).tolist() == [*range(8), *range(40, 140)]


def test_a_checkpoint_without_a_ledger_has_the_segment_of_its_state(tmp_path: Path) -> None:
    config = make_config("gpt2", make_tokenizer("gpt2", tmp_path / "tok"))
    run = write_run(tmp_path / "run", config, random_weights(config))
    (segment,) = read_ledger(first_weights(str(run)))
    assert (segment.first, segment.after, segment.computed) == (0, 800, True) and segment.steps_at([5]) == [None]
    assert first_weights("hf/bert") == Path("hf/bert") and read_ledger(tmp_path) == []
    # A run that begins with these weights has that segment before its first.
    first, second = open_segment([segment], config_of(), data_of(), 0)
    assert first == segment and (second.first, second.computed) == (0, False)


def test_settings_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    (segment,) = open_segment([], config_of(), data_of(), 0)
    older = {**segment.settings["data"], "reset_at_documents": True, "packing": True}
    del older["split_seed"]
    old = segment.model_copy(update={"settings": {**segment.settings, "data": older}})
    write_ledger(tmp_path, [old])
    (read,) = read_ledger(tmp_path)
    assert read.config.data.packing and read.order() == segment.order()  # type: ignore[attr-defined]
    assert len(open_segment([read], config_of(), data_of(), 0)) == 1


def test_weights_made_of_several_have_read_what_each_has(tmp_path: Path) -> None:
    """A branch and its trunk share a stream, whose longer part counts; of unknown weights nothing is known."""
    begun = open_segment([], config_of(), data_of(), 0)
    trunk, branch = grown(begun, 20, 160), grown(begun, 8, 64)
    branch = grown(open_segment(branch, config_of(seed=9), data_of(), 0), 2, 16)
    for name, segments in (("trunk", trunk), ("branch", branch), ("mean", []), ("none", []), ("imported", [])):
        (tmp_path / name).mkdir()
        write_ledger(tmp_path / name, segments)
    join_ledgers(tmp_path / "mean", [tmp_path / "branch", tmp_path / "trunk"])
    assert read_ledger(tmp_path / "mean") == [trunk[0], branch[1]]
    join_ledgers(tmp_path / "none", [tmp_path / "trunk", tmp_path / "imported"])
    assert read_ledger(tmp_path / "none") == []


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    (segment,) = open_segment([], config_of(), data_of(), 0)
    text = Ledger(segments=[segment]).model_dump_json()
    (tmp_path / LEDGER_NAME).write_text(text)
    assert read_ledger(tmp_path) == [segment]
    for damaged in (text[:-9], text.replace('"to":0', '"to":"x"'), json.dumps({"format": "other", "segments": []})):
        (tmp_path / LEDGER_NAME).write_text(damaged)
        with pytest.raises(CheckpointError, match="ledger.json: damaged or of another version"):
            read_ledger(tmp_path)
