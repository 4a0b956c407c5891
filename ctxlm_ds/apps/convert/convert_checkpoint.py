"""Convert checkpoints: to and from Hugging Face folders, from other systems, to and from DeepSpeed's format.

    ctxlm convert to-hf   --checkpoint RUN_OR_STEP --output DIR [--dtype bf16] [--push USER/MODEL]
    ctxlm convert babylm RUN --output DIR
    ctxlm convert onnx --model HF_DIR --output DIR
    ctxlm convert from-hf --model DIR --output DIR
    ctxlm convert tokenizer --checkpoint RUN_OR_STEP --tokenizer DIR --output DIR
    ctxlm convert grow --checkpoint RUN_OR_STEP --set model.num_layers=28 --output DIR
    ctxlm convert from-megatron --checkpoint DIR  --tokenizer DIR --output DIR
    ctxlm convert from-fairseq  --checkpoint FILE --tokenizer DIR --output DIR
    ctxlm convert to-universal   --checkpoint RUN_OR_STEP --output DIR
    ctxlm convert from-universal --checkpoint DIR --output DIR --config RECIPE

The same to-hf again does nothing; a folder made of another checkpoint or with other options needs --overwrite.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.console import logger, setup_logging
from ctxlm_ds.errors import ConfigError, ExportError

if TYPE_CHECKING:
    from ctxlm_ds.export.huggingface import Conversion

CARD = "README.md"
VOCABULARY, GROW = "tokenizer", "grow"
LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]*")
LANGUAGE = re.compile(r"[a-z]{2,3}|multilingual")
CHECKPOINT_HELP = "a run (its newest checkpoint) or a checkpoint"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    to_hf = add_command(commands, "to-hf", "a checkpoint as a plain Hugging Face folder", CHECKPOINT_HELP)
    to_hf.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="data type of the weights")
    to_hf.add_argument("--weights", choices=("trained", "ema"), default="trained", help="ema: their moving average")
    to_hf.add_argument("--max-shard-size", default="5GB", help="largest weight file, such as 500MB or 5GB")
    to_hf.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    hub = to_hf.add_argument_group("Hugging Face Hub").add_argument
    hub("--push", metavar="USER/MODEL", help="upload the folder, also one that is complete already")
    hub("--private", action="store_true", help="make a new repository private")
    hub("--license", metavar="NAME", help="for the model card, such as apache-2.0")
    hub("--language", nargs="+", default=[], metavar="CODE", help="for the model card, such as en")
    hub("--dataset", nargs="+", default=[], metavar="NAME", help="for the model card: data sets of the Hub")
    babylm = add_command(commands, "babylm", "a run's checkpoints at words as the folders of a BabyLM submission")
    babylm.add_argument("checkpoint", metavar="RUN", type=Path, help="folder of a run with checkpoint.at_words")
    onnx = add_command(commands, "onnx", "a Hugging Face folder as ONNX")
    onnx.add_argument("--model", required=True, type=Path, help="local folder, as to-hf writes it")
    from_hf = add_command(commands, "from-hf", "such a model as weights for initialize_from")
    from_hf.add_argument("--model", required=True, type=Path, help="local folder with safetensors and a tokenizer")
    text = "fresh heads for a model without those of pretraining, such as a BertModel"
    from_hf.add_argument("--new-head", action="store_true", help=text)
    text = "a checkpoint's weights for another vocabulary, for initialize_from"
    vocabulary = add_command(commands, VOCABULARY, text, f"{CHECKPOINT_HELP}, or a folder of from-hf")
    text = "rows of new tokens: mean of their old pieces, initial values, or known tokens with near vectors (pieces)"
    vocabulary.add_argument("--method", choices=("pieces", "random", "static"), default="pieces", help=text)
    text = "static: vectors of the new tokenizer's tokens, as word2vec's text"
    vocabulary.add_argument("--vectors", type=Path, metavar="FILE", help=text)
    text = "static: text to train these vectors on (extra downstream)"
    vocabulary.add_argument("--corpus", type=Path, metavar="FILE", help=text)
    growth = add_command(commands, GROW, "a larger model, tiled from a checkpoint", f"{CHECKPOINT_HELP}, or of from-hf")
    text = "sizes of the larger model, such as model.num_layers=28"
    growth.add_argument("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help=text)
    text = "BERT or GPT of Megatron-LM or Megatron-DeepSpeed as a Hugging Face folder"
    megatron = add_command(commands, "from-megatron", text, "a run (its newest checkpoint), or one checkpoint")
    text = "RoBERTa, BART or mBART of fairseq as a Hugging Face folder"
    fairseq = add_command(commands, "from-fairseq", text, "the .pt file, or the folder with model.pt")
    for command, whose in ((megatron, "the model's"), (fairseq, "the model's"), (vocabulary, "the new")):
        command.add_argument("--tokenizer", required=True, type=Path, help=f"folder of {whose} tokenizer")
    to_universal = add_command(commands, "to-universal", "a checkpoint in DeepSpeed's format", CHECKPOINT_HELP)
    text = "how the optimizer that will load it counts: torch.optim's in a tensor, DeepSpeed's in an int"
    to_universal.add_argument("--step-form", choices=("auto", "tensor", "int"), default="auto", help=text)
    from_universal = add_command(commands, "from-universal", "such a checkpoint as a run", "its folder")
    from_universal.add_argument("--config", required=True, help="recipe of its model, with the tokenizer's path")
    return parser.parse_args()


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, checkpoint: str | None = None
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text)
    if checkpoint:
        command.add_argument("--checkpoint", required=True, type=Path, help=checkpoint)
    command.add_argument("--output", required=True, type=Path, help="folder to write")
    return command


def loading_call(done: Conversion) -> str:
    """Return Python that loads a converted model."""
    if done.loading is not None:
        return done.loading.format(folder=done.output)
    if done.pipeline is None:
        return f'transformers.{done.hf_class}.from_pretrained("{done.output}")'
    return f'transformers.pipeline("{done.pipeline}", model="{done.output}")'


def export_hf(arguments: argparse.Namespace) -> list[str]:
    """Export a checkpoint unless that is done, complete its model card, and upload it if asked."""
    from ctxlm_ds.export.huggingface import is_exported, to_hf
    from ctxlm_ds.export.safetensors_files import parse_size

    facts = card_facts(arguments)
    if arguments.push is not None:
        check_push(arguments.push)
    out = arguments.output
    averaged = arguments.weights == "ema"
    how = (arguments.checkpoint, out, arguments.dtype, parse_size(arguments.max_shard_size), averaged)
    if not arguments.overwrite and is_exported(*how):
        lines = [f"{out}: complete already, nothing to do"]
    else:
        done = to_hf(*how)
        lines = conversion_lines(done, loading_call(done))
    add_facts(out, facts)
    if arguments.push is not None:
        lines.append(f"uploaded as {push(out, arguments.push, arguments.private)}")
    return lines


def card_facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what a run does not record, for a model card; ConfigError for what the Hub would not understand."""
    if arguments.license is not None and not LICENSE.fullmatch(arguments.license):
        raise ConfigError(f"--license {arguments.license}: give the Hub's name of it, such as apache-2.0")
    for language in arguments.language:
        if not LANGUAGE.fullmatch(language):
            raise ConfigError(f"--language {language}: give an ISO 639 code, such as en, or multilingual")
    facts = {"license": arguments.license, "language": arguments.language, "datasets": arguments.dataset}
    return {name: value for name, value in facts.items() if value}


