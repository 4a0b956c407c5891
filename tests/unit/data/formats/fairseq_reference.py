"""The rows of RoBERTa's pretraining, from lines of text to token ids, as fairseq's source describes them.

Sources (github.com/facebookresearch/fairseq):
- examples/roberta/multiprocessing_bpe_encoder.py: each line is stripped and encoded by itself; --keep-empty keeps the
  empty lines between documents (examples/roberta/README.pretraining.md).
- fairseq/binarizer.py, fairseq/data/dictionary.py: every line, an empty one too, gets </s> at its end (append_eos).
- fairseq/tasks/masked_lm.py: blocks of tokens_per_sample - 1, <s> in front of each.
- fairseq/data/token_block_utils_fast.pyx: which lines a block has, by break mode.
- fairseq/trainer.py: a block longer than the model's positions is left out of training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

Line = list[int]
SEPARATOR_LINE = 1
"""Length of an empty line: its </s>."""


def binarized(documents: Sequence[Sequence[str]], encode: Callable[[str], Line], eos: int) -> list[Line]:
    """One line per sentence, an empty line between documents."""
    lines: list[Line] = []
    for number, document in enumerate(documents):
        if number:
            lines.append([eos])
        lines += [[*encode(sentence.strip()), eos] for sentence in document]
    return lines


def blocks(lines: Sequence[Line], size: int, mode: str) -> list[Line]:
    """The blocks of at most `size` tokens in which training sees the lines; one line may be longer."""
    stream = [token for line in lines for token in line]
    if mode == "none":
        return [stream[begin : begin + size] for begin in range(0, len(stream), size)]
    within_documents = mode == "complete_doc"
    found: list[list[Line]] = [[]]
    for line in lines:
        ends_document = within_documents and len(line) == SEPARATOR_LINE
        if ends_document or (found[-1] and sum(map(len, found[-1])) + len(line) > size):
            found.append([])
        if not ends_document:
            found[-1].append(line)
    joined = [[token for line in block for token in line] for block in found]
    return [block for block in joined if len(block) > int(within_documents)]


def rows(
    documents: Sequence[Sequence[str]], encode: Callable[[str], Line], bos: int, eos: int, length: int, mode: str
) -> list[Line]:
    """Every block behind <s>; those longer than `length` - 1 are still there."""
    return [[bos, *block] for block in blocks(binarized(documents, encode, eos), length - 1, mode)]


def cut(row: Line, length: int) -> list[Line]:
    """Our rows instead of one that is too long for training: it is cut, and <s> put in front of each part."""
    bos, *block = row
    starts = accumulate([0] * bool(block) + [length - 1] * ((len(block) - 1) // (length - 1)))
    return [[bos, *block[start : start + length - 1]] for start in starts]
