"""Write the surprisal of each word of a text, one sentence a line, as TSV: line, word, nats, bits.

A word (between white space) has the sum of its tokens' surprisals; nan if its first token is not scored, as that of a
sentence under a causal model whose tokenizer adds no beginning.
"""

from __future__ import annotations

import argparse
import math
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from ctxlm_ds.console import setup_logging
from ctxlm_ds.errors import DataError
from ctxlm_ds.process.launch import quiet_libraries
from ctxlm_ds.untrusted_json import read_text

if TYPE_CHECKING:
    from ctxlm_ds.apps.evaluate.scorers import TokenScores


def main(argv: Sequence[str] | None = None) -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="ctxlm evaluate surprisal", description=__doc__, formatter_class=form)
    parser.add_argument("file", type=Path, metavar="FILE", help="text with one sentence a line")
    parser.add_argument("--model", required=True, type=Path, metavar="DIR", help="folder in Hugging Face's form")
    parser.add_argument("--definition", default="babylm", metavar="NAME", help="of a token's score; default: babylm")
    parser.add_argument("--way", metavar="NAME", help="what the model sums (docs/minimal-pairs.md)")
    arguments = parser.parse_args(argv)
    setup_logging()
    quiet_libraries()
    lines = read_text(arguments.file, DataError).split("\n")
    kept = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    with redirect_stdout(sys.stderr):  # libraries print when they are imported
        from ctxlm_ds.apps.evaluate.scorers import open_scorer

        scorer = open_scorer(arguments.model, arguments.definition, arguments.way)
    print("line\tword\tnats\tbits")
    for (number, line), scored in zip(kept, scorer.tokens([line for _, line in kept]), strict=True):
        for word, nats in word_surprisals(line, scored):
            print(f"{number}\t{word}\t{nats:.6f}\t{nats / math.log(2):.6f}")


def word_surprisals(sentence: str, scored: TokenScores) -> Iterator[tuple[str, float]]:
    """Yield each word of a sentence with its surprisal in nats; nan if its first character is in no scored token."""
    words = sentence.split()
    ends, at = [], 0
    for word in words:
        at = sentence.index(word, at) + len(word)
        ends.append(at)
    sums, begun = [0.0] * len(words), [False] * len(words)
    for value, (start, end) in zip(scored.values.tolist(), scored.spans, strict=True):
        place = bisect_right(ends, end - 1)
        if end > 0 and place < len(words):  # a special token ends at 0
            sums[place] -= value
            begun[place] |= start <= ends[place] - len(words[place])
    for word, nats, is_whole in zip(words, sums, begun, strict=True):
        yield word, nats if is_whole else math.nan
