"""ctxlm average: the mean of the weights in float64, as a checkpoint that exports; models that differ are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ctxlm_ds.apps.convert.average import average, last_of, main
from ctxlm_ds.checkpoint.folders import AVERAGE_NAME, list_checkpoints
from ctxlm_ds.checkpoint.ledger import read_ledger
from ctxlm_ds.checkpoint.manifest import verify
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.errors import CheckpointError, ConfigError
from ctxlm_ds.export.huggingface import from_hf, to_hf
from ctxlm_ds.export.weights import open_checkpoint
from ctxlm_ds.recipe.load import load_saved_config
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.checkpoints import make_config, make_tokenizer, random_weights, write_run
from tests.integration.route import call_here

SMALL_READS = 100


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns runs of one tokenizer."""
    tokenizer = make_tokenizer("gpt2", tmp_path_factory.mktemp("tokenizer") / "tok")

    def run(name: str, **model: object) -> Path:
        config = make_config("gpt2", tokenizer, model_settings=model)
        return write_run(tmp_path_factory.mktemp("runs") / name, config, random_weights(config, len(name)))

    return run


def checkpoint(run: Path) -> Path:
    return list(list_checkpoints(run / "checkpoints").values())[-1] if (run / "checkpoints").is_dir() else run


def test_the_mean_is_that_of_float64(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxlm_ds.apps.convert.average.READ_ELEMENTS", SMALL_READS)
    runs = [make("a"), make("bb"), make("ccc")]
    done = call_here(main, "average", *runs, "--weights", 1, 2, 5, "--output", tmp_path / "mean")
    assert "the average of 3 checkpoints" in done.stdout, done.stderr
    verify(tmp_path / "mean")
    found, readers = CheckpointReader(tmp_path / "mean"), [CheckpointReader(checkpoint(run)) for run in runs]
    assert found.names() == readers[0].names() and not found.moment_kinds()
    assert not torch.equal(*(reader.read_full(found.names()[0]) for reader in readers[:2]))
    for name in found.names():
        parts = [share * reader.read_full(name).double() for share, reader in zip((1, 2, 5), readers, strict=True)]
        torch.testing.assert_close(found.read_full(name), (sum(parts) / 8).float(), rtol=1e-7, atol=0)
    shares = [one["share"] for one in json.loads((tmp_path / "mean" / AVERAGE_NAME).read_text())["average of"]]
    assert shares == [1 / 8, 2 / 8, 5 / 8]
    assert read_ledger(tmp_path / "mean") == read_ledger(checkpoint(runs[0]))
    largest = max(each.relative for each in to_hf(tmp_path / "mean", tmp_path / "hf").comparisons)
    assert largest < 1e-6


def test_an_average_exports_as_its_run_does(make: Callable[..., Path], tmp_path: Path) -> None:
    """With the length that the run trained on, to the bit; an average of imported weights has trained nothing."""
    run = make("a")
    average([run, run], None, tmp_path / "mean")
    found, own = open_checkpoint(tmp_path / "mean"), open_checkpoint(run)
    assert found.train_state == own.train_state and found.train_state["step"]
    assert found.trained_length == own.trained_length
    assert all(torch.equal(found.reader.read_full(name), own.reader.read_full(name)) for name in own.reader.names())
    to_hf(run, tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "import")
    average([tmp_path / "import"], None, tmp_path / "imported")
    assert open_checkpoint(tmp_path / "imported").train_state == {}


def test_what_cannot_be_averaged_is_refused_before_a_file_is_written(make: Callable[..., Path], tmp_path: Path) -> None:
    run, wide, other = make("a"), make("wide", hidden_size=48), make("eps", layer_norm_eps=1e-3)
    with pytest.raises(CheckpointError, match=r"different models \(.*: \(.*32.*\) and \(.*48"):
        average([run, wide], None, tmp_path / "mean")
    with pytest.raises(CheckpointError, match="different models .the model sections"):
        average([run, other], None, tmp_path / "mean")
    with pytest.raises(ConfigError, match="1 numbers for 2 checkpoints"):
        average([run, run], [1.0], tmp_path / "mean")
    for weights in ([1.0, -1.0], [float("nan"), 1.0]):
        with pytest.raises(ConfigError, match="positive sum"):
            average([run, run], weights, tmp_path / "mean")
    with pytest.raises(CheckpointError, match="no such folder"):
        average([run, tmp_path / "gone"], None, tmp_path / "mean")
    with pytest.raises(ConfigError, match="--last 9: .* has fewer checkpoints"):
        last_of(run, 9)
    assert not list(tmp_path.iterdir())


def test_models_of_different_tokenizers_are_refused(make: Callable[..., Path], tmp_path: Path) -> None:
    """Their rows are of other words, although all shapes are equal."""
    run = make("a")
    size = load_saved_config(checkpoint(run) / "config.yaml").model.vocab_size
    train_tokenizer("gpt2", iter(["other words have other pieces"] * 9), 300, tmp_path / "tok")
    config = make_config("gpt2", tmp_path / "tok", vocab_size=size)
    other = write_run(tmp_path / "other", config, random_weights(config))
    with pytest.raises(CheckpointError, match="have different tokenizers, so their rows differ"):
        average([run, other], None, tmp_path / "mean")
