"""Registries of families, objectives and the other kinds, each entry imported at first use.

An entry of this package is one line here. Other packages add entries through the entry-point groups below
(docs/extending.md). Imports only the standard library, so that a login node can check a recipe.
"""

from __future__ import annotations

import difflib
import importlib.metadata
from collections.abc import Mapping
from functools import cache, cached_property
from typing import Any

from ctxlm_ds.errors import ConfigError

entry_points = cache(importlib.metadata.entry_points)  # of all groups: it reads a file of every package


class Registry:
    """Entries of one kind by name."""

    def __init__(self, kind: str, group: str, shipped: Mapping[str, str]) -> None:
        """Create a registry of entries that messages call `kind`.

        Other packages add entries in the entry-point `group`; `shipped` has `module:object` of those of this package.
        """
        self.kind = kind
        self.group = group
        self._shipped = dict(shipped)
        self._added: dict[str, Any] = {}
        self._loaded: dict[str, Any] = {}

    def names(self) -> tuple[str, ...]:
        """Return every name, entries of this package first."""
        return tuple(dict.fromkeys([*self._shipped, *self._installed, *self._added]))

    def shipped_names(self) -> tuple[str, ...]:
        """Return the names of the entries of this package."""
        return tuple(self._shipped)

    def __contains__(self, name: object) -> bool:
        return name in self._shipped or name in self._added or name in self._installed

    def get(self, name: str) -> Any:
        """Return an entry, imported the first time; ConfigError if there is none, or it cannot be imported."""
        if name not in self._loaded:
            shipped = [self._shipped[name]] if name in self._shipped else []
            installed = [*shipped, *self._installed.get(name, ())]
            target = self._added.get(name) or next(iter(installed), None)
            if len(installed) > 1 and name not in self._added:
                raise ConfigError(f"{self.kind} {name} is there {len(installed)} times ({', '.join(installed)}); "
                                  "uninstall one of the packages, or rename its entry point")  # fmt: skip
            if target is None:
                near = difflib.get_close_matches(name, self.names(), 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"no {self.kind} is named {name}{hint} (there are: {', '.join(self.names())})")
            self._loaded[name] = load_object(target, f"{self.kind} {name}") if isinstance(target, str) else target
        return self._loaded[name]

    def register(self, name: str, entry: Any) -> None:
        """Add an entry (an object, or `module:object`) for this process, in a notebook or a test."""
        if name in self._shipped:
            raise ConfigError(f"{self.kind} {name} is part of ctxlm_ds; choose another name")
        self._added[name] = entry
        self._loaded.pop(name, None)

    @cached_property
    def _installed(self) -> dict[str, list[str]]:
        """Entries of other packages: name -> the different objects of this name."""
        points = {(point.name, point.value) for point in entry_points().select(group=self.group)}
        return {name: sorted(value for other, value in points if other == name) for name, _ in sorted(points)}


def load_object(target: str, what: str = "the object") -> Any:
    """Import `module:object` and return the object; ConfigError, which calls it `what`, if it cannot be imported."""
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ConfigError(f"{what} ({target}) cannot be imported: {error}") from error