def add_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write facts into the header of the folder's model card. Raises ExportError if it has none."""
    from huggingface_hub import ModelCard

    if not facts:
        return
    if not (folder / CARD).is_file():
        raise ExportError(f"{folder} has no model card ({CARD}) for a license, languages or data sets")
    card = ModelCard.load(folder / CARD)
    for name, value in facts.items():
        setattr(card.data, name, value)
    card.save(folder / CARD)


def check_push(name: str) -> None:
    """Raise ConfigError before the conversion if the Hub has no such names, or there is no token."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"--push {name}: give USER/MODEL ({error})") from error
    if get_token() is None:
        raise ConfigError(f"--push {name}: no token of the Hub; log in with hf auth login, or set HF_TOKEN")


def push(folder: Path, name: str, private: bool = False) -> str:
    """Upload a folder as one commit and return its address; an existing repository keeps its visibility.

    Raises ExportError if the Hub cannot be reached or refuses; the folder stays as it is.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    api = HfApi()
    try:
        url = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message="Upload a model exported by ctxlm_ds")
    except HfHubHTTPError as error:
        reason = error.server_message or str(error).splitlines()[0]
        raise ExportError(f"{name}: the Hub refuses the upload: {reason}; {folder} is complete") from error
    except (OfflineModeIsEnabled, HTTPError) as error:
        raise ExportError(
            f"{name}: the Hub cannot be reached ({error}); {folder} is complete, and the same command uploads it"
        ) from error
    return str(url)


