"""What a kind of task does: examples to features, a model class, outputs to predictions and scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.task import TaskDescription
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.recipe.problems import show_value

IGNORED_LABEL = -100


@dataclass(eq=False)
class Features(Dataset[dict[str, Any]]):
    """Features of examples: what the model reads, and where each row comes from."""

    rows: list[dict[str, Any]]
    sources: list[dict[str, Any]]
    """Of each row: number of its example, and what the kind needs to read the outputs."""
    examples: Sequence[Example]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


@dataclass(frozen=True)
class Prediction:
    """What the model says about one example."""

    value: Any
    """Label, number, tags, or text of an answer."""
    probabilities: Any = None
    """Probability of each label (of each word for tags), or of the answer."""


@dataclass
class Kind(ABC):
    """One kind of task, with the tokenizer of the model that is fine-tuned."""

    auto: ClassVar[str]
    """Name of transformers' auto class of the kind."""
    collates: ClassVar[str] = "DataCollatorWithPadding"
    """Name of transformers' class that makes a batch of features."""
    reads_whole: ClassVar[bool] = False
    """True if the head reads one vector of a row, false if one of each token."""
    reads_end = False
    """True if the head reads the vector of the token that ends a text (`prepare.make_kind` finds out)."""
    new_tokens: ClassVar[bool] = False
    """True if the inputs have tokens that the model does not know, whose embeddings must be trained."""

    task: TaskDescription
    tokenizer: Any
    """None if the kind reads vectors."""
    labels: list[str]
    max_length: int

    @classmethod
    def find_labels(cls, task: TaskDescription, train: Sequence[Example]) -> list[str]:
        """Return the labels in order; [] if the kind has none."""
        return []

    def check(self, examples: Sequence[Example]) -> None:  # noqa: B027
        """Refuse examples that do not fit (DataError with file and line); here none, the reader has checked them."""

    def target(self, example: Example) -> Any:
        """Return what is learned for an example: number of its label or of each tag, or a number.

        A kind that learns places in a text or a text encodes them itself and has no such target.
        """
        raise NotImplementedError

    @abstractmethod
    def features(self, examples: Sequence[Example]) -> Features:
        """Return what the model reads."""

    def configure(self, config: Any) -> None:  # noqa: B027
        """Adapt the model's configuration; refuse a model that the kind cannot use (ConfigError)."""

    def extend(self, base: Any) -> Any:
        """Return an extended class of transformers' class for the model; None takes that."""
        return None

    def model(self, folder: Path, config: Any, random: bool) -> Any:
        """Return the model in fp32: from a folder's weights (safetensors only), or of random weights.

        A folder's 16-bit weights are widened: small updates would vanish in their rounding. Modules that the folder
        does not have are drawn by the seed; weights of other sizes are refused (ConfigError).
        """
        auto_class = getattr(transformers, self.auto)
        found = auto_class._model_mapping[type(config)]
        base = found[0] if isinstance(found, (list, tuple)) else found
        extended = self.extend(base)
        if extended is not None:
            # Its weights can be read by the class that it extends, which ignores the further ones.
            extended.__name__ = extended.__qualname__ = base.__name__
        if random:
            return (auto_class.from_config if extended is None else extended._from_config)(config, dtype=torch.float32)
        options = {"config": config, "dtype": torch.float32, "use_safetensors": True, "local_files_only": True}
        try:
            model, loading = (extended or auto_class).from_pretrained(folder, output_loading_info=True, **options)
        except RuntimeError as error:
            if "ignore_mismatched_sizes" not in str(error):
                raise
            raise ConfigError(
                f"--model {folder}: weights of other sizes than the task needs; a model fine-tuned on a task with "
                "other labels cannot be its start, give the pretrained one"
            ) from None
        check_weights(folder, model, loading["missing_keys"], f"{model.base_model_prefix}.")
        return model

    def collator(self) -> Any:
        """Return what makes a batch of features."""
        return getattr(transformers, self.collates)(self.tokenizer)

    def arguments(self, **given: Any) -> Any:
        """Return transformers' TrainingArguments, or a class of it."""
        return transformers.TrainingArguments(**given)

    def trainer(self, **given: Any) -> Any:
        """Return transformers' Trainer, or a class of it."""
        return transformers.Trainer(**given)

    @abstractmethod
    def predict(self, outputs: Any, features: Features) -> list[Prediction]:
        """Return one prediction per example from the model's outputs for all features."""

    def keep_logits(self, outputs: Any, labels: Any) -> Any:
        """Return the outputs that `predict` reads; encoder-decoders also return large states."""
        return outputs[0] if isinstance(outputs, tuple) else outputs

    def facts(self, model: Any) -> dict[str, Any]:
        """Return what a trained model shows in addition to its scores, for metrics.json."""
        return {}

    @abstractmethod
    def is_right(self, prediction: Prediction, example: Example) -> bool:
        """Return whether a prediction is completely right."""

    @abstractmethod
    def score(self, predictions: Sequence[Prediction], examples: Sequence[Example]) -> dict[str, float]:
        """Return the task's metrics."""

    def most_frequent(self, train: Sequence[Example], dev: Sequence[Example]) -> dict[str, float]:
        """Return the scores of the most frequent training label (or tag, without spans); of other answers none."""
        if self.task.entry.answer not in ("label", "tags") or self.task.scheme is not None:
            return {}
        ((label, _),) = Counter(one for example in train for one in example.tags or (example.label,)).most_common(1)
        return self.score([Prediction([label] * len(one.tags) if one.tags else label) for one in dev], dev)


def check_label(label: str, known: Sequence[str], example: Example, word: int | None = None) -> None:
    """Refuse a label, of a word or of all, that the training file does not have (DataError with file and line)."""
    if label not in known:
        has = ", ".join(known) or "none"
        origin = example.origin if word is None else example.origin_of(word)
        noun = "tag" if example.tags else "label"
        raise DataError(f"{origin}: unknown {noun} {show_value(label)}; the training file has {has}")


def check_weights(folder: Path, model: torch.nn.Module, missing: Iterable[str] = (), prefix: str = "") -> None:
    """Raise ConfigError if a weight is not finite, or one `missing` that begins with `prefix` is no pooler's."""
    for name in sorted(missing):
        if name.startswith(prefix) and "pooler" not in name:
            raise ConfigError(f"{folder}: has no {name}; are its weights those of a wrapped model (module.…)?")
    for name, value in model.named_parameters():
        if not value.isfinite().all():
            raise ConfigError(f"{folder}: {name} has NaN or infinite values; the model is damaged, take an earlier one")


def quiet_transformers() -> None:
    """Silence its progress bars and its list of the weights of heads that a task does not use."""
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()


def softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return probabilities along the last axis."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)
