"""Corruptions and pairs of a dataset against the published rules, written down here as slow loops.

    python -m tests.objective_statistics PREFIX --config RECIPE [--set A.B=C] [--rows N]

prints each figure, what the rule gives, and their difference in standard errors. The rules are those of
create_pretraining_data.py (google-research/bert and albert), mask_tokens_dataset.py (fairseq), masking.py (SpanBERT).
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxlm_ds.console import at_least, run_command, setup_logging
from ctxlm_ds.data.dataset.inspection import open_tokenizer
from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.index.build import excerpt
from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.numba_random import stream, stream_key, word_at
from ctxlm_ds.data.sample import Examples, Samples
from ctxlm_ds.data.stream.loader import TRAIN_MASKS
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.objectives.corruption.spans import draw_length
from ctxlm_ds.objectives.corruption.tokens import MaskingRules, length_shares
from ctxlm_ds.objectives.span_corruption import Denoising
from ctxlm_ds.objectives.text_infilling import TextInfilling
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import RunConfig
from tests.ragged import one_sample
from tests.unit.data.formats.bert_reference import create_instances

MOST_ERRORS = 4.0
LONGEST_SHOWN = 10
FEWEST = 200
"""Runs of fewer samples say nothing about a share."""


class Figure(NamedTuple):
    """A measured value, what the published rule gives, and the standard error of their difference."""

    name: str
    measured: float
    published: float
    error: float

    @property
    def distance(self) -> float:
        """Difference in standard errors; 0 if both are the same number."""
        difference = abs(self.measured - self.published)
        return difference / self.error if self.error else (0.0 if difference < 1e-9 else math.inf)


class Masked(NamedTuple):
    """Sequences before and after corruption."""

    samples: Samples
    examples: Examples
    section: Any
    rules: MaskingRules
    budgets: Any
    key: np.uint64

    def predicted(self) -> Iterator[list[int]]:
        """Yield the predicted positions of each sequence."""
        for number in range(len(self.budgets)):
            yield self.examples.example(number).prediction_positions.tolist()


def share(name: str, count: float, trials: int, published: float) -> Figure:
    """A share of trials with a known probability."""
    return Figure(name, count / trials, published, math.sqrt(published * (1.0 - published) / trials))


def two_shares(name: str, one: int, of_one: int, other: int, of_other: int) -> Figure:
    """A share of our trials and of the rule's."""
    both = (one + other) / (of_one + of_other)
    return Figure(name, one / of_one, other / of_other, math.sqrt(both * (1 - both) * (1 / of_one + 1 / of_other)))


def mask_rows(rows: RowSource, config: RunConfig, objective: Any, count: int) -> Masked:
    """Corrupt `count` rows as training does; of several epochs if there are fewer."""
    epochs, numbers = np.divmod(np.arange(count), len(rows))
    samples, _ = rows.samples(numbers, epochs)
    budgets, key = objective.budgets(samples.lengths, config.data), stream_key(config.training.seed, TRAIN_MASKS)
    return Masked(
        samples, objective.corrupt_batch(samples, key, budgets), config.objective, objective._rules, budgets, key
    )


def units_of(masked: Masked, number: int) -> list[list[int]]:
    """Positions of each token, word or given span that may be predicted."""
    sample, section = one_sample(masked.samples, number), masked.section
    begin = int(masked.samples.starts[number])
    units: list[list[int]] = []
    for position, token in enumerate(sample.input_ids.tolist()):
        if sample.special_mask[position] and section.special_tokens != "roberta":
            continue
        continues = section.spans == "given" and masked.samples.continues_span[begin + position] == 1
        continues |= section.whole_word and not masked.rules.word_starts[token]
        alone = sample.special_mask[position] or (position > 0 and sample.special_mask[position - 1])
        if units and continues and not alone:
            units[-1].append(position)
        else:
            units.append([position])
    return units


