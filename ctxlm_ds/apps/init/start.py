"""Settings of a new recipe that starts from a shipped one: data, layout, batch and steps for this machine."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path

from ctxlm_ds.apps.init.settings import Setting, load_table
from ctxlm_ds.apps.plan.check_run import with_tokenizer_size
from ctxlm_ds.console import counted
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.hardware import GIB, GPUS, Gpu
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.problems import did_you_mean
from ctxlm_ds.recipe.schema import RunConfig, TokenizerConfig
from ctxlm_ds.recipe.sections import DataSection
from ctxlm_ds.registry import FAMILIES

MOST_EPOCHS = 40.0
"""Passes over the data if no hours are given, at most: about as many as BERT's (Devlin 2018, A.2)."""
_WARMUP = 0.06
"""Share of the steps if the shipped recipe counts its warmup in steps of a much longer run."""
_LAPTOPS_SPLIT, _SPLIT, _SPLIT_SEED = "90,10,0", "97,3,0", 0
MOST_DRAWN_TOKENS, _TOKEN_BYTES = 1 << 29, 4
"""Tokens of a text, each of about so many bytes, up to which its documents are drawn: the run copies them."""
_EVALUATED, _FORWARDS = 0.1, 3
"""Share of a shorter run's time for evaluations, and rows that are evaluated in the time of a trained one."""
LEAST_INTERVAL_STEPS = 10
_MATRIX_SIZE = 512
_MEASURED_S = 1.0
_CPU_SHARE = 0.5
"""Share of a large product's speed that a training step reaches on CPU cores."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices of a run, one rank each."""

    ranks: int
    gpu: Gpu | None = None
    """None: CPU cores."""
    cpu_flops_per_s: float = 0.0
    """fp32 operations per second that training reaches on all cores; only without a GPU, as the host's memory."""
    memory_bytes: float = 0.0

    @property
    def precision(self) -> str:
        """bf16 if the GPU has it, else fp16; fp32 on CPUs."""
        if self.gpu is None:
            return "fp32"
        return "bf16" if self.gpu.has_bf16 else "fp16"

    def __str__(self) -> str:
        if self.gpu is None:
            return f"{counted(self.ranks, 'CPU rank')}, {os.cpu_count()} cores"
        return f"{self.ranks} x {self.gpu.name} ({self.gpu.memory_gib:.0f} GiB)"


def find_machine(ranks: int | None = None) -> Machine:
    """Return this machine with a number of ranks; by default one per GPU, or one if there is no GPU."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu = describe_gpu(properties.name, properties.total_memory / GIB, properties.major >= 8)
        return Machine(ranks or torch.cuda.device_count(), gpu)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(ranks or 1, None, _measure_cpu() * _CPU_SHARE, float(memory))


def describe_gpu(name: str, memory_gib: float, has_bf16: bool) -> Gpu:
    """Return the planner's entry for a GPU; if its name is unknown, the entry nearest in memory under that name."""
    able = [gpu for gpu in GPUS if gpu.has_bf16 == has_bf16]
    same = [gpu for gpu in able if gpu.name.partition("-")[0].lower() in name.lower()]
    nearest = min(same or able, key=lambda gpu: abs(gpu.memory_gib - memory_gib))
    return replace(nearest, name=nearest.name if same else name, memory_gib=memory_gib)


def _measure_cpu() -> float:
    """Return the fp32 operations per second of the fastest of several matrix products on all threads."""
    import torch
    from torch.utils.benchmark import Timer

    matrices = torch.rand(2, _MATRIX_SIZE, _MATRIX_SIZE)
    timer = Timer("m[0] @ m[1]", globals={"m": matrices}, num_threads=torch.get_num_threads())
    return 2.0 * _MATRIX_SIZE**3 / min(timer.blocked_autorange(min_run_time=_MEASURED_S).times)


def shipped_recipe(family: str, size: str) -> str:
    """Return the shipped recipe of a family and size. Raises ConfigError if there is none."""
    recipes = load_table("sizes").get(family)
    if recipes is None:
        raise ConfigError(
            f"--family {family}: no recipe of such a family ships{did_you_mean(family, load_table('sizes')) or '.'} "
            f"Families: {', '.join(load_table('sizes'))}"
        )
    if size not in recipes:
        known = ", ".join(f"{key} ({recipe})" for key, recipe in recipes.items())
        raise ConfigError(f"--size {size}: family {family} has {known}")
    return recipes[size]


