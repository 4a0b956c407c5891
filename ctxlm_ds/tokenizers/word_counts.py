"""How often each word of a corpus occurs, counted by the `tokenizers` library on all cores."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


def count_words(texts: Iterable[str], normalizer: Any, pre_tokenizer: Any) -> dict[str, int]:
    """Occurrences by word, in code-point order of the words; memory grows with the number of different words.

    A word is what `pre_tokenizer` cuts out of the normalized text.
    """
    from tokenizers import Tokenizer, models, trainers

    counter = Tokenizer(models.BPE())
    if normalizer is not None:
        counter.normalizer = normalizer
    counter.pre_tokenizer = pre_tokenizer
    # A vocabulary of one learns nothing; the words that a trainer has counted are part of its state.
    trainer = trainers.BpeTrainer(vocab_size=1, special_tokens=["<unk>"], limit_alphabet=0, show_progress=False)
    counter.train_from_iterator(iter(texts), trainer)
    words = json.loads(trainer.__getstate__())["BpeTrainer"]["words"]
    return dict(sorted(words.items()))
