"""Tiny runs of any registered family: its recipe, its rows from the real data route, its engine, and what it learns.

Everything that knows how a part of the project is called is here and in hugging_face.py, so that the contract itself
(test_contract.py) speaks of families only.
"""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel  # noqa: F401 (imported before the ranks are forked: it takes seconds)

from ctxlm_ds import run as run_builder
from ctxlm_ds.data.preprocess.config import PreprocessConfig, dataset_prefix
from ctxlm_ds.data.preprocess.job import preprocess
from ctxlm_ds.data.stream.loader import Step, TrainLoader
from ctxlm_ds.data.stream.run_datasets import build_run_rows
from ctxlm_ds.export.teacher import with_teacher
from ctxlm_ds.families.base import Family
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.layers import ModelBuild
from ctxlm_ds.models.program import build_program
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.parallel.parameters import initialize_parameters
from ctxlm_ds.parallel.topology import build_topology
from ctxlm_ds.process.launch import quiet_libraries
from ctxlm_ds.recipe.deepspeed import build_deepspeed_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.sections import DataSection
from ctxlm_ds.registry import FAMILIES, FORMATS
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import tokenizer_types, train_tokenizer
from ctxlm_ds.training.engine.engine import Engine
from ctxlm_ds.training.engine.runtime import init_process_group
from ctxlm_ds.training.loop.state import TrainState
from ctxlm_ds.training.measure import measure
from tests.dist.states import held_by, resume_newest, save_at
from tests.dist.training import gather_weights
from tests.families import packages
from tests.golden.corpus import WORDS, Numbers

ROWS, MICRO_ROWS = 8, 4
"""Of a global batch and of a micro-batch."""
STEPS, TRAINING_STEPS = 2, 20
NUM_DOCUMENTS = 160
VOCABULARY = 40
"""Words beside those that a tokenizer of its type has at least."""
LEARNING_RATE, DROPOUT = 5e-3, 0.2
NO_KEY = "attention_dropout"
"""Dropped inside torch's fused attention, which takes no key: its masks depend on the layout."""


SPAN_BOUNDARY = {
    "objective": {
        "name": "masked_lm", "whole_word": True, "spans": "geometric", "replace_spans": True, "count_rounding": "up",
        "boundary_weight": 1.0,
    },
    "data": {"sample_format": "doc_sentences", "separate_sentences": False, "seq_length": 32},
}  # fmt: skip
TEACHERS = {"teacher": "BertForPreTraining", "tuned_teacher": "BertForSequenceClassification"}
"""Class of transformers by folder."""
WITH_TEACHER = {"objective": {"name": "distillation"}, "teacher": {"path": "teacher"}}
TINYBERT = {
    "objective": {"name": "tinybert", "layer_map": [1, 2, 4, 5], "mask_prob": 0.1, "prediction_weight": 1.0},
    "teacher": {"path": "tuned_teacher"},
}
MEMORY = {
    "model": FAMILIES.get("xlnet").tiny()["model"] | {"mem_len": 24},
    "data": FAMILIES.get("xlnet").tiny()["data"] | {"both_directions": True},
}
LANGUAGES = {
    "objective": FAMILIES.get("mbart").tiny()["objective"] | {"language_tokens": True},
    "languages": ("en_XX", "de_DE"),
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert+boundary": ("bert", SPAN_BOUNDARY), "distilbert+teacher": ("distilbert", WITH_TEACHER),
    "tinybert+teacher": ("tinybert", TINYBERT), "xlnet+memory": ("xlnet", MEMORY),
    "bart+mass": ("bart", {"objective": {"name": "masked_seq2seq"}}), "mbart+languages": ("mbart", LANGUAGES),
}  # fmt: skip
"""Recipes of a family with other objectives than its own: the family, and the sections that differ; `languages` of its
sources if each has one."""
T5_1_1 = {"gated": True, "tied_head": False, "hidden_activation": "gelu_tanh"}
EPS = 1e-6
"""Of AdamW, whose first step multiplies the rounding of a gradient g by eps / (|g| + eps)^2. T5 1.1's smallest gradient
is 6e-8 (8e-3 elsewhere in its tensor) with a rounding of 4e-9, which this epsilon makes 2e-5 of a weight: weights are
judged by a norm of their tensor."""
SMOOTH = {"t5": {"hidden_activation": "gelu"}}
"""Of runs that are compared with themselves: the gradient of T5's ReLU jumps at 0, where another rounding turns a unit
on or off. Norms then differ by up to 6e-4 (tests/unit/kernels/test_bias_gelu.py shows one unit)."""
VERSIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5+1.1": (
        "t5",
        {
            "model": FAMILIES.get("t5").tiny()["model"] | T5_1_1,
            "objective": FAMILIES.get("t5").tiny()["objective"] | {"z_loss": 0.01},
        },
    )
}
"""Other models of a family."""
OTHERS = VARIANTS | VERSIONS if packages.families is None else packages.recipes