def new_settings(args: argparse.Namespace, machine: Machine, name: str) -> dict[str, Setting]:
    """Return the settings of a recipe that extends a shipped one, from the options of `ctxlm init`.

    Raises ConfigError if there is no such recipe or dataset, or the model does not fit in the machine's memory;
    DataError if the dataset has too few documents to hold some out.
    """
    base = shipped_recipe(args.family, args.size)
    shipped = load_config(base)
    shipped_rows = shipped.training.global_batch_size
    batch = math.ceil(shipped_rows / machine.ranks) * machine.ranks
    why = "" if batch == shipped_rows else f", {shipped_rows}, for {machine.ranks} ranks"
    prefix = args.data or dataset_prefix(shipped.data, name)
    rows = num_rows(args.data, shipped.data.seq_length) if args.data else None
    split = _LAPTOPS_SPLIT if args.size == "laptop" else _SPLIT
    num_tokens = rows * shipped.data.seq_length if rows else text_bytes(args.text) // _TOKEN_BYTES
    seed = _SPLIT_SEED if num_tokens <= MOST_DRAWN_TOKENS else None
    if args.data and seed is not None:
        from ctxlm_ds.data.dataset.reader import IndexedDataset
        from ctxlm_ds.data.stream.run_datasets import draw_part

        draw_part(IndexedDataset(args.data), split, seed, "valid")
    settings = {
        "extends": Setting(base, "all other settings, with their sources"),
        "name": Setting(name, ""),
        "tokenizer.path": Setting(args.tokenizer or f"{name}-tokenizer", "" if args.tokenizer else "made below"),
        "data.train": Setting([prefix], "" if args.data else "made below"),
        "data.split": Setting(split, "percents of the text for training, evaluation and a test"),
        "data.split_seed": Setting(seed, "draws documents, of a copy of the text; null: the last are held out"),
        "training.precision": Setting(machine.precision, f"of {machine}"),
        "training.global_batch_size": Setting(batch, f"of the shipped recipe{why}"),
    }
    changed = shipped.with_values("training", precision=machine.precision, global_batch_size=batch)
    size = fitting_vocab_size(FAMILIES.get(changed.model.family).tokenizer, args.text)
    if args.tokenizer is not None:
        changed = with_tokenizer_size(changed.model_copy(update={"tokenizer": TokenizerConfig(path=args.tokenizer)}))
    elif changed.model.vocab_size is None:
        changed = changed.with_values("model", vocab_size=size)
    step_seconds, layout = plan(changed, machine)
    return settings | layout | _length(shipped, args.hours, step_seconds, rows, batch)


