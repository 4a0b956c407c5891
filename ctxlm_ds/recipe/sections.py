"""What every `model`, `objective` and `data` section has, whichever family, objective or sample format it names.

Generic code sees these classes only and calls their hooks; a registered family, objective or sample format brings a
subclass with its own settings. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_serializer, model_validator

from ctxlm_ds.recipe.problems import Problem
from ctxlm_ds.recipe.section import NonNegativeInt, PositiveFloat, PositiveInt, Section


class ModelSection(Section):
    """The shape of a model; its further settings are those of its family."""

    same_function: ClassVar[tuple[str, ...]] = ("family",)
    """Settings that change what the model computes but no shape: `initialize_from` compares them."""
    double_separator: ClassVar[bool] = False
    """Whether two separators stand between the segments of a pair."""

    family: str
    """Name of a registered family."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding; null takes the tokenizer's size. Larger than the tokenizer is allowed, smaller is not."""

    @property
    def num_blocks(self) -> int:
        """Number of repeated layers, before which a pipeline may be cut."""
        raise NotImplementedError

    @property
    def longest_sequence(self) -> int | None:
        """Longest sequence that the model can read; None for no limit."""
        return None

    @property
    def width(self) -> int | None:
        """Width of most layers, from which ZeRO-3's bucket sizes follow; None leaves them to DeepSpeed."""
        return None

    @property
    def drops(self) -> bool:
        """Whether any dropout is above 0."""
        return False

    @property
    def idle_settings(self) -> tuple[str, ...]:
        """Names of settings without effect beside the others; a warning names those that were changed."""
        return ()

    def problems(self) -> Iterator[Problem]:
        """Yield what is impossible in this section alone."""
        yield from ()

    def row_problems(self, data: DataSection) -> Iterator[Problem]:
        """Yield what keeps the model from reading the rows."""
        yield from ()

    def tensor_parallel_problems(self, size: int) -> Iterator[Problem]:
        """Yield what keeps `size` tensor-parallel ranks from sharing the layers."""
        yield from ()


class ObjectiveSection(Section):
    """What the model learns to predict; its further settings are those of its objective."""

    name: str
    """Name of a registered objective."""

    @property
    def idle_settings(self) -> tuple[str, ...]:
        """Names of settings without effect beside the others; a warning names those that were changed."""
        return ()

    def problems(self, data: DataSection) -> Iterator[Problem]:
        """Yield what is impossible in this section, alone or with the rows."""
        yield from ()


class TrainSource(Section):
    """One dataset to train on; its path alone may stand for it."""

    SHORT_FORM: ClassVar[str] = "path"

    path: str
    """Dataset prefix (without .bin/.idx)."""
    weight: PositiveFloat | None = None
    """Share of the rows in proportion to the other sources' (data.blend `weighted` or `megatron`)."""
    epochs: PositiveFloat | None = None
    """Passes over it in one epoch of the run, 1.5 and 0.5 too; null is 1 (data.blend `concatenate`)."""
    name: str | None = None
    """Name in tables and held-out figures; null is the last part of the path."""

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def _to_path(self, serialize: Callable[[TrainSource], dict[str, Any]]) -> str | dict[str, Any]:
        given = {key: value for key, value in serialize(self).items() if value is not None}
        return self.path if len(given) == 1 else given


class ValidationSource(Section):
    """One held-out dataset."""

    name: str
    """Name under which its figures appear (`eval/NAME/…`)."""
    path: str
    """Dataset prefix (without .bin/.idx)."""
    part: Literal["all", "train", "valid", "test"] = "all"
    """Which part of data.split; `all` takes every document."""


class DataSection(Section):
    """From indexed datasets to rows of a batch; its further settings are those of its sample format."""

    fixed: ClassVar[tuple[str, ...]] = ("blend", "temperature", "split", "seq_length", "sample_format")
    """Settings that a run cannot change when it resumes, for they decide its rows."""
    by_sentence: ClassVar[bool] = False
    """Whether a sequence of its datasets should be a sentence (preprocess_data.py --split-sentences)."""
    ends_documents: ClassVar[bool] = False
    """Whether its datasets must end each document with the separator (preprocess_data.py --append-eod)."""

    train: list[TrainSource] = []
    """Datasets to train on."""
    blend: Literal["concatenate", "weighted", "temperature", "megatron"] = "concatenate"
    """How they are mixed. `concatenate`: each source's rows as often as its epochs say, all shuffled together.
    `weighted`: shares by weight, whatever the sizes. `temperature`: shares in proportion to rows^(1/temperature).
    `megatron`: Megatron's order of sources (weights, or rows if none has one)."""
    temperature: Annotated[float, Field(ge=1.0)] = 1.0
    """`temperature` blends: 1 is in proportion to the rows, higher is more even (mBERT 1/0.7, XLM-R 1/0.3)."""
    split: str | None = None
    """Document-wise train, valid and test shares of each training dataset as in Megatron, `969,30,1`; trains on the
    first and, if data.validation is empty, evaluates each source's second. null trains on every document."""
    validation: list[ValidationSource] = []
    """Held-out datasets, evaluated a source at a time."""
    seq_length: PositiveInt = 128
    """Positions in a row, special tokens included."""
    sample_format: str
    """Name of a registered sample format."""
    sample_index_dir: str | None = None
    """Where sample indexes are kept; null keeps them beside each dataset."""
    num_workers: NonNegativeInt = 1
    """Loader worker processes per rank; 0 loads in the training process. Results do not depend on it."""
    prefetch_steps: PositiveInt = 2
    """Optimizer steps of batches each worker prepares ahead."""

    @property
    def shares_rows(self) -> bool:
        """Whether a row holds several sequences that never see each other."""
        return False

    @property
    def sequences_per_row(self) -> int:
        """Sequence slots of a row."""
        return 1

    @property
    def passes(self) -> int:
        """Passes over a dataset in one epoch of its sample index."""
        return 1

    @property
    def idle_settings(self) -> tuple[str, ...]:
        """Names of settings without effect beside the others; a warning names those that were changed."""
        return ()

    def problems(self, model: ModelSection) -> Iterator[Problem]:
        """Yield what is impossible in this section, alone or with the model."""
        yield from ()
