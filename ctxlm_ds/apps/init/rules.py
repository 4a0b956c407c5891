"""Rules for arguments whose setting needs a computation; each runs once, after the rows of the table."""

from __future__ import annotations

import json
import math
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ctxlm_ds.apps.init.settings import Translation, canonical, load_table, plain_value
from ctxlm_ds.apps.init.start import num_rows, preprocess_options
from ctxlm_ds.console import counted
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.schema import TrainingConfig
from ctxlm_ds.registry import FORMATS

Names = Sequence[str]
MAX_RAMP_SIZES = 20_000


def _shape(result: Translation, names: Names) -> None:
    """Set what Megatron computes of a model's shape; check the parts that --swiglu needs to be a family's model."""
    swiglu, hidden, size = result.has("--swiglu"), result.number("--hidden-size"), result.number("--ffn-hidden-size")
    rotary = result.text("--position-embedding-type") == "rope" or result.has("--use-rotary-position-embeddings")
    if swiglu and not (rotary and result.has("--disable-bias-linear")):
        needed = "--position-embedding-type rope and --disable-bias-linear"
        raise ConfigError(f"--swiglu without {needed}: no family has such a model; llama has all three")
    if size is None and hidden is not None:
        size = int(4 * hidden * 2 / 3 / 64) * 64 if swiglu else 4 * hidden
    if size is not None:
        result.set("model.intermediate_size", size, result.source("--ffn-hidden-size"))
    exact = result.has("--onnx-safe") or (result.has("--no-bias-gelu-fusion") and not result.has("--openai-gelu"))
    why = result.given("--no-bias-gelu-fusion", "--openai-gelu", "--onnx-safe") or "the fused gelu is the tanh form"
    if not swiglu:
        result.set("model.hidden_activation", "gelu" if exact else "gelu_tanh", why)
    groups, grouped = result.number("--num-query-groups"), result.has("--group-query-attention")
    given = result.given("--num-query-groups", "--group-query-attention")
    if groups is not None or grouped:
        result.set("model.num_key_value_heads", groups or 1, given)
    if groups is not None and not grouped:
        result.notes.append(f"{given}: taken, but Megatron uses it only with --group-query-attention")


def _one_segment(result: Translation, names: Names) -> None:
    if result.has(names[0]):
        result.set("objective.name", "masked_lm", names[0])
        result.set("data.sample_format", "doc_sentences", names[0])
        result.set("data.separate_sentences", False, names[0])


def _sources(result: Translation, names: Names) -> None:
    """Set the datasets, their weights, and Megatron's shares of training and validation."""
    words, given = result.texts("--data-path") or result.texts("--train-data-path"), result.given(*names[:2])
    if result.data is not None:
        result.set("data.train", [result.data], "--data")
    elif len(words) == 1:
        result.set("data.train", words, given)
    elif words:
        is_weighted = not isinstance(plain_value(words[0]), str)
        if is_weighted and len(words) % 2:
            raise ConfigError(f"{given}: expected pairs of a weight and a prefix")
        pairs = list(zip(words[::2], words[1::2], strict=True)) if is_weighted else []
        sources: list[Any] = [{"path": path, "weight": plain_value(weight)} for weight, path in pairs] or [*words]
        result.set("data.train", sources, given)
        result.set("data.blend", "megatron", "Megatron's order of sources")
    paths = [word for word in result.texts("--valid-data-path") if isinstance(plain_value(word), str)]
    if paths:
        held_out = [{"name": Path(path).name, "path": path} for path in paths]
        result.set("data.validation", held_out, "--valid-data-path")
    if result.settings.get("data.train") and not result.has("--train-data-path"):
        shares = "".join(result.texts("--split")) or "969,30,1"
        result.set("data.split", shares.replace(" ", ""), result.source("--split"))


def _reset(result: Translation, names: Names) -> None:
    both = all(result.has(name) for name in names)
    if not both and result.given(*names):
        result.notes.append(f"{result.given(*names)}: only both together have a setting, data.reset_at_documents")
    result.set("data.reset_at_documents", both, result.source(*names), is_default=not both)


def _tokenizer(result: Translation, names: Names) -> None:
    path = result.tokenizer or result.text("--tokenizer-model") or result.text("--vocab-file")
    if path is not None:
        result.set("tokenizer.path", path, result.given(*names))
    merges = result.text("--merge-file")
    beside = [] if path is None else [Path(path).with_name("merges.txt")]
    beside += [Path(path[: -len("vocab.json")] + "merges.txt")] if path and path.endswith("vocab.json") else []
    if merges is not None and result.tokenizer is None and Path(merges) not in beside:
        advice = "put both files into one folder, as vocab.json and merges.txt, and name it with --tokenizer"
        result.notes.append(f"--merge-file {merges}: the merges are read next to the vocabulary; {advice}")


