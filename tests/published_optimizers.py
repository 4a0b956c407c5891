"""Updates of optimizers as they were published, a complete parameter at a time, for comparisons in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ctxlm_ds.parallel.parameters import ParameterFacts
from ctxlm_ds.recipe.sections import OptimizerSection

Tensors = dict[str, torch.Tensor]
Facts = dict[str, ParameterFacts]
Update = Callable[[int, Tensors], None]
"""Changes the parameters with the gradients of a step, which is counted from 1."""


def zeros(parameters: Tensors) -> Tensors:
    return {name: torch.zeros_like(p) for name, p in parameters.items()}


def decay_of(name: str, facts: Facts, config: OptimizerSection) -> float:
    return config.weight_decay if facts[name].decays or config.decay_biases else 0.0


def blocks_of(facts: ParameterFacts, parameter: torch.Tensor) -> tuple[int, ...]:
    """Rows of the matrices in a parameter."""
    return (facts.split.blocks if facts.split is not None else ()) or (parameter.shape[0],)


def shazeer_2018(config: OptimizerSection, parameters: Tensors, facts: Facts, least: int) -> Update:
    """mesh_tensorflow's AdafactorOptimizer, a matrix at a time."""
    second = zeros(parameters)

    def update(step: int, gradients: Tensors) -> None:
        decay = 1.0 - step**-0.8
        for name, parameter in parameters.items():
            blocks = blocks_of(facts[name], parameter)
            parts = zip(parameter.split(blocks), gradients[name].split(blocks), second[name].split(blocks), strict=True)
            for p, g, v in parts:
                v.mul_(decay).add_((1 - decay) * (g * g + 1e-30))
                estimate = v
                if p.dim() == 2 and min(p.shape) >= least:
                    estimate = v.mean(1)[:, None] * v.mean(0)[None, :] / v.mean()
                step_of = g * estimate.rsqrt()
                step_of = step_of / max(1.0, float(step_of.square().mean().sqrt()))
                rate = config.learning_rate * max(1e-3, float(p.square().mean().sqrt()))
                p.mul_(1 - rate * decay_of(name, facts, config)).sub_(rate * step_of)

    return update


def duchi_2011(config: OptimizerSection, parameters: Tensors, facts: Facts) -> Update:
    """tf.train.AdagradOptimizer with decoupled decay."""
    totals = {name: torch.full_like(p, config.initial_accumulator) for name, p in parameters.items()}

    def update(step: int, gradients: Tensors) -> None:
        for name, p in parameters.items():
            totals[name] += gradients[name] ** 2
            rate = config.learning_rate
            p.mul_(1 - rate * decay_of(name, facts, config)).sub_(rate * gradients[name] / totals[name].sqrt())

    return update


def you_2019(
    config: OptimizerSection, parameters: Tensors, facts: Facts, ratios: dict[str, list[float]] | None = None
) -> Update:
    """LAMB, algorithm 2, with phi(z) = z; `ratios` gets the trust ratios of each parameter."""
    first, second, (beta1, beta2) = zeros(parameters), zeros(parameters), config.betas

    def update(step: int, gradients: Tensors) -> None:
        for name, p in parameters.items():
            g = gradients[name]
            first[name] = beta1 * first[name] + (1 - beta1) * g
            second[name] = beta2 * second[name] + (1 - beta2) * g * g
            r = first[name] / (1 - beta1**step) / ((second[name] / (1 - beta2**step)).sqrt() + config.eps)
            r = r + decay_of(name, facts, config) * p
            takes_ratio = (p.ndim > 1 or config.trust_ratio == "all") and p.norm() > 0
            ratio = float(p.norm() / r.norm()) if takes_ratio else 1.0
            if ratios is not None:
                ratios.setdefault(name, []).append(ratio)
            p -= config.learning_rate * ratio * r

    return update


def wortsman_2023(config: OptimizerSection, parameters: Tensors, facts: Facts, sizes: dict[str, list[float]]) -> Update:
    """StableAdamW, algorithm 2; `sizes` gets the RMS of each gradient in units of its moment."""
    first, second, (beta1, beta2) = zeros(parameters), zeros(parameters), config.betas

    def update(step: int, gradients: Tensors) -> None:
        for name, p in parameters.items():
            g = gradients[name]
            first[name] = beta1 * first[name] + (1 - beta1) * g
            second[name] = beta2 * second[name] + (1 - beta2) * g * g
            m, v = first[name] / (1 - beta1**step), second[name] / (1 - beta2**step)
            rms = float((g * g / v.clamp_min(config.eps**2)).mean().sqrt())
            sizes.setdefault(name, []).append(rms)
            rate = config.learning_rate / max(1.0, rms)
            p.mul_(1 - rate * decay_of(name, facts, config)).sub_(rate * m / (v.sqrt() + config.eps))

    return update


def jordan_2024(config: OptimizerSection, parameters: Tensors, facts: Facts) -> Update:
    """torch's Muon for each matrix, query, key and value apart, and AdamW for the rest."""
    matrices: list[torch.nn.Parameter] = []
    plain: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    parts: dict[str, list[torch.nn.Parameter]] = {}
    for name, parameter in parameters.items():
        blocks = blocks_of(facts[name], parameter) if facts[name].matrix else (parameter.shape[0],)
        # Views: a step on a part changes the parameter.
        parts[name] = [torch.nn.Parameter(part) for part in parameter.split(blocks)]
        (matrices if facts[name].matrix else plain[facts[name].decays]).extend(parts[name])
    rate, decay = config.matrix_learning_rate, config.weight_decay
    muon = torch.optim.Muon(
        matrices, lr=rate, weight_decay=decay, momentum=config.momentum, adjust_lr_fn=config.matrix_scale
    )
    groups = [{"params": plain[decays], "weight_decay": decay * decays} for decays in (True, False)]
    adamw = torch.optim.AdamW(groups, config.learning_rate, config.betas, config.eps, foreach=False)

    def update(step: int, gradients: Tensors) -> None:
        for name, gradient in gradients.items():
            for part, of_part in zip(parts[name], gradient.split([len(p) for p in parts[name]]), strict=True):
                part.grad = of_part.clone()
        if config.gradient_clipping:
            torch.nn.utils.clip_grad_norm_([p for own in parts.values() for p in own], config.gradient_clipping)
        for optimizer in (muon, adamw):
            optimizer.step()

    return update
