"""UL2's mixture: each sample's denoiser, its mode token and its shares."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ctxlm_ds.data.numba_random import stream_key
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.base import build_objective
from tests.ragged import samples_from, single_sample
from tests.sample_data import FakeTokenizer
from tests.unit.objectives.test_span_corruption import check_figures, config_of

MODES = {"[NLU]": 5, "[NLG]": 6, "[S2S]": 7}
COUNT = 3000


class ModeTokenizer(FakeTokenizer):
    def token_to_id(self, token: str) -> int | None:
        """Mode tokens, and two hundred sentinels: half of the tokens in spans of 3 make 127 spans."""
        number = token.removeprefix("<extra_id_").removesuffix(">")
        if number.isdigit() and int(number) < 200:
            return self.vocab_size - 1 - int(number)
        return MODES.get(token, super().token_to_id(token))


def test_samples_are_of_the_published_denoisers() -> None:
    config = config_of(512, objective={"name": "denoiser_mixture"})
    objective = build_objective(config.objective, ModeTokenizer(vocab_size=40_000))
    fields = {field.name: field.columns for field in objective.fields(config.data)}
    text = np.arange(10, 10 + config.objective.sample_length(config.data))
    samples = samples_from([single_sample(text)] * COUNT)
    examples = objective.corrupt_batch(samples, stream_key(1, "mask"), objective.budgets(samples.lengths, config.data))
    assert np.diff(examples.starts).max() == fields["input_ids"] == 512
    assert np.diff(examples.target_starts).max() <= fields["decoder_labels"]
    kinds: Counter[tuple[int, int, int]] = Counter()
    continuations = 0
    for number in range(COUNT):
        example = examples.example(number)
        mode, spans = int(example.input_ids[0]), int((example.input_ids >= 39_000).sum())
        noise = len(example.target_ids) - 1 - spans
        if mode == MODES["[S2S]"]:
            continuations += 1
            assert spans == 0
        else:
            kinds[mode, noise, spans] += 1
    denoisers = config.objective.denoisers()
    wanted = Counter((MODES[str(d.mode_token)], *d.counts(d.text_length(512))) for d in denoisers if not d.is_prefix)
    assert set(kinds) == set(wanted) and len(kinds) == 6
    for times, share in [(continuations, 0.2), *((times, 0.8 / 6) for times in kinds.values())]:
        assert abs(times / COUNT - share) < 4 * (share * (1 - share) / COUNT) ** 0.5


def test_figures_are_the_published_ones(tmp_path: Path) -> None:
    config = config_of(128, objective={"name": "denoiser_mixture"})
    check_figures(config, ModeTokenizer(), tmp_path)


def test_a_vocabulary_without_mode_tokens_is_refused() -> None:
    config = config_of(64, objective={"name": "denoiser_mixture"})
    options = r"ctxlm tokenizer --special-tokens '\[NLU\]' '\[NLG\]' '\[S2S\]', or name"
    wanted = rf"mode_tokens: the tokenizer has no \[NLU\], rows need 3 such tokens .*{options}"
    with pytest.raises(ConfigError, match=wanted):
        build_objective(config.objective, FakeTokenizer()).fields(config.data)


def test_too_few_sentinels_are_refused() -> None:
    config = config_of(512, objective={"name": "denoiser_mixture", "mode_tokens": None})
    with pytest.raises(ConfigError, match=r"has no <extra_id_100>, rows need 12\d such tokens .*--extra-ids 12\d,"):
        build_objective(config.objective, FakeTokenizer()).fields(config.data)


def test_mode_tokens_may_be_left_out() -> None:
    config = config_of(64, objective={"name": "denoiser_mixture", "mode_tokens": None})
    assert build_objective(config.objective, FakeTokenizer()).fields(config.data)
