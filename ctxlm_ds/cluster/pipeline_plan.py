"""From a recipe to the steps of its pipeline: what each runs, what it goes by, what it makes.

In: a recipe with a `pipeline` section. Out: a Plan. Nothing is run or written. Not here: what is done already
(pipeline_verdict.py), Slurm (pipeline_submit.py). Imports no torch: a login node without it runs this.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxlm_ds.cluster import pipeline_commands as commands
from ctxlm_ds.cluster.pipeline_commands import Places, combined, phase_checks, phase_configs, phase_name
from ctxlm_ds.cluster.pipeline_outputs import DATASET, MODEL, PATH, RUN, SAMPLES, TOKENIZER, Output
from ctxlm_ds.cluster.pipeline_records import STEPS_DIR, all_records
from ctxlm_ds.cluster.pipeline_steps import Plan, Step, flatten
from ctxlm_ds.data.sources.reading import find_sources, source_signature
from ctxlm_ds.errors import DataError
from ctxlm_ds.recipe.load import dump_config, load_config
from ctxlm_ds.recipe.pipeline_rules import appends_eod, fill_placeholders, pipeline_problems, splits_sentences
from ctxlm_ds.recipe.pipeline_schema import PipelineCommand, PipelineConfig, StepResources
from ctxlm_ds.recipe.schema import RunConfig

DEFAULT_FOLDER = "pipelines"
HOW_NOT_WHAT = (
    "extends", "name", "run_dir", "initialize_from", "deepspeed", "pipeline", "tokenizer", "parallel", "evaluation",
    "checkpoint", "anomalies", "watchdog", "logging", "profiler", "kernels", "data.train", "data.validation",
    "data.num_workers", "data.prefetch_steps", "data.sample_index_dir", "training.max_hours",
    "training.micro_batch_size", "training.compile", "training.activation_checkpointing", "training.deterministic",
)  # fmt: skip
"""Settings of a recipe that do not make another model of it."""
SAMPLE_SETTINGS = (
    "data.sample_format", "data.seq_length", "data.short_seq_prob", "data.num_duplicates", "data.packing",
    "data.max_sequences_per_row", "data.reset_at_documents", "data.split", "training.seed", "objective",
)  # fmt: skip


def make_plan(recipe: str, overrides: Sequence[str] = ()) -> Plan:
    """Load a recipe and lay out its pipeline.

    Raises:
        ConfigError: every problem of the recipe, its `pipeline` section and its further phases, all at once.
    """
    config = load_config(recipe, overrides, [pipeline_problems, phase_checks(recipe, overrides)])
    assert config.pipeline is not None
    return _Planner(recipe, tuple(overrides), config, config.pipeline).plan()


@dataclass(frozen=True)
class _Texts:
    """Files to read."""

    patterns: tuple[str, ...]
    signature: str | None
    unreadable: str


@dataclass(frozen=True)
class _Planner:
    recipe: str
    overrides: tuple[str, ...]
    config: RunConfig
    pipeline: PipelineConfig

    @property
    def folder(self) -> Path:
        return Path(os.path.abspath(self.pipeline.output_dir or f"{DEFAULT_FOLDER}/{self.config.name}"))

    def plan(self) -> Plan:
        steps = [*self._tokenizer(), *self._preprocess(), *self._heldout()]
        configs = phase_configs(self.recipe, self.overrides, self.config, self._places())
        for index, config in enumerate(configs):
            steps += [self._samples(index, config), self._pretrain(index, config)]
        steps += self._export(configs)
        for command in self.pipeline.append:
            steps.append(self._append(command, steps[-1].name, configs))
        recipes = {self._recipe_file(index): dump_config(config) for index, config in enumerate(configs)}
        return Plan(self.config.name, self.recipe, self.folder, tuple(steps), recipes, self.pipeline.shards_at_once)

    # Places

    @property
    def _tokenizer_folder(self) -> str:
        path = self.config.tokenizer.path
        return os.path.abspath(path) if path else str(self.folder / "tokenizer")

    def _datasets(self, name: str) -> tuple[str, ...]:
        kind = "sentence" if splits_sentences(self.config, self.pipeline) else "document"
        return tuple(str(self.folder / "data" / f"{name}_{key}_{kind}") for key in self.pipeline.json_keys)

    def _shards(self, index: int) -> tuple[str, ...]:
        count = self.pipeline.shards
        wholes = (Path(prefix) for prefix in self._datasets("train"))
        return tuple(str(path.parent / "shards" / f"{path.name}_shard{index:05d}-of-{count:05d}") for path in wholes)

    def _places(self) -> Places:
        train = self._datasets("train") if self.pipeline.input else ()
        keys = self.pipeline.json_keys
        names = ["heldout"] if len(keys) == 1 else [f"heldout-{key}" for key in keys]
        held_out = zip(names, self._datasets("heldout"), strict=True) if self.pipeline.heldout else ()
        return Places(self.folder, self._tokenizer_folder, train, tuple(held_out))

    def _recipe_file(self, index: int) -> str:
        return f"{phase_name('pretrain', index)}.yaml"

    # Steps

    def _tokenizer(self) -> list[Step]:
        wanted = self.pipeline.tokenizer
        if wanted is None:
            return []
        texts = self._texts(self.pipeline.input, "tokenizer")
        settings = {
            **self._reading(texts),
            "type": commands.tokenizer_type(wanted, self.config.model.family),
            **wanted.model_dump(mode="json", exclude={"type"}),
        }
        command = commands.train_tokenizer(self.config, self.pipeline, texts.patterns, self._tokenizer_folder)
        outputs = (Output(TOKENIZER, self._tokenizer_folder),)
        return [self._step("tokenizer", command, settings, (outputs,), unreadable=texts.unreadable)]

    def _preprocess(self) -> list[Step]:
        if not self.pipeline.input:
            return []
        texts = self._texts(self.pipeline.input, "preprocess")
        count, wholes = self.pipeline.shards, self._datasets("train")
        command = commands.preprocess(
            self.config, self.pipeline, texts.patterns, self._tokenizer_folder, self.folder / "data", "train", count
        )
        parts = tuple(_datasets(self._shards(index)) for index in range(count)) if count > 1 else (_datasets(wholes),)
        first = self._step(
            "preprocess", command, self._dataset_settings(texts), parts, needs=self._tokenizer_needs(),
            layout={"shards": count}, temporary=count > 1, unreadable=texts.unreadable,
        )  # fmt: skip
        if count == 1:
            return [first]
        joined = [
            commands.merge([self._shards(index)[number] for index in range(count)], whole)
            for number, whole in enumerate(wholes)
        ]
        return [first, self._step("merge", joined, {}, (_datasets(wholes),), needs=("preprocess",))]

    def _heldout(self) -> list[Step]:
        if not self.pipeline.heldout:
            return []
        name = "preprocess-heldout"
        texts = self._texts(self.pipeline.heldout, name)
        command = commands.preprocess(
            self.config, self.pipeline, texts.patterns, self._tokenizer_folder, self.folder / "data", "heldout", 1
        )
        outputs = _datasets(self._datasets("heldout"))
        settings, needs = self._dataset_settings(texts), self._tokenizer_needs()
        return [self._step(name, command, settings, (outputs,), needs=needs, unreadable=texts.unreadable)]

    def _samples(self, index: int, config: RunConfig) -> Step:
        name, flat = phase_name("samples", index), flatten(config.model_dump(mode="json"))
        recipe = self.folder / STEPS_DIR / self._recipe_file(index)
        facts: dict[str, Any] = {"sample_format": config.data.sample_format, "seq_length": config.data.seq_length}
        if config.data.sample_index_dir:
            facts["folder"] = os.path.abspath(config.data.sample_index_dir)
        prefixes = [source.path for source in config.data.train] + [source.path for source in config.data.validation]
        outputs = tuple(Output(SAMPLES, os.path.abspath(prefix), facts) for prefix in prefixes)
        settings = {key: value for key, value in flat.items() if _below(key, SAMPLE_SETTINGS)}
        needs = self._dataset_needs() + (("preprocess-heldout",) if self.pipeline.heldout else ())
        command = commands.build_samples(recipe, self._resources(name).cpus)
        return self._step(
            name, command, {**settings, **self._given(config)}, (outputs,), needs=needs, temporary=True, rebuilds=True,
            recipe=recipe.name,
        )  # fmt: skip

    def _pretrain(self, index: int, config: RunConfig) -> Step:
        flat = flatten(config.model_dump(mode="json"))
        settings = {key: value for key, value in flat.items() if not _below(key, HOW_NOT_WHAT)} | self._given(config)
        needs = self._dataset_needs()
        if index:
            needs += (phase_name("pretrain", index - 1),)
        elif config.initialize_from:
            settings["initialize_from"] = os.path.abspath(config.initialize_from)
        limits = {"max_steps": config.training.max_steps, "max_tokens": config.training.max_tokens}
        return self._step(
            phase_name("pretrain", index), [], settings, ((Output(RUN, str(config.run_dir), limits),),), needs=needs,
            waits=(phase_name("samples", index),), recipe=self._recipe_file(index),
        )  # fmt: skip

    def _export(self, configs: Sequence[RunConfig]) -> list[Step]:
        if not self.pipeline.export:
            return []
        last = phase_name("pretrain", len(configs) - 1)
        folder, dtype = str(self.folder / "hf"), self.pipeline.export_dtype
        command = commands.export(str(configs[-1].run_dir), folder, dtype)
        return [self._step("export", command, {"dtype": dtype}, ((Output(MODEL, folder),),), needs=(last,))]

    def _append(self, own: PipelineCommand, before: str, configs: Sequence[RunConfig]) -> Step:
        values = {"output_dir": str(self.folder), "tokenizer": self._tokenizer_folder}
        values |= {"run_dir": str(configs[-1].run_dir)}
        values |= {"hf_dir": str(self.folder / "hf")} if self.pipeline.export else {}
        for name, given in (("dataset", self.pipeline.input), ("heldout", self.pipeline.heldout)):
            values |= {name: self._datasets("train" if name == "dataset" else name)[0]} if given else {}
        filled = {name: commands.quoted(value) for name, value in values.items()}
        output = own.output and os.path.abspath(fill_placeholders(own.output, values))
        outputs = (Output(PATH, output),) if output else ()
        settings = {"command": own.command, "output": own.output}
        command = fill_placeholders(own.command.strip(), filled)
        resources = combined(self.pipeline.resources.default, own.resources)
        return Step(own.name, (command,), settings, (outputs,), resources, needs=tuple(own.after) or (before,))

    # What steps have in common

    def _step(self, name: str, lines: str | Sequence[str], settings: Mapping[str, Any],
              tasks: tuple[tuple[Output, ...], ...], **more: Any) -> Step:  # fmt: skip
        lines = (lines,) if isinstance(lines, str) else tuple(lines)
        return Step(name, lines, settings, tasks, self._resources(name), **more)

    def _resources(self, name: str) -> StepResources:
        kind = name.split("-")[0]
        given = self.pipeline.resources
        own = [getattr(given, kind)]
        if kind == "pretrain" and name != kind:
            own.append(self.pipeline.phases[int(name.split("-")[1]) - 2].resources)
        resources = combined(given.default, *own)
        if resources.cpus is None and kind in ("tokenizer", "preprocess", "samples"):
            resources = resources.model_copy(update={"cpus": self.pipeline.workers})
        return resources

    def _texts(self, inputs: Sequence[str], step: str) -> _Texts:
        """The texts and their signature; that of when they were read where they are no longer there."""
        patterns = tuple(commands.absolute(name) for name in inputs)
        try:
            signature = source_signature(find_sources(patterns, self.pipeline.input_format))
            return _Texts(patterns, signature, "")
        except (DataError, OSError) as error:
            recorded = [record.settings.get("input") for record in all_records(self.folder, step).values()]
            return _Texts(patterns, recorded[0] if recorded else None, str(error))

    def _reading(self, texts: _Texts) -> dict[str, Any]:
        return {
            "input": texts.signature,
            "json_keys": self.pipeline.json_keys,
            "input_format": self.pipeline.input_format,
        }

    def _dataset_settings(self, texts: _Texts) -> dict[str, Any]:
        return {
            **self._reading(texts),
            "split_sentences": splits_sentences(self.config, self.pipeline),
            "append_eod": appends_eod(self.config, self.pipeline),
            **self._given_tokenizer(),
        }

    def _given_tokenizer(self) -> dict[str, Any]:
        """What stands for a tokenizer that no step makes."""
        return {} if self.pipeline.tokenizer else {"tokenizer": Output(TOKENIZER, self._tokenizer_folder).fingerprint()}

    def _given(self, config: RunConfig) -> dict[str, Any]:
        """What stands for a tokenizer and datasets that no step makes."""
        facts = self._given_tokenizer()
        if not self.pipeline.input:
            facts["data.train"] = [
                {"weight": source.weight, "epochs": source.epochs, "content": _dataset_content(source.path)}
                for source in config.data.train
            ]
        return facts

    def _tokenizer_needs(self) -> tuple[str, ...]:
        return ("tokenizer",) if self.pipeline.tokenizer else ()

    def _dataset_needs(self) -> tuple[str, ...]:
        if not self.pipeline.input:
            return ()
        return ("merge",) if self.pipeline.shards > 1 else ("preprocess",)


def _datasets(prefixes: Sequence[str]) -> tuple[Output, ...]:
    return tuple(Output(DATASET, prefix) for prefix in prefixes)


def _dataset_content(prefix: str) -> str | None:
    return Output(DATASET, os.path.abspath(prefix)).fingerprint()


def _below(path: str, names: Sequence[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in names)
