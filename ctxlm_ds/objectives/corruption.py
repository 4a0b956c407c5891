"""Choosing and replacing the tokens to predict (masked LM): Samples -> Examples, a micro-batch at once.

In: samples, the key of their random streams, and how many predictions each may have. Out: examples. Not here: the
loss, torch, which key that is (data/loader), the loops themselves (masking.py). Sources: google-research/bert
create_pretraining_data.py (Devlin 2018), fairseq data/mask_tokens_dataset.py (Liu 2019).

Of a sample of n tokens, specials counted as both originals do, k are predicted: max(1, round(p·n)) or, rounding
`probabilistic`, max(1, floor(p·n + U)); never more than the sample's budget. Each becomes the mask token, itself, or a
random token (80/10/10). `special_tokens` says which originals' habit is followed: `never` neither masks specials nor
draws them as random tokens, `bert` draws from the whole vocabulary, `roberta` also masks the specials.

Whole words are drawn in random order and taken while they fit: a word that would exceed k is skipped (BERT). Where not
one word fits, the first drawn is predicted in part, so that every sample has a prediction.

The words of a sample's stream (data/numba_random.py): word 0 rounds its count; word 1 + 2j draws the j-th candidate
(token or word) among those not yet drawn, by Fisher and Yates's shuffle; word 2 + 2i replaces the token at position i:
its upper half says how, its lower half is the random token. So the result depends on the sample and its key alone,
whatever batch it is corrupted in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.data.sample import Examples, Samples
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.masking import MaskingRules, mask_samples
from ctxlm_ds.recipe.sections import ObjectiveSection

if TYPE_CHECKING:
    from ctxlm_ds.tokenizers.base import Tokenizer


class MaskedTokenCorruption:
    """The corruption of BERT and RoBERTa for one tokenizer.

    Raises:
        ConfigError: keep_prob and random_prob exceed 1, or the tokenizer has only special tokens to draw from.
    """

    def __init__(self, config: ObjectiveSection, tokenizer: Tokenizer) -> None:
        if config.keep_prob + config.random_prob > 1.0:
            raise ConfigError(
                f"objective.keep_prob {config.keep_prob} and objective.random_prob {config.random_prob} add up to more "
                "than 1; lower one of them (BERT: 0.1 and 0.1)"
            )
        self._rules = MaskingRules(
            mask_prob=config.mask_prob,
            keep_prob=config.keep_prob,
            random_prob=config.random_prob,
            rounds_to_nearest=config.count_rounding == "nearest",
            masks_specials=config.special_tokens == "roberta",
            whole_word=config.whole_word,
            mask_id=tokenizer.mask_id,
            random_ids=_random_ids(config, tokenizer),
            word_starts=tokenizer.word_start_mask() if config.whole_word else np.empty(0, dtype=np.bool_),
        )

    def corrupt_batch(self, samples: Samples, key: np.uint64, budgets: NDArray[np.int64]) -> Examples:
        """Corrupt samples, whose tokens are below the tokenizer's vocab_size.

        Args:
            samples: c sequences of any lengths.
            key: of the random streams (native.stream_key).
            budgets: [c] most predictions of each, at least 1.
        """
        ids = np.empty_like(samples.input_ids)
        positions, labels, starts = mask_samples(samples, key, budgets, self._rules, ids)
        return Examples(
            input_ids=ids,
            starts=samples.starts,
            second_starts=samples.second_starts,
            is_random_next=samples.is_random_next,
            prediction_positions=positions,
            prediction_labels=labels,
            prediction_starts=starts,
        )


def _random_ids(config: ObjectiveSection, tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Ids that a random replacement is drawn from, uniformly."""
    ids = np.arange(tokenizer.vocab_size, dtype=np.int32)
    if config.special_tokens != "bert":
        ids = np.setdiff1d(ids, np.array(sorted(tokenizer.special_ids), dtype=np.int32))
    if len(ids) == 0:
        raise ConfigError(f"the tokenizer's {tokenizer.vocab_size} tokens are all special; train it on more text")
    return ids