def num_rows(prefix: str, seq_length: int) -> int:
    """Return about how many rows of `seq_length` tokens a dataset (a prefix) fills; ConfigError if there is none."""
    if not Path(f"{prefix}.idx").is_file():
        raise ConfigError(f"{prefix}: no such dataset (no {prefix}.idx); preprocess makes one")
    from ctxlm_ds.data.dataset.reader import read_index

    return max(1, int(read_index(Path(f"{prefix}.idx")).lengths.sum(dtype="int64")) // seq_length)


def dataset_prefix(data: DataSection, name: str) -> str:
    """Return the prefix that preprocess writes for the sample format of a recipe with this name."""
    return f"data/{name}_text_{'sentence' if data.by_sentence else 'document'}"


def text_bytes(text: str | None) -> int:
    """Return the size of the files that a path or glob names."""
    return sum(Path(name).stat().st_size for name in glob(text or "") if Path(name).is_file())


def fitting_vocab_size(kind: str, text: str | None) -> int | None:
    """Return a size of vocabulary for a text: 4,000 tokens for a megabyte, twice as many for ten times the text.

    None, for the size of the published vocabulary, if that is smaller or the size of the text is not known.
    """
    from ctxlm_ds.tokenizers.train import tokenizer_types

    num_bytes = text_bytes(text)
    if not num_bytes:
        return None
    size = 4000 * 2 ** max(0, round(math.log10(num_bytes / 1e6)))
    return size if size < tokenizer_types()[kind].default_vocab_size else None


def preprocess_options(data: DataSection) -> list[str]:
    """Return the options of `ctxlm preprocess` that rows of this section need."""
    return [*(["--split-sentences"] if data.by_sentence else []), *(["--append-eod"] if data.ends_documents else [])]


def first_recipe_of(tokenizer_kind: str) -> RunConfig | None:
    """Return the smallest shipped recipe of the first family with this kind of tokenizer; None if none has it."""
    recipes = (load_config(next(iter(sizes.values()))) for sizes in load_table("sizes").values())
    return next((one for one in recipes if FAMILIES.get(one.model.family).tokenizer == tokenizer_kind), None)


def plan(config: RunConfig, machine: Machine) -> tuple[float, dict[str, Setting]]:
    """Return the seconds of a step and the settings of the recommended layout; ConfigError if nothing fits."""
    from ctxlm_ds.apps.plan.layouts import Layout
    from ctxlm_ds.apps.plan.plan import Planner
    from ctxlm_ds.apps.plan.search import require_plan, search_layouts
    from ctxlm_ds.models.meter import CPU
    from ctxlm_ds.recipe.hardware import Cluster

    source = f"planned for {machine}"
    if machine.gpu is not None:
        cluster = Cluster(machine.gpu, 1, machine.ranks)
        best = require_plan(search_layouts(Planner(config, cluster)), cluster)
        found = {"deepspeed": Setting(f"zero{best.layout.zero_stage}", source)}
        for section, values in best.layout.values(config.parallel.pipeline_layers).items():
            for key, value in values.items():
                if section == "training" or value is True or value not in (1, False):
                    found[f"{section}.{key}"] = Setting(value, source)
        return best.time.total, found
    planner = Planner(config, Cluster(GPUS[0], 1, machine.ranks), platform=CPU)
    rows = config.training.global_batch_size // machine.ranks
    micro = math.gcd(rows, 1 << (min(32, config.training.micro_batch_size).bit_length() - 1))
    room = machine.memory_bytes / 2 / machine.ranks
    while micro > 1 and planner.memory(Layout(machine.ranks, micro_batch_size=micro)).total > room:
        micro //= 2
    settings = {"training.micro_batch_size": Setting(micro, source), "deepspeed": Setting("zero1", "")}
    return planner.flops / machine.cpu_flops_per_s, settings


def _length(
    shipped: RunConfig, hours: float | None, step_seconds: float, rows: int | None, batch: int
) -> dict[str, Setting]:
    """Return steps, and what a shorter run changes: warmup, decay, evaluations and checkpoints."""
    steps, why = shipped.training.max_steps, "of the shipped recipe"
    speed = f"at an estimated {step_seconds:.3g} s a step"
    if hours is not None:
        why = f"{hours:g} hours, a tenth for evaluation, {speed}"
        steps = max(1, int(hours * 3600 * (1 - _EVALUATED) / step_seconds))
    elif rows is not None and rows * MOST_EPOCHS / batch < steps:
        steps, why = max(1, math.ceil(rows * MOST_EPOCHS / batch)), f"{MOST_EPOCHS:g} epochs of about {rows:,} rows"
    if rows is not None:
        why += f"; {steps * batch / rows:.3g} epochs" if "epochs of" not in why else ""
    if hours is None:
        why += f"; about {steps * step_seconds / (1 - _EVALUATED) / 3600:,.3g} hours {speed}"
    found = {"training.max_steps": Setting(steps, why)}
    if steps == shipped.training.max_steps:
        return found
    schedule = shipped.schedule
    if schedule.warmup_steps is not None:
        found["schedule.warmup_steps"] = Setting(None, "")
        found["schedule.warmup_fraction"] = Setting(_WARMUP, f"{schedule.warmup_steps:,} steps of a longer run")
    if schedule.total_steps is not None:
        found["schedule.total_steps"] = Setting(None, "the decay ends with the run")
    if schedule.start_step:
        found["schedule.start_step"] = Setting(0, "")
    for section in ("evaluation", "checkpoint"):
        interval = min(getattr(shipped, section).interval_steps or steps, max(LEAST_INTERVAL_STEPS, steps // 10))
        found[f"{section}.interval_steps"] = Setting(interval, "a tenth of the run at most, but no fewer than 10")
    least = batch * (2 if shipped.data.in_lanes else 1)
    times = 1 + steps // found["evaluation.interval_steps"].value
    evaluated = max(least, int(steps * batch * _EVALUATED * _FORWARDS / times))
    source = f"a tenth of the time at most, but {least} rows"
    found["evaluation.max_rows"] = Setting(min(shipped.evaluation.max_rows, evaluated), source)
    if (shipped.checkpoint.keep_every_steps or 0) > steps:
        found["checkpoint.keep_every_steps"] = Setting(None, "")
    return found