def wanted_by_rule(length: int, specials: int, section: Any, rng: np.random.Generator) -> int:
    """How many tokens are predicted."""
    if section.count_rounding == "nearest":
        return max(1, round(section.mask_prob * length))
    if section.count_rounding == "up":
        return max(1, math.ceil(section.mask_prob * (length - specials)))
    return max(1, int(section.mask_prob * length + rng.random()))


def choose_units(units: list[list[int]], wanted: int, section: Any, rng: np.random.Generator) -> set[int]:
    """BERT and fairseq: units in random order while they fit; if none fits, part of the first."""
    order = [units[place] for place in rng.permutation(len(units))]
    marked: set[int] = set()
    for unit in order:
        if len(marked) + len(unit) <= wanted:
            marked.update(unit)
    return marked or set(order[0][:wanted])


def choose_spans(units: list[list[int]], wanted: int, section: Any, rng: np.random.Generator) -> set[int]:
    """SpanBERT: the unit of a random position and those after it, until the budget cuts the last one."""
    owners = {position: number for number, unit in enumerate(units) for position in unit}
    places, shares, marked = list(owners), length_shares(section), set[int]()
    wanted = min(wanted, len(places))
    while len(marked) < wanted:
        length = rng.choice(len(shares), p=shares) + 1
        anchor = places[rng.integers(len(places))]
        if anchor in marked:
            continue
        run = [p for unit in units[owners[anchor] : owners[anchor] + length] for p in unit]
        for place, position in enumerate(run):
            if position - place != run[0]:
                break  # a special token
            if len(marked) < wanted:
                marked.add(position)
    return marked


def choose_ngrams(units: list[list[int]], wanted: int, section: Any, rng: np.random.Generator) -> set[int]:
    """ALBERT: n-grams at shuffled places, shortened to fit, left out if they overlap."""
    marked: set[int] = set()
    order = rng.permutation(len(units))
    for start in order:
        if len(marked) >= wanted:
            break
        longest = min(section.max_span_length, len(units) - start)
        shares = 1 / np.arange(1, longest + 1)
        length = rng.choice(longest, p=shares / shares.sum()) + 1
        while length and len(marked) + sum(map(len, units[start : start + length])) > wanted:
            length -= 1
        chosen = {position for unit in units[start : start + length] for position in unit}
        if length and not chosen & marked:
            marked |= chosen
    return marked or set(units[order[0]][:wanted])


CHOOSERS: dict[str, Callable[..., set[int]]] = {
    "none": choose_units, "given": choose_units, "geometric": choose_spans, "ngram": choose_ngrams,
}  # fmt: skip


def by_rule(masked: Masked, seed: int = 5) -> list[list[int]]:
    """The positions that the published rule chooses in the same sequences, with other draws."""
    rng, found = np.random.default_rng(seed), []
    for number, budget in enumerate(masked.budgets.tolist()):
        sample = one_sample(masked.samples, number)
        wanted = wanted_by_rule(len(sample.input_ids), int(sample.special_mask.sum()), masked.section, rng)
        choose = CHOOSERS[masked.section.spans]
        found.append(sorted(choose(units_of(masked, number), min(wanted, budget), masked.section, rng)))
    return found


def run_lengths(positions: Sequence[Sequence[int]]) -> Counter[int]:
    """Lengths of the runs of adjacent positions."""
    counts: Counter[int] = Counter()
    for of_one in positions:
        length = 0
        for place, position in enumerate(of_one):
            length += 1
            if place + 1 == len(of_one) or of_one[place + 1] != position + 1:
                counts[length] += 1
                length = 0
    return counts


