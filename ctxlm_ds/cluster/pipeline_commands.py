"""The commands of a pipeline's steps, as a user would type them, and the recipes of its pretraining phases.

In: the recipe with its `pipeline` section, places of tokenizer and datasets. Out: lines of shell; a resolved RunConfig
a phase. Imports no torch. Not here: what runs the commands (pipeline_step.py).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.check import find_problems
from ctxlm_ds.recipe.deepspeed import DEFAULT_CONFIG, build_deepspeed_config, load_deepspeed_json
from ctxlm_ds.recipe.load import find_recipe, load_config
from ctxlm_ds.recipe.pipeline_rules import appends_eod, splits_sentences
from ctxlm_ds.recipe.pipeline_schema import PipelineConfig, PipelineTokenizer, StepResources
from ctxlm_ds.recipe.problems import Problem, ProblemsError
from ctxlm_ds.recipe.schema import RunConfig, TokenizerConfig, TrainSource, ValidationSource

CHECKOUT = Path(__file__).resolve().parent.parent.parent
TOKENIZER_TYPES = {"bert": "wordpiece", "roberta": "bpe", "gpt2": "gpt2", "gpt1": "gpt2"}
HF_SCHEME = "hf://"
SHARED_DATA = ("train", "validation", "split", "blend", "temperature")
"""Of the section `data`, what every phase has from the first."""
SAME_MODEL = ("family", "hidden_size", "num_layers", "num_attention_heads", "intermediate_size", "type_vocab_size",
              "hidden_activation", "layer_norm_eps", "pre_layer_norm")  # fmt: skip
"""What a phase cannot change of the model of the one before."""


def from_checkout(*parts: str) -> str:
    """A file of the checkout, relative where this is the working directory."""
    path = CHECKOUT.joinpath(*parts)
    return os.path.join(*parts) if Path.cwd() == CHECKOUT else str(path)


def absolute(pattern: str) -> str:
    """A path or glob that means the same from anywhere."""
    return pattern if pattern.startswith(HF_SCHEME) else os.path.abspath(os.path.expanduser(pattern))


def quoted(text: object) -> str:
    """A word of shell."""
    return shlex.quote(str(text))


def _tool(name: str, *words: object) -> str:
    return " ".join(["python", quoted(from_checkout("tools", name)), *map(quoted, words)])


def tokenizer_type(wanted: PipelineTokenizer, family: str) -> str:
    """The kind to train."""
    return wanted.type or TOKENIZER_TYPES[family]


def _reading(pipeline: PipelineConfig, patterns: Sequence[str]) -> list[object]:
    words: list[object] = ["--input", *patterns, "--json-keys", *pipeline.json_keys]
    if pipeline.input_format != "auto":
        words += ["--input-format", pipeline.input_format]
    if pipeline.max_bad_records:
        words += ["--max-bad-records", pipeline.max_bad_records]
    return words


def train_tokenizer(config: RunConfig, pipeline: PipelineConfig, patterns: Sequence[str], folder: str) -> str:
    """tools/train_tokenizer.py."""
    wanted = pipeline.tokenizer
    assert wanted is not None
    words = [*_reading(pipeline, patterns), "--type", tokenizer_type(wanted, config.model.family)]
    if wanted.vocab_size is not None:
        words += ["--vocab-size", wanted.vocab_size]
    if not wanted.lowercase:
        words += ["--cased"]
    if wanted.max_sample_bytes is not None:
        words += ["--max-sample-bytes", wanted.max_sample_bytes]
    return _tool("train_tokenizer.py", *words, *wanted.options, "--output-dir", folder)


def preprocess(
    config: RunConfig, pipeline: PipelineConfig, patterns: Sequence[str], tokenizer: str, folder: Path, name: str,
    shards: int,
) -> str:  # fmt: skip
    """tools/preprocess_data.py, of one shard where there are several."""
    words = [*_reading(pipeline, patterns), "--tokenizer", tokenizer]
    words += ["--split-sentences"] if splits_sentences(config, pipeline) else []
    words += ["--append-eod"] if appends_eod(config, pipeline) else []
    prefix = folder / "shards" / name if shards > 1 else folder / name
    line = _tool("preprocess_data.py", *words, "--workers", pipeline.workers, "--output-prefix", prefix)
    return f'{line} --shard "$SLURM_ARRAY_TASK_ID/{shards}"' if shards > 1 else line


def merge(parts: Sequence[str], whole: str) -> str:
    """tools/merge_datasets.py; every shard by name, so that a missing one is an error."""
    return _tool("merge_datasets.py", "--input", *parts, "--output-prefix", whole)


def build_samples(recipe: Path, threads: int | None) -> str:
    """tools/build_samples.py."""
    return _tool("build_samples.py", "--config", recipe, *(["--workers", threads] if threads else []))


def export(run_dir: str, folder: str, dtype: str) -> str:
    """tools/convert_checkpoint.py to-hf."""
    return _tool("convert_checkpoint.py", "to-hf", "--checkpoint", run_dir, "--output", folder, "--dtype", dtype)


@dataclass(frozen=True)
class Places:
    """Where the steps before pretraining leave what it reads; empty where the recipe names it already."""

    folder: Path
    tokenizer: str
    train: tuple[str, ...] = ()
    """Dataset prefixes, one a JSON key."""
    heldout: tuple[tuple[str, str], ...] = ()
    """Name and prefix."""


def phase_name(kind: str, index: int) -> str:
    """`pretrain`, `pretrain-2`: the first keeps its name when a second is added."""
    return kind if index == 0 else f"{kind}-{index + 1}"


def phase_configs(recipe: str, overrides: Sequence[str], config: RunConfig, places: Places) -> list[RunConfig]:
    """The recipe of each phase, with tokenizer, datasets, run directory and where its weights come from.

    Raises:
        ConfigError: the recipe of a further phase cannot be loaded.
    """
    assert config.pipeline is not None
    configs = [_filled(config, places)]
    for index in range(len(config.pipeline.phases)):
        own = load_phase(recipe, overrides, config.pipeline, index)
        shared = {name: getattr(configs[0].data, name) for name in SHARED_DATA}
        default = places.folder / phase_name("pretrain", index + 1)
        run_dir = own.run_dir if own.run_dir != config.run_dir else None
        configs.append(
            own.model_copy(
                update={
                    "name": config.name,
                    "tokenizer": configs[0].tokenizer,
                    "data": own.data.model_copy(update=shared),
                    "run_dir": str(Path(run_dir).absolute() if run_dir else default),
                    "initialize_from": configs[-1].run_dir,
                    "pipeline": None,
                }
            )
        )
    return configs


def load_phase(recipe: str, overrides: Sequence[str], pipeline: PipelineConfig, index: int) -> RunConfig:
    """The recipe of a further phase as the user wrote it; a path is relative to the recipe that names it.

    Raises:
        ConfigError: it cannot be loaded.
    """
    phase = pipeline.phases[index]
    if phase.recipe is None:
        return load_config(recipe, [*overrides, *phase.set])
    return load_config(str(find_recipe(phase.recipe, find_recipe(recipe).parent)), phase.set)


def _filled(config: RunConfig, places: Places) -> RunConfig:
    data = config.data
    if places.train:
        data = data.model_copy(update={"train": [TrainSource(path=prefix) for prefix in places.train]})
    if places.heldout:
        held_out = [ValidationSource(name=name, path=prefix) for name, prefix in places.heldout]
        data = data.model_copy(update={"validation": held_out})
    run_dir = Path(config.run_dir).absolute() if config.run_dir else places.folder / "pretrain"
    tokenizer = TokenizerConfig(path=places.tokenizer)
    return config.model_copy(
        update={"data": data, "tokenizer": tokenizer, "run_dir": str(run_dir), "pipeline": None}
    )


def phase_checks(recipe: str, overrides: Sequence[str]) -> Callable[[RunConfig], Iterator[Problem]]:
    """A check for load_config: every phase can be loaded, has the first one's model, and fits its job's ranks."""

    def check(config: RunConfig) -> Iterator[Problem]:
        if config.pipeline is None:
            return
        first = [*_rank_problems(config, _pretrain_resources(config.pipeline, -1), "pipeline.resources.pretrain")]
        yield from first
        for index in range(len(config.pipeline.phases)):
            here = f"pipeline.phases[{index}]"
            try:
                own = load_phase(recipe, overrides, config.pipeline, index)
            except ProblemsError as error:
                yield from _own_problems(error, _recipe_problems(recipe, overrides), here)
                continue
            except ConfigError as error:
                yield Problem(here, str(error), ("pipeline.phases",))
                continue
            yield from _model_problems(config, own, here)
            ranks = _rank_problems(own, _pretrain_resources(config.pipeline, index), here)
            yield from (item for item in ranks if item.text not in [other.text for other in first])

    return check


def _recipe_problems(recipe: str, overrides: Sequence[str]) -> tuple[Problem, ...]:
    """What the recipe itself is refused for, whatever its phases."""
    try:
        load_config(recipe, overrides)
    except ProblemsError as error:
        return error.problems
    return ()


def _own_problems(error: ProblemsError, told: Sequence[Problem], here: str) -> Iterator[Problem]:
    """The problems of a phase's recipe, but for those that are told of the first one."""
    for item in error.problems:
        if item not in told:
            yield Problem(here, f"{item.path}: {item.text}", ("pipeline.phases",), item.where)


