"""A tiny model and fixed global batches for tests that train under several layouts."""

from __future__ import annotations

import itertools
import os
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

# Imported before the ranks are forked, so that each need not import it again (seconds of torch.compile's machinery).
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
import torch

from ctxlm_ds import run as run_builder
from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.parallel.topology import build_topology
from ctxlm_ds.process.launch import clear_stale_build_locks, quiet_libraries
from ctxlm_ds.recipe import choices
from ctxlm_ds.recipe.deepspeed import build_deepspeed_config
from ctxlm_ds.recipe.schema import RunConfig, TrainingConfig
from ctxlm_ds.training.engine.engine import Engine
from ctxlm_ds.training.engine.runtime import init_process_group
from tests.sample_data import FakeTokenizer
from tests.sections import data_section, model_section, objective_section

SEQ_LENGTH, SLOTS, VOCAB = 16, 4, 61
GLOBAL_BATCH = 16
OBJECTIVES = {"bert": "masked_lm_nsp", "roberta": "masked_lm", "gpt2": "causal_lm", "gpt1": "causal_lm"}
DOCUMENT_SLOTS = 3


def tiny_config(family: str = "bert", dropout: float = 0.0, **changes: Any) -> RunConfig:
    """A two-layer model; `changes` are whole sections."""
    is_decoder = OBJECTIVES[family] == "causal_lm"
    blocks = data_section(sample_format="blocks", seq_length=SEQ_LENGTH, max_sequences_per_row=DOCUMENT_SLOTS)
    values: dict[str, Any] = {
        "model": model_section(
            family=family,
            vocab_size=VOCAB,
            hidden_size=16,
            num_layers=2,
            num_attention_heads=2,
            intermediate_size=64 if family == "gpt1" else 32,
            max_position_embeddings=SEQ_LENGTH,
            hidden_dropout=dropout,
            attention_dropout=dropout,
            initializer_range=0.1,
            hidden_activation="gelu_tanh" if is_decoder else "gelu",
        ),
        "data": blocks if is_decoder else data_section(seq_length=SEQ_LENGTH),
        "objective": objective_section(name=OBJECTIVES[family]),
        "optimizer": choices.OPTIMIZER.make(learning_rate=0.01, weight_decay=0.1),
        "training": TrainingConfig(global_batch_size=GLOBAL_BATCH, micro_batch_size=4, precision="fp32"),
    }
    values.update(changes)
    return RunConfig(**values)


def global_batch(step: int) -> Batch:
    """Rows of different lengths with different numbers of predictions, so that no split is even."""
    generator = torch.Generator().manual_seed(1000 + step)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    lengths = integers(6, SEQ_LENGTH + 1, GLOBAL_BATCH, 1)
    inside = torch.arange(SEQ_LENGTH)[None, :] < lengths
    num_predictions = integers(1, SLOTS + 1, GLOBAL_BATCH, 1)
    slots = torch.arange(SLOTS)[None, :] < num_predictions
    labels = torch.where(slots, integers(5, VOCAB, GLOBAL_BATCH, SLOTS), IGNORE_LABEL)
    return Batch(
        {
            "input_ids": torch.where(inside, integers(5, VOCAB, GLOBAL_BATCH, SEQ_LENGTH), 0),
            "token_type_ids": (torch.arange(SEQ_LENGTH)[None, :] >= 4).long() * inside,
            "position_ids": torch.arange(SEQ_LENGTH)[None, :] * inside,
            "sequence_ids": inside.long(),
            "sequence_starts": torch.cat([torch.zeros_like(lengths), lengths], dim=1),
            "prediction_positions": torch.where(slots, torch.arange(1, SLOTS + 1)[None, :], 0),
            "cls_positions": torch.zeros(GLOBAL_BATCH, 1, dtype=torch.long),
            "masked_lm_labels": labels,
            "next_sentence_labels": integers(0, 2, GLOBAL_BATCH, 1),
        }
    )


