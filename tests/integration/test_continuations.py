"""A BERT fills masks at each evaluation, and a T5 spans: the same when split, and the run is unchanged.

That exported models write the same: tests/families/test_generation.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.registry import FAMILIES
from tests.integration.conftest import Prepared, prepare
from tests.integration.route import call, launcher, metrics, pretrain_words, write_recipe

PROMPT = "the [MASK] is about [MASK]."
SPANS = "the <extra_id_0> is about <extra_id_1>."


def test_filled_masks(bert_route: Prepared, tmp_path: Path) -> None:
    recipe = bert_route.recipe(tmp_path / "tiny.yaml")  # with dropout, whose random words must stay the same
    runs = {name: tmp_path / name for name in ("without", "one", "split", "shared")}
    texts = [f"evaluation.prompts=['{PROMPT}']", "evaluation.continuations=1"]
    call(*launcher("forked", 1), *pretrain_words(recipe, [f"run_dir={runs['without']}"]))
    one = call(*launcher("forked", 1), *pretrain_words(recipe, [f"run_dir={runs['one']}", *texts]))
    assert [one.stderr.count(f"step {step} filled: ") for step in (6, 12)] == [2, 2]
    for key in ("loss", "grad_norm", "eval/heldout/loss"):
        assert metrics(runs["one"], key) == metrics(runs["without"], key), key

    written = metrics(runs["one"], "texts")
    for name, axis in (("split", "tensor"), ("shared", "context")):
        words = [f"run_dir={runs[name]}", f"parallel.{axis}_parallel_size=2", *texts]
        call(*launcher("forked", 2), *pretrain_words(recipe, words))
        assert metrics(runs[name], "texts") == written and list(written) == [6, 12]
    for key in ("loss", "grad_norm", "eval/heldout/loss", "eval/heldout/masked_lm_accuracy"):
        assert metrics(runs["shared"], key) == pytest.approx(metrics(runs["one"], key), rel=1e-5), key
    assert PROMPT in (runs["one"] / "report.html").read_text()
    prompt, words = written[12][0]
    assert prompt == PROMPT and len(words.split(", ")) == 2


def t5_recipe(folder: Path) -> Path:
    """A tiny T5 over made-up texts, from the tools as a user runs them."""
    route = prepare(folder, "t5", 500, "--append-eod")
    tiny = FAMILIES.get("t5").tiny()
    no_dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}  # of attention it would depend on the layout
    return write_recipe(
        folder / "t5.yaml",
        {
            "name": "tiny-t5", "model": tiny["model"] | no_dropout, "tokenizer": {"path": str(route.tokenizer)},
            "objective": tiny["objective"],
            "data": {
                **tiny["data"], "train": [str(route.train)], "num_workers": 0,
                "validation": [{"name": "heldout", "path": str(route.heldout)}],
            },
            "optimizer": {"learning_rate": 0.001}, "schedule": {"warmup_steps": 2},
            "training": {"global_batch_size": 4, "micro_batch_size": 2, "max_steps": 6, "precision": "fp32"},
            "evaluation": {
                "interval_steps": 6, "max_rows": 8, "prompts": [SPANS], "continuations": 1, "continuation_tokens": 8,
            },
            "logging": {"interval_steps": 1, "tensorboard": False},
        },
    )  # fmt: skip


def test_written_targets(tmp_path: Path) -> None:
    recipe = t5_recipe(tmp_path)
    one, split = tmp_path / "one", tmp_path / "split"
    done = call(*launcher("forked", 1), *pretrain_words(recipe, [f"run_dir={one}"]))
    assert done.stderr.count("step 6 written: ") == 2
    parallel = [f"run_dir={split}", "parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true"]
    call(*launcher("forked", 2), *pretrain_words(recipe, parallel))
    ((given, _), (held_out, restored)) = metrics(one, "texts")[6]
    assert metrics(split, "texts") == metrics(one, "texts")
    assert given.replace(" ", "") == SPANS.replace(" ", "")
    assert "<extra_id_0>" in held_out and " (was <extra_id_0>" in restored
