"""The prefix LM objective: inputs and targets are a text in two parts."""

from __future__ import annotations

import numpy as np
import pytest

from ctxlm_ds.data.numba_random import stream_key
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.check import check_config
from tests.ragged import samples_from, single_sample
from tests.sample_data import FakeTokenizer
from tests.unit.objectives.test_span_corruption import config_of


@pytest.mark.parametrize(("density", "fewest"), [(0.5, 1), (0.25, 30)])
def test_a_text_is_cut_in_two(density: float, fewest: int) -> None:
    config = config_of(64, objective={"name": "prefix_lm", "noise_density": density})
    objective = build_objective(config.objective, FakeTokenizer())
    text = np.arange(5, 5 + config.objective.sample_length(config.data))
    samples = samples_from([single_sample(text)] * 400)
    examples = objective.corrupt_batch(samples, stream_key(1, "mask"), objective.budgets(samples.lengths, config.data))
    lengths = np.diff(examples.starts) - 1
    assert lengths.max() <= 62 and lengths.min() >= fewest
    assert abs((1 - lengths / len(text)).mean() - density) < 4 * (density / 3**0.5) / 20
    for number in range(400):
        example = examples.example(number)
        assert [*example.input_ids[:-1], *example.target_ids[:-1]] == text.tolist()
        assert example.input_ids[-1] == example.target_ids[-1] == FakeTokenizer().sep_id


def test_it_needs_no_sentinels() -> None:
    class WithoutSentinels(FakeTokenizer):
        def token_to_id(self, token: str) -> int | None:
            return None

    config = config_of(64, objective={"name": "prefix_lm"})
    objective = build_objective(config.objective, WithoutSentinels())
    fields = {field.name: field.columns for field in objective.fields(config.data)}
    assert (fields["input_ids"], fields["decoder_labels"]) == (64, 63)


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 leaves nothing to write"):
        check_config(config_of(64, objective={"name": "prefix_lm", "noise_density": 0.0}), None)
