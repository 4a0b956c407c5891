"""A run whose checkpoints are fine-tuned on a task meanwhile: its scores are logged, its numbers stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.downstream_models import sentiment, write_task
from tests.integration.conftest import Prepared
from tests.integration.route import call, launcher, metrics, pretrain_words


def test_checkpoints_are_judged_and_the_run_stays_bitwise_the_same(bert_route: Prepared, tmp_path: Path) -> None:
    examples = sentiment(8)[1]
    write_task(tmp_path, examples, examples[:4])
    entry = {"task": str(tmp_path / "mine.yaml"), "data": str(tmp_path / "data"), "every_steps": 3, "epochs": 1}
    (tmp_path / "pairs.jsonl").write_text('{"sentence_good": "the film was good .", "sentence_bad": "film the was ."}')
    pairs = {"task": "minimal-pairs-fast", "data": str(tmp_path), "every_steps": 3}
    settings: dict[str, Any] = {
        "model": {"hidden_size": 16, "num_layers": 1, "intermediate_size": 32},
        "training": {"max_steps": 3, "global_batch_size": 2, "micro_batch_size": 2}, "schedule": {"warmup_steps": 1},
        "checkpoint": {"keep_last": 2, "interval_steps": 1}, "logging": {"tensorboard": True},
    }  # fmt: skip
    saved = []
    for name, judged in (("plain", []), ("judged", [entry, pairs])):
        recipe = bert_route.recipe(tmp_path / f"{name}.yaml", **settings, evaluation={"downstream": judged})
        done = call(*launcher("forked", 1), *pretrain_words(recipe, [f"run_dir={tmp_path / name}"]))
        (manifest,) = (tmp_path / name).glob("checkpoints/step-00000003/manifest.json")
        files = json.loads(manifest.read_text())["files"]
        saved.append({path: facts for path, facts in files.items() if path.endswith(".safetensors")})
    for key in ("loss", "grad_norm", "eval/heldout/loss"):
        assert metrics(tmp_path / "judged", key) == metrics(tmp_path / "plain", key), key
    assert saved[0] == saved[1] and saved[0]
    scores = metrics(tmp_path / "judged", "downstream/mine/accuracy")
    assert set(scores) == {3} and all(0 <= score <= 1 for score in scores.values())
    assert metrics(tmp_path / "judged", "downstream/minimal-pairs-fast/pairs/accuracy")[3] in (0, 0.5, 1)
    assert "step 3 held out: downstream/mine accuracy" in done.stderr
    folder = tmp_path / "judged" / "downstream" / "step-00000003"
    assert sorted(path.name for path in folder.iterdir()) == [
        "mine", "mine-log.txt", "minimal-pairs-fast", "minimal-pairs-fast-log.txt"]  # fmt: skip
    events = b"".join(path.read_bytes() for path in tmp_path.glob("judged/tensorboard/events*"))
    assert b"downstream/mine/accuracy" in events
