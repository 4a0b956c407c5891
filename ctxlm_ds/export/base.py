"""The interface of a family's export: its classes in transformers, or a format of its authors' programs.

In: the family's section, the outputs (heads) that an objective asks for, the files of a folder. Out: what the generic
code of this package writes, reads and compares. Not here: any family (families/*/export.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.key_maps import KeyMap, Shape, WeightSource
from ctxlm_ds.recipe.sections import ModelSection
from ctxlm_ds.registry import FAMILIES, load_object
from ctxlm_ds.tokenizers.base import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

Fields = dict[str, "Tensor"]
"""Fields of a batch by name."""


class TokenIds(Protocol):
    """The ids that a Hugging Face config names; a Tokenizer has them."""

    @property
    def pad_id(self) -> int: ...

    @property
    def cls_id(self) -> int: ...

    @property
    def sep_id(self) -> int: ...


class Rows(NamedTuple):
    """Token ids and token types of some sequences."""

    ids: list[list[int]]
    types: list[list[int]]


@dataclass(frozen=True)
class CardText:
    """A model card's sentences about the family."""

    kind: str
    """Kind of model, after `A`."""
    heads: str
    """A sentence about what it predicts."""
    task: str | None
    """Its pipeline in transformers and on the Hub; None if transformers has none."""
    tag: str
    """Its tag on the Hub, in addition to the general ones."""
    usage: str
    """Lines of Python that use the pipeline, or `model` and `tokenizer`; the model is in `folder`."""
    language_model: str
    """Kind of language model, after `A`."""


def same(*names: str) -> dict[str, str]:
    """Return settings that have the same name here and there."""
    return {name: name for name in names}


COMMON_SETTINGS = same(
    "vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings",
    "initializer_range",
) | {"num_layers": "num_hidden_layers"}  # fmt: skip
"""Settings of BERT and of the classes that follow its names."""


ENDS = {"bos_token_id": "cls_id", "eos_token_id": "sep_id"}
"""A sequence's first and last token."""


