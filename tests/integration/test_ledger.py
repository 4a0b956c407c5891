"""The ledgers of a run, its resume on another layout, a fork, and a run from the fork's weights; `ctxlm ledger`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ctxlm_ds.apps.convert.fork import fork
from ctxlm_ds.apps.report.ledger import main
from ctxlm_ds.data.dataset.reader import IndexedDataset
from tests.integration.conftest import Prepared
from tests.integration.route import call, call_here, launcher, pretrain_words


def ledger(path: Path) -> list[dict[str, Any]]:
    segments: list[dict[str, Any]] = json.loads(path.read_text())["segments"]
    return segments


def spans(segments: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(Path(segment["run"]).name, segment["from"], segment["to"]) for segment in segments]


def answer(*words: object) -> Any:
    done = call_here(main, "ctxlm ledger", *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_chain_of_runs(bert_route: Prepared, tmp_path: Path) -> None:
    recipe = bert_route.recipe(
        tmp_path / "recipe.yaml", checkpoint={"interval_steps": 2, "keep_last": 9}, schedule={"total_steps": 12}
    )  # fmt: skip
    run, branch, other = (tmp_path / name for name in ("run", "branch", "other"))

    def train(ranks: int, path: Path, *overrides: str) -> None:
        call(*launcher("forked", ranks), *pretrain_words(path, overrides, 1))

    train(2, recipe, f"run_dir={run}", "training.max_steps=4")
    # Another batch size and another layout go on in the same segment.
    train(1, recipe, f"run_dir={run}", "training.max_steps=6", "training.global_batch_size=4")
    checkpoints = run / "checkpoints"
    assert spans(ledger(checkpoints / "step-00000004" / "ledger.json")) == [("run", 0, 32)]
    assert spans(ledger(run / "ledger.json")) == [("run", 0, 40)]
    assert (run / "ledger.json").read_bytes() == (checkpoints / "step-00000006" / "ledger.json").read_bytes()
    assert "ledger.json" in json.loads((checkpoints / "step-00000006" / "manifest.json").read_text())["files"]
    fork(f"{run}@4", branch, ["training.max_steps=7"])
    train(1, branch / "config.yaml")
    assert spans(ledger(branch / "ledger.json")) == [("run", 0, 56)]
    train(1, recipe, f"run_dir={other}", "training.max_steps=3", f"initialize_from={branch}", "training.seed=9")
    assert spans(ledger(other / "ledger.json")) == [("run", 0, 56), ("other", 0, 24)]
    (before, last), (source,) = answer(other), answer(branch)[0]["sources"]
    assert before["sources"] == [source] and last["settings"]["training"]["seed"] == 9
    assert source["read"]["rows"] == 56 and source["read"]["words"] > 0

    # Every row holds text: all reads of all documents together are all rows that were read.
    dataset, found = IndexedDataset(bert_route.train), {}
    for document in range(dataset.num_documents):
        (one,) = answer(other, "--document", f"{bert_route.train}:{document}")
        found |= {(read["segment"], read["position"]): read["step"] for read in one["reads"]}
    assert sorted(found) == [*((0, row) for row in range(56)), *((1, row) for row in range(24))]
    assert all(step == row // 8 + 1 for (_, row), step in found.items())

    text = json.loads((bert_route.folder / "train.jsonl").read_text().splitlines()[3])["text"]
    (tmp_path / "text").write_text(text + "\n")
    (by_text,), (by_number,) = (
        answer(run, "--text", tmp_path / "text"),
        answer(run, "--document", f"{bert_route.train}:3"),
    )
    assert by_text == by_number and by_text["documents"] == [3]
    shown = call_here(main, "ctxlm ledger", other).stdout
    assert "masked_lm_nsp" in shown and "0 to 55" in shown and "0 to 23" in shown
    shown = call_here(main, "ctxlm ledger", other, "--document", f"{bert_route.train}:3").stdout
    assert f"1 document of {bert_route.train} (3)" in shown
