"""Rules for arguments whose setting needs a computation; each runs once, after the rows of the table."""

from __future__ import annotations

import json
import math
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ctxlm_ds.apps.init.dataset_size import num_rows
from ctxlm_ds.apps.init.samples import steps_of_samples
from ctxlm_ds.apps.init.translate import Translation, plain_value
from ctxlm_ds.console import counted
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.registry import FORMATS

Names = Sequence[str]


def _given(result: Translation, names: Names) -> str:
    """Return the given arguments as they were written."""
    return " ".join(" ".join([result.typed(name), *result.texts(name)]) for name in names if result.has(name))


def _source(result: Translation, names: Names) -> str:
    return _given(result, names) or f"default of {' and '.join(names)}"


def _variant(result: Translation, names: Names) -> None:
    """Check the parts that --swiglu needs to be a family's model."""
    if not result.has("--swiglu"):
        return
    rotary = result.text("--position-embedding-type") == "rope" or result.has("--use-rotary-position-embeddings")
    missing = [] if rotary else ["--position-embedding-type rope"]
    missing += [] if result.has("--disable-bias-linear") else ["--disable-bias-linear"]
    if missing:
        raise ConfigError(f"--swiglu without {' and '.join(missing)}: no family has such a model; llama has them all")


def _grouped(result: Translation, names: Names) -> None:
    """Set the key-value heads of --num-query-groups, which --group-query-attention switches on."""
    groups = result.number("--num-query-groups")
    if groups is None and result.has("--group-query-attention"):
        result.notes.append("--group-query-attention: give --num-query-groups too; its default, 1, is taken")
        groups = 1
    elif groups is not None and not result.has("--group-query-attention"):
        given = f"--num-query-groups {groups}"
        result.notes.append(f"{given}: taken, but Megatron uses it only with --group-query-attention")
    if groups is not None:
        result.set("model.num_key_value_heads", groups, _given(result, names))


def _feed_forward(result: Translation, names: Names) -> None:
    hidden, size = result.number("--hidden-size"), result.number(names[0])
    if size is None and hidden is not None:
        size = int(4 * hidden * 2 / 3 / 64) * 64 if result.has("--swiglu") else 4 * hidden
    if size is not None:
        result.set("model.intermediate_size", size, _source(result, names))


def _activation(result: Translation, names: Names) -> None:
    if result.has("--swiglu"):
        return
    exact = result.has("--onnx-safe") or (result.has("--no-bias-gelu-fusion") and not result.has("--openai-gelu"))
    why = _given(result, names) or "the fused gelu is the tanh form"
    result.set("model.hidden_activation", "gelu" if exact else "gelu_tanh", why)


def _one_segment(result: Translation, names: Names) -> None:
    if result.has(names[0]):
        result.set("objective.name", "masked_lm", names[0])
        result.set("data.sample_format", "doc_sentences", names[0])
        result.set("data.separate_sentences", False, names[0])


def _blend(result: Translation, names: Names) -> None:
    words = result.texts("--data-path") or result.texts("--train-data-path")
    if result.data is not None:
        result.set("data.train", [result.data], "--data")
    elif len(words) == 1:
        result.set("data.train", words, _given(result, names))
    elif words:
        is_weighted = not isinstance(plain_value(words[0]), str)
        if is_weighted and len(words) % 2:
            raise ConfigError(f"{_given(result, names)}: expected pairs of a weight and a prefix")
        pairs = list(zip(words[::2], words[1::2], strict=True)) if is_weighted else []
        sources: list[Any] = [{"path": path, "weight": plain_value(weight)} for weight, path in pairs] or [*words]
        result.set("data.train", sources, _given(result, names)[:60])
        result.set("data.blend", "megatron", "Megatron's order of sources")


def _validation(result: Translation, names: Names) -> None:
    paths = [word for word in result.texts(names[0]) if isinstance(plain_value(word), str)]
    if paths:
        result.set("data.validation", [{"name": Path(path).name, "path": path} for path in paths], names[0])


