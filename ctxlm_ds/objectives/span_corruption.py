"""Denoising by a decoder: it writes spans that became sentinels (T5), the end of a text (prefix LM), or both (UL2).

Source: google-research/text-to-text-transfer-transformer t5/data/preprocessors.py (`random_spans_helper`,
`random_spans_noise_mask`, `random_prefix_noise_mask`, `prefix_lm`). Prefix LM is of Raffel 2020, section 3.2.1, the
mixture of Tay 2022, arXiv:2205.05131, section 3.1 and table 1.
"""

from __future__ import annotations

import shlex
import struct
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field as Setting

from ctxlm_ds.data.fields import Field
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.encoder_decoder import (
    END_TOKENS,
    LABELS,
    EncoderDecoder,
    EncoderDecoderSection,
    target_term,
)  # fmt: skip
from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.sections import DataSection, Probability

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ctxlm_ds.data.sample import Samples, TargetExamples
    from ctxlm_ds.objectives.corruption.noise_spans import DenoiserTables
    from ctxlm_ds.tokenizers.base import Tokenizer

SHORTEST_TEXT = 2
"""A shorter text has nothing to replace."""
MOST_NOISE = 0.9
"""Largest share of replaced tokens; at 1 a text of any length makes a short input."""
ROUNDED, ROUNDED_SHARE = 3, 1e-6
"""More than rounding to integers and to fp32 adds to an input, in tokens and as a share of the text."""
LONGEST_TEXT = 16
"""Most tokens of text for a token of the input, more than MOST_NOISE needs."""


@dataclass(frozen=True)
class Denoiser:
    """One way to make an input and a target of a text."""

    noise_density: float = 0.15
    """Share of the tokens to replace; of a prefix denoiser, the largest mean share that is the target."""
    mean_span_length: float | None = 3.0
    """Mean length of a replaced span; None makes the text's end the target, from a random place on (prefix LM)."""
    mode_token: str | None = None
    """Token before the input that names the denoiser."""
    share: float = 1.0
    """Share of the samples, relative to the other denoisers'."""

    @property
    def is_prefix(self) -> bool:
        return self.mean_span_length is None

    def counts(self, length: int) -> tuple[int, int]:
        """Return how many of `length` tokens are replaced, and in how many spans; 0, 0 if there is nothing to replace.

        The products and quotients are rounded to fp32, halves to even numbers, as in the original.
        """
        if self.mean_span_length is None or length < SHORTEST_TEXT:
            return 0, 0
        noise = min(max(round(_fp32(length * _fp32(self.noise_density))), 1), length - 1)
        spans = max(round(_fp32(noise / _fp32(self.mean_span_length))), 1)
        return noise, min(spans, noise, length - noise)

    def prefix_bounds(self, length: int) -> tuple[int, int]:
        """Return the fewest and the most of `length` tokens that are a prefix denoiser's input."""
        most = max(length - 1, 0)
        return min(most, max(1, round(_fp32(_fp32(1.0 - 2.0 * self.noise_density) * most)))), most

    def lengths(self, length: int) -> tuple[int, int]:
        """Return the tokens of input and target of `length` tokens, the most that a prefix denoiser can make."""
        first = END_TOKENS + (self.mode_token is not None)
        if self.is_prefix:
            fewest, most = self.prefix_bounds(length)
            return most + first, length - fewest + END_TOKENS
        noise, spans = self.counts(length)
        return length - noise + spans + first, noise + max(spans, 1) + END_TOKENS

    def text_length(self, input_length: int) -> int:
        """Return how many tokens of text make an input of at most `input_length` tokens (568 make 512)."""
        first = END_TOKENS + (self.mode_token is not None)
        length = input_length - first
        if self.mean_span_length is None:
            return length
        # The length from which to count: up to it, inputs fit with all that rounding adds to noise and spans.
        kept = 1.0 - self.noise_density
        rate = kept + min(kept, self.noise_density / self.mean_span_length)
        most = LONGEST_TEXT * input_length
        length = max(length, min(most, int((input_length - first - ROUNDED) / (rate + ROUNDED_SHARE))))
        while length < most and self.lengths(length + 1)[0] <= input_length:
            length += 1
        # Where inputs and targets have equal shares, as the original.
        inputs, targets = self.lengths(length)
        return length - 1 if self.noise_density == 0.5 and targets > inputs else length


