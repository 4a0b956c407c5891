"""Base classes of sections, and the number types of settings. Every number has an upper bound.

Generic code uses these classes and their hooks only. A registered family, objective, sample format, optimizer or
schedule adds a subclass with further settings. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_serializer, model_validator

from ctxlm_ds.recipe.problems import Problem

PositiveInt = Annotated[int, Field(ge=1, le=10**15)]
NonNegativeInt = Annotated[int, Field(ge=0, le=10**15)]
PositiveSteps = Annotated[int, Field(ge=1, le=10**9)]
"""Optimizer steps, or rows of a step."""
NonNegativeSteps = Annotated[int, Field(ge=0, le=10**9)]
Width = Annotated[int, Field(ge=1, le=2**20)]
"""One dimension of a tensor."""
SmallInt = Annotated[int, Field(ge=1, le=10_000)]
"""Number of layers, ranks, passes, and other things that a person can count."""
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFraction = Annotated[float, Field(gt=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0, le=1e9)]
NonNegativeFloat = Annotated[float, Field(ge=0.0, le=1e9)]
LearningRate = Annotated[float, Field(ge=0.0, le=1000.0)]
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the first and second moment in checkpoints."""
EMA_KIND = "ema"
"""Name of the moving average of the weights, stored as a moment."""


class Section(BaseModel):
    """One section of a recipe: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @property
    def idle_settings(self) -> tuple[str, ...]:
        """Names of settings that have no effect with the others; a note lists those that were changed."""
        return ()


class ModelSection(Section):
    """Shape of a model; the family adds further settings."""

    same_function: ClassVar[tuple[str, ...]] = ("family",)
    """Settings that change what the model computes but no shape; `initialize_from` compares them."""
    double_separator: ClassVar[bool] = False
    """True if a pair has two separators between its segments."""
    learned_positions: ClassVar[bool] = True
    """True if each position up to `longest_sequence` has weights; false for rotary and relative positions."""

    family: str
    """Name of a registered family."""
    vocab_size: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Rows of the embedding, at least the size of the tokenizer; null takes that size."""

    @property
    def num_blocks(self) -> int:
        """Number of repeated layers, a setting `num_layers` as a rule; a pipeline may be cut before each."""
        blocks: int = self.num_layers  # type: ignore[attr-defined]
        return blocks

    @property
    def num_distinct_blocks(self) -> int:
        """Number of repeated layers with separate weights; less than num_blocks if layers share theirs."""
        return self.num_blocks

    @property
    def longest_sequence(self) -> int | None:
        """Longest sequence that the model can read; None for no limit."""
        return None

    @property
    def width(self) -> int | None:
        """Width of most layers (hidden_size), which decides ZeRO-3's bucket sizes; None leaves them to DeepSpeed."""
        return getattr(self, "hidden_size", None)

    @property
    def drops(self) -> bool:
        """True if a layer draws random numbers: a setting that ends in `dropout` is above 0, or a layer samples."""
        return any(value > 0.0 for name, value in self if name.endswith("dropout"))

    def problems(self) -> Iterator[Problem]:
        """Yield problems of this section alone."""
        yield from ()

    def row_problems(self, data: DataSection) -> Iterator[Problem]:
        """Yield reasons why the model cannot read the rows."""
        yield from ()

    def tensor_parallel_problems(self, size: int) -> Iterator[Problem]:
        """Yield reasons why `size` tensor-parallel ranks cannot split the layers."""
        yield from ()

    def context_parallel_problems(self, size: int, tensor: int) -> Iterator[Problem]:
        """Yield reasons why `size` ranks cannot share the positions of a row; each has the heads of 1 / `tensor`."""
        text = f"{size}, but layers of model.family {self.family} read complete rows; set it to 1"
        yield Problem("parallel.context_parallel_size", text, ("model.family",))


