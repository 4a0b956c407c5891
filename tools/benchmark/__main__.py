"""Measure a part of the package against its peer (transformers, tokenizers, Megatron), as ratios of one run.

Both sides take turns, so a machine whose speed drifts favours neither. Run it as `python tools/benchmark COMMAND`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:
    # Python puts this folder on the path, where datasets.py hides the library of that name.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from ctxlm_ds.console import at_least, run_command, setup_logging
from ctxlm_ds.errors import ConfigError

PEERS = ("bare", "autocast", "bf16", "trainer")
"""Names for --against."""
PARTS = ("kernels", "operations", "settings", "steps")
"""Of `device`, each in at most eight minutes."""

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ctxlm_ds.recipe.schema import RunConfig
    from tools.benchmark.steps import StepBenchmark
    from tools.benchmark.tables import Table


def _recipe_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="RECIPE", help="recipe: a path or the name of a shipped one")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="override settings")
    parser.add_argument("--threads", type=at_least(1), metavar="N", help="CPU threads (default: torch's)")


def _step_options(parser: argparse.ArgumentParser) -> None:
    _recipe_options(parser)
    parser.add_argument("--deepspeed_config", metavar="JSON", help="DeepSpeed JSON (that of the recipe, or zero1)")
    parser.add_argument("--micro-batches", type=at_least(1), default=2, metavar="N", help="micro-batches of a step (2)")
    parser.add_argument("--dropout", nargs="+", type=_dropout, default=[0.1, 0.0], metavar="P", help="dropouts (0.1 0)")


def _pretrain_options(parser: argparse.ArgumentParser) -> None:
    _step_options(parser)
    parser.add_argument(
        "--against", type=_peers, default=PEERS, metavar="A,B", help=f"sides to compare with ({','.join(PEERS)})"
    )


def _document_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", type=Path, metavar="FILE", help="document whose marked places get the tables")
    parser.add_argument("--threads", type=at_least(1), metavar="N", help="CPU threads (all cores)")


def _device_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", default="bert-large-phase2", metavar="RECIPE", help="recipe of the steps (bert-large-phase2)"
    )
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="override settings")
    parser.add_argument("--rows", type=at_least(1), default=64, metavar="N", help="rows of a micro-batch (64)")
    parts = ", ".join(PARTS)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"{parts} (all)")


def _packing_options(parser: argparse.ArgumentParser) -> None:
    _step_options(parser)
    parser.add_argument("--input", metavar="PREFIX", help="dataset whose lengths the documents have (drawn, mean 60)")


def _dropout(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not a probability below 1")
    return value


def _peers(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(PEERS)}")
    return names


def _preprocess_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="as for ctxlm preprocess")
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="tokenizer folder")
    parser.add_argument("--split-sentences", action="store_true", help="a sequence is a sentence")
    parser.add_argument(
        "--workers", type=at_least(1), metavar="N", help="worker processes, and the peer's threads (all cores)"
    )


def _samples_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--documents", type=at_least(1), default=1_000_000, metavar="N", help="documents of made-up lengths"
    )


def _merge_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", nargs="+", required=True, metavar="PREFIX", help="datasets to join, in order")
    parser.add_argument("--output-dir", required=True, metavar="DIR", help="folder on the disk to measure")


def _ngram_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--train", required=True, type=Path, metavar="PREFIX", help="dataset whose n-grams count")
    parser.add_argument("--held-out", required=True, type=Path, metavar="PREFIX", help="dataset to predict")
    parser.add_argument("--tokenizer", metavar="DIR", help="predict what ELMo with this tokenizer predicts")


def _target_options(parser: argparse.ArgumentParser) -> None:
    _recipe_options(parser)
    parser.add_argument("--model", required=True, type=Path, metavar="DIR", help="exported model of the recipe's run")


def _save_options(parser: argparse.ArgumentParser) -> None:
    _recipe_options(parser)
    parser.add_argument("--deepspeed_config", default="zero1", metavar="JSON", help="DeepSpeed JSON (zero1)")
    parser.add_argument("--output-dir", required=True, metavar="DIR", help="folder on the disk to measure")
    parser.add_argument("--steps", type=at_least(1), default=3, metavar="N", help="steps between two saves (3)")


def _steps(args: argparse.Namespace) -> Iterable[str]:
    from ctxlm_ds.recipe.load import load_config

    config = load_config(args.config, args.set)
    from tools.benchmark.steps import compare_steps

    tables = compare_steps(config, _step_benchmark(args, config, args.against))
    return (line for table in tables for line in table.text())


def _packing(args: argparse.Namespace) -> Iterable[str]:
    from ctxlm_ds.recipe.load import load_config

    config = load_config(args.config, args.set)
    from tools.benchmark.packing import compare_packing

    tables = compare_packing(config, _step_benchmark(args, config), args.input)
    return (line for table in tables for line in table.text())


def _document(args: argparse.Namespace) -> Iterable[str]:
    from tools.benchmark.document import check_document, describe_machine, measure_all, write_tables

    if args.write:
        check_document(args.write)
    for place, tables in measure_all(_use_threads(args.threads), args.rounds):
        for table in tables:
            yield from table.text()
        if args.write:
            write_tables(args.write, place, tables, describe_machine())
            yield f"written to {args.write}"


def _device(args: argparse.Namespace) -> Iterable[str]:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("torch finds no GPU here; run this on one (python tools/benchmark steps measures a CPU)")
    for part in args.only:
        for table in _device_part(part, args):
            yield from table.text()


def _device_part(part: str, args: argparse.Namespace) -> Iterable[Table]:
    """Return the tables of a part; the kernels' part needs no package but torch, triton and numpy."""
    if part == "kernels":
        from tools.benchmark.kernels import measure_kernels

        return measure_kernels("cuda")
    from ctxlm_ds.recipe.load import load_config
    from tools.benchmark.device import measure_anchored, measure_device

    if part == "steps":
        return measure_anchored(args.rounds)
    sizes = [f"training.micro_batch_size={args.rows}", f"training.global_batch_size={args.rows}"]
    return measure_device(load_config(args.config, [*args.set, *sizes]), part, args.rounds)


