"""Propose width, depth, batch, rate and tokens of a run that has so much text and so many hours.

The planner gives the tokens that each size reads in the hours. Published laws, fitted on causal models of 44 million to
16 billion parameters, give the losses, of which only the order of sizes is used:

    L = E + A / N'^a + B / D'^b

by Hoffmann et al. 2022 (arXiv:2203.15556, approach 3) and by the fit of their data that Besiroglu et al. 2024
(arXiv:2404.10102) corrected, by Muennighoff et al. 2023 (arXiv:2305.16264, section 3), or by a ladder of runs of one's
own (tools/scaling.py). Tokens that are read again count less (D'), and so do parameters beyond those that the text is
enough for (N'), in all of them as Muennighoff et al. fitted it. Batch and rate are those of DeepSeek for AdamW (Bi et
al. 2024, arXiv:2401.02954, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ctxlm_ds.apps.plan.layouts import Layout
from ctxlm_ds.apps.plan.plan import Planner
from ctxlm_ds.apps.plan.search import search_layouts
from ctxlm_ds.atomic import read_object
from ctxlm_ds.console import aligned
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.hardware import Cluster
from ctxlm_ds.recipe.schema import RunConfig

SHAPES = ((128, 2), (256, 4), (512, 8), (768, 12), (1024, 24), (1536, 24), (2048, 24), (2560, 32), (4096, 32))
"""Widths and layers; heads have 64 elements."""
HEAD_SIZE = 64
WARMUP = 0.02
"""Share of the steps, as no published number of warmup steps fits every length."""
SIZES = ("hidden_size", "num_layers", "num_attention_heads", "intermediate_size")
"""Settings of a shape."""
TOKENS_OF_A_WORD = 1.35
"""Of subword vocabularies of 30,000 to 50,000 ids on English."""
NEARLY = 0.01
"""Sizes whose loss is at most so much above the lowest, in nats, are named with it: the laws are no surer."""
FARTHEST = 10.0
"""A separate ladder of runs is used up to so many times its largest size."""


class Law(NamedTuple):
    """Constants of a law, and the largest number of parameters that it was fitted on."""

    source: str
    e: float
    a: float
    alpha: float
    b: float
    beta: float
    largest: float = 16e9

    def loss(self, parameters: float, tokens: float, unique: float) -> float:
        """Return the loss after `tokens`, of which `unique` differ."""
        # The parameters that are optimal for the unique tokens: those of the computation for which the tokens are.
        exponent = (math.log(self.alpha * self.a / (self.beta * self.b)) + self.beta * math.log(unique)) / self.alpha
        enough = min(parameters, math.exp(min(exponent, 500.0)))
        effective = discounted(enough, parameters, 5.3), discounted(min(unique, tokens), tokens, 15.4)
        return self.e + self.a / effective[0] ** self.alpha + self.b / effective[1] ** self.beta


PUBLISHED = (
    Law("Hoffmann 2022", 1.69, 406.4, 0.34, 410.7, 0.28),
    Law("Besiroglu 2024", 1.8172, 482.01, 0.3478, 2085.43, 0.3658),
    Law("Muennighoff 2023", 1.869, 520.8, 0.3527, 1487.7, 0.3527),
)


def discounted(base: float, total: float, decay: float) -> float:
    """Return what `total` is worth if everything beyond `base` repeats it (Muennighoff 2023, equations 5 and 6)."""
    return base + base * decay * (1 - math.exp(-(total / base - 1) / decay))


def read_ladder(path: Path) -> Law:
    """Return the law of a ladder of runs (tools/scaling.py). Raises ConfigError if the file has none."""
    try:
        return Law(**{"source": str(path), **(read_object(path) or {})["law"]})
    except (KeyError, TypeError):
        raise ConfigError(f"{path}: no law; python tools/scaling.py fit writes one") from None


@dataclass(frozen=True)
class Proposal:
    """One size, trained for the hours."""

    config: RunConfig
    layout: Layout
    parameters: int
    tokens: float
    seconds_per_step: float
    rate: float
    """Peak learning rate of AdamW."""
    losses: Mapping[str, float]

    @property
    def settings(self) -> list[str]:
        """Return the settings of the run, for --set."""
        model, training = self.config.model, self.config.training
        optimizer = self.config.optimizer
        is_adamw = optimizer.follows_width() and optimizer.matrix_moments is None
        rate = [f"optimizer.learning_rate={self.rate:.2g}"] if is_adamw else []
        return ["phases=[]", *(f"model.{name}={getattr(model, name)}" for name in SIZES),
                "training.batch_ramp=null", f"training.global_batch_size={training.global_batch_size}",
                f"training.max_steps={training.max_steps}", "schedule.warmup_steps=null",
                f"schedule.warmup_fraction={WARMUP}", *rate,
                f"deepspeed=zero{self.layout.zero_stage}", *self.layout.settings(None)]  # fmt: skip


@dataclass(frozen=True)
class Budget:
    """A recipe, and the text and hours for which its size is to be chosen."""

    recipe: RunConfig
    cluster: Cluster
    words: float
    hours: float
    laws: tuple[Law, ...]

    def proposals(self) -> list[Proposal]:
        """Return a proposal of each size that fits. Raises ConfigError if none does, or a family has no such shapes."""
        model, cluster = self.recipe.model, self.cluster
        if not set(SIZES) <= set(type(model).model_fields):
            raise ConfigError(f"--budget: model.family {model.family} has no width and depth of a transformer")
        found = [one for width, depth in SHAPES if (one := self._proposal(width, depth)) is not None]
        if not found:
            raise ConfigError(f"--budget: no size fits on {cluster.world_size} {cluster.gpu.name}")
        return found

    def _proposal(self, width: int, depth: int) -> Proposal | None:
        config, ranks = self.recipe, self.cluster.world_size
        batch = ranks * max(1, round(config.training.global_batch_size / ranks))
        config = config.with_values("training", batch_ramp=None, global_batch_size=batch)
        wide = config.model.intermediate_size / config.model.hidden_size  # type: ignore[attr-defined]
        config = config.with_values(
            "model", hidden_size=width, num_layers=depth, num_attention_heads=width // HEAD_SIZE,
            intermediate_size=round(wide * width / HEAD_SIZE) * HEAD_SIZE,
        )  # fmt: skip
        if next(iter(config.model.problems()), None) is not None:
            return None  # other settings of the family do not go with this shape
        for _ in range(2):  # the operations of the hours decide the batch, which decides the speed
            planner = Planner(config, self.cluster)
            found = search_layouts(planner).recommended
            if found is None:
                return None
            plan, batch = found, config.training.global_batch_size
            steps = max(1, int(self.hours * 3600 / plan.time.total))
            rows = 0.2920 * (planner.flops * steps) ** 0.3271 / config.data.seq_length
            decided = ranks * 2 ** round(math.log2(max(1.0, rows / ranks)))
            config = config.with_values("training", global_batch_size=decided)
        config, size = planner.config.with_values("training", max_steps=steps), planner.model.num_parameters
        rate = 0.3118 * (planner.flops * steps) ** -0.1250
        tokens = float(steps * batch * config.data.seq_length)
        losses = {law.source: law.loss(size, tokens, self.words * TOKENS_OF_A_WORD) for law in self.laws
                  if size <= law.largest * FARTHEST}  # fmt: skip
        return Proposal(config, plan.layout, size, tokens, plan.time.total, rate, losses)


def describe(proposals: list[Proposal], words: float, laws: tuple[Law, ...]) -> list[str]:
    """Return the lines of a table of sizes, and which of them each law prefers."""
    unique = words * TOKENS_OF_A_WORD
    heading = ["width", "layers", "parameters", "tokens", "passes", "batch", "AdamW's rate", "s/step"]
    rows = [[*heading, *(law.source for law in laws)]]
    for one in proposals:
        model: Any = one.config.model
        losses = (f"{one.losses[law.source]:.3f}" if law.source in one.losses else "too far" for law in laws)
        rows.append([
            str(model.hidden_size), str(model.num_layers), f"{one.parameters / 1e6:,.1f}M", f"{one.tokens / 1e9:.3g}B",
            f"{one.tokens / unique:.3g}", str(one.config.training.global_batch_size),
            f"{one.rate:.2g}", f"{one.seconds_per_step:.3g}", *losses,
        ])  # fmt: skip
    lines = aligned(rows)
    for law in laws:
        known = [one for one in proposals if law.source in one.losses]
        if not known:
            lines.append(f"{law.source}: every size is more than {FARTHEST:g} times its largest")
            continue
        best = min(known, key=lambda one: one.losses[law.source])
        near = [one for one in known if one.losses[law.source] <= best.losses[law.source] + NEARLY]
        names = ", ".join(f"{one.parameters / 1e6:,.0f}M" for one in near)
        lines += [f"{law.source}: {best.parameters / 1e6:,.0f}M parameters (within {NEARLY:g} nats: {names})",
                  f"  --set {' '.join(best.settings)}"]  # fmt: skip
    return [*lines, "The laws are of causal models of 44M parameters and more; for masks, and below, they are a guess."]