class ObjectiveSection(Section):
    """Pretraining objective; the objective adds further settings."""

    name: str
    """Name of a registered objective."""
    z_loss: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Weight of the squared logarithm of the sum of exponentials of the logits, of each label that is a word, which
    keeps that sum near 1 (T5 1e-4); reported as TERM_z_loss."""

    shares_positions: ClassVar[bool] = True
    """True if ranks can share the positions of rows (parallel.context_parallel_size)."""

    @property
    def needs_languages(self) -> bool:
        """True if each source must name the token of its language (data.train, `language`)."""
        return False

    @property
    def needs_spans(self) -> bool:
        """True if datasets must give spans of their text (ctxlm preprocess --spans-key)."""
        return False

    def sample_length(self, data: DataSection) -> int:
        """Return the most tokens of a sample before corruption, which fill rows of data.seq_length after it."""
        return data.seq_length

    def stack_lengths(self, data: DataSection) -> tuple[int, ...]:
        """Return the positions of a row in each stack of layers (an encoder, a decoder)."""
        return (data.seq_length,)

    def problems(self, data: DataSection) -> Iterator[Problem]:
        """Yield problems of this section, alone or with the rows."""
        yield from ()

    def model_problems(self, model: ModelSection) -> Iterator[Problem]:
        """Yield settings that do not fit those of the model."""
        yield from ()

    def teacher_problems(self, model: ModelSection, teacher: ModelSection) -> Iterator[Problem]:
        """Yield reasons why the model cannot learn from the teacher."""
        yield from ()


class TrainSource(Section):
    """One training dataset; may be written as its path alone."""

    SHORT_FORM: ClassVar[str] = "path"

    path: str
    """Dataset prefix (without .bin/.idx)."""
    weight: Annotated[float, Field(gt=0.0, le=1e15)] | None = None
    """Relative share of the rows (data.blend `weighted` or `megatron`)."""
    epochs: Annotated[float, Field(gt=0.0, le=10_000.0)] | None = None
    """Passes over the dataset per epoch of the run; fractions are allowed, null is 1 (data.blend `concatenate`)."""
    name: str | None = None
    """Name in tables and metrics; null is the last part of the path."""
    language: str | None = None
    """Special token of the language of its texts (mBART: `en_XX`), if the objective reads one."""

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def _to_path(self, serialize: Callable[[TrainSource], dict[str, Any]]) -> str | dict[str, Any]:
        given = {key: value for key, value in serialize(self).items() if value is not None}
        return self.path if len(given) == 1 else given


class ValidationSource(Section):
    """One held-out dataset; may be written as its path alone, whose last part is then its name."""

    SHORT_FORM: ClassVar[str] = "path"

    name: str
    """Name in the metrics (`eval/NAME/…`)."""
    path: str
    """Dataset prefix (without .bin/.idx)."""
    part: Literal["all", "train", "valid", "test"] = "all"
    """Part of data.split; `all` takes every document."""
    language: str | None = None
    """Special token of the language of its texts, if the objective reads one."""

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"name": value.rstrip("/").rpartition("/")[2], "path": value} if isinstance(value, str) else value


class DataSection(Section):
    """Datasets and how they become rows; the sample format adds further settings."""

    fixed: ClassVar[tuple[str, ...]] = ("blend", "temperature", "split", "split_seed", "seq_length", "sample_format")
    """Settings that decide the rows; a run cannot change them when it resumes."""
    by_sentence: ClassVar[bool] = False
    """True if each sequence of the datasets should be a sentence (ctxlm preprocess --split-sentences)."""
    frames: ClassVar[bool] = False
    """True if samples begin and end with special tokens."""
    ends_documents: ClassVar[bool] = False
    """True if the datasets must end each document with the separator (ctxlm preprocess --append-eod)."""

    in_lanes: ClassVar[bool] = False
    """True if row r of a batch continues row r of the batch before it."""

    train: list[TrainSource] = []
    """Datasets to train on."""
    blend: Literal["concatenate", "in_order", "weighted", "temperature", "megatron"] = "concatenate"
    """How training datasets are mixed. `concatenate`: all rows, repeated by `epochs`, mixed. `in_order`: one
    after another, not shuffled. `weighted`: shares by weight, of any size. `temperature`: shares proportional to
    rows^(1/temperature). `megatron`: Megatron's order of sources (by weight, or by rows if none has one)."""
    temperature: Annotated[float, Field(ge=1.0, le=1e6)] = 1.0
    """For `temperature` blends: 1 is proportional to the rows, higher is more even (mBERT 1/0.7, XLM-R 1/0.3)."""
    split: str | None = None
    """Train, valid and test shares of each training dataset, by document, as in Megatron: `969,30,1`. The run trains on
    the first and, if data.validation is empty, evaluates the second. null trains on every document."""
    split_seed: NonNegativeInt | None = None
    """Seed that draws the order in which `split` cuts the documents, by tokens; the run makes a copy of the dataset in
    that order. A held-out part then has at least 20 documents. null: in the dataset's order, by number (Megatron)."""
    validation: list[ValidationSource] = []
    """Held-out datasets, each evaluated separately."""
    seq_length: Width = 128
    """Positions per row, special tokens included."""
    max_epochs: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """Most passes over a training dataset; a run that would read one more often is refused (BabyLM: 10)."""
    sample_format: str
    """Name of a registered sample format."""
    sample_index_dir: str | None = None
    """Folder of the sample indexes; null stores them next to each dataset."""
    num_workers: Annotated[int, Field(ge=0, le=1024)] = 1
    """Loader worker processes per rank; 0 loads in the training process. Results do not depend on it."""
    prefetch_steps: Annotated[int, Field(ge=1, le=1000)] = 2
    """Optimizer steps that each worker prepares ahead."""

    @property
    def may_lack_end(self) -> bool:
        """True if a sample that begins with a special token may end without one."""
        return False

    @property
    def shares_rows(self) -> bool:
        """True if a row may hold several sequences that do not attend to each other."""
        return False

    @property
    def sequences_per_row(self) -> int:
        """Maximum number of sequences per row."""
        return int(getattr(self, "max_sequences_per_row", 1)) if self.shares_rows else 1

    @property
    def idle_settings(self) -> tuple[str, ...]:
        packs = self.shares_rows or "max_sequences_per_row" not in type(self).model_fields
        return (*(() if packs else ("max_sequences_per_row",)), *(("split_seed",) if self.split is None else ()))

    @property
    def passes(self) -> int:
        """Passes over a dataset per epoch of its sample index."""
        return int(getattr(self, "num_duplicates", 1))

    def problems(self, model: ModelSection) -> Iterator[Problem]:
        """Yield problems of this section, alone or with the model."""
        yield from ()


