"""What the golden runs train: streams of rows, the models on them, each model's precision and layout.

Recipes are dicts as a recipe file has them, with paths relative to the folder of the data (run_case.prepare_data).
Nothing here imports the project. Dropout is 0 everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Sections = dict[str, dict[str, Any]]

STEPS = 8
MICRO_BATCHES = 2
DIGESTED_STEPS = 3
"""First steps of a stream whose micro-batches are kept as digests."""
TOKENIZERS = {"wordpiece": 120, "bpe": 300, "gpt2": 300, "t5": 160, "xlnet": 70, "elmo": 40}
"""Type, which also names the folder -> size of the vocabulary (byte-level ones hold every byte, T5's 100 sentinels)."""
DATASETS = {
    "bert": ("wordpiece", "--split-sentences"),
    "roberta": ("bpe", "--split-sentences", "--leading-space"),
    "gpt1": ("wordpiece", "--append-eod"),
    "gpt2": ("gpt2", "--append-eod"),
    "llama": ("gpt2", "--append-eod"),
    "t5": ("t5",),
    "bart": ("bpe", "--split-sentences", "--leading-space"),
    "xlnet": ("xlnet", "--split-sentences", "--append-eod"),
    "elmo": ("elmo", "--split-sentences"),
}
"""Family -> its tokenizer, and the options of its dataset."""


def dataset_prefix(family: str) -> str:
    """The dataset of a family, as tools/preprocess_data.py names it."""
    return f"{family}_text_{'sentence' if '--split-sentences' in DATASETS[family] else 'document'}"


def _stream(family: str, sample_format: str, data: Any = None, masks: Any = None) -> Sections:
    objectives = {
        "bert": "masked_lm_nsp", "roberta": "masked_lm", "t5": "span_corruption", "bart": "text_infilling",
        "xlnet": "permutation_lm", "elmo": "bidirectional_lm",
    }  # fmt: skip
    return {
        "tokenizer": {"path": DATASETS[family][0]},
        "data": {
            "train": [dataset_prefix(family)], "split": "8,2,0", "seq_length": 32, "sample_format": sample_format,
            "num_workers": 0, **(data or {}),
        },
        "objective": {"name": objectives.get(family, "causal_lm"), **(masks or {})},
    }  # fmt: skip


_FAIRSEQ = {"special_tokens": "roberta", "count_rounding": "probabilistic"}
_DENSE = {"separate_sentences": False}
_PACKED = {**_DENSE, "packing": True, "max_sequences_per_row": 4, "seq_length": 64}
STREAMS: dict[str, Sections] = {
    "bert": _stream("bert", "segment_pair"),
    "bert-whole-word": _stream("bert", "segment_pair", masks={"whole_word": True}),
    "bert-static": _stream("bert", "segment_pair", {"num_duplicates": 2}, {"masking": "static"}),
    "bert-sentence-pair": _stream("bert", "sentence_pair", masks={"special_tokens": "bert"}),
    "roberta": _stream("roberta", "full_sentences", _DENSE, _FAIRSEQ),
    "roberta-packed": _stream("roberta", "full_sentences", _PACKED),
    "roberta-documents": _stream("roberta", "doc_sentences", _PACKED, _FAIRSEQ),
    "gpt1": _stream("gpt1", "blocks", {"max_sequences_per_row": 3}),
    "gpt2": _stream("gpt2", "blocks", {"max_sequences_per_row": 3}),
    "gpt2-unbroken": _stream("gpt2", "blocks", {"reset_at_documents": False}),
    "llama": _stream("llama", "blocks", {"max_sequences_per_row": 3}),
    "t5": _stream("t5", "chunks"),
    "bart": _stream("bart", "doc_sentences", _DENSE),
    "xlnet": _stream("xlnet", "text_and_pair", {"both_directions": True}),
    "elmo": _stream("elmo", "bidirectional_lanes", {"seq_length": 12}),
}
"""The sections that decide which rows a run sees: tokenizer, data and objective."""

_SHAPE = {
    "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64,
    "initializer_range": 0.1, "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "bert": {**_SHAPE, "family": "bert", "num_layers": 4, "layer_norm_eps": 1e-12},
    "roberta": {**_SHAPE, "family": "roberta", "num_layers": 4, "layer_norm_eps": 1e-5},
    "gpt1": {
        **_SHAPE, "family": "gpt1", "num_layers": 3, "layer_norm_eps": 1e-5, "hidden_activation": "gelu_tanh",
        "intermediate_size": 128,
    },
    "gpt2": {
        **_SHAPE, "family": "gpt2", "num_layers": 3, "layer_norm_eps": 1e-5, "hidden_activation": "gelu_tanh",
        "intermediate_size": 128,
    },
    "llama": {**_SHAPE, "family": "llama", "num_layers": 3, "num_key_value_heads": 2, "layer_norm_eps": 1e-5},
    "t5": {
        "family": "t5", "hidden_size": 32, "num_layers": 2, "num_decoder_layers": 2, "num_attention_heads": 4,
        "head_size": 8, "intermediate_size": 64, "relative_buckets": 8, "relative_reach": 12, "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "bart": {
        **_SHAPE, "family": "bart", "num_layers": 2, "num_decoder_layers": 2, "layer_norm_eps": 1e-5,
        "activation_dropout": 0.0,
    },
    "xlnet": {
        "family": "xlnet", "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "initializer_range": 0.1, "hidden_dropout": 0.0, "attention_dropout": 0.0, "mem_len": 24,
    },
    "elmo": {
        "family": "elmo", "projection_size": 32, "cell_size": 48, "num_sampled": 16, "character_size": 8,
        "filters": [[1, 8], [2, 16], [3, 32]], "num_highways": 1, "dropout": 0.0,
    },
}  # fmt: skip
"""Family -> the recipe's section `model`."""
OLD_FAMILIES = ("bert", "roberta", "gpt1", "gpt2")
"""Families of the checkpoints that are kept."""


@dataclass(frozen=True)
class Case:
    """A run of STEPS steps; `changes` are settings of sections beside what stream, family and precision give."""

    name: str
    stream: str
    precision: str
    zero_stage: int
    tensor: int = 1
    pipeline: int = 1
    ranks: int = 1
    changes: Sections = field(default_factory=dict)

    @property
    def family(self) -> str:
        return self.stream.partition("-")[0]

    def recipe(self) -> dict[str, Any]:
        """The values of the recipe file."""
        micro_batch_size, copies = 4, self.ranks // (self.tensor * self.pipeline)
        settings: dict[str, Any] = {
            "name": self.name,
            "model": MODELS[self.family],
            **STREAMS[self.stream],
            "optimizer": {"learning_rate": 0.01, "weight_decay": 0.1, "gradient_clipping": 0.5},
            "schedule": {"warmup_steps": 2, "total_steps": 2 * STEPS},
            "training": {
                "global_batch_size": micro_batch_size * MICRO_BATCHES * copies, "micro_batch_size": micro_batch_size,
                "max_steps": STEPS, "seed": 11, "precision": self.precision,
            },
            "parallel": {"tensor_parallel_size": self.tensor, "pipeline_parallel_size": self.pipeline},
            "evaluation": {"interval_steps": STEPS // 2, "max_rows": 8},
            "checkpoint": {"interval_steps": STEPS},
            "logging": {"interval_steps": 1, "tensorboard": False},
        }  # fmt: skip
        return settings | {section: {**settings.get(section, {}), **self.changes[section]} for section in self.changes}


def _split(name: str, stream: str, precision: str, zero_stage: int = 1, **changes: dict[str, Any]) -> Case:
    """Over 4 ranks: halves of each layer, the layers in two stages."""
    return Case(name, stream, precision, zero_stage, tensor=2, pipeline=2, ranks=4, changes=changes)


_SEQUENCE = {"parallel": {"sequence_parallel": True}}
# Two rows a lane, so that an evaluation carries a state.
_LANES = {"evaluation": {"max_rows": 16}}
_REFERENCE = {"attention": "reference", "layer_norm": "reference", "bias_gelu": "reference", "optimizer": "reference"}
_RECOMPUTE = {"activation_checkpointing": True}
# With an epsilon that is not lost beside the variance, as BERT's 1e-12 is.
_PRE_NORM = {"pre_layer_norm": True, "layer_norm_eps": 1e-5}
CASES = [
    Case("bert-fp32", "bert", "fp32", 0),
    Case("bert-bf16", "bert-whole-word", "bf16", 2, changes={"training": _RECOMPUTE}),
    Case("bert-fp32-pre-norm", "bert", "fp32", 0, changes={"model": _PRE_NORM, "kernels": _REFERENCE}),
    _split("bert-fp32-split", "bert", "fp32", **_SEQUENCE),
    _split("bert-bf16-split", "bert", "bf16", model=_PRE_NORM),
    Case("roberta-fp32", "roberta", "fp32", 0),
    Case("roberta-bf16", "roberta-packed", "bf16", 1),
    _split("roberta-fp32-split", "roberta", "fp32", 0, **_SEQUENCE),
    _split("roberta-bf16-split", "roberta-documents", "bf16"),
    Case("gpt1-fp32", "gpt1", "fp32", 0),
    Case("gpt1-bf16", "gpt1", "bf16", 2),
    _split("gpt1-fp32-split", "gpt1", "fp32", **_SEQUENCE),
    _split("gpt1-bf16-split", "gpt1", "bf16", training=_RECOMPUTE),
    Case("gpt2-fp32", "gpt2", "fp32", 0),
    Case("gpt2-bf16", "gpt2-unbroken", "bf16", 1),
    _split("gpt2-fp32-split", "gpt2", "fp32", **_SEQUENCE),
    _split("gpt2-bf16-split", "gpt2", "bf16"),
    Case("gpt2-fp32-zero3", "gpt2", "fp32", 3, ranks=2),
    Case("llama-fp32", "llama", "fp32", 0),
    _split("llama-bf16-split", "llama", "bf16", **_SEQUENCE),
    Case("t5-fp32", "t5", "fp32", 0),
    _split("t5-bf16-split", "t5", "bf16", **_SEQUENCE),
    Case("bart-fp32", "bart", "fp32", 0),
    _split("bart-bf16-split", "bart", "bf16", **_SEQUENCE),
    Case("xlnet-fp32", "xlnet", "fp32", 0, changes=_LANES),
    _split("xlnet-bf16-split", "xlnet", "bf16", **_SEQUENCE, **_LANES),
    Case("elmo-fp32", "elmo", "fp32", 0, changes=_LANES),
    _split("elmo-bf16-split", "elmo", "bf16", **_SEQUENCE, **_LANES),
]
"""Nine families, fp32 and bf16, on one rank and split over four (ZeRO 0 does not go with bf16)."""

_TINY = {"hidden_size": 4, "num_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}


def old_run(family: str) -> Case:
    """The run that leaves the checkpoint of a family kept in checkpoints/: as small as its tokenizer allows."""
    model = {**_TINY, "intermediate_size": 16 if family.startswith("gpt") else 8}
    changes = {"model": model, "training": {"max_steps": 3}, "checkpoint": {"interval_steps": 3}}
    return Case(f"old-{family}", family, "fp32", 0, changes=changes)


def new_run(family: str, initialize_from: str) -> dict[str, Any]:
    """A recipe that starts from other weights and ends after one step at a learning rate of 0."""
    recipe = old_run(family).recipe()
    return recipe | {
        "name": f"new-{family}",
        "initialize_from": initialize_from,
        "training": {**recipe["training"], "max_steps": 1, "seed": 12},
        "checkpoint": {"interval_steps": 1},
    }