class FamilyExport(ABC):
    """A family's part of the conversion to and from transformers.

    A family whose model is several classes of transformers has one export for each of them (`models`).
    """

    section: ClassVar[type[ModelSection]]
    model_type: ClassVar[str]
    """`model_type` of the config.json that it reads."""
    config_class: ClassVar[str]
    """Config class of transformers."""
    hf_classes: ClassVar[Mapping[frozenset[str], str]]
    """Outputs of a model -> model class of transformers that computes them."""
    extra_outputs: ClassVar[frozenset[str]] = frozenset()
    """Outputs whose heads no class of transformers has; an export keeps them in a separate file."""
    settings: ClassVar[Mapping[str, str]]
    """Our setting -> theirs with the same value."""
    activation_key: ClassVar[str]
    """Their setting for model.hidden_activation."""
    activations: ClassVar[Mapping[str, str]] = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}
    """Our activation -> their name for the same function."""
    further_activations: ClassVar[Mapping[str, str]] = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
    """Their further names -> our activation."""
    special_ids: ClassVar[Mapping[str, str]] = {}
    """Their settings of special tokens, in addition to padding -> TokenIds' name."""
    default_pad_id: ClassVar[int] = 0
    """Padding id of a config that names none."""
    plain_settings: ClassVar[Mapping[str, Any]] = {}
    """Settings with the only values that are imported: those with which the class computes the published model."""
    kept_settings: ClassVar[tuple[str, ...]] = ()
    """Their settings that our model does not have: an export of imported weights has the source's values."""
    tokenizer_settings: ClassVar[Mapping[str, Any]] = {}
    """Settings of the exported tokenizer that its class does not have."""
    proof_arguments: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Arguments with which the proof of a conversion makes a class, to leave out parts that a model lacks."""
    fixed_norm_eps: ClassVar[float | None] = None
    """Epsilon of every LayerNorm if no setting of the class changes it."""
    exact_gelu: ClassVar[bool] = False
    """The class's head always computes the exact gelu."""
    next_token_output: ClassVar[str | None] = None
    """The output [b, s, v] with the next token's logits at every position, if transformers' class can generate()."""

    encoder_decoder: ClassVar[bool] = False
    """True if a decoder writes; `next_token_output` then has its positions [b, t, v]."""
    position_outputs: ClassVar[frozenset[str]] = frozenset()
    """Outputs that have a value at every position. Padded positions are not compared."""
    folder: ClassVar[str] = ""
    """Folder of this class's files in an export; empty for the export's folder."""

    def models(self) -> tuple[FamilyExport, ...]:
        """Return the exports that together hold a model of the family; that of the export's folder is the first."""
        return (self,)

    def num_blocks(self, model: Any) -> int:
        """Return the number of layers of the class's model."""
        return int(model.num_blocks)

    @abstractmethod
    def key_map(self, model: Any, outputs: Sequence[str], pad_id: int) -> KeyMap:
        """Return the table for a model with these outputs; raise ExportError if no class computes it (`check`)."""

    def shared_outputs(self, outputs: Sequence[str]) -> tuple[str, ...]:
        """Return those of a model's outputs that this class of transformers can have."""
        return tuple(name for name in outputs if name not in self.extra_outputs)

    def claims(self, values: Mapping[str, Any]) -> bool:
        """Return whether a config.json is of this family although another one has the same `model_type`."""
        return False

    def check(self, model: Any, outputs: Sequence[str]) -> None:
        """Raise ExportError if no class of transformers computes this model."""
        classes = " and ".join(self.hf_classes.values())
        if self.fixed_norm_eps not in (None, getattr(model, "layer_norm_eps", None)):
            raise ExportError(
                f"model.layer_norm_eps is {model.layer_norm_eps:g}: {classes} always computes {self.fixed_norm_eps:g}; "
                "train with that to export"
            )
        if self.exact_gelu and model.hidden_activation != "gelu":
            raise ExportError(
                f"model.hidden_activation is {model.hidden_activation}: {classes}'s head always computes the exact "
                "gelu; train with model.hidden_activation: gelu to export"
            )
        if frozenset(outputs) not in self.hf_classes:
            raise ExportError(
                f"model.family {model.family} with {', '.join(outputs)}: no class of transformers computes these; "
                f"{', '.join(self.hf_classes.values())} do not"
            )

    def their_settings(self, model: Any, ids: TokenIds) -> dict[str, Any]:
        """Return the arguments of the config class for a model with vocab_size set."""
        settings = {theirs: getattr(model, ours) for ours, theirs in self.settings.items()}
        special = {theirs: getattr(ids, ours) for theirs, ours in self.special_ids.items()}
        activation = {self.activation_key: self.activations[model.hidden_activation]}
        return settings | activation | special | {"pad_token_id": ids.pad_id}

    def written_settings(self, model: Any) -> dict[str, Any]:
        """Return settings that config.json must have although their config class has other values."""
        return {}

    def our_settings(self, config: Any, folder: Path) -> dict[str, Any]:
        """Return our section's values for a config; raise ExportError if its activation is not one of ours."""
        known = {**{theirs: ours for ours, theirs in self.activations.items()}, **self.further_activations}
        activation = getattr(config, self.activation_key)
        if activation not in known:
            raise ExportError(
                f"{folder}/config.json: {self.activation_key} {activation!r} is not one of {', '.join(known)}"
            )
        return {ours: getattr(config, theirs) for ours, theirs in self.settings.items()} | {
            "family": self.section.model_fields["family"].default,
            "hidden_activation": known[activation],
        }

    def pad_id(self, config: Any) -> int:
        """Return the padding id that a config of transformers means."""
        return self.default_pad_id if config.pad_token_id is None else config.pad_token_id

    def outputs_in(self, file_names: Sequence[str]) -> tuple[str, ...]:
        """Return the outputs whose heads are among a folder's tensors; its config.json may declare another class."""
        (outputs,) = self.hf_classes
        return tuple(outputs)

    def import_warnings(self, read: Callable[[str], Tensor]) -> Iterator[str]:
        """Yield what an import changes or loses; `read(name in the table)` reads their tensors."""
        yield from ()

    def tokenizer_problem(self, pad_id: int, tokenizer: Tokenizer) -> str | None:
        """Return why a folder's tokenizer does not fit its config with this padding id; None if it does."""
        return None

    def start_id(self, ids: TokenIds) -> int:
        """Return the token that a decoder reads first, if the model has one."""
        return ids.pad_id

    def num_token_types(self, model: Any) -> int:
        """Return the number of token types that the model distinguishes."""
        return 1

    @abstractmethod
    def text_rows(self, loaded: Any, model: Any, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> Rows:
        """Return pairs of texts as rows; special tokens come from `loaded`, the tokenizer as transformers loads it.

        Raises ExportError if its special tokens are not those that the model was trained with.
        """

    def further_fields(self, fields: Fields) -> Fields:
        """Return fields that only this family's objectives have, for the rows with which a conversion is proved."""
        return {}

    def their_inputs(self, fields: Fields) -> Fields:
        """Return the arguments of transformers' forward for a batch's fields."""
        return {"input_ids": fields["input_ids"], "attention_mask": (fields["sequence_ids"] > 0).long()}

    def their_outputs(self, result: Any, fields: Fields) -> Fields:
        """Return the result of transformers' forward under our names and in our shapes; here, its logits."""
        ((output,),) = self.hf_classes
        return {output: result.logits}

    @abstractmethod
    def card(self, outputs: Sequence[str], mask_token: str) -> CardText:
        """Return the model card's sentences; `mask_token` is empty if the tokenizer has none."""


class EncoderDecoderExport(FamilyExport):
    """What exports of encoder-decoders share."""

    encoder_decoder = True

    def text_rows(self, loaded: Any, model: Any, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> Rows:
        """Encode each pair as one text with the end-of-text token, cut to the model's positions."""
        check_special_ids(loaded, tokenizer, pad="pad", eos="sep")
        most = None if model.longest_sequence is None else model.longest_sequence - 1
        rows = [[*ids[:most], tokenizer.sep_id] for ids in tokenizer.encode_batch([" ".join(pair) for pair in pairs])]
        return Rows(rows, [[0] * len(row) for row in rows])

    def their_inputs(self, fields: Fields) -> Fields:
        return super().their_inputs(fields) | {"decoder_input_ids": fields["decoder_input_ids"]}

    def write_card(self, kind: str, text: str) -> CardText:
        """Describe a model that writes; `text` is Python for what it reads."""
        usage = (
            f'inputs = tokenizer({text}, return_tensors="pt")\n'
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))\n"
        )
        heads = "Its decoder writes the target of the text that its encoder reads."
        return CardText(kind, heads, None, "text2text-generation", usage, "sequence-to-sequence")