def _split(result: Translation, names: Names) -> None:
    if result.has("--train-data-path") or not result.settings.get("data.train"):
        return
    shares = "".join(result.texts(names[0])) or "969,30,1"
    result.set("data.split", shares.replace(" ", ""), _source(result, names))


def _reset(result: Translation, names: Names) -> None:
    both = all(result.has(name) for name in names)
    if not both and _given(result, names):
        result.notes.append(f"{_given(result, names)}: only both together have a setting, data.reset_at_documents")
    result.set("data.reset_at_documents", both, _source(result, names), is_default=not both)


def _tokenizer(result: Translation, names: Names) -> None:
    path = result.tokenizer or result.text("--tokenizer-model") or result.text("--vocab-file")
    if path is not None:
        result.set("tokenizer.path", path, _given(result, names))
    merges = result.text("--merge-file")
    if path is None and merges is not None:
        result.notes.append(f"--merge-file {merges}: give its vocabulary too, --vocab-file, or --tokenizer DIR")
    elif path is not None and merges is not None and result.tokenizer is None:
        expected = Path(path).with_name(Path(path).name.removesuffix("vocab.json") + "merges.txt")
        if Path(merges) not in (expected, Path(path).with_name("merges.txt")):
            result.notes.append(
                f"--merge-file {merges}: the merges are read next to {path}; put both files into one folder, as "
                "vocab.json and merges.txt"
            )


def _betas(result: Translation, names: Names) -> None:
    betas = [float(result.number(name, default)) for name, default in zip(names, (0.9, 0.999), strict=True)]
    result.set("optimizer.betas", betas, _source(result, names))


