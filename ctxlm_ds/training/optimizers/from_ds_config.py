"""The optimizer that a DeepSpeed JSON describes, built by DeepSpeed, and the rules of that section of the JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ctxlm_ds.recipe.deepspeed_rules import AUTO, deepspeed_keys, type_problem
from ctxlm_ds.recipe.problems import Problem, did_you_mean, nearest_name, show_value
from ctxlm_ds.training.optimizers.base import AdamSection, GroupKind, Optimizer

ELEMENTWISE = ("Adam", "AdamW", "Lion", "SGD", "RMSprop", "RAdam", "Adamax", "Adadelta", "Rprop")
"""Optimizers that update each element independently, so that ZeRO may split parameters anywhere."""
DEEPSPEED_SPELLS = frozenset({"adam", "adamw", "lion"})
"""Names that DeepSpeed accepts in any case; all others must match torch.optim exactly."""
Factor = Annotated[float, Field(gt=0.0, le=1e6)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
REMOVED = "DeepSpeed has removed its 1-bit optimizers"
NO_MUP = "the layers are not parametrised for it"
REFUSED = {
    "lamb": "its trust ratios would be those of the shards; optimizer.name lamb in the recipe is exact",
    **dict.fromkeys(("onebitadam", "onebitlamb", "zerooneadam"), REMOVED),
    "muon": "its steps differ between ZeRO stages; optimizer.name muon in the recipe is exact",
    "adagrad": "DeepSpeed rebuilds it without the parameter groups (the first step fails); that of the recipe is exact",
    "adafactor": "ZeRO gives it flat shards, which have neither rows nor columns",
    "lbfgs": "it evaluates the loss several times per step",
    "sparseadam": "gradients here are dense",
    "nadam": "it keeps a product of momenta that a checkpoint cannot hold",
    "asgd": "it keeps averages that a checkpoint cannot hold",
    **dict.fromkeys(("muadam", "muadamw", "musgd"), NO_MUP),
}
PARAMETER_RULES: dict[str, Any] = {
    "betas": tuple[Fraction, Fraction],
    "etas": tuple[Factor, Factor],
    "step_sizes": tuple[Factor, Factor],
    **dict.fromkeys(("alpha", "dampening", "momentum", "rho"), Fraction),
    "eps": Fraction,
    "lr": Factor,
    "weight_decay": Annotated[float, Field(ge=0.0, le=1000.0)],
}
"""Rules of the optimizers' parameters; the others are flags."""


class FromDeepSpeedConfigSection(AdamSection):
    """Optimizer of the DeepSpeed JSON; its "auto" become these settings."""

    kernels: ClassVar = ("auto",)
    handed_over: ClassVar = True

    name: str = "from_ds_config"

    @property
    def idle_settings(self) -> tuple[str, ...]:
        return ("betas", "eps", "weight_decay")

    def hand_over(self, settings: dict[str, Any]) -> Iterator[Problem]:
        section = settings.get("optimizer", AUTO)
        if section == AUTO or section.get("type", AUTO) == AUTO:
            yield Problem(
                "optimizer",
                "missing, or without a type, but the recipe's optimizer.name from_ds_config uses this section; "
                'add {"type": …, "params": {…}}, or set optimizer.name to another',
            )
            return
        params = section["params"] = {} if section.get("params", AUTO) in (AUTO, None) else section["params"]
        if not isinstance(params, dict):
            yield Problem("optimizer.params", f"{show_value(params)}: expected a section")
            return
        values = self.json_values()
        # The learning rate is always the recipe's, set by its schedule.
        if params.setdefault("lr", AUTO) not in (AUTO, None, values["lr"]):
            yield Problem(
                "optimizer.params.lr",
                f"{show_value(params['lr'])} here, but {show_value(values['lr'])} in the recipe "
                '(optimizer.learning_rate); write "auto" here, or change the recipe',
            )
        params["lr"] = values["lr"]
        params |= {name: value for name, value in values.items() if params.get(name) == AUTO}
        yield from _parameter_problems(section["type"], params)
        yield from _kind_problems(section["type"])


class FromDeepSpeedConfig(Optimizer):
    """DeepSpeed builds and steps it."""

    section = FromDeepSpeedConfigSection

    def group_settings(self, kind: GroupKind) -> dict[str, Any]:
        if kind == "fixed" or (kind == "rest" and not self.settings.decay_biases):
            return super().group_settings(kind)
        return {}  # an entry would be in place of the JSON's weight_decay


def _parameter_problems(kind: str, params: dict[str, Any]) -> Iterator[Problem]:
    names = deepspeed_keys()["optimizers"]
    if kind.lower() in ("adam", "adamw"):
        known = names["torch_adam" if params.get("torch_adam") is True else "adam"]
    else:
        known = names.get(kind, names["Lion"])
    for name, value in params.items():
        path = f"optimizer.params.{name}"
        if name not in known:
            text = f"{kind} has no such parameter (value {show_value(value)}){did_you_mean(name, known)}"
            yield Problem(path, text + f" (it has {', '.join(known)})")
        elif value != AUTO and (reason := type_problem(value, PARAMETER_RULES.get(name, bool | None))):
            yield Problem(path, reason)


def _kind_problems(kind: str) -> Iterator[Problem]:
    allowed = ", ".join(ELEMENTWISE)
    reason = REFUSED.get(kind.lower())
    if reason is not None:
        yield Problem("optimizer.type", f"{kind}: {reason}; choose one of {allowed}, or optimizer.name in the recipe")
    elif kind not in ELEMENTWISE and kind.lower() not in DEEPSPEED_SPELLS:
        near = nearest_name(kind, ELEMENTWISE)
        hint = f"did you mean {near}? " if near else ""
        yield Problem("optimizer.type", f"{kind}: {hint}expected one of {allowed}")