def convert_hf(arguments: argparse.Namespace) -> list[str]:
    from ctxlm_ds.export.huggingface import from_hf

    out = arguments.output
    if arguments.command == "to-hf":
        return export_hf(arguments)
    if arguments.command == "babylm":
        from ctxlm_ds.apps.convert.babylm import export_babylm

        return export_babylm(arguments.checkpoint, out)
    if arguments.command == VOCABULARY:
        from ctxlm_ds.apps.convert.resize import change_tokenizer

        static = arguments.vectors, arguments.corpus
        return change_tokenizer(arguments.checkpoint, arguments.tokenizer, out, arguments.method, *static)
    if arguments.command == GROW:
        from ctxlm_ds.apps.convert.resize import grow

        return grow(arguments.checkpoint, arguments.set, out)
    if arguments.command == "onnx":
        from ctxlm_ds.apps.convert.inference import to_onnx

        return to_onnx(arguments.model, out)
    if arguments.command == "from-hf":
        done = from_hf(arguments.model, out, arguments.new_head)
        next_step = f"--set {shlex.quote(f'initialize_from={out}')} with the model section of its config.yaml"
    else:
        from ctxlm_ds.export.foreign.fairseq import from_fairseq
        from ctxlm_ds.export.foreign.megatron_checkpoint import from_megatron

        convert = from_megatron if arguments.command == "from-megatron" else from_fairseq
        done = convert(arguments.checkpoint, arguments.tokenizer, out)
        next_step = f"{loading_call(done)}, or --set {shlex.quote(f'initialize_from={out}')}"
    return conversion_lines(done, next_step)


def conversion_lines(done: Conversion, next_step: str) -> list[str]:
    largest = max(comparison.relative for comparison in done.comparisons)
    compared, whose = ("logits:", "the logits'") if done.loading is None else ("weights, read back:", "their")
    return [
        f"{done.hf_class}, {done.num_parameters:,} parameters, from {done.source}",
        compared,
        *(f"  {comparison}" for comparison in done.comparisons),
        f"largest difference: {largest:.2e} of {whose} scale",
        f"wrote {done.output}",
        f"next: {next_step}",
    ]


def convert_universal(arguments: argparse.Namespace) -> list[str]:
    from ctxlm_ds.checkpoint.universal import from_universal, to_universal

    source, out = arguments.checkpoint, arguments.output
    if arguments.command == "to-universal":
        to_universal(source, out, arguments.step_form)
        next_step = f'engine.load_checkpoint("{out}") with "checkpoint": {{"load_universal": true}} in its JSON'
    elif from_universal(source, out, arguments.config):
        next_step = f"--set {shlex.quote(f'run_dir={out}')}"
    else:
        next_step = f"--set {shlex.quote(f'initialize_from={out}')} (not resumed: its place in the data is unknown)"
    return [f"wrote {out}", f"next: {next_step}"]


def check_source(arguments: argparse.Namespace) -> None:
    """Refuse a source or tokenizer that does not exist, or a model without its heads, before torch is imported."""
    tokenizer: Path | None = getattr(arguments, "tokenizer", None)
    if tokenizer is not None and not tokenizer.exists():
        raise ConfigError(f"--tokenizer {tokenizer}: no such file or folder")
    source: Path = getattr(arguments, "model", None) or arguments.checkpoint
    if source.exists():
        if arguments.command == "from-hf":
            from ctxlm_ds.export.hf_config import check_tensors

            check_tensors(source, arguments.new_head)
        return
    of_runs = ("to-hf", "to-universal", VOCABULARY, GROW)
    remedies = dict.fromkeys(of_runs, "; give a run or a checkpoint (RUN/checkpoints/step-…)")
    remedies["onnx"] = "; give a folder of ctxlm convert to-hf"
    remedies["from-hf"] = "; give a local folder (names on the Hub are not looked up)"
    raise ConfigError(f"{source}: no such file or folder{remedies.get(arguments.command, '')}")


def main() -> None:
    arguments = parse_arguments()
    setup_logging()
    check_source(arguments)
    logger.info("%s: importing torch, then reading weights", arguments.command)
    convert = convert_universal if arguments.command.endswith("-universal") else convert_hf
    sys.stdout.write("\n".join(convert(arguments)) + "\n")