def choice_figures(masked: Masked) -> Iterator[Figure]:
    """Budget, lengths of runs, and of what is chosen completely."""
    ours, rule = list(masked.predicted()), by_rule(masked)
    sizes = [np.array([len(one) for one in positions], dtype=float) for positions in (ours, rule)]
    tokens = masked.samples.lengths.astype(float)
    shares = [size / tokens for size in sizes]
    error = math.hypot(*(one.std() for one in shares)) / math.sqrt(len(tokens))
    yield Figure("predicted share of the tokens", shares[0].mean(), shares[1].mean(), error)
    lengths = [run_lengths(positions) for positions in (ours, rule)]
    totals = [sum(counts.values()) for counts in lengths]
    for length in range(1, LONGEST_SHOWN + 1):
        name = f"runs of {length} token{'s' * (length > 1)}"
        if lengths[1][length] >= FEWEST:
            yield two_shares(name, lengths[0][length], totals[0], lengths[1][length], totals[1])
    if masked.section.whole_word or masked.section.spans == "given":
        whole = [whole_units(masked, positions) for positions in (ours, rule)]
        yield two_shares("units predicted completely", *whole[0], *whole[1])


def whole_units(masked: Masked, positions: Sequence[Sequence[int]]) -> tuple[int, int]:
    """How many units of several tokens are predicted completely, and how many at all."""
    whole = touched = 0
    for number, chosen in enumerate(map(set, positions)):
        for unit in units_of(masked, number):
            count = len(chosen.intersection(unit)) if len(unit) > 1 else 0
            whole, touched = whole + (count == len(unit)), touched + (count > 0)
    return whole, max(1, touched)


def length_figures(masked: Masked) -> Iterator[Figure]:
    """Lengths that the first draw of each sequence has, before the text's end and the budget cut them."""
    shares, counts, keys = length_shares(masked.section), Counter[int](), masked.samples.keys
    for number in range(len(keys)):
        state = np.uint64(stream(masked.key, *keys[number]))
        counts[int(draw_length(np.uint64(word_at(state, 1)), shares, len(shares)))] += 1
    for length, published in enumerate(shares.tolist(), start=1):
        yield share(f"length {length} drawn", counts[length], len(keys), published)


def replacement_figures(masked: Masked) -> Iterator[Figure]:
    """Shares of mask, kept and random tokens; of runs if one draw replaces a run."""
    section, rules = masked.section, masked.rules
    chances = np.bincount(rules.random_ids, minlength=len(rules.is_special)) / len(rules.random_ids)
    counts: Counter[str] = Counter()
    same = 0.0
    for number in range(len(masked.budgets)):
        example = masked.examples.example(number)
        positions, labels = example.prediction_positions, example.prediction_labels
        seen = example.input_ids[positions]
        begins = np.ones(len(positions), dtype=np.bool_)
        if section.replace_spans:
            begins[1:] = np.diff(positions) > 1
        runs = np.split(np.arange(len(positions)), np.flatnonzero(begins)[1:])
        for run in runs:
            kind = "mask" if (seen[run] == rules.mask_id).all() else "kept" if (seen[run] == labels[run]).all() else "x"
            counts[kind] += 1
            same += float(np.prod(chances[labels[run]]))  # random tokens that are the original ones
    total = sum(counts.values())
    chance = section.random_prob * same / total
    what = "runs" if section.replace_spans else "predictions"
    yield share(f"{what} masked", counts["mask"], total, 1 - section.keep_prob - section.random_prob)
    yield share(f"{what} random", counts["x"], total, section.random_prob - chance)
    yield share(f"{what} kept", counts["kept"], total, section.keep_prob + chance)