def _model_problems(first: RunConfig, own: RunConfig, here: str) -> Iterator[Problem]:
    for name in SAME_MODEL:
        before, now = getattr(first.model, name), getattr(own.model, name)
        if before != now:
            text = f"its model.{name} is {now}, that of the first phase {before}; weights cannot be taken over"
            yield Problem(here, text, ("pipeline.phases", f"model.{name}"))


def _pretrain_resources(pipeline: PipelineConfig, index: int) -> StepResources:
    own = [pipeline.phases[index].resources] if index >= 0 else []
    return combined(pipeline.resources.default, pipeline.resources.pretrain, *own)


def combined(*resources: StepResources) -> StepResources:
    """The later ones over the earlier ones; `extra` options are added up."""
    values: dict[str, object] = {}
    for item in resources:
        values |= {name: value for name, value in item if value is not None and name != "extra"}
    return StepResources(**values, extra=[option for item in resources for option in item.extra])  # type: ignore[arg-type]


def _rank_problems(config: RunConfig, resources: StepResources, here: str) -> Iterator[Problem]:
    """What the job of a phase would refuse after its time in the queue."""
    if resources.ntasks_per_node is None:
        return
    world_size = (resources.nodes or 1) * resources.ntasks_per_node
    place = ("pipeline.phases",) if "phases" in here else ()
    known = {(problem.path, problem.text) for problem in find_problems(config)}
    found = [item for item in find_problems(config, world_size) if (item.path, item.text) not in known]
    for problem in found:
        yield Problem(here, f"{world_size} ranks: {problem.path}: {problem.text}", (*place, problem.path))
    if found or known:
        return
    try:
        source = config.deepspeed or DEFAULT_CONFIG
        build_deepspeed_config(config, load_deepspeed_json(source), world_size, f"DeepSpeed config {source}")
    except ConfigError as error:
        yield Problem(here, f"{world_size} ranks: {error}", (*place, "deepspeed"))
