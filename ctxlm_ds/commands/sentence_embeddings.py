"""Train and judge vectors of sentences and documents with sentence-transformers, from an exported model.

train: contrastive fine-tuning (MultipleNegativesRankingLoss; van den Oord et al. 2018, eq. 4) on pairs of a task, or on
sentences with themselves under two dropout masks (SimCSE, Gao et al. 2021). evaluate: correlation with judged
similarity, paraphrases by a threshold, or paragraphs found by their questions.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ctxlm_ds.apps.downstream.task import TaskDescription, load_task
from ctxlm_ds.atomic import is_same, output_folder, read_object, write_text
from ctxlm_ds.console import aligned, at_least, counted, setup_logging
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.finetune import positive, share
from ctxlm_ds.process.library_noise import quiet_libraries

logger = logging.getLogger("ctxlm_ds")
Texts = list[str]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="contrastive fine-tuning")
    train.add_argument("--model", required=True, type=Path, metavar="DIR", help="model in Hugging Face's form")
    train.add_argument("--output", required=True, type=Path, metavar="DIR", help="gets a folder seedN for each seed")
    data = train.add_mutually_exclusive_group(required=True)
    data.add_argument("--sentences", type=Path, metavar="FILE", help="a sentence a line, each its own pair")
    data.add_argument("--task", help="pairs of its training file: those with its positive label, or a question and "
                      "its paragraph")  # fmt: skip
    train.add_argument("--data", type=Path, metavar="DIR", help="folder of the task's files")
    train.add_argument("--seeds", type=at_least(0), nargs="+", default=[1], metavar="N")
    train.add_argument("--batch-size", type=at_least(2), default=64, metavar="N", help="the others are negatives")
    train.add_argument("--learning-rate", type=positive, default=3e-5, metavar="X")
    train.add_argument("--epochs", type=positive, default=1.0, metavar="X")
    train.add_argument("--temperature", type=positive, default=0.05, metavar="X", help="of the cosines (default: 0.05)")
    train.add_argument("--dropout", type=share, metavar="X", help="in place of the model's")
    evaluate = commands.add_parser("evaluate", help="judge vectors on a task")
    evaluate.add_argument("--model", required=True, type=Path, nargs="+", metavar="DIR",
                          help="folders seedN of train, or one model in Hugging Face's form")  # fmt: skip
    evaluate.add_argument("--task", required=True, help="a task of pairs, or of questions and paragraphs")
    evaluate.add_argument("--data", required=True, type=Path, metavar="DIR", help="folder of the task's files")
    evaluate.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder of metrics.json")
    for command in (train, evaluate):
        command.add_argument("--pooling", choices=["mean", "cls", "max"], default="mean", help="of a model's tokens")
        command.add_argument("--max-length", type=at_least(4), metavar="N", help="tokens; default: the model's")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    arguments = parse_arguments(argv)
    setup_logging()
    quiet_libraries()
    if find_spec("sentence_transformers") is None:
        raise ConfigError("sentence-transformers: not installed; pip install 'ctxlm_ds[downstream]'")
    from transformers.utils import logging as library_logging

    library_logging.disable_progress_bar()
    library_logging.set_verbosity_error()
    (train if arguments.command == "train" else evaluate)(arguments)


def load_encoder(folder: Path, pooling: str, max_length: int | None) -> Any:
    """Return the SentenceTransformer of a folder that `train` wrote, or of a model with pooling over its tokens.

    Raises:
        ConfigError: the folder has no model.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import AutoConfig

    if (folder / "modules.json").is_file():
        model = SentenceTransformer(str(folder), local_files_only=True)
    elif not (folder / "config.json").is_file():
        raise ConfigError(f"--model {folder}: no config.json and no modules.json; give a folder in Hugging Face's form")
    elif AutoConfig.from_pretrained(folder, local_files_only=True).is_encoder_decoder:
        raise ConfigError(f"--model {folder}: an encoder-decoder has no vectors of one stack; give an encoder")
    else:
        words = Transformer(str(folder), model_kwargs={"local_files_only": True, "use_safetensors": True})
        model = SentenceTransformer(modules=[words, Pooling(words.get_embedding_dimension(), pooling_mode=pooling)])
        if words.tokenizer.pad_token is None:
            words.tokenizer.pad_token = words.tokenizer.eos_token
    if max_length is not None:
        from ctxlm_ds.apps.downstream.prepare import longest_rows

        model.max_seq_length = longest_rows(folder, model.tokenizer, max_length)
    return model


