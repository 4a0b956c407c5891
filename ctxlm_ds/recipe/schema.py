"""The recipe: every setting of a pretraining run, typed, documented and checked without torch.

The settings of `model`, `objective` and `data` stand in sections.py and beside each family, objective and format.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny, WrapValidator

from ctxlm_ds.recipe.choices import DATA, MODEL, OBJECTIVE
from ctxlm_ds.recipe.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Probability, Section
from ctxlm_ds.recipe.sections import DataSection, ModelSection, ObjectiveSection

FIXED_WHATEVER_THE_ROWS = ("model", "objective", "training.seed", "optimizer.name")
"""Settings that a run cannot change when it resumes, beside those that decide its rows (DataSection.fixed)."""


class TokenizerConfig(Section):
    """Which tokenizer made the dataset."""

    path: str | None = None
    """Folder of the tokenizer (made by tools/train_tokenizer.py, or any local Hugging Face tokenizer folder)."""


class OptimizerConfig(Section):
    """Weights' update. Biases and LayerNorm weights are never decayed."""

    name: Literal["adamw", "lamb", "from_ds_config"] = "adamw"
    """`adamw`, `lamb` (You 2019, exact under every ZeRO stage) or `from_ds_config` (the DeepSpeed JSON's, whole)."""
    learning_rate: PositiveFloat = 1e-4
    """Peak learning rate."""
    betas: tuple[Probability, Probability] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: PositiveFloat = 1e-6
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    gradient_clipping: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 switches clipping off (RoBERTa)."""


class ScheduleConfig(Section):
    """Learning rate by step: a linear warmup, then the named decay."""

    name: Literal["linear", "polynomial", "cosine", "inverse_sqrt", "wsd", "constant"] = "linear"
    """Shape after the warmup; `wsd` is warmup-stable-decay."""
    warmup_steps: NonNegativeInt | None = None
    """Steps of warmup; give this or warmup_fraction."""
    warmup_fraction: Probability | None = None
    """Warmup as a share of total_steps, rounded down to a whole step; neither given is no warmup."""
    total_steps: PositiveInt | None = None
    """Schedule step at which the decay ends; null is start_step + training.max_steps."""
    start_step: NonNegativeInt = 0
    """Schedule step of the run's first step (a second phase that goes on along the first one's line)."""
    final_learning_rate: NonNegativeFloat = 0.0
    """Learning rate at total_steps and after."""
    power: PositiveFloat = 1.0
    """Exponent of `polynomial`."""
    decay_from: Literal["warmup", "start"] = "warmup"
    """`linear`, `polynomial`, `cosine`: `warmup` falls from the peak at the end of the warmup (transformers, fairseq);
    `start` counts the decay from step 0, so the peak is not quite reached (the code of BERT, GPT, NVIDIA's LAMB)."""
    decay_fraction: Probability = 0.1
    """Last share of total_steps in which `wsd` decays."""


class TrainingConfig(Section):
    """The loop: batch, limits, precision."""

    global_batch_size: PositiveInt = 256
    """Rows an optimizer step, over all ranks."""
    micro_batch_size: PositiveInt = 8
    """Rows a rank computes at once."""
    max_steps: PositiveInt = 1000
    """Stop after this many optimizer steps."""
    max_tokens: PositiveInt | None = None
    """Stop after this many non-padding tokens."""
    max_hours: PositiveFloat | None = None
    """Stop (with a checkpoint) after this much wall time of this process."""
    seed: NonNegativeInt = 1234
    """Seed of weights, data order, masks and dropout."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Data type of parameters and activations; master weights and moments are always fp32."""
    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Data type in which micro-batches' gradients are added up."""
    initial_loss_scale_power: NonNegativeInt = 16
    """fp16 only: dynamic loss scaling starts at 2 to this power."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""
    compile: bool = False
    """torch.compile every transformer layer (about 1.2x at length 512; a minute or more at the start)."""
    deterministic: bool = False
    """Deterministic CUDA algorithms: bitwise resume on GPUs, somewhat slower."""


class ParallelConfig(Section):
    """How the model is laid out over ranks; data-parallel size is what remains of the world."""

    tensor_parallel_size: PositiveInt = 1
    """Ranks that share each layer's weights; must divide the attention heads and the feed-forward width."""
    pipeline_parallel_size: PositiveInt = 1
    """Consecutive groups of layers on different ranks (ZeRO stages 0 and 1)."""
    sequence_parallel: bool = False
    """Share positions between tensor-parallel ranks where weights are not shared (LayerNorm, dropout): less memory."""
    pipeline_partition: Literal["parameters", "time", "uniform"] = "parameters"
    """What pipeline stages share evenly: `parameters`, computing `time`, or the number of layers (`uniform`)."""
    pipeline_layers: list[PositiveInt] | None = None
    """Transformer layers of each stage by hand; null lets pipeline_partition decide."""
    vocab_multiple: PositiveInt = 1
    """Each tensor-parallel rank's vocabulary rows are padded to a multiple of this (not in checkpoints or exports)."""


class EvaluationConfig(Section):
    """Held-out figures during the run."""

    interval_steps: NonNegativeInt = 1000
    """Evaluate every so many steps, and at the end; 0 only at the end."""
    max_rows: PositiveInt = 2048
    """Rows of each validation source to evaluate."""


class CheckpointConfig(Section):
    """Saving and rotation."""

    interval_steps: PositiveInt = 1000
    """Save every so many steps, and at the end."""
    interval_minutes: PositiveFloat | None = None
    """Also save when this much time has passed since the last save."""
    keep_last: PositiveInt = 3
    """Newest checkpoints to keep."""
    keep_every_steps: PositiveInt | None = None
    """Checkpoints at multiples of this are never removed."""
    overlap: bool = True
    """Copy the states to CPU memory and write them while training goes on; false: training waits for the disk. A last
    checkpoint, and one at a stop signal, are always waited for."""
    max_failed_saves: NonNegativeInt = 3
    """Saves in a row that may fail (a full or read-only disk) before the run stops; 0 stops at the first. Those tried
    again between two intervals do not count."""


class AnomaliesConfig(Section):
    """What happens at a loss or gradient that is not finite, or at a loss spike (docs/reliability.md). Whatever it is,
    the batch's gradients are not applied, and its rows are logged."""

    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """A loss or gradient norm that is NaN or infinite: `stop` with an error, `skip` the batch without an update, or
    `rollback` to the last checkpoint and pass over the rows since. An fp16 overflow counts only where the loss scale
    can fall no further."""
    spike: Literal["ignore", "skip", "rollback"] = "ignore"
    """A loss more than spike_threshold standard deviations above the mean of the last spike_window_steps good steps."""
    spike_threshold: PositiveFloat = 6.0
    """Standard deviations."""
    spike_window_steps: PositiveInt = 100
    """Good steps that mean and standard deviation are taken over; no loss is a spike before there are so many."""
    max_skips: PositiveInt = 10
    """Batches that may be skipped in a row; the next one stops the run."""
    max_rollbacks: NonNegativeInt = 3
    """Times that a run may go back; the next anomaly after them stops it."""


class WatchdogConfig(Section):
    """Limits after which a rank that does not get on writes every thread's stack to RUN/attempts and ends the job."""

    step_minutes: PositiveFloat | None = 30.0
    """A training step or evaluation batch; null: no limit."""
    save_minutes: PositiveFloat | None = 60.0
    """Writing a checkpoint; null: no limit."""
    start_minutes: PositiveFloat | None = 120.0
    """From the start to the first step (sample indexes, a checkpoint's checksums); null: no limit."""


class LoggingConfig(Section):
    """What a person and a program can follow."""

    interval_steps: PositiveInt = 10
    """Steps between lines of metrics.jsonl, TensorBoard points and log lines."""
    tensorboard: bool = True
    """Write RUN/tensorboard."""


class ProfilerConfig(Section):
    """A torch-profiler window."""

    start_step: NonNegativeInt = 10
    """First step recorded."""
    num_steps: NonNegativeInt = 0
    """Steps recorded; 0 switches the profiler off. Traces go to RUN/profile."""


class KernelsConfig(Section):
    """Which implementation computes an operation; `auto` takes the fastest that runs here, a named one must run."""

    attention: Literal["auto", "reference", "sdpa", "varlen"] = "auto"
    """`reference` (plain softmax), `sdpa` (torch), `varlen` (FlashAttention over packed rows, CUDA)."""
    layer_norm: Literal["auto", "reference", "torch", "apex"] = "auto"
    """`reference` (plain), `torch` (fused native), `apex` (FusedLayerNorm)."""
    bias_gelu: Literal["auto", "reference", "torch", "compiled"] = "auto"
    """`reference` (plain erf), `torch` (native gelu), `compiled` (torch.compile fuses bias and gelu)."""
    linear: Literal["auto", "torch", "float32"] = "auto"
    """`torch`, or `float32` (bf16 products computed in float32: 10 to 50 times faster on CPUs without bf16 units)."""
    dropout: Literal["auto", "torch", "compiled"] = "auto"
    """Dropout of hidden states: `torch` (plain operations), `compiled` (one kernel); both drop the same elements."""
    optimizer: Literal["auto", "reference", "torch", "deepspeed", "apex"] = "auto"
    """`reference` (a loop over tensors), `torch` (fused), `deepspeed` (FusedAdam/CPUAdam), `apex` (FusedAdam)."""


class RunConfig(Section):
    """A whole recipe."""

    extends: str | None = None
    """Recipe (a shipped name or a path) whose settings this one starts from."""
    name: str = "run"
    """Name of the run; used in titles and the model card."""
    run_dir: str | None = None
    """Run directory; null is runs/NAME."""
    initialize_from: str | None = None
    """Run, checkpoint or Hugging Face folder whose weights alone start this run (fresh optimizer, schedule, data)."""
    deepspeed: str | None = None
    """DeepSpeed JSON (a path, or a name in ds_configs/; null is `zero1`); --deepspeed_config overrides it."""
    model: Annotated[SerializeAsAny[ModelSection], WrapValidator(MODEL.validate)] = Field(
        default_factory=MODEL.make_default
    )
    """Shape of the model."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Tokenizer."""
    data: Annotated[SerializeAsAny[DataSection], WrapValidator(DATA.validate)] = Field(
        default_factory=DATA.make_default
    )
    """Datasets and rows."""
    objective: Annotated[SerializeAsAny[ObjectiveSection], WrapValidator(OBJECTIVE.validate)] = Field(
        default_factory=OBJECTIVE.make_default
    )
    """Objective."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning-rate schedule."""
    training: TrainingConfig = TrainingConfig()
    """Loop."""
    parallel: ParallelConfig = ParallelConfig()
    """Layout."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    anomalies: AnomaliesConfig = AnomaliesConfig()
    """NaN, overflow and loss spikes."""
    watchdog: WatchdogConfig = WatchdogConfig()
    """Hangs."""
    logging: LoggingConfig = LoggingConfig()
    """Logs."""
    profiler: ProfilerConfig = ProfilerConfig()
    """Profiler."""
    kernels: KernelsConfig = KernelsConfig()
    """Kernels."""

    @property
    def fixed_settings(self) -> tuple[str, ...]:
        """What fixes the model and the order and content of the rows: a change would make another run."""
        return (*FIXED_WHATEVER_THE_ROWS, *(f"data.{name}" for name in self.data.fixed))
