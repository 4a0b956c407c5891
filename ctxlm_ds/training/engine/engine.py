"""A small interface to DeepSpeed's engine: train a step, evaluate batches, access the fp32 states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from ctxlm_ds.console import logger
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.data.stream.loader import Step
from ctxlm_ds.kernels.dispatch import DTYPES
from ctxlm_ds.models.layers import LayerSequence
from ctxlm_ds.models.program import Program
from ctxlm_ds.models.stages import blocks_per_stage, plan_stages
from ctxlm_ds.objectives.base import Objective
from ctxlm_ds.parallel.parameters import fix_others
from ctxlm_ds.parallel.topology import Topology
from ctxlm_ds.process.launch import without_known_prints
from ctxlm_ds.recipe.schema import RunConfig, flat_settings
from ctxlm_ds.recipe.sections import EMA_KIND
from ctxlm_ds.recipe.zero import ZeroSettings
from ctxlm_ds.training.engine.average import WeightAverage
from ctxlm_ds.training.engine.forward_backward import PassContext, PlainPasses
from ctxlm_ds.training.engine.fragments import (
    Fragment,
    flat_tensors,
    is_moment,
    list_fragments,
    loaded_owners,
    prepare_folders,
    refresh_model_weights,
)
from ctxlm_ds.training.engine.losses import TermLosses, TokenChoice, means, perplexity, weighted_total
from ctxlm_ds.training.engine.runtime import (
    check_batch_ramp,
    check_precision,
    deepspeed_adam,
    device_type,
    engine_settings,
    holding_of,
    import_muon_uncompiled,
    keep_precision,
    leave_gradients_in_place,
    load_async_io,
    load_described_optimizer,
    model_parallel_unit,
    write_frozen,
)
from ctxlm_ds.training.engine.update import Clipping, FindSpike, StepJudge, StepTotals, Updater, loss_scaler
from ctxlm_ds.training.loop.state import Ahead, StepInterrupted, StepResult
from ctxlm_ds.training.optimizers.base import OptimizerPlace, optimizer_of
from ctxlm_ds.training.optimizers.build import (
    completed_updates,
    forget_state,
    parameter_groups,
    restore_state,
    use_full_vectors,
)
from ctxlm_ds.training.optimizers.steps import ParameterLayout, Sharers, Stepper

LOSS_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class Engine:
    """One rank's part of training, in any layout and ZeRO stage; losses are exact over the global batch."""

    def __init__(
        self,
        config: RunConfig,
        deepspeed_config: dict[str, Any],
        program: Program,
        objective: Objective,
        topology: Topology,
    ) -> None:
        """Build the model and DeepSpeed's engine from this rank's share of the program; weights are not set yet.

        Raises ConfigError or KernelError for an impossible configuration, on every rank.
        """
        # DeepSpeed counts the rows of every copy of the weights.
        rows = deepspeed_config["train_batch_size"] * topology.context_parallel_size
        deepspeed_config = deepspeed_config | {"train_batch_size": rows}
        zero = ZeroSettings.of_json(deepspeed_config)
        self.zero_stage = zero.stage
        check_precision(config.training, self.zero_stage)
        self.config = config
        self.first_step = 0  # of the phase, from which its dropout counts
        self.before_update: Callable[[], None] = lambda: None
        """Called in every step before weights and moments change."""
        self.topology = topology
        self._is_pipeline = topology.pipeline_parallel_size > 1
        sizes = config.training.global_batch_size, config.training.micro_batch_size * topology.data_parallel_size
        topology.run_together(lambda: load_async_io() if prepare_folders(zero.nvme_paths) else None)
        self.program, self.parallel, self.terms = program, program.parallel, program.terms
        self.objective = objective
        losses = TermLosses(self.terms, program.outputs, self.parallel)
        self.passes = PassContext(
            losses,
            self.parallel,
            topology,
            config.training.precision == "fp16",
            shares={field.name: field.shared for field in objective.fields(config.data)},
            micro_batches=sizes[0] // sizes[1],
            replays_graphs=config.training.compile and config.training.compile_mode == "reduce-overhead",
        )
        needs_mpu = topology.tensor_parallel_size > 1 and not self._is_pipeline
        self._mpu = model_parallel_unit(topology) if needs_mpu else None
        logger.info("building the model (%s parameters)", f"{program.num_parameters:,}")
        self._facts, self._shapes = fix_others(program.facts, config.training.only), program.trained_shapes
        model = self._build_model(deepspeed_config)
        named = model.full_named_parameters() if self._is_pipeline else list(model.named_parameters())
        self._frozen = {name: parameter.requires_grad_(False) for name, parameter in named if name not in self._shapes}
        self.named_parameters = [(name, parameter) for name, parameter in named if name in self._shapes]
        self._holdings = {
            name: holding_of(self.parallel, name, self._facts[name], self._shapes[name], parameter)
            for name, parameter in self.named_parameters
        }
        section = deepspeed_config.get("optimizer", {"params": {}})
        section = {**section, "params": {**section["params"], "lr": None}}  # which is the recipe's
        self.json_optimizer = flat_settings({"deepspeed": {"optimizer": section}})
        optimizer, self.optimizer_choice = self._build_optimizer(deepspeed_config, zero.offload_optimizer)
        self._initialize(deepspeed_config, model, optimizer)

    def _build_model(self, deepspeed_config: dict[str, Any]) -> Any:
        descriptions = self.program.layers
        check_batch_ramp(self.config.training, self.config.model.family, descriptions)
        outputs, streams = self.passes.losses.outputs, self.parallel.dropout
        if not self._is_pipeline:
            with self._partitioning(deepspeed_config):
                return LayerSequence(descriptions, outputs, streams)
        from ctxlm_ds.training.engine.pipeline import PipelineStage

        bounds = plan_stages(self.config.parallel, descriptions, self._shapes)
        counts = ", ".join(map(str, blocks_per_stage(descriptions, bounds)))
        logger.info("pipeline: %s transformer layers on stages 0 to %d", counts, len(bounds) - 2)
        with without_known_prints():
            dtype = DTYPES[self.config.training.precision]
            return PipelineStage(descriptions, outputs, bounds, self.topology, streams, dtype)

    def _partitioning(self, deepspeed_config: dict[str, Any]) -> AbstractContextManager[Any]:
        """Return a context in which stage 3 partitions layers as they are built."""
        if self.zero_stage < 3:
            return nullcontext()
        import deepspeed

        group = None if self._mpu is None else self._mpu.get_data_parallel_group()
        return deepspeed.zero.Init(config_dict_or_path=deepspeed_config, data_parallel_group=group, mpu=self._mpu)

    def _build_optimizer(
        self, deepspeed_config: dict[str, Any], offloaded: bool
    ) -> tuple[torch.optim.Optimizer | None, str]:
        if self.config.optimizer.handed_over:
            self.topology.run_together(lambda: load_described_optimizer(deepspeed_config["optimizer"], offloaded))
            return None, f"optimizer={deepspeed_config['optimizer']['type']} (from the DeepSpeed JSON)"
        device = "cpu" if offloaded else device_type()
        place = OptimizerPlace(device, self.zero_stage, offloaded, partial(deepspeed_adam, offloaded))
        rule, kernel = optimizer_of(self.config.optimizer), self.config.kernels.optimizer
        return self.topology.run_together(lambda: rule.build(self._groups(), kernel, place))

    def _groups(self) -> list[dict[str, Any]]:
        return parameter_groups(self.named_parameters, self._facts, self.config.optimizer)

    def _initialize(
        self, deepspeed_config: dict[str, Any], model: Any, optimizer: torch.optim.Optimizer | None
    ) -> None:
        import deepspeed

        from ctxlm_ds.training.engine.zero_optimizers import used_by_deepspeed

        # A module global that an earlier engine of this process may have set.
        deepspeed.utils.groups.mpu = None
        import_muon_uncompiled()
        settings = engine_settings(deepspeed_config, self.zero_stage, self._is_pipeline)
        with without_known_prints(), used_by_deepspeed(settings):
            self._deepspeed, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                model_parameters=self._groups() if optimizer is None else None,
                config=settings,
                mpu=self._mpu,
                dist_init_required=False,
            )
        self.device = self._deepspeed.device
        self.module: Any = self._deepspeed.module
        """The model, its parameters in the layout of the ZeRO stage."""
        keep_precision(self._frozen, self.program.layers)
        if self.zero_stage == 0 and self.topology.replica_size == 1:
            leave_gradients_in_place(self._deepspeed)
        self._zero = self._deepspeed.optimizer
        self._inner = optimizer if optimizer is not None else getattr(self._zero, "optimizer", self._zero)
        use_full_vectors(self._inner)
        if self._is_pipeline:
            from ctxlm_ds.training.engine.pipeline import PipelinePasses

            self._run: Any = PipelinePasses(self._deepspeed, self.passes)
        else:
            self._run = PlainPasses(self._deepspeed, self.passes)
        pairs = [(parameter, self._holdings[name]) for name, parameter in self.named_parameters]
        # DeepSpeed does not clip under stage 0.
        clipping = Clipping(pairs, self.config.optimizer.gradient_clipping, self.topology)
        self._updater = Updater(self._zero, self._run.update, clipping if self.zero_stage == 0 else None)
        self._totals = StepTotals(self.terms, self.topology, self.device)
        self._first_scalars = self.scalars()
        self.average = WeightAverage(self.config.training.ema, self._owners, self.weights_changed)
        if isinstance(self._inner, Stepper):
            sharers = Sharers(self.topology, self.zero_stage, self.device)
            flat = flat_tensors(self._zero)
            self._inner.bind(ParameterLayout(self.fragments(), self._shapes, self._facts, flat, sharers))

    # States for checkpoints and initialisation.

    def fragments(self) -> list[Fragment]:
        """Return this rank's fragments of the fp32 weights."""
        return list_fragments(self._zero, self.named_parameters, self._holdings)

    def _owners(self) -> list[torch.Tensor]:
        """Return the tensors that the inner optimizer steps, each once."""
        return list({id(fragment.owner): fragment.owner for fragment in self.fragments()}.values())

    def optimizer_state(self, owner: torch.Tensor) -> Mapping[str, Any]:
        """Return the inner optimizer's state of one owner tensor, and its average; empty before the first update."""
        return {**self._inner.state.get(owner, {}), **self.average.of(owner)}

    def moment_kinds(self) -> dict[str, tuple[str, ...]]:
        """Return the names of each parameter's moments; fixed ones have none in checkpoints."""
        if not self.config.optimizer.handed_over:
            facts, moments, average = self._facts, self.config.optimizer.moments_of, self.average.kinds
            return {name: () if facts[name].fixed else moments(facts[name].matrix) + average for name in self._shapes}
        items = [(owner, item) for owner in self._owners() for item in self.optimizer_state(owner).items()]
        kinds = tuple(sorted({name for owner, (name, value) in items if is_moment(owner, value)}))
        return dict.fromkeys(self._shapes, kinds)

    def prepare_optimizer_state(self, updates: int, kinds: Sequence[str]) -> None:
        """Give every owner zeroed moments, those of the given kinds that it has, and a count of `updates` updates."""
        if EMA_KIND in kinds:
            self.average.begin(is_loaded=True)
        known, kinds = self.moment_kinds(), [kind for kind in kinds if kind != EMA_KIND]
        if not kinds:  # every step so far was skipped
            return
        by_kinds: dict[tuple[str, ...], dict[int, torch.Tensor]] = {}
        for fragment in self.fragments():
            # Those of an optimizer of the JSON are unknown before its first update.
            own = tuple(kind for kind in kinds if kind in ({*known[fragment.name]} - {EMA_KIND} or kinds))
            by_kinds.setdefault(own, {})[id(fragment.owner)] = fragment.owner
        for own, owners in (by_kinds or {tuple(kinds): {}}).items():
            restore_state(self._inner, loaded_owners(self._zero, owners.values()), updates, own)

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]], moment: str | None = None) -> None:
        """Write full fp32 parameters into this rank's fragments; every held one must come exactly once.

        With `moment`, a kind that prepare_optimizer_state was given, write these moments of the parameters that have
        them instead.
        """
        pieces: dict[str, list[Fragment]] = {}
        kinds = self.moment_kinds()
        for fragment in self.fragments():
            if moment is None or moment in kinds[fragment.name]:
                pieces.setdefault(fragment.name, []).append(fragment)
        missing = set(pieces)
        for name, tensor in named:
            missing.discard(name)
            for fragment in pieces.get(name, []):
                flat = tensor.reshape(-1) if fragment.shard.is_whole else fragment.shard.extract(tensor)
                state = self.optimizer_state(fragment.owner)
                view = fragment.moment(state, moment) if moment else fragment.weight()
                view.copy_(flat.narrow(0, fragment.start, fragment.length))
        assert not missing, f"no values for {sorted(missing)}"
        self.weights_changed()

    def load_frozen(self, value_of: Callable[[str], torch.Tensor]) -> None:
        """Write the frozen parameters of this rank's layers; `value_of` gives the full value of a name."""
        for name, parameter in self._frozen.items():
            write_frozen(self.parallel, name, self._facts[name], value_of(name), parameter)

    def carried_tensors(self) -> dict[str, torch.Tensor]:
        """Return the carried tensors of this rank's layers by name and micro-batch."""
        return self.module.carried.named()

    def carried_names(self) -> list[str]:
        """Return the names that carried_tensors has after a complete step."""
        numbers = [self.passes.micro_batch_number(index) for index in range(self.passes.micro_batches)]
        return [f"{name}.{number}" for name in self.module.carried.names for number in numbers]

    def load_carried(self, named: Mapping[str, torch.Tensor]) -> None:
        """Replace the carried tensors of this rank's layers."""
        dtype = DTYPES[self.config.training.precision]
        self.module.carried.load({key: value.to(self.device, dtype) for key, value in named.items()})

    def weights_changed(self) -> None:
        """Update the model after fragments were written; all ranks call it."""
        refresh_model_weights(self._zero)

    def scalars(self) -> dict[str, float]:
        """Return the number of applied updates and the state of the loss scaler."""
        values: dict[str, float] = {"optimizer_updates": completed_updates(self._inner)}
        scaler = loss_scaler(self._zero)
        if scaler is not None:
            values.update({field: float(getattr(scaler, field)) for field in LOSS_SCALER_FIELDS})
        return values

    def restore_scalars(self, values: Mapping[str, float]) -> None:
        """Restore the loss scaler, if both runs are in fp16."""
        scaler = loss_scaler(self._zero)
        for field in LOSS_SCALER_FIELDS:
            if scaler is not None and field in values:
                setattr(scaler, field, type(getattr(scaler, field))(values[field]))

    def forget_updates(self) -> None:
        """Reset moments, counters, the loss scale and carried tensors to before the first update."""
        self.load_carried({})
        self.average.forget()
        if self._inner.state:
            forget_state(self._inner, loaded_owners(self._zero, self._owners()))
        self.restore_scalars(self._first_scalars)

    def close(self) -> None:
        """Release DeepSpeed's buffers; the engine cannot be used after it."""
        self._deepspeed.destroy()

    def train_step(
        self,
        step: Step,
        step_index: int,
        learning_rate: float,
        find_spike: FindSpike = lambda loss: None,
        look_ahead: Callable[[], Ahead] = Ahead,
    ) -> StepResult:
        """Run forward, backward and update over one global batch; raises StepInterrupted if it is abandoned.

        If the loss or gradient norm is not finite, or `find_spike` returns what is wrong with a finite loss, the result
        has an `anomaly` on every rank, the gradients are dropped, and no weight, moment or counter changes.
        `look_ahead` is called while the device computes; its result saves the next step a collective.
        """
        rows = step.rows_consumed * self.topology.context_parallel_size  # as DeepSpeed counts them
        if rows != self._deepspeed.train_batch_size():
            self._deepspeed.set_train_batch_size(rows)
            # DeepSpeed finds the last micro-batch of a step by a count over the run, which is at the end of a step now.
            self._deepspeed.micro_steps = 0
        counts = self._totals.counts_of(step)
        factors = self._factors(counts.predictions, len(step.micro_batches))
        for group in self._inner.param_groups:
            group["lr"] = learning_rate * group.get("moves", 1.0)
        try:
            sums = self._run.train(step, step_index - self.first_step, factors)
        except StepInterrupted:
            self.module.carried.end_step(keep=False)
            raise
        vector = self._totals.start(sums, look_ahead())
        self.before_update()
        self.average.begin()
        judge = StepJudge(self._totals, self.terms, step_index, self.passes.is_fp16, find_spike)
        update = self._updater.end_step(vector, judge)
        if update.applied:
            self.average.update()
        self.module.carried.end_step(keep=update.applied)
        return StepResult(
            loss=judge.total,
            terms=judge.losses,
            accuracy=judge.accuracy,
            grad_norm=update.grad_norm,
            num_tokens=counts.num_tokens,
            skipped=not update.applied,
            loss_scale=float(getattr(self._zero, "loss_scale", 1.0)) if self.passes.is_fp16 else 1.0,
            anomaly=judge.anomaly or update.anomaly(step_index, self.passes.is_fp16),
            flags=judge.flags,
        )

    def _factors(self, counts: Sequence[float], num_micro_batches: int) -> torch.Tensor:
        """Return the factor of each term's sum that makes DeepSpeed's averaging yield the exact global mean."""
        averaging = num_micro_batches * self.topology.replica_size
        weights = [term.weight for term in self.terms]
        values = [weight * (averaging / count) if count else 0.0 for weight, count in zip(weights, counts, strict=True)]
        return torch.tensor(values, dtype=torch.float32).to(self.device, non_blocking=True)

    # Evaluation.

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch | None]) -> dict[str, float]:
        """Return `loss`, `TERM_loss`, `TERM_accuracy` and a causal model's `perplexity` over all ranks' batches."""
        ones = torch.ones(len(self.terms), dtype=torch.float32, device=self.device)
        terms, accuracy = means(self.terms, self._totals.evaluation(self._run.evaluate(batches, ones)))
        figures = {"loss": weighted_total(self.terms, terms)} | {f"{term}_loss": loss for term, loss in terms.items()}
        return figures | {f"{term}_accuracy": x for term, x in accuracy.items()} | perplexity(self.terms, terms)

    @torch.no_grad()
    def choose(self, batch: Batch, choice: TokenChoice) -> list[int]:
        """Return the next token of each row of a micro-batch that is the same on all ranks; all ranks call it."""
        losses, choice.chosen = self.passes.losses, []
        choice.outputs, self.passes.losses = losses.outputs, choice
        try:
            self._run.evaluate([batch], torch.ones(1, dtype=torch.float32, device=self.device))
        finally:
            self.passes.losses = losses
        chosen = choice.chosen or [0] * len(choice.places)
        return [int(token) for token in self.topology.all_reduce_max([float(token) for token in chosen])]
