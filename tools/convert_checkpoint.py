"""Convert checkpoints to and from plain Hugging Face folders; every conversion compares the logits of both sides.

    python tools/convert_checkpoint.py to-hf   --checkpoint RUN_OR_STEP --output DIR [--dtype bf16]
    python tools/convert_checkpoint.py from-hf --model DIR --output DIR
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ctxlm_ds.console import run_command, setup_logging

if TYPE_CHECKING:
    from ctxlm_ds.export.huggingface import Conversion


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    to_hf = commands.add_parser("to-hf", help="a checkpoint as a plain BERT or RoBERTa folder")
    to_hf.add_argument("--checkpoint", required=True, type=Path, help="a run (its newest checkpoint) or a checkpoint")
    to_hf.add_argument("--output", required=True, type=Path, help="folder to write")
    to_hf.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="data type of the weights")
    to_hf.add_argument("--max-shard-size", default="5GB", help="largest weight file, such as 500MB or 5GB")
    from_hf = commands.add_parser("from-hf", help="such a model as weights for initialize_from")
    from_hf.add_argument("--model", required=True, type=Path, help="local folder with safetensors and a tokenizer")
    from_hf.add_argument("--output", required=True, type=Path, help="folder to write")
    return parser.parse_args()


def report(conversion: Conversion, next_step: str) -> None:
    lines = [f"{conversion.hf_class}, {conversion.num_parameters:,} parameters, from {conversion.source}", "logits:"]
    lines += [f"  {comparison}" for comparison in conversion.comparisons]
    largest = max(conversion.comparisons, key=lambda comparison: comparison.relative)
    lines.append(f"largest difference: {largest.relative:.2e} of the logits' scale")
    lines += [f"wrote {conversion.output}", next_step]
    sys.stdout.write("\n".join(lines) + "\n")


def main() -> None:
    arguments = parse_arguments()
    setup_logging()
    from ctxlm_ds.export.huggingface import from_hf, to_hf
    from ctxlm_ds.export.safetensors_files import parse_size

    if arguments.command == "to-hf":
        max_shard_bytes = parse_size(arguments.max_shard_size)
        conversion = to_hf(arguments.checkpoint, arguments.output, arguments.dtype, max_shard_bytes)
        report(conversion, f'next: transformers.pipeline("fill-mask", model="{arguments.output}")')
    else:
        conversion = from_hf(arguments.model, arguments.output)
        report(conversion, f"next: --set initialize_from={arguments.output} with the model section of its config.yaml")


if __name__ == "__main__":
    run_command(main)