def _step_benchmark(args: argparse.Namespace, config: RunConfig, against: Sequence[str] = ()) -> StepBenchmark:
    from ctxlm_ds.recipe.deepspeed import DEFAULT_CONFIG
    from tools.benchmark.steps import StepBenchmark

    return StepBenchmark(
        deepspeed=args.deepspeed_config or config.deepspeed or DEFAULT_CONFIG,
        against=against,
        dropouts=args.dropout,
        micro_batches=args.micro_batches,
        rounds=args.rounds,
        threads=_use_threads(args.threads),
    )


def _loader(args: argparse.Namespace) -> Iterable[str]:
    from ctxlm_ds.recipe.load import load_config

    config = load_config(args.config, args.set)
    from tools.benchmark.loaders import compare_loaders

    _set_threads(args.threads)
    return compare_loaders(config, args.rounds)


def _preprocess(args: argparse.Namespace) -> Iterable[str]:
    from tools.benchmark.datasets import compare_preprocess

    return compare_preprocess(args.input, args.tokenizer, args.split_sentences, args.workers, args.rounds)


def _samples(args: argparse.Namespace) -> Iterable[str]:
    from tools.benchmark.samples import compare_samples

    return compare_samples(args.documents, args.rounds)


def _merge(args: argparse.Namespace) -> Iterable[str]:
    from tools.benchmark.datasets import compare_merge

    return compare_merge(args.input, args.output_dir, args.rounds)


