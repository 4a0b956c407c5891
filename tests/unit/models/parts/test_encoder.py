"""What the encoder computes: sequences that never see each other, heads on the chosen positions."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import LayerSequence, ModelBuild
from ctxlm_ds.models.program import build_program
from ctxlm_ds.recipe.sections import ModelSection
from tests.encoder_batches import OUTPUTS, random_batch, tiny_model

SEQ_LENGTH = 20


def model_of(
    config: ModelSection, shares_rows: bool, outputs: tuple[str, ...] = OUTPUTS, attention: str = "auto"
) -> LayerSequence:
    kernels = KernelSet({"attention": attention}, "cpu", torch.float32)
    return build_program(config, ModelBuild(outputs, kernels, shares_rows=shares_rows)).module(0)


@pytest.mark.parametrize(("packing", "lengths"), [(True, [[8, 5], [3, 9]]), (False, [[8], [3]])])
@pytest.mark.parametrize("attention", ["sdpa", "reference"])
def test_a_sequence_is_blind_to_its_neighbours_and_to_padding(
    packing: bool, lengths: list[list[int]], attention: str
) -> None:
    config = tiny_model()
    model = model_of(config, packing, attention=attention).eval()
    fields = random_batch(lengths, config, SEQ_LENGTH).fields
    before = model.run(fields)
    first_slots = fields["prediction_positions"][:, 0]
    assert (first_slots < torch.tensor([8, 3])).all()
    ids = fields["input_ids"]
    fields["input_ids"] = torch.where(fields["sequence_ids"] == 1, ids, (ids + 7) % 61)
    after = model.run(fields)
    for name in OUTPUTS:
        torch.testing.assert_close(after[name][:, 0], before[name][:, 0], rtol=0, atol=1e-6)
    if packing:
        assert (after["sentence_logits"][:, 1] - before["sentence_logits"][:, 1]).abs().max() > 1e-3


def test_padding_gets_no_gradient() -> None:
    config = tiny_model()
    model = model_of(config, shares_rows=False)
    fields = random_batch([[8], [3]], config, SEQ_LENGTH).fields
    table = model.word_embeddings
    words = table(fields["input_ids"]).detach().requires_grad_()
    table.forward = lambda x, decode=False, split_tokens=False: table.decode(x) if decode else words
    torch.stack([output.sum() for output in model.run(fields).values()]).sum().backward()
    assert words.grad is not None
    padding = fields["sequence_ids"] == 0
    assert (words.grad[padding] == 0).all() and (words.grad[~padding].abs().sum(-1) > 0).all()


def imported_files() -> list[str]:
    """The files of the package that an encoder imports into a process without it."""
    for name in [name for name in sys.modules if name.startswith("ctxlm_ds")]:
        del sys.modules[name]
    importlib.import_module("ctxlm_ds.models.parts.encoder")
    return [str(module.__file__) for name, module in sys.modules.items() if name.startswith("ctxlm_ds")]


def test_an_encoder_imports_few_files() -> None:
    """Model code stays readable alone: at most 30 files of the package with a line of code, this one included."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as fork:  # which has imported torch
        imported = fork.submit(imported_files).result()
    files = [path for path in imported if Path(path).stat().st_size]
    assert 10 < len(files) <= 30, sorted(files)