FAMILIES = Registry(
    "family",
    "ctxlm_ds.families",
    {
        "bert": "ctxlm_ds.families.bert.config:BERT",
        "roberta": "ctxlm_ds.families.roberta.config:ROBERTA",
        "xlm_roberta": "ctxlm_ds.families.roberta.config:XLM_ROBERTA",
        "albert": "ctxlm_ds.families.albert.config:ALBERT",
        "electra": "ctxlm_ds.families.electra.config:ELECTRA",
        "distilbert": "ctxlm_ds.families.bert.config:DISTILBERT",
        "tinybert": "ctxlm_ds.families.bert.config:TINYBERT",
        "modernbert": "ctxlm_ds.families.modernbert.config:MODERNBERT",
        "t5": "ctxlm_ds.families.t5.config:T5",
        "bart": "ctxlm_ds.families.bart.config:BART",
        "mbart": "ctxlm_ds.families.bart.config:MBART",
        "xlnet": "ctxlm_ds.families.xlnet.config:XLNET",
        "unilm": "ctxlm_ds.families.bert.config:UNILM",
        "megatron_bert": "ctxlm_ds.families.bert.config:MEGATRON_BERT",
        "gpt2": "ctxlm_ds.families.gpt.config:GPT2",
        "gpt1": "ctxlm_ds.families.gpt.config:GPT1",
        "llama": "ctxlm_ds.families.llama.config:LLAMA",
        "elmo": "ctxlm_ds.families.elmo.config:ELMO",
    },
)
OBJECTIVES = Registry(
    "objective",
    "ctxlm_ds.objectives",
    {
        "masked_lm": "ctxlm_ds.objectives.masked_lm:MaskedLM",
        "masked_lm_nsp": "ctxlm_ds.objectives.masked_lm:MaskedLMNextSentence",
        "masked_lm_sop": "ctxlm_ds.objectives.masked_lm:MaskedLMSentenceOrder",
        "unified_lm": "ctxlm_ds.objectives.unified_lm:UnifiedLM",
        "replaced_tokens": "ctxlm_ds.objectives.replaced_tokens:ReplacedTokens",
        "distillation": "ctxlm_ds.objectives.distillation:Distillation",
        "tinybert": "ctxlm_ds.objectives.tinybert:TinyBert",
        "causal_lm": "ctxlm_ds.objectives.causal_lm:CausalLM",
        "permutation_lm": "ctxlm_ds.objectives.permutation_lm:PermutationLM",
        "bidirectional_lm": "ctxlm_ds.objectives.bidirectional_lm:BidirectionalLM",
        "span_corruption": "ctxlm_ds.objectives.span_corruption:SpanCorruption",
        "prefix_lm": "ctxlm_ds.objectives.span_corruption:PrefixLM",
        "denoiser_mixture": "ctxlm_ds.objectives.span_corruption:DenoiserMixture",
        "masked_seq2seq": "ctxlm_ds.objectives.masked_seq2seq:MaskedSeq2Seq",
        "text_infilling": "ctxlm_ds.objectives.text_infilling:TextInfilling",
    },
)
FORMATS = Registry(
    "sample format",
    "ctxlm_ds.sample_formats",
    {
        "segment_pair": "ctxlm_ds.data.formats.pairs:SegmentPair",
        "sentence_order": "ctxlm_ds.data.formats.pairs:SentenceOrder",
        "given_pairs": "ctxlm_ds.data.formats.pairs:GivenPairs",
        "doc_segments": "ctxlm_ds.data.formats.pairs:DocSegments",
        "text_and_pair": "ctxlm_ds.data.formats.text_and_pair:TextAndPair",
        "sentence_pair": "ctxlm_ds.data.formats.pairs:SentencePair",
        "full_sentences": "ctxlm_ds.data.formats.running_text:FullSentences",
        "doc_sentences": "ctxlm_ds.data.formats.running_text:DocSentences",
        "blocks": "ctxlm_ds.data.formats.running_text:Blocks",
        "chunks": "ctxlm_ds.data.formats.running_text:Chunks",
        "lanes": "ctxlm_ds.data.formats.lanes:Lanes",
        "bidirectional_lanes": "ctxlm_ds.data.formats.lanes:BidirectionalLanes",
    },
)
OPTIMIZERS = Registry(
    "optimizer",
    "ctxlm_ds.optimizers",
    {
        "adamw": "ctxlm_ds.training.optimizers.adamw:AdamW",
        "stable_adamw": "ctxlm_ds.training.optimizers.stable_adamw:StableAdamW",
        "lamb": "ctxlm_ds.training.optimizers.lamb:Lamb",
        "muon": "ctxlm_ds.training.optimizers.muon:Muon",
        "adafactor": "ctxlm_ds.training.optimizers.adafactor:Adafactor",
        "adagrad": "ctxlm_ds.training.optimizers.adagrad:Adagrad",
        "from_ds_config": "ctxlm_ds.training.optimizers.from_ds_config:FromDeepSpeedConfig",
    },
)
SCHEDULES = Registry(
    "schedule",
    "ctxlm_ds.schedules",
    {
        "linear": "ctxlm_ds.training.schedules.schedule:Linear",
        "polynomial": "ctxlm_ds.training.schedules.schedule:Polynomial",
        "cosine": "ctxlm_ds.training.schedules.schedule:Cosine",
        "inverse_sqrt": "ctxlm_ds.training.schedules.schedule:InverseSqrt",
        "wsd": "ctxlm_ds.training.schedules.schedule:WarmupStableDecay",
        "segments": "ctxlm_ds.training.schedules.schedule:Segments",
        "constant": "ctxlm_ds.training.schedules.schedule:Constant",
    },
)
TRACKERS = Registry(
    "tracker",
    "ctxlm_ds.trackers",
    {
        "tensorboard": "ctxlm_ds.training.hooks.metrics:TensorBoardWriter",
        "wandb": "ctxlm_ds.training.hooks.trackers:WandbTracker",
    },
)
KERNELS = Registry("kernel", "ctxlm_ds.kernels", {})
"""Implementations of other packages, named OPERATION.NAME; those of this package are tables in kernels/OPERATION.py."""
TOKENIZERS = Registry(
    "tokenizer kind",
    "ctxlm_ds.tokenizers",
    {
        "wordpiece": "ctxlm_ds.tokenizers.kinds.wordpiece:WORDPIECE",
        "byte_bpe": "ctxlm_ds.tokenizers.kinds.bpe:BYTE_BPE",
        "character_bpe": "ctxlm_ds.tokenizers.kinds.bpe:GPT1",
        "sentencepiece": "ctxlm_ds.tokenizers.kinds.sentencepiece:SENTENCEPIECE",
        "characters": "ctxlm_ds.tokenizers.kinds.characters:CHARACTERS",
    },
)
LAUNCHERS = Registry(
    "launcher",
    "ctxlm_ds.launchers",
    # The first one that has started a process counts.
    {
        "ranks": "ctxlm_ds.process.launchers:RANKS",
        "torchrun": "ctxlm_ds.process.launchers:TORCHRUN",
        "deepspeed": "ctxlm_ds.process.launchers:DEEPSPEED",
        "environment": "ctxlm_ds.process.launchers:ENVIRONMENT",
        "srun": "ctxlm_ds.process.slurm:SRUN",
        "single": "ctxlm_ds.process.launchers:SINGLE",
    },
)