def order_figures(rows: RowSource, short_seq_prob: float, seed: int = 6) -> Iterator[Figure]:
    """Labels and numbers of pairs, against create_instances_from_document on the same documents."""
    for index in rows.indexes:
        kind = index.format.sequence_label
        if kind is None:
            continue
        dataset, documents = index.dataset, []
        ends = bool((dataset.metadata or {})["append_eod"])
        for number in range(*index.meta["dataset"]["documents"]):
            sentences = [sequence.tolist() for sequence in dataset.document(number)]
            sentences[-1] = sentences[-1][: len(sentences[-1]) - ends]
            documents.append([sentence for sentence in sentences if sentence])
        documents = [document for document in documents if document]
        room, rng = index.meta["settings"]["seq_length"] - 3, random.Random(seed)
        pairs = [
            create_instances(documents, number, room, short_seq_prob, rng, None, kind == "next_sentence")
            for number in range(len(documents))
        ]
        rule = [(np.array([pair["is_random"] for pair in of_one]), pair_sizes(of_one)) for of_one in pairs]
        starts = dataset.first_tokens(dataset.document_indices[:-1])
        owners = starts.searchsorted(index.records["a_start"], side="right")
        ours = [
            (index.records["is_random"][owners == owner] == 1, index.records["num_tokens"][owners == owner] - 3)
            for owner in np.unique(owners)
        ]
        name = {"next_sentence": "random next segments", "sentence_order": "exchanged segments"}[kind]
        for place, figure in enumerate((name, "tokens of a pair")):
            (one, its_error), (other, other_error) = (mean_of(found, place) for found in (ours, rule))
            yield Figure(figure, one, other, math.hypot(its_error, other_error))


def pair_sizes(pairs: Sequence[dict[str, Any]]) -> NDArray[np.int64]:
    return np.array([len(pair["a"]) + len(pair["b"]) for pair in pairs])


def mean_of(documents: Sequence[tuple[NDArray[Any], NDArray[Any]]], place: int) -> tuple[float, float]:
    """Mean over the pairs of all documents, and its error: pairs of a document share its target length."""
    sums = np.array([values[place].sum() for values in documents], dtype=float)
    counts = np.array([len(values[place]) for values in documents], dtype=float)
    mean = sums.sum() / counts.sum()
    return mean, math.sqrt(((sums - mean * counts) ** 2).sum()) / counts.sum()


def statistics(rows: RowSource, config: RunConfig, objective: Any, count: int) -> list[Figure]:
    """Every figure of a masked language model, of denoisers or of text infilling over `count` rows."""
    if isinstance(objective, Denoising):
        from tests.denoiser_statistics import denoising_figures  # it imports this module

        return list(denoising_figures(rows, config, objective, count))
    if isinstance(objective, TextInfilling):
        from tests.infilling_statistics import infilling_figures

        return list(infilling_figures(rows, config, objective, count))
    masked = mask_rows(rows, config, objective, count)
    drawn = length_figures(masked) if len(length_shares(masked.section)) else ()
    pairs = order_figures(rows, getattr(config.data, "short_seq_prob", 0.0))
    return [*choice_figures(masked), *drawn, *replacement_figures(masked), *pairs]


def lines(figures: Sequence[Figure]) -> Iterator[str]:
    yield f"{'figure':38}{'measured':>10}{'published':>11}{'errors':>8}"
    for name, measured, published, error in figures:
        distance = Figure(name, measured, published, error).distance
        yield f"{name:38}{measured:10.4f}{published:11.4f}{distance:8.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefix", metavar="PREFIX", help="dataset without .bin/.idx")
    parser.add_argument("--config", required=True, metavar="RECIPE", help="recipe of a masked language model or a T5")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="change its settings")
    parser.add_argument("--rows", type=at_least(1), default=2000, metavar="N", help="rows to count (2000)")
    args = parser.parse_args()
    setup_logging()
    settings = [f"data.train=[{args.prefix}]", *args.set]
    config = load_config(args.config, settings)
    if hasattr(config.objective, "masking"):
        config = load_config(args.config, ["objective.masking=dynamic", "data.num_duplicates=1", *settings])
    tokenizer = open_tokenizer(IndexedDataset(args.prefix), config.tokenizer.path)
    assert tokenizer is not None
    objective = build_objective(config.objective, tokenizer)
    with excerpt(args.prefix, tokenizer, config.row_settings, objective, args.rows) as (rows, source):
        figures = statistics(rows, config, objective, args.rows)
        print(f"{source}; {args.rows:,} of {len(rows):,}")
        print("\n".join(lines(figures)))


if __name__ == "__main__":
    run_command(main)