def family_of(name: str) -> Family:
    """The family of a name of the registry or of OTHERS."""
    family: Family = FAMILIES.get(OTHERS[name][0] if name in OTHERS else name)
    return family


def tiny_of(name: str) -> dict[str, Any]:
    """The sections of a tiny recipe."""
    return family_of(name).tiny() | (OTHERS[name][1] if name in OTHERS else {})


@dataclass(frozen=True)
class Layout:
    """Ranks, ZeRO stage, and what else may change nothing."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    stage: int = 0
    sequence_parallel: bool = False
    recompute: bool = False
    context: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    def __str__(self) -> str:
        words = [f"tp{self.tensor}", f"pp{self.pipeline}", f"dp{self.data}", f"zero{self.stage}"]
        words += [f"cp{self.context}"] * (self.context > 1)
        return "-".join(words + ["sp"] * self.sequence_parallel + ["recompute"] * self.recompute)


ONE_RANK = Layout()


class Source(NamedTuple):
    """A dataset of some of the documents."""

    prefix: Path
    part: slice
    language: str | None

    def settings(self, sample_format: str) -> dict[str, str]:
        """The recipe's entry."""
        path = dataset_prefix(self.prefix, "text", documents_of(sample_format))
        return {"path": path} | ({"language": self.language} if self.language else {})


@dataclass(frozen=True)
class Run:
    """A family on a layout; `folder` holds the session's tokenizers, datasets and recorded rows."""

    family: str
    folder: Path
    layout: Layout = ONE_RANK
    dropout: bool = False
    seed: int = 1234
    optimizer: str = "adamw"
    alone: bool = False
    """Whether a row must hold one sequence, as transformers takes it."""

    def on(self, layout: Layout) -> Run:
        """The same on other ranks."""
        return replace(self, layout=layout)

    def config(self) -> RunConfig:
        """The resolved recipe."""
        sections = self.sections()
        sections["model"]["vocab_size"] = load_tokenizer(sections["tokenizer"]["path"]).vocab_size
        config = with_teacher(RunConfig.model_validate(sections))
        return config.model_copy(update={"data": with_rows_of_one(config.data)}) if self.alone else config

    @property
    def languages(self) -> tuple[str, ...]:
        """Tokens of the languages of its sources, if they have any."""
        return tiny_of(self.family).get("languages", ())

    @property
    def texts_name(self) -> str:
        """Of its tokenizer and datasets, which families share."""
        return "-".join((family_of(self.family).tokenizer, *self.languages))

    def sources(self) -> list[Source]:
        """Its datasets: one, or one with a part of the texts for each language."""
        count, prefix = max(1, len(self.languages)), self.folder / "data" / self.texts_name
        return [
            Source(prefix.with_name(f"{prefix.name}{number or ''}"), slice(number, None, count), language)
            for number, language in enumerate(self.languages or (None,))
        ]

    def sections(self) -> dict[str, Any]:
        """The recipe around the sections that the family brings."""
        family, sections = family_of(self.family), tiny_of(self.family)
        dropouts = [name for name in family.section.model_fields if name.endswith("dropout")]
        drops = {name: DROPOUT if self.dropout and name != NO_KEY else 0.0 for name in dropouts}
        return {
            "name": self.family.replace("+", "-"),
            "model": sections["model"] | drops | ({} if self.alone else SMOOTH.get(self.family, {})),
            "objective": sections["objective"],
            "teacher": {name: str(self.folder / path) for name, path in sections.get("teacher", {}).items()},
            "data": sections["data"] | {
                "train": [source.settings(sections["data"]["sample_format"]) for source in self.sources()],
                "num_workers": 0, "sample_index_dir": str(self.folder / "indexes"),
            },
            "tokenizer": {"path": str(self.folder / "tokenizers" / self.texts_name)},
            "optimizer": {
                "name": self.optimizer, "learning_rate": LEARNING_RATE, "weight_decay": 0.1, "gradient_clipping": 0.0,
                "eps": EPS,
            },
            "training": {
                "global_batch_size": ROWS, "micro_batch_size": MICRO_ROWS, "precision": "fp32", "seed": self.seed,
                "activation_checkpointing": self.layout.recompute,
            },
            "parallel": {
                "tensor_parallel_size": self.layout.tensor, "pipeline_parallel_size": self.layout.pipeline,
                "context_parallel_size": self.layout.context, "sequence_parallel": self.layout.sequence_parallel,
            },
        }  # fmt: skip