# Training.


def train(arguments: argparse.Namespace) -> None:
    """Train a model for each seed that has none yet.

    Raises:
        ConfigError: a seed has a model of other settings, or a launcher started several processes.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("train runs in one process, which uses all GPUs it sees; start it without a launcher")
    firsts, seconds = read_pairs(arguments)
    logger.info("%s of texts", counted(len(firsts), "pair"))
    wanted = recorded_settings(arguments)
    for seed in arguments.seeds:
        folder = arguments.output / f"seed{seed}"
        if (folder / "modules.json").is_file():
            is_same(folder, read_object(folder / "settings.json"), wanted, "choose another --output or remove it",
                    ConfigError)  # fmt: skip
            logger.info("%s exists already", folder)
            continue
        with output_folder(folder) as partial:
            losses = train_one(arguments, seed, firsts, seconds, partial)
            (partial / "losses.json").write_text(json.dumps(losses) + "\n", encoding="utf-8")
            (partial / "settings.json").write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
        logger.info("seed %d: loss %.4f in the first epoch, %.4f in the last", seed, losses[0], losses[-1])


def recorded_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what decides the trained models, apart from the seed."""
    given = {name: value for name, value in vars(arguments).items() if name not in ("command", "output", "seeds")}
    given |= {name: str(value.resolve()) for name, value in given.items() if isinstance(value, Path)}
    task = None if arguments.task is None else load_task(arguments.task)[1].model_dump(mode="json")
    return given | {"task": task}