def global_blocks(step: int) -> Batch:
    """Rows of one to three documents for causal language models, some rows padded at the end."""
    generator = torch.Generator().manual_seed(2000 + step)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    cuts = torch.sort(integers(1, SEQ_LENGTH + 1, GLOBAL_BATCH, DOCUMENT_SLOTS)).values
    starts = torch.cat([torch.zeros_like(cuts[:, :1]), cuts], dim=1)
    places = torch.arange(SEQ_LENGTH).expand(GLOBAL_BATCH, -1)
    document = (places[:, :, None] >= starts[:, None, :]).sum(dim=2)
    inside = document <= DOCUMENT_SLOTS
    begin = starts.gather(1, document - 1)
    return Batch(
        {
            "input_ids": torch.where(inside, integers(5, VOCAB, GLOBAL_BATCH, SEQ_LENGTH), 0),
            "position_ids": (places - begin) * inside,
            "sequence_ids": document * inside,
            "sequence_starts": starts,
            "causal_lm_labels": torch.where(inside, integers(5, VOCAB, GLOBAL_BATCH, SEQ_LENGTH), IGNORE_LABEL),
        }
    )


def slice_batch(batch: Batch, start: int, stop: int) -> Batch:
    """Rows [start, stop) of a batch."""
    return Batch({name: tensor[start:stop] for name, tensor in batch.fields.items()})


def step_for_rank(step: int, micro_batch_size: int, rank: int, world_size: int, family: str = "bert") -> Step:
    """This rank's micro-batches of a global batch, dealt out in turn."""
    whole = global_blocks(step) if OBJECTIVES[family] == "causal_lm" else global_batch(step)
    starts = range(0, GLOBAL_BATCH, micro_batch_size)[rank::world_size]
    micro = [slice_batch(whole, start, start + micro_batch_size) for start in starts]
    labels = [name for name in whole.fields if name.endswith("_labels")]
    counts = {
        name.removesuffix("_labels"): sum(int((b.fields[name] != IGNORE_LABEL).sum()) for b in micro) for name in labels
    }
    counts |= {f"{name}_z": count for name, count in counts.items()}
    tokens = sum(b.num_tokens for b in micro)
    return Step(micro_batches=micro, counts=counts, num_tokens=tokens, rows_consumed=GLOBAL_BATCH, epoch=0)


def build_engine(config: RunConfig, user_json: dict[str, Any], checkpointing: bool = False) -> Engine:
    """An engine over this process group with the keyed initial weights."""
    quiet_libraries()
    clear_stale_build_locks()
    init_process_group()
    layout = config.parallel
    topology = build_topology(
        0, 1, layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.context_parallel_size
    )
    if checkpointing:
        recomputed = config.training.model_copy(update={"activation_checkpointing": True})
        config = config.model_copy(update={"training": recomputed})
    settings = build_deepspeed_config(config, user_json, topology.world_size)
    objective = build_objective(config.objective, FakeTokenizer(vocab_size=VOCAB))
    engine = run_builder.engine_builder(config, settings, objective, topology)()
    run_builder.initialize_weights(engine)
    return engine


def train(rank: int, world_size: int, config: RunConfig, user_json: dict[str, Any], num_steps: int) -> dict[str, Any]:
    """Losses, gradient norms and whole fp32 weights after `num_steps` steps at the peak learning rate."""
    engine = build_engine(config, user_json, config.training.activation_checkpointing)
    losses, norms = [], []
    for step in range(num_steps):
        result = engine.train_step(step_of(engine, step), step, config.optimizer.learning_rate)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return {"losses": losses, "norms": norms, "weights": gather_weights(engine)}


def step_of(engine: Engine, step: int) -> Step:
    """An engine's micro-batches of a global batch."""
    topology = engine.topology
    ranks = topology.data_parallel_rank, topology.data_parallel_size
    return step_for_rank(step, engine.config.training.micro_batch_size, *ranks, family=engine.config.model.family)


def gather_weights(engine: Engine) -> dict[str, torch.Tensor]:
    """Every parameter's whole fp32 value, assembled from all ranks' fragments, on rank 0; nothing on the others."""
    pieces = [(f.name, f.shard, f.start, f.weight().numpy()) for f in engine.fragments()]
    shapes = engine.program.trained_shapes
    return assembled(engine, pieces, {name: torch.full(shape, float("nan")) for name, shape in shapes.items()})


def assembled(engine: Engine, own: list[Any], whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of which every rank has pieces (name, shard, start, values), on rank 0; nothing on the others."""
    world_size = engine.topology.world_size
    found: list[Any] | None = [own] * world_size if engine.topology.is_main else None
    if world_size > 1:
        torch.distributed.gather_object(own, found)
    for name, shard, start, values in itertools.chain.from_iterable(found or []):
        whole.setdefault(name, torch.full(shard.shape, float("nan")))
        shard.place(whole[name], torch.from_numpy(values), start)
    return whole if found else {}
