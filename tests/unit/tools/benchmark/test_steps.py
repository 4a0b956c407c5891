"""What is measured beside a recipe, and the figures of the table."""

from __future__ import annotations

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.training.measure import measure, training_flops_per_row
from tools.benchmark import steps
from tools.benchmark.__main__ import PEERS
from tools.benchmark.process_counters import DeviceCalls
from tools.benchmark.steps import (
    StepFigures,
    measured_precision,
    measured_recipe,
    model_flops_per_row,
    peak_note,
    peers_of,
    refuse,
)
from tools.benchmark.turns import Facts, SideProcess, Turn

TINY = load_config("bert-tiny", ["training.micro_batch_size=2"])


def test_the_measured_recipe() -> None:
    case = measured_recipe(TINY, 0.25, "fp32", 3)
    assert (case.model.hidden_dropout, case.model.attention_dropout) == (0.25, 0.25)
    assert case.training.global_batch_size == 6 and case.training.precision == "fp32"
    assert measured_recipe(TINY, None, "bf16", 1).model == TINY.model


def test_a_second_phase_is_measured_from_fresh_weights() -> None:
    config = load_config("bert-tiny-phase2", ["initialize_from=nowhere", "initialize_moments=true"])
    case = measured_recipe(config, 0.0, "fp32", 1)
    assert case.initialize_from is None and not case.initialize_moments


def test_the_share_of_a_card_s_peak() -> None:
    share = ["MFU of the engine's step: 40.0% of 989 TFLOP/s (H100)."]
    assert peak_note(395.6e12, "bf16", "NVIDIA H100 80GB HBM3") == share
    assert peak_note(1e12, "bf16", "2 CPU threads") == []


def test_peers_by_precision() -> None:
    half = measured_recipe(TINY, 0.0, "bf16", 1)
    full = measured_recipe(TINY, 0.0, "fp32", 1)
    everything = ["bare model", "transformers, autocast", "transformers, bf16", "transformers.Trainer"]
    assert list(peers_of(half, PEERS, 1)) == everything
    assert list(peers_of(full, PEERS, 1)) == ["bare model", "transformers, fp32", "transformers.Trainer"]
    assert list(peers_of(half, ["bf16"], 1)) == ["transformers, bf16"]


def test_a_cpu_without_units_is_measured_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("ctxlm_ds.kernels.linear.bf16_is_emulated", lambda device: True)
    precision, note = measured_precision("bf16")
    assert precision == "fp32" and "no bf16 units" in note
    assert measured_precision("fp32") == ("fp32", "")


@pytest.mark.parametrize(
    ("recipe", "settings", "words"),
    [
        ("bert-laptop", (), "model.vocab_size"),
        ("bert-tiny", ("training.precision=fp16",), "fp16"),
        ("distilbert-base", ("teacher.path=nowhere",), "teacher"),
    ],
)
def test_steps_that_have_no_counterpart(recipe: str, settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        refuse(load_config(recipe, settings))


def test_a_causal_model_computes_half_of_the_pairs() -> None:
    """4 s^2 h operations a layer for all pairs forward, three times that with the backward pass (Kaplan 2020)."""
    config = load_config("gpt2-small")
    model, length = config.model, config.data.seq_length
    pairs = 12 * model.num_layers * length**2 * model.hidden_size  # type: ignore[attr-defined]
    seen = (length + 1) / (2 * length)
    assert model_flops_per_row(config) == pytest.approx(training_flops_per_row(measure(config)) - pairs * (1 - seen))
    assert model_flops_per_row(TINY) == training_flops_per_row(measure(TINY)), "an encoder's positions see all others"


def side(name: str, *seconds: float) -> SideProcess:
    process = SideProcess(name, None)  # type: ignore[arg-type]
    process.turns = [Turn(s, 2 * s, 10.0) for s in seconds]
    process.first_step_s = 5.0
    return process


def test_ratios_are_those_of_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that becomes ten times slower in the second round."""
    monkeypatch.setattr(steps, "step_flops", lambda device: 8 * 10**12)
    case = measured_recipe(TINY, 0.0, "fp32", 2)
    sides = {"ctxlm_ds": side("", 1.0, 10.0), "bare model": side("", 0.8, 8.0), "matrix product": side("", 2.0, 20.0)}
    facts = {name: Facts(3_000_000, DeviceCalls(40, 2)) for name in sides}
    figures = StepFigures(case, "cpu", sides, facts)
    ours, bare, ceiling = figures.rows()
    tokens, tflops = 4 * 128, 4 * training_flops_per_row(measure(case)) / 1e12
    assert ours[:3] == ["ctxlm_ds", f"{tokens * 0.55:,.0f} ({tokens / 10:,.0f} to {tokens:,.0f})", "-"]
    assert float(ours[3]) == pytest.approx(tflops * 0.55, rel=0.01)
    assert float(ours[4].split()[0]) == pytest.approx(100 * tflops / 4, abs=0.06)
    assert ours[5:] == ["3.0 MB", "11.00", "10", "5.0 s", "40", "2"]
    assert bare[2] == "0.80 (0.80 to 0.80)"
    assert ceiling[3:5] == ["2.2 (0.4 to 4)", "100 %"] and len(ceiling) == len(ours)
    assert figures.notes() == [
        "Time of the engine's step over the bare model's: 1.250 (1.250 to 1.250); CPU seconds 1.250."
    ]