def train_one(
    arguments: argparse.Namespace, seed: int, firsts: Texts, seconds: Texts, folder: Path
) -> list[float]:
    """Train once and save the model; returns the mean loss of each epoch."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.base.sampler import BatchSamplers
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from torch import cuda, nn
    from transformers import PrinterCallback, set_seed

    from ctxlm_ds.apps.downstream.fit import progress_lines

    devices = max(1, cuda.device_count())
    if arguments.batch_size % devices:
        raise ConfigError(f"--batch-size {arguments.batch_size}: not a multiple of the {devices} devices")
    set_seed(seed)
    model = load_encoder(arguments.model, arguments.pooling, arguments.max_length)
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    for module in dropouts:
        module.p = module.p if arguments.dropout is None else arguments.dropout
    if arguments.sentences is not None and not any(module.p for module in dropouts):
        raise ConfigError("--sentences: the model has no dropout, so both vectors of a sentence are the same; give "
                          "--dropout 0.1")  # fmt: skip
    settings = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "trainer"), per_device_train_batch_size=arguments.batch_size // devices, seed=seed,
        learning_rate=arguments.learning_rate, num_train_epochs=arguments.epochs, warmup_steps=0.1, report_to=[],
        logging_strategy="epoch", save_strategy="no", disable_tqdm=True, use_cpu=not cuda.is_available(),
        dataloader_pin_memory=cuda.is_available(),
        batch_sampler=BatchSamplers.NO_DUPLICATES,  # a text that is in a batch twice would be its own negative
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(
        model=model, args=settings, train_dataset=Dataset.from_dict({"first": firsts, "second": seconds}),
        loss=MultipleNegativesRankingLoss(model, scale=1 / arguments.temperature), callbacks=[progress_lines()],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    model.save(str(folder), create_model_card=False)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def read_pairs(arguments: argparse.Namespace) -> tuple[Texts, Texts]:
    """Return both texts of each pair.

    Raises:
        ConfigError: the task has no pairs.
        DataError: there are fewer than two.
    """
    if arguments.sentences is not None:
        from ctxlm_ds.untrusted_json import read_text

        lines = read_text(arguments.sentences, DataError, 1 << 32).splitlines()
        firsts = [line.strip() for line in lines if line.strip()]
        seconds = firsts
    else:
        if arguments.data is None:
            raise ConfigError("--task needs --data, the folder of the task's files")
        from ctxlm_ds.apps.downstream.prepare import read_parts

        _, task = load_task(arguments.task)
        kept = [one for one in read_parts(task, arguments.data).train if is_similar(task, one)]
        firsts, seconds = ([one.pair or "" for one in kept], [one.text for one in kept])
    if len(firsts) < 2:
        raise DataError(f"{arguments.sentences or arguments.task}: {counted(len(firsts), 'pair')}; two are needed")
    return firsts, seconds


def is_similar(task: TaskDescription, example: Any) -> bool:
    """Return whether an example's texts are a pair whose vectors should be close.

    Raises:
        ConfigError: the task has no such pairs.
    """
    if task.kind == "question_answering":
        return bool(example.answers)
    if task.kind == "classification" and "pair" in task.columns and task.positive is not None:
        return bool(example.label == task.positive)
    raise ConfigError("a task with pairs is needed: questions, or a classification of pairs with `positive`")


# Evaluation.


def evaluate(arguments: argparse.Namespace) -> None:
    """Judge each model; write metrics.json with median and spread over them."""
    name, task = load_task(arguments.task)
    from ctxlm_ds.apps.downstream.prepare import read_parts

    metric, evaluator = make_evaluator(task, read_parts(task, arguments.data).dev)
    results = []
    for folder in arguments.model:
        results.append(evaluator(load_encoder(folder, arguments.pooling, arguments.max_length)))
        logger.info("%s: %s", folder, ", ".join(f"{key} {value:.4f}" for key, value in results[-1].items()))
    spreads = {key: [one[key] for one in results] for key in results[0]}
    dev = {key: {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
           for key, values in spreads.items()}  # fmt: skip
    row = {"seeds": list(range(len(results))), "dev": dev}
    first = arguments.model[0]
    model = first.parent if (first / "modules.json").is_file() and first.name.startswith("seed") else first
    same = task.kind == "regression"
    summary = {"task": name if same else f"{name}-vectors", "model": str(model), "method": "sentence vectors",
               "published": task.published if same else {}, "metric": metric, "grid": [row], "chosen": row}  # fmt: skip
    write_text(arguments.output / "metrics.json", json.dumps(summary, indent=1) + "\n")
    head = ["models", *dev]
    cells = [f"{one['median']:.4f} ({one['lowest']:.4f} to {one['highest']:.4f})" for one in dev.values()]
    print("\n".join(aligned([head, [str(len(results)), *cells]])))


def make_evaluator(task: TaskDescription, examples: Sequence[Any]) -> tuple[str, Callable[[Any], dict[str, float]]]:
    """Return the metric that judges, and what computes all metrics of a model, all between cosines.

    Raises:
        ConfigError: the task has no pairs.
    """
    from sentence_transformers.sentence_transformer import evaluation

    firsts, seconds = [one.text for one in examples], [one.pair or "" for one in examples]
    quiet: dict[str, Any] = {"write_csv": False, "show_progress_bar": False}
    if task.kind == "regression" and "pair" in task.columns:
        numbers = [float(one.label) for one in examples]
        found: Any = evaluation.EmbeddingSimilarityEvaluator(
            firsts, seconds, numbers, main_similarity="cosine", **quiet
        )
        names = {"spearman": "spearman_cosine", "pearson": "pearson_cosine"}
    elif task.kind == "question_answering":
        places = {text: str(at) for at, text in enumerate(dict.fromkeys(firsts))}
        found = evaluation.InformationRetrievalEvaluator(
            {one.identifier: one.pair for one in examples}, {at: text for text, at in places.items()},
            {one.identifier: {places[one.text]} for one in examples}, main_score_function="cosine", **quiet,
        )  # fmt: skip
        names = {"mrr@10": "cosine_mrr@10", "accuracy@1": "cosine_accuracy@1", "recall@10": "cosine_recall@10",
                 "ndcg@10": "cosine_ndcg@10"}  # fmt: skip
    else:
        labels = [int(is_similar(task, one)) for one in examples]
        found = evaluation.BinaryClassificationEvaluator(
            firsts, seconds, labels, similarity_fn_names=["cosine"], **quiet
        )
        names = {"average_precision": "cosine_ap", "f1": "cosine_f1", "accuracy": "cosine_accuracy"}

    def scores(model: Any) -> dict[str, float]:
        values = found(model)
        return {name: float(values[key]) for name, key in names.items()}

    return next(iter(names)), scores