def _fp32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


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
        if any(denoiser.noise_density == 0.0 for denoiser in self.denoisers()):
            published = type(self).model_fields["noise_density"].default
            text = f"0 leaves nothing to write; expected above 0 ({published:g} as published)"
            yield Problem("objective.noise_density", text)
            return
        yield from super().problems(data)
        if self.sentinel_tokens.count(NUMBER) != 1:
            text = f"{self.sentinel_tokens!r} has no single {NUMBER} for the number; write <extra_id_{NUMBER}>"
            yield Problem("objective.sentinel_tokens", text)
        if data.seq_length < SHORTEST_INPUT:
            text = f"{data.seq_length} leaves no room for text next to sentinels; set at least {SHORTEST_INPUT}"
            yield Problem("data.seq_length", text, ("objective.name",))
        remedy = "set it to false, or data.sample_format to chunks"
        yield from self.packing_problems(data, "the sentinels and the end-of-text token of", remedy)


class SpanCorruptionSection(DenoisingSection):
    """Replaced spans, which the decoder writes (T5)."""

    name: str = "span_corruption"
    noise_density: Annotated[float, Setting(ge=0.0, le=MOST_NOISE)] = 0.15
    """Share of the tokens that are replaced."""
    mean_span_length: Annotated[float, Setting(ge=1.0, le=1e6)] = 3.0
    """Mean tokens of a replaced span."""

    def denoisers(self) -> Sequence[Denoiser]:
        return (Denoiser(self.noise_density, self.mean_span_length),)


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

    def corrupt_batch(self, samples: Samples, key: np.uint64, budgets: NDArray[np.int64]) -> TargetExamples:
        from ctxlm_ds.objectives.corruption.noise_spans import denoise

        return denoise(samples, key, self._tables_for(int(budgets.max(initial=SHORTEST_INPUT))))

    def restored(self, fields: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
        """Return [b, t]: True for labels that are text; sentinels need not be special tokens."""
        import numpy as np

        sentinels = [ids for tables in self._tables.values() for ids in tables.sentinels]
        return super().restored(fields) & ~np.isin(fields[LABELS], sentinels)

    def _tables_for(self, input_length: int) -> DenoiserTables:
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
    """Return the ids of different tokens, which `setting` names and `options` of ctxlm tokenizer make.

    Raises ConfigError if the vocabulary lacks one.
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

    section = SpanCorruptionSection
    terms = (target_term("span_corruption"),)


class PrefixLMSection(DenoisingSection):
    """The continuation of a text from a random place on."""

    name: str = "prefix_lm"
    noise_density: Annotated[float, Setting(ge=0.0, le=0.5)] = 0.5
    """Mean share of a text that is the target; 0.5 cuts anywhere (T5), 0.25 in the second half (UL2)."""

    @property
    def idle_settings(self) -> tuple[str, ...]:
        return ("sentinel_tokens",)

    def denoisers(self) -> Sequence[Denoiser]:
        return (Denoiser(self.noise_density, None),)


class PrefixLM(Denoising):
    """The prefix LM objective of T5's comparison."""

    section = PrefixLMSection
    terms = (target_term("prefix_lm"),)


REGULAR = ((0.15, 3.0), (0.15, 8.0))
EXTREME = ((0.5, 3.0), (0.5, 8.0), (0.15, 64.0), (0.5, 64.0))
"""Share of the tokens that are replaced, and mean length of a span."""
PREFIX_DENSITY = 0.25


class DenoiserMixtureSection(DenoisingSection):
    """Short spans, long or many spans, and continuations, one of them for each sample (UL2)."""

    name: str = "denoiser_mixture"
    prefix_share: Probability = 0.2
    """Share of the samples that are continuations (S-denoisers); the other six denoisers have equal shares."""
    mode_tokens: tuple[str, str, str] | None = ("[NLU]", "[NLG]", "[S2S]")
    """Tokens before the inputs of R-denoisers, X-denoisers and S-denoisers; null for none."""

    def denoisers(self) -> Sequence[Denoiser]:
        regular, extreme, prefix = self.mode_tokens or (None, None, None)
        share = (1.0 - self.prefix_share) / (len(REGULAR) + len(EXTREME))
        return (
            *(Denoiser(density, length, regular, share) for density, length in REGULAR),
            *(Denoiser(density, length, extreme, share) for density, length in EXTREME),
            Denoiser(PREFIX_DENSITY, None, prefix, self.prefix_share),
        )


class DenoiserMixture(Denoising):
    """The objective of UL2. A denoiser for which a text is too long leaves its end out."""

    section = DenoiserMixtureSection
    terms = (target_term("denoiser_mixture"),)
