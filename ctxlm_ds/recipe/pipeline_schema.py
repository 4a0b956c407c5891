"""The recipe's `pipeline` section: the route from raw text to an exported model, as jobs of a cluster.

In: nothing. Out: typed settings. Not here: what is impossible together (pipeline_rules.py), the jobs (cluster/).
"""

from __future__ import annotations

from typing import Literal

from ctxlm_ds.recipe.section import NonNegativeInt, PositiveInt, Section


class StepResources(Section):
    """What a step's job asks of Slurm; null leaves it to the cluster (or to the lines in slurm/pretrain.sbatch)."""

    nodes: PositiveInt | None = None
    """`--nodes`: machines."""
    ntasks_per_node: PositiveInt | None = None
    """`--ntasks-per-node`: ranks of a node (of `pretrain`)."""
    gpus_per_node: PositiveInt | None = None
    """`--gpus-per-node`."""
    cpus: PositiveInt | None = None
    """`--cpus-per-task`; null is pipeline.workers for `tokenizer`, `preprocess` and `samples`."""
    memory: str | None = None
    """`--mem`, of a node: `64G`."""
    time: str | None = None
    """`--time`: `2:00:00`, `1-12`, `"90"` (minutes)."""
    partition: str | None = None
    """`--partition`, the queue."""
    account: str | None = None
    """`--account` that is billed."""
    extra: list[str] = []
    """Further options of sbatch, each as one word: `--constraint=a100`, `--qos=long`."""


class PipelineResources(Section):
    """What the jobs ask of Slurm, step by step."""

    default: StepResources = StepResources()
    """For every step; what a step's own section sets goes before it, `extra` options come on top."""
    tokenizer: StepResources = StepResources()
    """Training the tokenizer."""
    preprocess: StepResources = StepResources()
    """Each shard, and the held-out texts."""
    merge: StepResources = StepResources()
    """Joining the shards."""
    samples: StepResources = StepResources()
    """Building the sample indexes."""
    pretrain: StepResources = StepResources()
    """Pretraining, every phase that has no resources of its own."""
    export: StepResources = StepResources()
    """The export, which also computes logits with transformers."""


class PipelineTokenizer(Section):
    """The tokenizer to train (tools/train_tokenizer.py)."""

    type: Literal["wordpiece", "bpe", "gpt2", "unigram", "sentencepiece-bpe"] | None = None
    """Kind; null is the one that model.family was published with."""
    vocab_size: PositiveInt | None = None
    """Every id; null is the published model's of the kind."""
    lowercase: bool = True
    """`wordpiece`: fold case and accents; false keeps them."""
    max_sample_bytes: str | None = None
    """Train on a sample of whole documents of at most so many bytes: `500M`, `10G`."""
    options: list[str] = []
    """Further options of tools/train_tokenizer.py, each as one word: `--min-frequency`, `5`."""


class PipelinePhase(Section):
    """One further phase of pretraining; it starts from the weights of the phase before."""

    recipe: str | None = None
    """Recipe (a shipped name or a path) of this phase; null is this recipe again. Tokenizer, datasets, split and blend
    are always this recipe's."""
    set: list[str] = []
    """Settings over it, `a.b=c` each, as on the command line."""
    resources: StepResources = StepResources()
    """What its job asks of Slurm, over pipeline.resources.pretrain."""


class PipelineCommand(Section):
    """One further step of your own."""

    name: str
    """Name of the step: letters, digits, `-`, `_`."""
    command: str
    """A line of shell. `{output_dir} {tokenizer} {dataset} {heldout} {run_dir} {hf_dir}` stand for the folders and
    prefixes that the steps before have made, `{run_dir}` for the last phase's run."""
    output: str | None = None
    """File or folder that it must leave behind (the same placeholders); null judges it by its exit status alone."""
    after: list[str] = []
    """Steps that it waits for; empty is the step before it."""
    resources: StepResources = StepResources()
    """What its job asks of Slurm."""


class PipelineConfig(Section):
    """From raw text to an exported model as jobs of a cluster (slurm/pipeline.sh); pretraining itself ignores it."""

    input: list[str] = []
    """Texts to train on: files, globs, `hf://NAME`; empty where data.train names datasets that are there."""
    heldout: list[str] = []
    """Held-out texts, named alike; they become data.validation. Without them: data.split, or none."""
    json_keys: list[str] = ["text"]
    """Keys or columns of a record that hold text; each gives a dataset."""
    input_format: Literal["auto", "text", "jsonl", "wikiextractor", "parquet", "arrow"] = "auto"
    """Where the files' names do not say it."""
    max_bad_records: NonNegativeInt = 0
    """Damaged records that each reading may skip."""
    tokenizer: PipelineTokenizer | None = None
    """Train this one; null where tokenizer.path names a folder."""
    shards: PositiveInt = 1
    """Parts of the text that are preprocessed side by side, an array of so many jobs."""
    shards_at_once: PositiveInt | None = None
    """Most of them at a time; null leaves it to the cluster."""
    workers: PositiveInt = 4
    """Worker processes of a shard, and threads that build samples."""
    split_sentences: bool | None = None
    """A sequence is a sentence; null is true, but for formats that join documents (`blocks`)."""
    append_eod: bool | None = None
    """The separator ends each document; null is true for formats that need it (`blocks`)."""
    output_dir: str | None = None
    """Folder of everything that is made; null is pipelines/NAME."""
    phases: list[PipelinePhase] = []
    """Phases of pretraining after the first, which is the recipe itself."""
    export: bool = True
    """Export the last phase as a Hugging Face folder."""
    export_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Data type of the exported weights."""
    append: list[PipelineCommand] = []
    """Further steps, in order."""
    resources: PipelineResources = PipelineResources()
    """What the jobs ask of Slurm."""
