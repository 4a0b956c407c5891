"""A model that only copies from far away gains from a long context, one that never sees it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.errors import DataError
from tests.sample_data import write_dataset
from tools import context_use

LENGTH, SCORED, CONTEXT = 32, 8, 4


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    write_dataset(tmp_path / "data", [[rng.integers(50, size=length).tolist()] for length in (70, 20)])
    return tmp_path / "data"


class Copies(torch.nn.Module):
    """Predicts with certainty the token that came half of the row before the next one, if the row is long enough."""

    def forward(self, ids: torch.Tensor) -> Any:
        logits = torch.zeros(*ids.shape, 50)
        for place in range(LENGTH // 2 - 1, ids.shape[1]):
            logits[:, place].scatter_(1, ids[:, place - LENGTH // 2 + 1, None], 20.0)
        return type("Output", (), {"logits": logits})


def test_rows_are_parts_of_one_document(data: Path) -> None:
    dataset = IndexedDataset(data)
    rows = list(context_use.rows_of(dataset, LENGTH, repeat=False))
    assert [row.tolist() for row in rows] == [dataset.tokens[first : first + LENGTH].tolist() for first in (0, 32)]
    repeated = list(context_use.rows_of(dataset, LENGTH, repeat=True))
    assert len(repeated) == 5 and all(torch.equal(*row.chunk(2)) for row in repeated)


def test_only_the_context_that_is_given_helps(data: Path) -> None:
    row = next(context_use.rows_of(IndexedDataset(data), LENGTH, repeat=True))
    assert context_use.loss_of(Copies(), row, SCORED, None, CONTEXT) < 1e-6
    assert context_use.loss_of(Copies(), row, SCORED, CONTEXT, CONTEXT) == pytest.approx(np.log(50), rel=1e-5)


def test_losses_are_those_of_transformers(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.5,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "model")
    sizes = ["--length", str(LENGTH), "--scored", str(SCORED), "--context", str(CONTEXT)]
    context_use.main([str(tmp_path / "model"), "--data", str(data), *sizes])
    assert torch.is_grad_enabled()  # as before: others compute in this process too
    lines = capsys.readouterr().out.splitlines()
    whole, short = (line for line in lines if line.startswith(str(tmp_path)))
    losses = []
    for row in context_use.rows_of(IndexedDataset(data), LENGTH, repeat=False):
        labels = row[None].clone()
        labels[:, :-SCORED] = -100
        losses.append(model(row[None], labels=labels).loss.item())
    assert f"after 24 tokens: loss {np.mean(losses):.4f}" in whole and "after 4 tokens: loss" in short and "[" in short


@pytest.mark.parametrize(
    ("sizes", "message"), [({"--scored": 10}, "a multiple of --context"), ({"--scored": LENGTH}, "at most --length")]
)
def test_sizes_that_do_not_fit_are_refused(
    sizes: dict[str, int], message: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"--length": LENGTH, "--scored": SCORED, "--context": CONTEXT} | sizes
    with pytest.raises(SystemExit):
        context_use.main(["model", "--data", str(data), *(str(word) for pair in asked.items() for word in pair)])
    assert message in capsys.readouterr().err


def test_documents_that_are_too_short_are_refused(data: Path) -> None:
    with pytest.raises(DataError, match="no document has 4,096 tokens"):
        context_use.main(["model", "--data", str(data)])
