"""A BERT fills masks at each evaluation: as the exported model does, the same when split, and the run is unchanged."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, BertForPreTraining

from tests.integration.conftest import Prepared
from tests.integration.route import call, launcher, metrics, pretrain_words, tool

PROMPT = "the [MASK] is about [MASK]."


def test_filled_masks(bert_route: Prepared, tmp_path: Path) -> None:
    recipe = bert_route.recipe(tmp_path / "tiny.yaml")  # with dropout, whose random words must stay the same
    runs = {name: tmp_path / name for name in ("without", "one", "split")}
    texts = [f"evaluation.prompts=['{PROMPT}']", "evaluation.continuations=1"]
    call(*launcher("python", 1), *pretrain_words(recipe, [f"run_dir={runs['without']}"]))
    one = call(*launcher("python", 1), *pretrain_words(recipe, [f"run_dir={runs['one']}", *texts]))
    assert [one.stderr.count(f"step {step} filled: ") for step in (6, 12)] == [2, 2]
    for key in ("loss", "grad_norm", "eval/heldout/loss"):
        assert metrics(runs["one"], key) == metrics(runs["without"], key), key

    split = [f"run_dir={runs['split']}", "parallel.tensor_parallel_size=2", *texts]
    call(*launcher("torchrun", 2), *pretrain_words(recipe, split))
    written = metrics(runs["one"], "texts")
    assert metrics(runs["split"], "texts") == written and list(written) == [6, 12]
    assert PROMPT in (runs["one"] / "report.html").read_text()

    tool("convert_checkpoint.py", "to-hf", "--checkpoint", runs["one"], "--output", tmp_path / "hf")
    model = BertForPreTraining.from_pretrained(tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        words = model(**inputs).prediction_logits.argmax(-1)[inputs["input_ids"] == tokenizer.mask_token_id]
    assert written[12][0] == [PROMPT, ", ".join(tokenizer.decode([word]) for word in words)]