def with_rows_of_one(data: DataSection) -> DataSection:
    """Turn the switch of a section by which its rows hold several sequences, if they do."""
    switches = [name for name in type(data).model_fields if isinstance(getattr(data, name), bool)]
    turned = [data.model_copy(update={name: not getattr(data, name)}) for name in switches]
    return next(other for other in [data, *turned] if not other.shares_rows)


def documents() -> list[str]:
    """Made-up texts in which a few words are most, so that a model soon learns something."""
    numbers = Numbers(seed=7)

    def sentence() -> str:
        count = 3 + numbers.below(6)
        places = [numbers.below(1 + numbers.below(1 + numbers.below(len(WORDS)))) for _ in range(count)]
        return " ".join(WORDS[place] for place in places).capitalize() + "."

    return [" ".join(sentence() for _ in range(2 + numbers.below(5))) for _ in range(NUM_DOCUMENTS)]


def documents_of(sample_format: str) -> PreprocessConfig:
    """How a dataset for this sample format keeps documents."""
    rows = FORMATS.get(sample_format)
    ends = rows.shifted and not rows.section.by_sentence
    return PreprocessConfig(append_eod=ends, split_sentences=not ends)


def prepare(rank: int, world_size: int, run: Run) -> None:
    """Case: make the tokenizer and the dataset unless another family did, and record rows from the loader.

    A step of the recorded stream is one micro-batch, so that any rank of any layout can take its own.
    """
    quiet_libraries()
    sections, kind = run.sections(), family_of(run.family).tokenizer
    tokenizer, texts, languages = Path(sections["tokenizer"]["path"]), documents(), run.languages
    if not tokenizer.exists():
        size = tokenizer_types()[kind].least_vocab_size + VOCABULARY + len(languages)
        train_tokenizer(kind, iter(texts), size, tokenizer, **({"language_codes": languages} if languages else {}))
    if "teacher" in tiny_of(run.family):
        write_teacher(Path(sections["teacher"]["path"]), load_tokenizer(tokenizer).vocab_size)
    (run.folder / "data").mkdir(exist_ok=True)
    for source in run.sources():
        corpus = source.prefix.with_suffix(".jsonl")
        if not corpus.exists():
            corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[source.part]))
        preprocess([str(corpus)], tokenizer, source.prefix, documents_of(sections["data"]["sample_format"]))
    config = run.config()
    objective = build_objective(config.objective, load_tokenizer(tokenizer))
    training = config.training.model_copy(update={"global_batch_size": MICRO_ROWS})
    single = config.model_copy(update={"training": training})
    rows = build_run_rows(config.row_settings, load_tokenizer(tokenizer), objective).train
    steps = islice(TrainLoader(rows, objective, single.data, single.training), TRAINING_STEPS * ROWS // MICRO_ROWS)
    recorded(run).write_bytes(pickle.dumps([pickle.dumps(step) for step in steps]))


def write_teacher(folder: Path, vocab_size: int) -> None:
    """Write a BERT of transformers, with a pooler that no run needs, in several files."""
    import transformers

    torch.manual_seed(5)
    config = transformers.BertConfig(
        vocab_size=vocab_size, hidden_size=32, num_hidden_layers=5, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    getattr(transformers, TEACHERS[folder.name])(config).save_pretrained(folder, max_shard_size="20KB")


def recorded(run: Run) -> Path:
    """The file of a family's rows."""
    return run.folder / f"{run.family}{'-alone' * run.alone}.rows"


@functools.lru_cache(maxsize=2)
def read_recorded(path: Path) -> list[bytes]:
    return pickle.loads(path.read_bytes())


def load_recorded(path: Path, part: slice) -> list[Step]:
    """Some of the recorded steps: most cases read few of them."""
    return [pickle.loads(step) for step in read_recorded(path)[part]]


def step_of(path: Path, number: int, rank: int = 0, size: int = 1) -> Step:
    """A data-parallel rank's part of a global batch."""
    count = ROWS // MICRO_ROWS
    own = load_recorded(path, slice(number * count + rank, (number + 1) * count, size))
    return Step(
        micro_batches=[batch for step in own for batch in step.micro_batches],
        counts={term: sum(step.counts[term] for step in own) for term in own[0].counts},
        num_tokens=sum(step.num_tokens for step in own), rows_consumed=ROWS, epoch=0,
    )  # fmt: skip


def build(run: Run) -> Engine:
    """The engine with the family's initial weights."""
    quiet_libraries()
    init_process_group()
    layout, config = run.layout, run.config()
    topology = build_topology(0, 1, layout.tensor, layout.pipeline, layout.context)
    settings = build_deepspeed_config(config, {"zero_optimization": {"stage": layout.stage}}, topology.world_size)
    objective = build_objective(config.objective, load_tokenizer(config.tokenizer.path))
    engine = run_builder.engine_builder(config, settings, objective, topology)()
    run_builder.initialize_weights(engine)
    return engine


def advance(engine: Engine, run: Run, steps: Sequence[int]) -> dict[str, list[float]]:
    """Losses and gradient norms of some steps."""
    ranks = engine.topology.data_parallel_rank, engine.topology.data_parallel_size
    results = [engine.train_step(step_of(recorded(run), step, *ranks), step, LEARNING_RATE) for step in steps]
    return {"losses": [result.loss for result in results], "norms": [result.grad_norm for result in results]}


def train(rank: int, world_size: int, run: Run, num_steps: int = STEPS) -> dict[str, Any]:
    """Case: figures of all steps, weights before the first and after STEPS, and what is built."""
    engine = build(run)
    initial = gather_weights(engine)
    figures = advance(engine, run, range(STEPS))
    weights = gather_weights(engine)
    rest = advance(engine, run, range(STEPS, num_steps))
    return {
        **{name: values + rest[name] for name, values in figures.items()}, "initial": initial, "weights": weights,
        "built": {name: parameter.numel() for name, parameter in engine.module.named_parameters()},
        "facts": engine.program.facts, "all_shapes": engine.program.shapes,
    }  # fmt: skip


def initial(rank: int, world_size: int, run: Run) -> dict[str, torch.Tensor]:
    """Case: the weights before the first step."""
    return gather_weights(build(run))


def count_flops(rank: int, world_size: int, run: Run) -> tuple[int, int]:
    """Case: operations of the forward pass of a global batch, as torch counts them and as the planner does.

    torch counts plain products only, so attention is asked to be made of them.
    """
    config = run.config()
    kernels = config.kernels.model_copy(update={"attention": "reference"})
    config = config.model_copy(update={"kernels": kernels})
    chosen = KernelSet(dict(kernels), "cpu", torch.float32)
    objective = build_objective(config.objective)
    build = ModelBuild((*objective.outputs, *objective.taps), chosen, shares_rows=config.data.shares_rows)
    module = build_program(config.model, build, objective, config.teacher).module()
    initialize_parameters(module, run.seed)
    with FlopCounterMode(display=False) as counter:
        for batch in step_of(recorded(run), 0).micro_batches:
            module.run(batch.fields)
    return counter.get_total_flops(), sum(layer.at(1).flops for layer in measure(config).layers) * ROWS


def save(rank: int, world_size: int, run: Run, run_dir: Path) -> dict[str, Any]:
    """Case: save after STEPS steps and go on; figures before it, what was saved, and losses and weights after it."""
    engine = build(run)
    initial = gather_weights(engine)
    figures = advance(engine, run, range(STEPS))
    save_at(engine, engine.config, run_dir, TrainState(step=STEPS, rows_consumed=STEPS * ROWS, tokens=7))
    return {**figures, "initial": initial, **held_by(engine), **go_on(engine, run)}


def resume(rank: int, world_size: int, run: Run, run_dir: Path) -> dict[str, Any]:
    """Case: load what another layout saved and go on."""
    engine = build(run)
    state = resume_newest(engine, engine.config, run_dir)
    return {**held_by(engine), "state": state, **go_on(engine, run)}


def go_on(engine: Engine, run: Run) -> dict[str, Any]:
    """Losses of the next steps and weights after them."""
    return {"next": advance(engine, run, range(STEPS, 2 * STEPS))["losses"], "last": gather_weights(engine)}
