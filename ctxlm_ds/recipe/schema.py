"""Schema of a recipe: every setting of a pretraining run with its type, range and documentation.

The settings of `model`, `objective`, `data`, `optimizer` and `schedule` are in sections.py and in the file of each
entry. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SerializeAsAny, WrapValidator

from ctxlm_ds.recipe.choices import DATA, MODEL, OBJECTIVE, OPTIMIZER, SCHEDULE, KnownName
from ctxlm_ds.recipe.phase import Phase
from ctxlm_ds.recipe.sections import (
    DataSection,
    ModelSection,
    NonNegativeFloat,
    NonNegativeSteps,
    ObjectiveSection,
    OptimizerSection,
    PositiveFloat,
    PositiveInt,
    PositiveSteps,
    Probability,
    RowSettings,
    ScheduleSection,
    Section,
    SmallInt,
)
from ctxlm_ds.recipe.words import WordList, Words
from ctxlm_ds.registry import KERNELS, TRACKERS

FIXED_SETTINGS = ("model", "objective", "teacher.fingerprint", "training.seed", "optimizer.name")
"""Settings that a run cannot change when it resumes, in addition to those that decide its rows (DataSection.fixed)."""

MicroBatch = Annotated[int, Field(ge=1, le=10**6)]
GlobalBatch = Annotated[int, Field(ge=1, le=10**8)]
Minutes = Annotated[float, Field(ge=0.001, le=1e9)]


class TokenizerConfig(Section):
    """Tokenizer that encoded the datasets."""

    path: str | None = None
    """Folder of the tokenizer (made by ctxlm tokenizer, or any local Hugging Face tokenizer folder)."""


class TeacherConfig(Section):
    """Frozen model whose outputs the run learns from (objectives of distillation)."""

    path: str | None = None
    """Hugging Face folder with safetensors, of any family that can be imported, with the vocabulary of the run."""
    model: Annotated[SerializeAsAny[ModelSection] | None, WrapValidator(MODEL.validate)] = None
    """Its settings; null reads config.json of the folder."""
    precision: Literal["run", "bf16", "fp32"] = "run"
    """Data type of its weights and activations; `run` is training.precision (ZeRO stage 3 needs that one)."""
    placement: Literal["spread", "last"] = "spread"
    """Under a pipeline: `spread` gives each stage a share of its layers, `last` puts all of them on the last stage."""
    fingerprint: str | None = None
    """sha256 of its files, which the run sets; a run cannot resume with another teacher."""


class TrainingConfig(Section):
    """Training loop: batch sizes, limits, precision."""

    global_batch_size: GlobalBatch = 256
    """Rows per optimizer step, over all ranks."""
    batch_ramp: tuple[PositiveSteps, PositiveSteps, PositiveInt] | None = None
    """[START, INCREMENT, ROWS]: the global batch grows from START by INCREMENT up to global_batch_size, at equal
    distances within the first ROWS rows (Megatron's --rampup-batch-size; GPT-3). Null: it is constant."""
    micro_batch_size: MicroBatch = 8
    """Rows per rank in one forward pass."""
    max_steps: PositiveSteps = 1000
    """Stop after this many optimizer steps."""
    max_tokens: PositiveInt | None = None
    """Stop after this many non-padding tokens."""
    max_words: Words | None = None
    """Stop at the step at which this many white-space words were read (`100M`); max_steps, left out, follows."""
    max_hours: PositiveFloat | None = None
    """Stop with a checkpoint after this wall time of this process."""
    only: list[str] = []
    """Train only parameters whose names begin so; `embeddings` also takes all with a row for each word. Empty: all."""
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Decay of a moving average of the weights, which is evaluated and saved too (4 bytes a parameter); null: none."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1234
    """Seed of weights, data order, masks and dropout."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Data type of parameters and activations; master weights and moments are always fp32."""
    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Data type in which the gradients of micro-batches are accumulated."""
    initial_loss_scale_power: Annotated[int, Field(ge=0, le=64)] = 16
    """fp16 only: dynamic loss scaling starts at 2 to this power."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""
    compile: bool = False
    """Apply torch.compile to every transformer layer (about 1.2x at length 512; a minute or more at the start)."""
    compile_mode: Literal["default", "reduce-overhead"] = "default"
    """Mode of `compile: true`; `reduce-overhead` replays each layer as a CUDA graph (one GPU a layer, bf16, ZeRO 1)."""
    deterministic: bool = False
    """Use deterministic CUDA algorithms: bitwise resume on GPUs, somewhat slower."""

    def batch_size_at(self, rows_read: int) -> int:
        """Return the rows of the step of a run that has read `rows_read` rows, computed as Megatron does."""
        if self.batch_ramp is None or rows_read > self.batch_ramp[2]:
            return self.global_batch_size
        start, increment, rows = self.batch_ramp
        return start + int(rows_read / (rows / ((self.global_batch_size - start) // increment))) * increment

    def rows_after(self, steps: int, rows_read: int = 0) -> int:
        """Return the rows that a run has read after `steps` more steps."""
        while steps and self.batch_ramp is not None and rows_read <= self.batch_ramp[2]:
            rows_read, steps = rows_read + self.batch_size_at(rows_read), steps - 1
        return rows_read + steps * self.global_batch_size


class ParallelConfig(Section):
    """Layout of the model over ranks. The data-parallel size is the world size divided by the product of the others."""

    tensor_parallel_size: SmallInt = 1
    """Ranks that share each layer's weights; must divide the attention heads and the feed-forward width."""
    pipeline_parallel_size: SmallInt = 1
    """Pipeline stages: consecutive groups of layers on different ranks (ZeRO stages 0 and 1)."""
    context_parallel_size: SmallInt = 1
    """Ranks that share the positions of each long row; must divide the heads of a tensor-parallel rank."""
    sequence_parallel: bool = False
    """Split positions over tensor-parallel ranks in LayerNorm and dropout, whose weights are not split: less memory."""
    pipeline_partition: Literal["parameters", "uniform"] = "parameters"
    """What is balanced over pipeline stages: `parameters`, or the number of layers (`uniform`)."""
    pipeline_layers: list[SmallInt] | None = None
    """Number of transformer layers per stage; null lets pipeline_partition decide."""
    vocab_multiple: SmallInt | None = None
    """Rows of each rank's vocabulary are padded to a multiple of this (not in files); null: 128 from 4,096 rows on."""

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that compute a row together."""
        return self.tensor_parallel_size * self.context_parallel_size * self.pipeline_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of ranks that read other rows, rounded down and at least 1."""
        return max(1, world_size // self.model_parallel_size)


class CheckpointConfig(Section):
    """Saving and rotation."""

    interval_steps: PositiveSteps = 1000
    """Steps between checkpoints; the end of the run is also saved."""
    interval_minutes: Minutes | None = None
    """Also save when this many minutes have passed since the last save."""
    keep_last: SmallInt = 3
    """Number of newest checkpoints to keep."""
    keep_every_steps: PositiveSteps | None = None
    """Checkpoints at multiples of this are never removed."""
    at_words: WordList = []
    """Also save at the first step at which so many white-space words were read, and never remove these checkpoints:
    numbers, `5M` or `1M..10M by 1M`."""
    overlap: bool = True
    """Write copies of the states while training continues; false waits for the disk, as the last save always does."""
    max_failed_saves: NonNegativeSteps = 3
    """Due saves in a row that may fail (a full or read-only disk) before the run stops; 0 stops at the first."""


class AnomaliesConfig(Section):
    """Reaction to a loss or gradient that is not finite, or to a loss spike (docs/reliability.md). The gradients of
    such a batch are never applied, and its rows are logged."""

    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """A loss or gradient norm that is NaN or infinite: `stop` with an error, `skip` the batch without an update, or
    `rollback` to the last checkpoint and skip the rows since. An fp16 overflow counts only if the loss scale cannot be
    lowered further."""
    spike: Literal["ignore", "skip", "rollback"] = "ignore"
    """Reaction to a loss spike_threshold deviations above the mean of the last spike_window_steps good steps."""
    spike_threshold: PositiveFloat = 6.0
    """Number of standard deviations."""
    spike_window_steps: Annotated[int, Field(ge=1, le=10**6)] = 100
    """Number of good steps for mean and standard deviation; before that, no loss counts as a spike."""
    max_skips: PositiveSteps = 10
    """Consecutive batches that may be skipped; the next one stops the run."""
    max_rollbacks: NonNegativeSteps = 3
    """Rollbacks per run; the next anomaly stops it."""


class WatchdogConfig(Section):
    """Time limits. A rank that exceeds one writes the stack of every thread to RUN/attempts and ends the job."""

    step_minutes: Minutes | None = 30.0
    """A training step, evaluation batch or pass of continuations; null: no limit."""
    save_minutes: Minutes | None = 60.0
    """Writing a checkpoint; null: no limit."""
    start_minutes: Minutes | None = 120.0
    """From the start to the first step (sample indexes, a checkpoint's checksums); null: no limit."""


class LoggingConfig(Section):
    """Progress output and metrics files."""

    interval_steps: PositiveSteps = 10
    """Steps between lines of metrics.jsonl, TensorBoard points and log lines."""
    trackers: list[Annotated[str, AfterValidator(KnownName(TRACKERS))]] = ["tensorboard"]
    """What also follows the run (docs/training.md): `tensorboard` (RUN/tensorboard), `wandb`."""
    tensorboard: bool = True
    """False leaves tensorboard out of trackers."""
    hooks: list[str] = []
    """Classes of your own that follow the run, as `package.module:Class` (docs/extending.md)."""
    peak_tflops: PositiveFloat | None = None
    """Dense peak of a device in the run's precision for `mfu`, 1e12 operations per second; null: that of known GPUs."""


class ProfilerConfig(Section):
    """Window of steps recorded with the torch profiler."""

    start_step: NonNegativeSteps = 10
    """First step recorded."""
    num_steps: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Steps recorded; 0 switches the profiler off. Traces go to RUN/profile."""


def _kernel(operation: str, *shipped: str) -> AfterValidator:
    return AfterValidator(KnownName(KERNELS, shipped, f"{operation}."))


class KernelsConfig(Section):
    """Implementation of each operation. `auto` takes the fastest that runs here; a named one must run. Other packages
    register further ones (docs/extending.md)."""

    attention: Annotated[
        str, _kernel("attention", "auto", "reference", "sdpa", "varlen", "flash3", "bmm", "triton")
    ] = "auto"
    """`reference` (plain softmax), `sdpa` (torch), `varlen` (FlashAttention over packed rows, CUDA), `flash3` (the same
    by FlashAttention-3, Hopper), `bmm` (products of matrices and a compiled loop, CPU), `triton` (tiles with a bias
    and with dropout that draws the same in every layout, CUDA)."""
    layer_norm: Annotated[str, _kernel("layer_norm", "auto", "reference", "torch", "apex")] = "auto"
    """`reference` (plain), `torch` (fused native), `apex` (FusedLayerNorm)."""
    bias_gelu: Annotated[str, _kernel("bias_gelu", "auto", "reference", "torch", "compiled", "triton")] = "auto"
    """`reference` (plain erf), `torch` (native gelu), `compiled` (torch.compile fuses bias and gelu), `triton` (gated
    activations in one pass, CUDA; the others are torch's)."""
    rotary: Annotated[str, _kernel("rotary", "auto", "torch", "triton")] = "auto"
    """Rotary positions of queries and keys: `torch` (plain operations), `triton` (in place, CUDA)."""
    linear: Annotated[str, _kernel("linear", "auto", "torch", "float32")] = "auto"
    """`torch`, or `float32` (bf16 products computed in float32: 10 to 50 times faster on CPUs without bf16 units)."""
    dropout: Annotated[str, _kernel("dropout", "auto", "torch", "compiled", "loop", "triton")] = "auto"
    """Dropout of hidden states: `torch` (plain operations), `compiled` (one kernel), `loop` (one pass, CPU), `triton`
    (one pass, CUDA). All drop the same elements."""
    add_norm: Annotated[str, _kernel("add_norm", "auto", "torch", "triton")] = "auto"
    """Dropout, residual sum and the norm after it: `torch` (the kernels of `dropout` and `layer_norm`, one after
    another), `triton` (one pass, CUDA, at most 8,192 wide). Both drop the same elements."""
    sampling: Annotated[str, _kernel("sampling", "auto", "torch", "compiled")] = "auto"
    """Words drawn from a generator's logits: `torch` (plain operations), `compiled` (one kernel)."""
    cross_entropy: Annotated[str, _kernel("cross_entropy", "auto", "full", "chunked", "compiled", "triton")] = "auto"
    """Losses over the vocabulary: `full` (logits of all predictions), `chunked` (some rows at a time inside the
    decoder, which never holds all logits), `compiled` (the same in fewer kernels), `triton` (the same in two, CUDA)."""
    optimizer: Literal["auto", "reference", "torch", "deepspeed", "apex"] = "auto"
    """`reference` (a loop over tensors), `torch` (fused), `deepspeed` (FusedAdam/CPUAdam), `apex` (FusedAdam)."""


class FineTuning(Section):
    """How a model is fine-tuned on a task, with one point of the grid."""

    epochs: PositiveFloat = 3.0
    """Epochs of fine-tuning."""
    batch_size: SmallInt = 32
    """Examples of a fine-tuning step."""
    learning_rate: PositiveFloat = 5e-5
    """Peak learning rate of fine-tuning."""
    train_layers: NonNegativeSteps | None = None
    """Train the last layers and the head only (0: the head); null trains everything."""
    max_train_examples: PositiveSteps | None = None
    """Train on the first examples only."""


class DownstreamTask(FineTuning):
    """A task or a suite on which the exported model is judged while the run trains, by a process on rank 0's host."""

    task: str
    """Name of a shipped task (docs/downstream.md) or suite (docs/evaluate.md), or a YAML description of one."""
    data: str
    """Folder of its files."""
    every_steps: PositiveSteps
    """Steps between checkpoints that are judged, a multiple of checkpoint.interval_steps; the last is judged too."""
    seed: NonNegativeSteps = 1
    """Seed of the head and of the order of the examples."""
    threads: SmallInt = 1
    """CPU threads of the process, which uses no accelerator."""

    @property
    def name(self) -> str:
        """Return the task's name in the metrics."""
        return PurePath(self.task).stem


class EvaluationConfig(Section):
    """Evaluation on held-out data during the run."""

    interval_steps: NonNegativeSteps = 1000
    """Steps between evaluations, which also run at the end, and with initialize_from at step 0; 0: only these."""
    max_rows: PositiveSteps = 2048
    """Rows to evaluate per validation source."""
    mask_prob: Probability | None = None
    """Share of the tokens to predict in evaluations, at most objective.mask_prob, which null takes: figures of runs
    that train with different shares can be compared."""
    continuations: Annotated[int, Field(ge=0, le=1000)] = 0
    """Held-out texts (those of the first validation source) whose first 16 tokens a causal model continues after each
    evaluation, in which a masked model fills two masks, and which a decoder restores from the corrupted tokens; for the
    log, TensorBoard and RUN/report.html."""
    prompts: list[str] = []
    """Texts that it continues, whose mask tokens it fills, or for which a decoder writes a target, before these."""
    continuation_tokens: SmallInt = 24
    """Most tokens of a continuation, at most data.seq_length - 1, or of a target, at most the longest of training; each
    costs the forward pass of a micro-batch."""
    continuation_temperature: NonNegativeFloat = 0.0
    """0 takes the most probable token, more draws one from softmax(logits / temperature), by seed, step and text."""
    downstream: list[DownstreamTask] = []
    """Tasks on which checkpoints are fine-tuned and judged (`downstream/TASK/METRIC` in the metrics)."""

    @property
    def continues(self) -> bool:
        return bool(self.continuations or self.prompts)

    @property
    def idle_settings(self) -> tuple[str, ...]:
        return () if self.continues else ("continuation_tokens", "continuation_temperature")


class RunConfig(Section):
    """A complete recipe."""

    extends: str | None = None
    """Recipe (a shipped name or a path) whose settings this one starts from."""
    name: str = "run"
    """Name of the run, used in titles and the model card (at most 100 characters)."""
    run_dir: str | None = None
    """Run directory; null is runs/NAME."""
    initialize_from: str | None = None
    """Run, checkpoint or Hugging Face folder that initializes the weights; steps start at 0, with an evaluation."""
    initialize_layers: list[Annotated[int, Field(ge=0, le=10_000)]] | Literal["spread"] | None = None
    """Repeated layers of initialize_from, numbered from 0, that initialize those of a smaller model, also of another
    family (a student of its teacher); `spread` takes the first, the last and equal steps between (0, 2, 4, 7, 9 and 11
    for 6 of 12, as DistilBERT). null needs the same model."""
    initialize_moments: bool = False
    """Also take moments from initialize_from, of the same optimizer.name; the count of updates starts at 0 (LAMB)."""
    deepspeed: str | None = None
    """DeepSpeed JSON (a path, or a name in ds_configs/; null is `zero1`); --deepspeed_config overrides it."""
    model: Annotated[SerializeAsAny[ModelSection], WrapValidator(MODEL.validate)] = Field(default_factory=MODEL.make)
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: Annotated[SerializeAsAny[DataSection], WrapValidator(DATA.validate)] = Field(default_factory=DATA.make)
    objective: Annotated[SerializeAsAny[ObjectiveSection], WrapValidator(OBJECTIVE.validate)] = Field(
        default_factory=OBJECTIVE.make
    )
    teacher: TeacherConfig = TeacherConfig()
    optimizer: Annotated[SerializeAsAny[OptimizerSection], WrapValidator(OPTIMIZER.validate)] = Field(
        default_factory=OPTIMIZER.make
    )
    schedule: Annotated[SerializeAsAny[ScheduleSection], WrapValidator(SCHEDULE.validate)] = Field(
        default_factory=SCHEDULE.make
    )
    training: TrainingConfig = TrainingConfig()
    phases: list[Phase] = []
    """Parts of the run with other settings, one after another (docs/phases.md); training.max_steps is their sum."""
    parallel: ParallelConfig = ParallelConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    anomalies: AnomaliesConfig = AnomaliesConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    logging: LoggingConfig = LoggingConfig()
    profiler: ProfilerConfig = ProfilerConfig()
    kernels: KernelsConfig = KernelsConfig()

    @property
    def directory(self) -> Path:
        return Path(self.run_dir or Path("runs") / self.name)

    def with_values(self, section: str, **values: Any) -> RunConfig:
        """Return the recipe with other values in a section."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})

    @property
    def row_settings(self) -> RowSettings:
        """Sections that decide the rows of the sources."""
        return RowSettings(self.data, self.objective, self.training.seed)

    @property
    def fixed_settings(self) -> tuple[str, ...]:
        """Settings that fix the model and the order and content of the rows; a run with others is another run."""
        lanes = ("training.global_batch_size",) if self.data.in_lanes else ()
        return (*FIXED_SETTINGS, *lanes, *(f"data.{name}" for name in self.data.fixed))

    def flat(self) -> dict[str, Any]:
        """Return every setting by its full name."""
        return flat_settings(self.model_dump(mode="json"))


def flat_settings(value: Any, name: str = "") -> dict[str, Any]:
    """Return the values of nested settings by their dotted names."""
    if not isinstance(value, dict) or not value:
        return {name: value}
    parts = (flat_settings(below, f"{name}.{key}" if name else key) for key, below in value.items())
    return {key: one for part in parts for key, one in part.items()}
