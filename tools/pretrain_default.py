"""Run the default job (`make pretrain`): raw text to a Hugging Face model that fills masks, in minutes on a CPU."""

import argparse
from pathlib import Path

from ctxlm_ds.console import run_command, setup_logging

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", nargs="+", default=[], help="your own text (files or globs), not the docstrings")
    parser.add_argument("--output-dir", type=Path, help="default: runs/default, with --corpus runs/NAME-OF-CORPUS")
    parser.add_argument("--recipe", default="bert-docstrings", help="recipe: a path or the name of a shipped one")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=2, help="DeepSpeed ranks")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="override settings")
    arguments = parser.parse_args()
    setup_logging()

    from ctxlm_ds.quickstart import Quickstart, QuickstartSettings

    name = Path(arguments.corpus[0]).name.split(".")[0].strip("*") or "corpus" if arguments.corpus else "default"
    settings = QuickstartSettings(
        output_dir=(arguments.output_dir or ROOT / "runs" / name).absolute(),
        corpus=tuple(arguments.corpus),
        recipe=arguments.recipe,
        vocab_size=arguments.vocab_size,
        num_ranks=arguments.ranks,
        overrides=tuple(arguments.set),
    )
    Quickstart(settings, ROOT / "tools").run()


if __name__ == "__main__":
    run_command(main)
