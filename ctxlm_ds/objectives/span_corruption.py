"""Span corruption (T5): spans of a text become sentinels, and the decoder writes the spans."""

from __future__ import annotations

import shlex
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field as Setting

from ctxlm_ds.data.fields import Field
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.denoisers import MOST_NOISE, Denoiser
from ctxlm_ds.objectives.encoder_decoder import LABELS, EncoderDecoder, EncoderDecoderSection, target_term
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import DataSection

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ctxlm_ds.data.sample import Samples, TargetExamples
    from ctxlm_ds.objectives.corruption.noise_spans import DenoiserTables
    from ctxlm_ds.tokenizers.base import Tokenizer

NUMBER = "{}"
SHORTEST_INPUT = 8
T5_SENTINELS = 100
"""Sentinels of T5's own tokenizer."""


class DenoisingSection(EncoderDecoderSection):
    """Settings of objectives that make input and target of one text."""

    sentinel_tokens: str = "<extra_id_{}>"
    """Names of the sentinels, {} for their number from 0: `<extra_id_{}>` (T5), `[unused{}]` (BERT's vocabulary)."""

    @abstractmethod
    def denoisers(self) -> Sequence[Denoiser]:
        """Return the ways to make input and target; each sample draws one."""

    def sample_length(self, data: DataSection) -> int:
        return max(denoiser.text_length(data.seq_length) for denoiser in self.denoisers())

    def target_length(self, data: DataSection) -> int:
        return max(d.lengths(d.text_length(data.seq_length))[1] for d in self.denoisers())

    def problems(self, data: DataSection) -> Iterator[Problem]:
        yield from super().problems(data)
        if self.sentinel_tokens.count(NUMBER) != 1:
            text = f"{self.sentinel_tokens!r} has no single {NUMBER} for the number; write <extra_id_{NUMBER}>"
            yield Problem("objective.sentinel_tokens", text)
        if data.seq_length < SHORTEST_INPUT:
            text = f"{data.seq_length} leaves no room for text next to sentinels; set at least {SHORTEST_INPUT}"
            yield Problem("data.seq_length", text, ("objective.name",))
        if data.shares_rows:
            text = (
                f"true, but objective.name {self.name} leaves room in a row for the sentinels and the end-of-text "
                "token of one text, so texts cannot share rows; set it to false, or data.sample_format to chunks"
            )
            yield Problem("data.packing", text, ("objective.name", "data.sample_format"))


class SpanCorruptionSection(DenoisingSection):
    """Replaced spans, which the decoder writes (T5)."""

    name: str = "span_corruption"
    noise_density: Annotated[float, Setting(ge=0.0, le=MOST_NOISE)] = 0.15
    """Share of the tokens that are replaced."""
    mean_span_length: Annotated[float, Setting(ge=1.0, le=1e6)] = 3.0
    """Mean tokens of a replaced span."""

    def denoisers(self) -> Sequence[Denoiser]:
        return (Denoiser(self.noise_density, self.mean_span_length),)

    def problems(self, data: DataSection) -> Iterator[Problem]:
        if self.noise_density == 0.0:
            yield Problem("objective.noise_density", "0: expected above 0 (0.15 as published)")
            return
        yield from super().problems(data)


class Denoising(EncoderDecoder):
    """An objective of denoisers (corruption/noise_spans.py); rows begin as texts of `sample_length` tokens."""

    config: DenoisingSection

    def __init__(self, section: DenoisingSection, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(section, tokenizer)
        self._tokenizer = tokenizer
        self._tables: dict[int, DenoiserTables] = {}

    def fields(self, data: DataSection) -> tuple[Field, ...]:
        if self._tokenizer is not None:
            self._tables_for(data.seq_length)
        return super().fields(data)

    def budgets(self, lengths: NDArray[np.int64], data: DataSection) -> NDArray[np.int64]:
        """Return the [n] most tokens of the inputs of texts of `lengths`."""
        import numpy as np

        return np.full(len(lengths), data.seq_length, dtype=np.int64)

    def corrupt_batch(self, samples: Samples, key: np.uint64, budgets: NDArray[np.int64]) -> TargetExamples:
        from ctxlm_ds.objectives.corruption.noise_spans import denoise

        return denoise(samples, key, self._tables_for(int(budgets.max(initial=SHORTEST_INPUT))))

    def restored(self, fields: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
        """Return [b, t]: True for labels that are text; sentinels need not be special tokens."""
        import numpy as np

        sentinels = [ids for tables in self._tables.values() for ids in tables.sentinels]
        return super().restored(fields) & ~np.isin(fields[LABELS], sentinels)

    def _tables_for(self, input_length: int) -> DenoiserTables:
        """Return the tables for inputs of at most `input_length` tokens."""
        import numpy as np

        from ctxlm_ds.objectives.corruption.noise_spans import NO_MODE, denoiser_tables

        tokenizer = self._tokenizer
        assert tokenizer is not None
        if input_length not in self._tables:
            denoisers = self.config.denoisers()
            spans = max(d.counts(d.text_length(input_length))[1] for d in denoisers)
            names = [self.config.sentinel_tokens.replace(NUMBER, str(number)) for number in range(spans)]
            options = f"--type t5 --extra-ids {max(T5_SENTINELS, spans)}, or --special-tokens"
            found = token_ids(tokenizer, names, "objective.sentinel_tokens", options)
            sentinels = np.array(found, dtype=np.int32)
            modes = list(dict.fromkeys(d.mode_token for d in denoisers if d.mode_token is not None))
            options = f"--special-tokens {' '.join(map(shlex.quote, modes))}"
            ids = dict(zip(modes, token_ids(tokenizer, modes, "objective.mode_tokens", options), strict=True))
            mode_ids = [NO_MODE if d.mode_token is None else ids[d.mode_token] for d in denoisers]
            self._tables[input_length] = denoiser_tables(denoisers, input_length, mode_ids, sentinels, tokenizer.sep_id)
        return self._tables[input_length]


def token_ids(tokenizer: Tokenizer, names: Sequence[str], setting: str, options: str) -> list[int]:
    """Return the ids of tokens.

    Args:
        tokenizer: the run's.
        names: n different tokens.
        setting: the setting that names them.
        options: the options of ctxlm tokenizer that make them.

    Raises:
        ConfigError: the vocabulary lacks one.
    """
    ids = [tokenizer.token_to_id(name) for name in names]
    missing = [name for name, token_id in zip(names, ids, strict=True) if token_id is None]
    if missing:
        raise ConfigError(
            f"{setting}: the tokenizer has no {missing[0]}, rows need {len(names)} such tokens ({names[0]} to "
            f"{names[-1]}); train it with ctxlm tokenizer {options}, or name tokens that it has"
        )
    return [token_id for token_id in ids if token_id is not None]


class SpanCorruption(Denoising):
    """The objective of T5 (Raffel 2020, section 3.1.4 and 3.3.4)."""

    name = "span_corruption"
    section = SpanCorruptionSection
    terms = (target_term("span_corruption"),)