def _betas(result: Translation, names: Names) -> None:
    betas = [float(result.number(name, default)) for name, default in zip(names, (0.9, 0.999), strict=True)]
    result.set("optimizer.betas", betas, result.source(*names))


def _global_batch(result: Translation, names: Names) -> None:
    size = result.number(names[0])
    if size is None:
        axes = ("tensor", "pipeline", "context")
        model_ranks = math.prod(int(result.value(f"parallel.{axis}_parallel_size") or 1) for axis in axes)
        size = int(result.value("training.micro_batch_size") or 1) * max(1, result.ranks // model_ranks)
    source = result.given(*names) or f"micro batch x data-parallel ranks (--ranks {result.ranks})"
    result.set("training.global_batch_size", size, source)


def _accumulated(result: Translation, names: Names) -> None:
    rows = int(result.number("--per_device_train_batch_size", 8)) * int(result.number(names[0], 1)) * result.ranks
    source = f"micro batch x {result.given(*names) or 'no accumulation'} x {counted(result.ranks, 'rank')}"
    result.set("training.global_batch_size", rows, source)


def _steps_of_samples(result: Translation, names: Names) -> None:
    batch, ramp = int(result.value("training.global_batch_size")), result.value("training.batch_ramp")
    for name in names:
        if not result.has(name):
            continue
        key, given = result.table["arguments"][name]["key"], result.given(name)
        steps = steps_of_samples(int(result.number(name)), batch, ramp)
        if steps is None:
            ramp_given = result.given("--rampup-batch-size")
            result.notes.append(f"{given}: its steps along {ramp_given} cannot be counted; set {key}")
        else:
            result.set(key, steps, f"{given}, in {'global batches' if ramp is None else 'steps along the batch ramp'}")
            if ramp is not None and key == "schedule.warmup_steps":
                result.notes.append(f"{given}: the rate rises evenly over {steps:,} steps, in Megatron over samples")


def steps_of_samples(samples: int, batch: int, ramp: Sequence[Any] | None) -> int | None:
    """Return the steps of a run over `samples` rows, as Megatron counts them: the last incomplete step is left out.

    None if the ramp is not START INCREMENT ROWS, or has too many sizes to count its steps.
    """
    try:
        training = TrainingConfig.model_validate({"global_batch_size": batch, "batch_ramp": ramp})
        rows = steps = 0
        start, increment, last = training.batch_ramp or (batch, 1, -1)
        if (batch - start) // increment > MAX_RAMP_SIZES:
            return None
        while rows <= last and rows < samples:
            size, width = training.batch_size_at(rows), last / ((batch - start) // increment)
            # The size is the same until `width` more rows are read; rounding may decide the last of these steps.
            same = max(1, min(int((width * (rows // width + 1) - rows) // size) - 1, (samples - rows) // size))
            rows, steps = rows + same * size, steps + same
    except (ValidationError, ZeroDivisionError):
        return None
    return steps + max(0, samples - rows) // batch


def _wsd(result: Translation, names: Names) -> None:
    steps = result.value("schedule.total_steps") or result.value("training.max_steps")
    if result.has(names[0]) and steps:
        result.set("schedule.decay_fraction", result.number(names[0]) / steps, result.given(*names))
    if result.has(names[0]) and not result.has("--lr-wsd-decay-style"):
        result.notes.append("--lr-wsd-decay-style: Megatron's default is exponential, which no schedule here has")


def _precision(result: Translation, names: Names) -> None:
    chosen = [name for name in names if result.has(name)]
    found = chosen[0].lstrip("-") if chosen else "fp32"
    result.set("training.precision", found, result.given(*names) or f"neither {' nor '.join(names)}")


def _power(result: Translation, names: Names) -> None:
    if result.value("training.precision") == "fp16":
        power = result.number(names[0], 2.0**32)
        if result.typed.get(canonical(names[0]), "--").startswith("--"):  # DeepSpeed's JSON has the power itself
            power = round(math.log2(max(1.0, float(power))))
        result.set("training.initial_loss_scale_power", power, result.source(*names))


def _evaluated_rows(result: Translation, names: Names) -> None:
    if result.number(names[0]) == 0:
        result.set("evaluation.interval_steps", 0, result.given(*names))
        return
    rows = int(result.number(names[0], 100)) * int(result.value("training.global_batch_size"))
    result.set("evaluation.max_rows", max(1, rows), f"{result.source(*names)}, times the global batch")


def _load(result: Translation, names: Names) -> None:
    folder = result.text("--load")
    if folder is not None and result.has("--finetune"):
        result.set("initialize_from", folder, result.given(*names))
        result.notes.append(f"--load {folder}: convert Megatron's checkpoint first (docs/checkpoints.md)")
    elif folder is not None and folder != result.text("--save"):
        result.notes.append(f"--load {folder}: a run resumes from its run_dir; weights start one with initialize_from")


def _profiled(result: Translation, names: Names) -> None:
    if result.has(names[0]):
        steps = int(result.number(names[0])) - int(result.number("--profile-step-start", 10))
        result.set("profiler.num_steps", max(0, steps), result.given(*names))


def _hf_model(result: Translation, names: Names) -> None:
    """Take the section `model` from a config of transformers, changed as --config_overrides says."""
    folder = result.text("--config_name") or result.text("--model_name_or_path")
    kind = result.text("--model_type")
    if result.has("--model_name_or_path"):
        result.set("initialize_from", result.text("--model_name_or_path"), result.given("--model_name_or_path"))
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
        if value is not None and (key != "vocab_size" or result.has("--model_name_or_path")):
            result.set(f"model.{key}", value, f"config of {kind or folder}")
    path = result.tokenizer or result.text("--tokenizer_name") or folder or "tokenizer"
    result.set("tokenizer.path", path, result.given("--tokenizer_name"))


def _write_default_config(folder: Path, kind: str, overrides: str | None) -> None:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    if kind not in CONFIG_MAPPING:
        raise ConfigError(f"--model_type {kind}: transformers has no such model")
    config = CONFIG_MAPPING[kind]()
    try:
        config.update_from_string(overrides) if overrides else None
    except ValueError as error:
        raise ConfigError(f"--config_overrides {overrides}: {error}") from error
    tables = (modeling_auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    architecture = next((table[kind] for table in tables if kind in table), "")
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": [architecture]}))


def _row_length(result: Translation, names: Names) -> None:
    given = next((name for name in names if result.has(name)), None)
    longest = result.value("model.max_position_embeddings") or 512
    length = result.number(given) if given else min(1024, longest)
    result.set("data.seq_length", length, result.source(*([given] if given else names)))


def _text_file(result: Translation, names: Names) -> None:
    """Name the datasets of --train_file and --validation_file, and the commands that make them."""
    data = FORMATS.get(str(result.value("data.sample_format"))).section
    for name in (name for name in ("--train_file", "--validation_file") if result.has(name)):
        file = result.text(name) or ""
        prefix = f"data/{Path(file).name.partition('.')[0]}"
        made = f"{prefix}_text_{'sentence' if data.by_sentence else 'document'}"
        words = [file, "--tokenizer", str(result.value("tokenizer.path")), *preprocess_options(data)]
        command = f"ctxlm preprocess --input {shlex.join([*words, '--output-prefix', prefix])}"
        result.notes.append(f"{name} {file}: {command}")
        if name == "--train_file":
            result.set("data.train", [made], result.given(name))
        else:
            result.set("data.validation", [{"name": Path(made).name, "path": made}], result.given(name))
    if result.data is not None:
        result.set("data.train", [result.data], "--data")
    if "data.train" in result.settings and "data.validation" not in result.settings:
        share = int(result.number("--validation_split_percentage", 5))
        result.set("data.split", f"{100 - share},{share},0", result.source("--validation_split_percentage"))


def _warmup(result: Translation, names: Names) -> None:
    steps = next((float(result.number(name)) for name in names if result.has(name) and result.number(name)), 0.0)
    with_warmup = f"{result.text('--lr_scheduler_type')}_with_warmup"  # then the plain one has none
    if steps and with_warmup in load_table("run_mlm")["arguments"]["--lr_scheduler_type"]["values"]:
        result.notes.append(f"{result.given(*names)}: --lr_scheduler_type has no warmup there")
    elif steps:
        key = "schedule.warmup_fraction" if steps < 1 else "schedule.warmup_steps"
        result.set(key, steps if steps < 1 else int(steps), result.given(*names))


def _epochs(result: Translation, names: Names) -> None:
    steps, epochs = result.number("--max_steps", -1), float(result.number("--num_train_epochs", 3.0))
    if steps > 0:
        result.set("training.max_steps", steps, result.given("--max_steps"))
    elif result.data is None:
        result.notes.append(f"--num_train_epochs {epochs:g}: give --data PREFIX to count rows; 1000 steps until then")
        result.set("training.max_steps", 1000, f"unknown: {epochs:g} epochs of data that is not named")
    else:
        rows = num_rows(result.data, int(result.value("data.seq_length")))
        steps = max(1, math.ceil(rows * epochs / int(result.value("training.global_batch_size"))))
        result.set("training.max_steps", steps, f"{epochs:g} epochs of about {rows:,} rows")


_IN_ORDER: tuple[Callable[[Translation, Names], None], ...] = (
    _shape, _hf_model, _one_segment, _sources, _text_file, _reset, _tokenizer, _row_length, _betas, _global_batch,
    _accumulated, _steps_of_samples, _epochs, _wsd, _warmup, _precision, _power, _evaluated_rows, _load, _profiled,
)  # fmt: skip
RULES = {rule.__name__.removeprefix("_"): rule for rule in _IN_ORDER}
"""Rules by name, in the order in which they run."""