def export_of(family: str) -> FamilyExport:
    """Return a family's export; raise ExportError if transformers has no such model."""
    target = FAMILIES.get(family).export
    if target is None:
        raise ExportError(
            f"model.family {family} has no class in transformers; its checkpoints can be used with this project only"
        )
    return load_object(target, f"the export of model.family {family}")


def all_exports() -> Iterator[FamilyExport]:
    """Yield the exports of all families, those of this package first."""
    for name in FAMILIES.names():
        if FAMILIES.get(name).export is not None:
            yield export_of(name)


def check_special_ids(loaded: Any, tokenizer: Tokenizer, **roles: str) -> None:
    """Raise ExportError unless the tokenizer as transformers loads it has our ids, by their role and ours."""
    theirs = {role: getattr(loaded, f"{role}_token_id") for role in roles}
    ours = {role: getattr(tokenizer, f"{own}_id") for role, own in roles.items()}
    if theirs != ours:
        raise ExportError(f"the exported tokenizer has the special tokens {theirs}, the model was trained with {ours}")


def at_positions(values: Tensor, positions: Tensor) -> Tensor:
    """Take values [b, s, v] at positions [b, p] of each row: [b, p, v]."""
    return values.gather(1, positions[:, :, None].expand(-1, -1, values.shape[-1]))


@dataclass(frozen=True)
class OwnFolder:
    """An opened folder."""

    source: WeightSource
    """Its weights under our names."""
    model: ModelSection
    """Its settings, with vocab_size set."""
    outputs: tuple[str, ...]
    """What the weights compute."""


class WordLayers(ABC):
    """A folder's model as a source of vectors of words, and of words' log-probabilities in both directions."""

    num_layers: int
    width: int

    @abstractmethod
    def __call__(self, sentences: Sequence[Sequence[str]]) -> list[NDArray[np.float32]]:
        """Return [layers, words, width] of each sentence; a sentence's vectors do not depend on the others."""

    @abstractmethod
    def split(self, text: str) -> list[tuple[str, tuple[int, int]]]:
        """Return the words of a text with their first characters and those behind their last ones; or ExportError."""

    @abstractmethod
    def log_probs(
        self, sentences: Sequence[Sequence[str]], before: Sequence[Sequence[str]]
    ) -> list[NDArray[np.float64]]:
        """Return the log-probabilities in nats of each sentence's words, forward and backward, [2, words].

        Sentences `before` are read first, unless the model is trained for states of zero. ExportError without softmax.
        """


class OwnFormat(ABC):
    """The format of a family whose models have no class in transformers.

    `to-hf` writes that format, model.safetensors with all weights under our names, config.json and the tokenizer.
    `initialize_from` reads it back.
    """

    title: ClassVar[str]
    """The format, for people."""
    loading: ClassVar[str]
    """Python that loads the folder `{folder}`."""

    @abstractmethod
    def claims(self, folder: Path) -> bool:
        """Return whether a folder has the files of the format."""

    @abstractmethod
    def write(self, folder: Path, model: ModelSection, source: WeightSource) -> None:
        """Write weights and settings; ExportError if the format cannot hold the model or a package is missing."""

    @abstractmethod
    def open(self, folder: Path) -> OwnFolder:
        """Open a folder; ExportError if a file is damaged or lacks weights, or a package is missing."""

    def word_layers(self, folder: Path) -> WordLayers:
        """Return what computes vectors of words from a folder's model; ExportError if it gives none."""
        raise ExportError(f"{folder}: models of this format ({self.title}) give no vectors of words")


def own_format_of(family: str) -> OwnFormat | None:
    """Return a family's format; None if transformers has its classes, or if it has neither."""
    target = FAMILIES.get(family).own_format
    return None if target is None else load_object(target, f"the format of model.family {family}")


def own_format_in(folder: Path) -> OwnFormat | None:
    """Return the format of a folder, or None if it is in none of them."""
    formats = (own_format_of(name) for name in FAMILIES.names())
    return next((each for each in formats if each is not None and each.claims(folder)), None)


class Tensors:
    """Weights under our names in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def shape(self, name: str) -> Shape:
        return tuple(self._tensors[name].shape)

    def read_full(self, name: str) -> Tensor:
        return self._tensors[name]