@dataclass(frozen=True)
class RowSettings:
    """Sections of a recipe that decide the rows of its sources."""

    data: DataSection
    objective: ObjectiveSection
    seed: int
    """training.seed."""


class UpdateSizes(NamedTuple):
    """Elements of the parameters that one rank updates, ZeRO's padding included."""

    partitioned: bool
    """True if the rank updates flat partitions of its groups (ZeRO stages 1 to 3)."""
    share: int
    """Elements of all groups."""
    group: int
    """Elements of the largest group."""
    largest: int
    """Elements of the largest complete parameter."""


class OptimizerSection(Section):
    """Optimizer of the weights; the optimizer adds further settings."""

    moments: ClassVar[tuple[str, ...]] = MOMENTS
    """Moments of an element, each of its size, by their names in checkpoints."""
    matrix_moments: ClassVar[tuple[str, ...] | None] = None
    """Moments of the matrices of repeated layers, if the update takes them complete, as a separate group; None if it
    treats them as other parameters."""
    zero_stages: ClassVar[tuple[int, ...]] = (0, 1, 2, 3)
    """ZeRO stages under which the update is exact."""
    tensor_parallel: ClassVar[bool] = True
    """True if the update is exact when tensor-parallel ranks hold parts of a parameter."""
    kernels: ClassVar[tuple[str, ...]] = ("auto", "reference")
    """Values of kernels.optimizer that compute the update exactly."""
    bytes_per_element: ClassVar[int] = 28
    """Bytes that an update reads and writes per element; 28 is one fused AdamW."""
    bytes_per_matrix_element: ClassVar[int] = 0
    """Bytes that an update reads and writes per element of the complete matrices."""
    matrix_copies: ClassVar[int] = 0
    """Copies of the largest complete matrix that its update holds."""
    handed_over: ClassVar[bool] = False
    """True if DeepSpeed builds the optimizer from its JSON."""
    json_types: ClassVar[tuple[str, ...]] = ()
    """Further names of the optimizer in a DeepSpeed JSON, in lower case."""
    json_params: ClassVar[Mapping[str, str]] = {"lr": "learning_rate", "weight_decay": "weight_decay"}
    """Parameters of the optimizer section of a DeepSpeed JSON, each with its setting here."""

    name: str
    """Name of a registered optimizer."""
    learning_rate: Annotated[float, Field(gt=0.0, le=1000.0)] = 1e-4
    """Peak learning rate."""
    weight_decay: LearningRate = 0.01
    """Decoupled weight decay."""
    decay_biases: bool = False
    """Also decay biases and LayerNorm weights, as fairseq does (RoBERTa); BERT's and NVIDIA's code does not."""
    gradient_clipping: NonNegativeFloat = 1.0
    """Maximum global gradient norm; 0 switches clipping off (RoBERTa)."""

    def follows_width(self) -> bool:
        """Return whether rates follow the width (models/parts/width.py)."""
        return False

    def moments_of(self, matrix: bool) -> tuple[str, ...]:
        """Return the moments of a parameter; `matrix` is True for matrices of repeated layers."""
        return self.matrix_moments if matrix and self.matrix_moments is not None else self.moments

    def json_values(self) -> dict[str, Any]:
        """Return the parameters of the optimizer section of a DeepSpeed JSON with the values of the recipe."""
        values = {key: getattr(self, name) for key, name in self.json_params.items()}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    def hand_over(self, settings: dict[str, Any]) -> Iterator[Problem]:
        """Fill "auto" in the optimizer section of a DeepSpeed JSON that is handed over, and yield its problems."""
        yield from ()

    def problems(self, kernel: str) -> Iterator[Problem]:
        """Yield problems of this section, alone or with kernels.optimizer."""
        if kernel not in self.kernels:
            text = f"{kernel} has no exact {self.name}; set {' or '.join(self.kernels)}"
            yield Problem("kernels.optimizer", text, ("optimizer.name",))

    def stage_problems(self, zero_stage: int) -> Iterator[Problem]:
        """Yield a problem if the update is not exact under a ZeRO stage."""
        if zero_stage not in self.zero_stages:
            exact = ", ".join(map(str, self.zero_stages))
            text = f"{zero_stage}: optimizer.name {self.name} is exact under stage {exact} only; use one of these"
            yield Problem("zero_optimization.stage", text, ("optimizer.name",))

    def tensor_parallel_problems(self, size: int, kernel: str) -> Iterator[Problem]:
        """Yield reasons why the update is not exact on `size` > 1 tensor-parallel ranks."""
        if not self.tensor_parallel:
            text = f"{size}, but optimizer.name {self.name} needs complete parameters; set 1, or another optimizer"
            yield Problem("parallel.tensor_parallel_size", text, ("optimizer.name",))

    def workspace(self, sizes: UpdateSizes) -> int:
        """Return the bytes that an update holds in addition to its states, without complete matrices."""
        return 0

    def matrix_flops(self, blocks: Sequence[int], columns: int) -> float:
        """Return the operations of an update of the matrices [rows, columns] with the rows of `blocks`."""
        return 0.0


class ScheduleSection(Section):
    """Learning rate per step: a warmup, then the decay of the named schedule, which adds further settings."""

    decays_to_the_end: ClassVar[bool] = True
    """True if the learning rate is final_learning_rate from total_steps on."""

    name: str
    """Name of a registered schedule."""
    warmup_steps: NonNegativeSteps | None = None
    """Steps of warmup; give this or warmup_fraction."""
    warmup_fraction: Probability | None = None
    """Warmup as a fraction of total_steps, rounded down; no warmup if neither is given."""
    total_steps: PositiveSteps | None = None
    """Schedule step at which the decay ends; null is start_step + training.max_steps."""
    start_step: NonNegativeSteps = 0
    """Schedule step of the run's first step (of a run that continues the schedule of another)."""
    final_learning_rate: LearningRate = 0.0
    """Learning rate at total_steps and after."""
    warmup_shape: Literal["linear", "constant"] = "linear"
    """Learning rate in the warmup: `linear` rises from 0, `constant` is the peak (T5, before `inverse_sqrt`)."""

    def problems(self, total_steps: int, warmup_steps: int) -> Iterator[Problem]:
        """Yield problems of this section with the resolved steps."""
        yield from ()