def _ngrams(args: argparse.Namespace) -> Iterable[str]:
    from tools.benchmark.ngrams import compare_ngrams

    if args.tokenizer is None:
        return compare_ngrams(args.train, args.held_out)
    from ctxlm_ds.tokenizers.load import load_tokenizer

    return compare_ngrams(args.train, args.held_out, load_tokenizer(args.tokenizer))


def _targets(args: argparse.Namespace) -> Iterable[str]:
    from ctxlm_ds.recipe.load import load_config

    config = load_config(args.config, args.set)
    from tools.benchmark.targets import Targets, compare_targets

    _set_threads(args.threads)
    return compare_targets(Targets.of(config), args.model)


def _save(args: argparse.Namespace) -> Iterable[str]:
    """Run on several ranks under torchrun, on one without a launcher."""
    from ctxlm_ds.process.launch import discover_ranks, prepare_process
    from ctxlm_ds.recipe.check import check_config
    from ctxlm_ds.recipe.deepspeed import build_deepspeed_config
    from ctxlm_ds.recipe.json_source import load_deepspeed_json
    from ctxlm_ds.recipe.load import load_config

    config = load_config(args.config, args.set)
    ranks = discover_ranks()
    check_config(config, ranks.world_size)
    settings = build_deepspeed_config(config, load_deepspeed_json(args.deepspeed_config), ranks.world_size)
    prepare_process(ranks)
    _set_threads(args.threads)
    from ctxlm_ds.parallel.topology import build_topology
    from ctxlm_ds.training.engine.runtime import init_process_group
    from tools.benchmark.saves import compare_saves

    init_process_group()
    layout = config.parallel
    sizes = layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.context_parallel_size
    topology = build_topology(ranks.local_rank, ranks.local_world_size, *sizes)
    return compare_saves(config, settings, topology, Path(args.output_dir), args.rounds, args.steps)


def _use_threads(threads: int | None) -> int:
    """Set the threads of the processes that are started from here, and return their number."""
    from ctxlm_ds.process.cgroups import available_cores
    from ctxlm_ds.process.launch import threads_per_rank

    count = threads or threads_per_rank(available_cores(), 1, os.environ)
    os.environ["OMP_NUM_THREADS"] = str(count)
    return count


def _set_threads(threads: int | None) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)


COMMANDS = (
    ("steps", "the engine's training step against transformers", _pretrain_options, _steps, 5),
    ("packing", "the engine on short documents: packed rows against padded ones", _packing_options, _packing, 5),
    ("document", "the tables of docs/benchmarks.md that need no data (make bench)", _document_options, _document, 3),
    ("device", "kernels, products, settings and recipes on this GPU, in half an hour", _device_options, _device, 3),
    ("loader", "rows of the loader against transformers' collator", _recipe_options, _loader, 5),
    ("preprocess", "ctxlm preprocess against encode_batch_fast", _preprocess_options, _preprocess, 5),
    ("merge", "ctxlm merge against a copy of the files", _merge_options, _merge, 5),
    ("save", "a checkpoint written in the background against one that training waits for", _save_options, _save, 5),
    ("ngrams", "held-out loss of counted unigrams and trigrams, for a causal model's", _ngram_options, _ngrams, 1),
    ("targets", "held-out loss and accuracy of an encoder-decoder, next to unigrams", _target_options, _targets, 1),
    ("samples", "the sample index against Megatron's C++ helpers", _samples_options, _samples, 5),
)
"""Name, description, options, the function that returns the lines of the table, and rounds."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python tools/benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True, metavar="COMMAND")
    for name, explanation, add_options, measure, rounds in COMMANDS:
        command = commands.add_parser(name, help=explanation, description=explanation)
        add_options(command)
        command.add_argument(
            "--rounds", type=at_least(1), default=rounds, metavar="N", help=f"measured rounds ({rounds})"
        )
        command.set_defaults(measure=measure)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    setup_logging(int(os.environ.get("RANK", "0")))
    for line in args.measure(args):
        print(line, flush=True)


if __name__ == "__main__":
    run_command(main)
