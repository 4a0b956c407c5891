"""Training steps of this package as sides of a benchmark: the engine's, and those of the bare model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, cycle
from typing import TYPE_CHECKING

from ctxlm_ds.recipe.schema import RunConfig
from tools.benchmark.turns import StepDone

if TYPE_CHECKING:
    from ctxlm_ds.data.stream.loader import Step


@dataclass(frozen=True)
class EngineSteps:
    """Engine.train_step under DeepSpeed, as the trainer calls it."""

    config: RunConfig
    deepspeed: str
    """DeepSpeed JSON: a path or a name."""

    def run(self, step_done: StepDone) -> None:
        """Take steps forever."""
        from ctxlm_ds.pretrain import join_ranks
        from ctxlm_ds.process.launch import discover_ranks
        from ctxlm_ds.recipe.deepspeed import build_deepspeed_config
        from ctxlm_ds.recipe.json_source import load_deepspeed_json

        config = self.config
        settings = build_deepspeed_config(config, load_deepspeed_json(self.deepspeed), 1)
        topology = join_ranks(config.parallel, config.training, settings, discover_ranks())
        from ctxlm_ds.objectives.base import build_objective
        from ctxlm_ds.run import engine_builder, initialize_weights
        from ctxlm_ds.training.engine.runtime import explain_out_of_memory

        with explain_out_of_memory(config):
            engine = engine_builder(config, settings, build_objective(config.objective), topology)()
            engine.forget_updates()
            initialize_weights(engine)
            for index, step in zip(count(), cycle(self.steps()), strict=False):
                engine.train_step(step, index, config.optimizer.learning_rate)
                step_done()

    def steps(self) -> list[Step]:
        """Return the steps to repeat."""
        from ctxlm_ds.objectives.base import build_objective
        from tools.benchmark.batches import full_rows

        return full_rows(self.config, build_objective(self.config.objective))


@dataclass(frozen=True)
class BareSteps:
    """The model of the recipe in a plain loop: weights and AdamW in the precision of the run, no DeepSpeed."""

    config: RunConfig

    def run(self, step_done: StepDone) -> None:
        """Take steps forever."""
        from ctxlm_ds.process.launch import discover_ranks, prepare_process

        prepare_process(discover_ranks())
        import torch

        from ctxlm_ds.kernels.dispatch import DTYPES, KernelSet
        from ctxlm_ds.models.layers import ModelBuild
        from ctxlm_ds.models.program import build_program
        from ctxlm_ds.objectives.base import build_objective
        from ctxlm_ds.parallel.context import DropoutStreams, ParallelContext
        from ctxlm_ds.training.engine.losses import TermLosses
        from ctxlm_ds.training.engine.runtime import compile_setting
        from tools.benchmark.batches import full_rows
        from tools.benchmark.plain_loop import PlainLoop, on_device

        config = self.config
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype, objective = DTYPES[config.training.precision], build_objective(config.objective)
        parallel = ParallelContext(dropout=DropoutStreams(config.training.seed, enabled=config.model.drops))
        build = ModelBuild(
            objective.outputs,
            KernelSet(dict(config.kernels), device.type, dtype),
            parallel,
            recompute=config.training.activation_checkpointing,
            compile=compile_setting(config.training, config.parallel, 1, device.type),
            shares_rows=config.data.shares_rows,
        )
        model = build_program(config.model, build).module(config.training.seed).to(device, dtype).train()
        losses = TermLosses(objective.terms, objective.tensors, parallel)
        loop = PlainLoop(config, model)
        for index, step in zip(count(), cycle(full_rows(config, objective)), strict=False):
            values = [term.weight / step.counts[term.name] for term in objective.terms]
            factors = torch.tensor(values, device=device)
            for number, batch in enumerate(step.micro_batches):
                parallel.dropout.begin(index, number, device)
                fields = on_device(batch.fields, device)
                losses(model.run(fields), fields, factors)[0].backward()
            loop.update()
            step_done()