def _global_batch(result: Translation, names: Names) -> None:
    size = result.number(names[0])
    if size is None:
        model_ranks = int(result.value("parallel.tensor_parallel_size") or 1)
        model_ranks *= int(result.value("parallel.pipeline_parallel_size") or 1)
        size = int(result.value("training.micro_batch_size") or 1) * max(1, result.ranks // model_ranks)
    source = _given(result, names) or f"micro batch x data-parallel ranks (--ranks {result.ranks})"
    result.set("training.global_batch_size", size, source)


def _accumulated(result: Translation, names: Names) -> None:
    rows = int(result.number("--per_device_train_batch_size", 8)) * int(result.number(names[0], 1)) * result.ranks
    source = f"micro batch x {_given(result, names) or 'no accumulation'} x {counted(result.ranks, 'rank')}"
    result.set("training.global_batch_size", rows, source)


def _steps_of_samples(result: Translation, names: Names) -> None:
    batch, ramp = int(result.value("training.global_batch_size")), result.value("training.batch_ramp")
    for name in names:
        if not result.has(name):
            continue
        key, given = result.table["arguments"][name]["key"], _given(result, [name])
        steps = steps_of_samples(int(result.number(name)), batch, ramp)
        if steps is None:
            ramp_given = _given(result, ["--rampup-batch-size"])
            result.notes.append(f"{given}: its steps along {ramp_given} cannot be counted; set {key}")
        else:
            result.set(key, steps, f"{given}, in {'global batches' if ramp is None else 'steps along the batch ramp'}")
            if ramp is not None and key == "schedule.warmup_steps":
                result.notes.append(f"{given}: the rate rises evenly over {steps:,} steps, in Megatron over samples")


def _wsd(result: Translation, names: Names) -> None:
    steps = result.value("schedule.total_steps") or result.value("training.max_steps")
    if result.has(names[0]) and steps:
        result.set("schedule.decay_fraction", result.number(names[0]) / steps, _given(result, names))


def _numbers(result: Translation, names: Names) -> None:
    if result.has(names[0]):
        result.set("training.batch_ramp", [plain_value(word) for word in result.texts(names[0])], _given(result, names))


def _hours(result: Translation, names: Names) -> None:
    if result.has(names[0]):
        result.set("training.max_hours", result.number(names[0]) / 60, _given(result, names))


def _precision(result: Translation, names: Names) -> None:
    chosen = [name for name in names if result.has(name)]
    found = chosen[0].lstrip("-") if chosen else "fp32"
    result.set("training.precision", found, _given(result, names) or f"neither {' nor '.join(names)}")


def _power(result: Translation, names: Names) -> None:
    if result.value("training.precision") == "fp16":
        power = round(math.log2(max(1.0, float(result.number(names[0], 2.0**32)))))
        result.set("training.initial_loss_scale_power", power, _source(result, names))


def _evaluated_rows(result: Translation, names: Names) -> None:
    if result.number(names[0]) == 0:
        result.set("evaluation.interval_steps", 0, _given(result, names))
        return
    rows = int(result.number(names[0], 100)) * int(result.value("training.global_batch_size"))
    result.set("evaluation.max_rows", max(1, rows), f"{_source(result, names)}, times the global batch")


def _load(result: Translation, names: Names) -> None:
    folder = result.text("--load")
    if folder is not None and result.has("--finetune"):
        result.set("initialize_from", folder, _given(result, names))
        result.notes.append(f"--load {folder}: convert Megatron's checkpoint first (docs/checkpoints.md)")
    elif folder is not None and folder != result.text("--save"):
        result.notes.append(f"--load {folder}: a run resumes from its run_dir; weights start one with initialize_from")


def _profiled(result: Translation, names: Names) -> None:
    if result.has(names[0]):
        steps = int(result.number(names[0])) - int(result.number("--profile-step-start", 10))
        result.set("profiler.num_steps", max(0, steps), _given(result, names))


def _hf_model(result: Translation, names: Names) -> None:
    """Take the section `model` from a config of transformers, changed as --config_overrides says."""
    folder = result.text("--config_name") or result.text("--model_name_or_path")
    kind = result.text("--model_type")
    if result.has("--model_name_or_path"):
        result.set("initialize_from", result.text("--model_name_or_path"), _given(result, ["--model_name_or_path"]))
    if folder is not None and not Path(folder, "config.json").is_file():
        raise ConfigError(
            f"{folder}: no local folder with a config.json (names on the Hub are not looked up); download it "
            f"(hf download {folder} --local-dir DIR) and name DIR, or drop it and keep --model_type, for new weights"
        )
    if folder is None and kind is None:
        raise ConfigError("the command gives none of --model_type, --config_name and --model_name_or_path")
    from ctxlm_ds.errors import ExportError
    from ctxlm_ds.export.hf_config import from_hf_config

    with tempfile.TemporaryDirectory() as temporary:
        if folder is None:
            _write_default_config(Path(temporary), kind or "", result.text("--config_overrides"))
        try:
            section = from_hf_config(Path(folder or temporary)).model
        except ExportError as error:
            raise ConfigError(str(error).replace(f"{temporary}: ", "").replace(temporary, kind or "")) from error
    for key, value in section.model_dump(mode="json").items():
        if value is not None and key != "vocab_size":
            result.set(f"model.{key}", value, f"config of {kind or folder}")
    path = result.tokenizer or result.text("--tokenizer_name") or folder or "tokenizer"
    result.set("tokenizer.path", path, _given(result, ["--tokenizer_name"]))


def _write_default_config(folder: Path, kind: str, overrides: str | None) -> None:
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        raise ConfigError(f"--model_type {kind}: transformers has no such model")
    config = CONFIG_MAPPING[kind]()
    if overrides:
        try:
            config.update_from_string(overrides)
        except ValueError as error:
            raise ConfigError(f"--config_overrides {overrides}: {error}") from error
    architecture = {"architectures": [_architecture(kind)]}
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), **architecture}), encoding="utf-8")


def _architecture(kind: str) -> str:
    from transformers.models.auto import modeling_auto

    tables = (modeling_auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return next((table[kind] for table in tables if kind in table), "")


def _row_length(result: Translation, names: Names) -> None:
    given = next((name for name in names if result.has(name)), None)
    longest = result.value("model.max_position_embeddings") or 512
    length = result.number(given) if given else min(1024, longest)
    result.set("data.seq_length", length, _source(result, [given] if given else names))


def _text_file(result: Translation, names: Names) -> None:
    made = {}
    data = FORMATS.get(str(result.value("data.sample_format"))).section
    level = "sentence" if data.by_sentence else "document"
    options = [*(["--split-sentences"] if data.by_sentence else []), *(["--append-eod"] if data.ends_documents else [])]
    for name in names:
        file = result.text(name)
        if file is not None:
            prefix = f"data/{Path(file).name.partition('.')[0]}"
            made[name] = f"{prefix}_text_{level}"
            tokenizer = result.value("tokenizer.path")
            words = ["--input", file, "--tokenizer", str(tokenizer), *options, "--output-prefix", prefix]
            command = f"ctxlm preprocess {shlex.join(words)}"
            result.notes.append(f"{name} {file}: {command}")
    if result.data is not None:
        result.set("data.train", [result.data], "--data")
    elif "--train_file" in made:
        result.set("data.train", [made["--train_file"]], _given(result, ["--train_file"]))
    if "--validation_file" in made:
        path = made["--validation_file"]
        result.set("data.validation", [{"name": Path(path).name, "path": path}], _given(result, ["--validation_file"]))


def _percentage(result: Translation, names: Names) -> None:
    if "data.train" in result.settings and "data.validation" not in result.settings:
        share = int(result.number(names[0], 5))
        result.set("data.split", f"{100 - share},{share},0", _source(result, names))


def _warmup(result: Translation, names: Names) -> None:
    steps = result.number(names[0])
    if steps:
        key = "schedule.warmup_fraction" if steps < 1 else "schedule.warmup_steps"
        result.set(key, steps if steps < 1 else int(steps), _given(result, names))


def _epochs(result: Translation, names: Names) -> None:
    steps, epochs = result.number("--max_steps", -1), float(result.number("--num_train_epochs", 3.0))
    if steps > 0:
        result.set("training.max_steps", steps, _given(result, ["--max_steps"]))
    elif result.data is None:
        result.notes.append(
            f"--num_train_epochs {epochs:g}: give --data PREFIX (a dataset) to count its rows; until then "
            "training.max_steps is 1000"
        )
        result.set("training.max_steps", 1000, f"unknown: {epochs:g} epochs of data that is not named")
    else:
        rows = num_rows(result.data, int(result.value("data.seq_length")))
        steps = max(1, math.ceil(rows * epochs / int(result.value("training.global_batch_size"))))
        result.set("training.max_steps", steps, f"{epochs:g} epochs of about {rows:,} rows")


RULES: dict[str, Callable[[Translation, Names], None]] = {
    "variant": _variant,
    "hf_model": _hf_model,
    "grouped": _grouped,
    "feed_forward": _feed_forward,
    "activation": _activation,
    "one_segment": _one_segment,
    "blend": _blend,
    "text_file": _text_file,
    "validation": _validation,
    "split": _split,
    "percentage": _percentage,
    "reset": _reset,
    "tokenizer": _tokenizer,
    "row_length": _row_length,
    "betas": _betas,
    "global_batch": _global_batch,
    "accumulated": _accumulated,
    "numbers": _numbers,
    "steps_of_samples": _steps_of_samples,
    "epochs": _epochs,
    "wsd": _wsd,
    "warmup": _warmup,
    "hours": _hours,
    "precision": _precision,
    "power": _power,
    "evaluated_rows": _evaluated_rows,
    "load": _load,
    "profiled": _profiled,
}
"""Rules by name, in the order in which they run."""
