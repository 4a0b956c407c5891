"""What a GPU does with a recipe: attention by backend, matrix products, a profiled step, kernels and compile.

Single operations have the sizes and the precision of the recipe and run forward and backward; a figure is the mean of
REPETITIONS runs, and what a backend refuses has none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

from ctxlm_ds.errors import ConfigError, CtxlmError
from ctxlm_ds.kernels.dispatch import DTYPES, OPERATIONS
from ctxlm_ds.recipe.deepspeed import DEFAULT_CONFIG
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import RunConfig
from tools.benchmark.our_sides import EngineSteps
from tools.benchmark.steps import LEAST_STEPS, StepBenchmark, compare_steps, measured_recipe, refuse
from tools.benchmark.tables import NOTHING, Table, spread
from tools.benchmark.turns import SideProcess, alternate, started

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip
MASKS = ("no mask", "mask of keys", "full mask")
LENGTHS = (512, 128)
POSITIONS = 32_768
"""Of a micro-batch in the tables of single operations."""
REPETITIONS = 10
DROPOUTS = (0.1, 0.0)


ANCHORED = {
    "bert-base-h200": (
        ["model.vocab_size=30522"],
        "ModernBERT-base, 8 H100: 304,000 tokens/s a GPU, MFU 20 % (arXiv 2412.13663)",
    ),
    "bert-large-phase2": (
        ["model.vocab_size=30522", "training.micro_batch_size=64"],
        "MLPerf 4.1, 8 H100 in FP8: about 248,000 real tokens/s a GPU, 46 % of the FP8 peak",
    ),
    "gpt2-small-h200": (
        ["model.vocab_size=50257", "training.micro_batch_size=32"],
        "SmolLM-135M, 64 H100: about 108,000 tokens/s a GPU, MFU 7 %",
    ),
    "llama-1b": (
        ["model.vocab_size=32000", "training.micro_batch_size=8"],
        "llm-foundry 1B, rows of 2,048, 8 H100: 45,455 tokens/s a GPU, MFU 41.8 %",
    ),
    "t5-base": (
        ["model.vocab_size=32128", "training.micro_batch_size=64"],
        "nanoT5, one A100: about 117,000 tokens/s",
    ),
}  # fmt: skip
"""Recipes that are measured: settings for a GPU of 80 GB, and the published figure next to it."""


def measure_anchored(rounds: int) -> Iterator[Table]:
    """Yield the step of each recipe of ANCHORED, with its dropout, against transformers and published figures."""
    for name, (settings, published) in ANCHORED.items():
        benchmark = StepBenchmark(DEFAULT_CONFIG, ("autocast", "trainer"), (None,), rounds=rounds)
        for table in compare_steps(load_config(name, settings), benchmark):
            yield replace(table, notes=[*table.notes, f"Published: {published}."])


def measure_device(config: RunConfig, part: str, rounds: int) -> Iterator[Table]:
    """Yield the single operations, or the recipe's step with each setting.

    Raises:
        ConfigError: the recipe's step cannot be measured.
    """
    refuse(config)
    if part == "operations":
        yield from measure_operations(config, "cuda", REPETITIONS)
        return
    for dropout in DROPOUTS:
        case = measured_recipe(config, dropout, config.training.precision, micro_batches=2)
        yield from compare_settings(case, rounds, f"{case.name}, dropout {dropout:g}")


def measure_operations(config: RunConfig, device: str, repetitions: int, positions: int = POSITIONS) -> Iterator[Table]:
    """Yield attention at LENGTHS, and the products of a layer and of the head.

    Raises:
        ConfigError: the model lacks a size.
    """
    model: Any = config.model
    names = ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    sizes: list[Any] = [getattr(model, name, None) for name in names]
    if None in sizes:
        raise ConfigError(
            f"model.family {model.family} lacks one of {', '.join(names)}; give a recipe that has all (bert-large)"
        )
    width, heads, inner, words = sizes
    options = {"dtype": DTYPES[config.training.precision], "device": device}
    for length in LENGTHS:
        yield attention_table((max(1, positions // length), heads, length, width // heads), options, repetitions)
    predictions = max(1, round(float(getattr(config.objective, "mask_prob", 1.0)) * positions))
    padded = -(-words // 128) * 128
    products = {
        "query, key, value": (positions, width, 3 * width),
        "attention output": (positions, width, width),
        "feed-forward up": (positions, width, inner),
        "feed-forward down": (positions, inner, width),
        f"head, {words:,} words": (predictions, width, words),
        f"head, {padded:,} words": (predictions, width, padded),
    }
    rows = [
        [name, " x ".join(map(str, shape)), *_product_cells(shape, options, repetitions)]
        for name, shape in products.items()
    ]
    header = ("", "tokens x inputs x outputs", "forward TFLOP/s", "of inputs TFLOP/s", "of weights TFLOP/s")
    yield Table(f"matrix products, {options['dtype']}".replace("torch.", ""), header, rows)


def attention_table(sizes: tuple[int, ...], options: dict[str, Any], repetitions: int) -> Table:
    """Measure every backend with every mask and dropout on inputs of `sizes` (rows, heads, positions, head size)."""
    rows, heads, length, size = sizes
    query, key, value = inputs = [torch.randn(sizes, **options).requires_grad_() for _ in range(3)]
    upstream = torch.randn(sizes, **options)
    # All masks hide the last eighth of the keys.
    seen = (torch.arange(length, device=options["device"]) < length - length // 8).expand(rows, 1, 1, length)
    masks = dict(zip(MASKS, (None, seen, seen.expand(-1, -1, length, -1).contiguous()), strict=True))
    flops = 3 * 4 * rows * heads * length * length * size  # the backward pass has twice the products

    def cells(backend: SDPBackend, mask: torch.Tensor | None, p: float) -> list[str]:
        def action() -> None:
            with sdpa_kernel(backend), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says why a backend is not used
                context = scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=p)
            torch.autograd.grad(context, inputs, upstream)

        try:
            seconds = seconds_of(action, repetitions)
        except RuntimeError:
            return [NOTHING, NOTHING]
        return [f"{1e3 * seconds:.2f}", f"{flops / seconds / 1e12:.3g}"]

    table = [
        [f"{name}, {mask}", *(cell for p in DROPOUTS for cell in cells(backend, masks[mask], p))]
        for name, backend in BACKENDS.items()
        for mask in MASKS
    ]
    header = [cell for p in DROPOUTS for cell in (f"dropout {p:g}: ms", "TFLOP/s")]
    title = f"attention forward and backward, {' x '.join(map(str, sizes))} (rows, heads, positions, head size)"
    return Table(title, ("", *header), table)


def _product_cells(shape: tuple[int, int, int], options: dict[str, Any], repetitions: int) -> list[str]:
    """Return the speed of the forward product and of the gradients of inputs and weights."""
    tokens, inputs, outputs = shape
    x, weight, upstream = (
        torch.randn(size, **options) for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    actions: list[Callable[[], object]] = [lambda: x @ weight.T, lambda: upstream @ weight, lambda: upstream.T @ x]
    return [f"{2 * tokens * inputs * outputs / seconds_of(action, repetitions) / 1e12:.3g}" for action in actions]


def seconds_of(action: Callable[[], object], repetitions: int) -> float:
    """Return the mean time of an action on the device, after runs that do not count."""
    timer = Timer("action()", globals={"action": action}, num_threads=torch.get_num_threads())
    return timer.timeit(repetitions).mean


def settings_to_compare(config: RunConfig) -> dict[str, RunConfig]:
    """Return the recipe with each way to compile, an unpadded vocabulary, and each kernel of attention and loss."""

    def changed(section: str, **settings: object) -> RunConfig:
        return config.model_copy(update={section: getattr(config, section).model_copy(update=settings)})

    cases = {
        f"compile {str(value).lower()}": changed("training", compile=value, compile_mode="default")
        for value in (False, True)
    }
    cases["compile reduce-overhead"] = changed("training", compile=True, compile_mode="reduce-overhead")
    cases["vocab_multiple 1"] = changed("parallel", vocab_multiple=1)
    return cases | {
        f"{operation} {row.name}": changed("kernels", **{operation: row.name})
        for operation in ("attention", "cross_entropy")
        for row in OPERATIONS[operation]
    }


def compare_settings(config: RunConfig, rounds: int, title: str) -> Iterator[Table]:
    """Yield where the time of one step of the recipe goes, and the engine's step with each setting.

    A setting that does not run here has its reason instead of figures.
    """
    sides: dict[str, SideProcess] = {}
    reasons: dict[str, str] = {}
    profile: Table | None = None
    for name, case in settings_to_compare(config).items():
        # One after another: all of them together may not fit into the memory of the device.
        try:
            with started({name: EngineSteps(case, DEFAULT_CONFIG)}) as processes:
                alternate(processes, rounds, LEAST_STEPS["cuda"])
                sides[name] = processes[name]
                profile = profile or processes[name].facts().kernels
        except CtxlmError as error:
            reasons[name] = str(error).splitlines()[0]
    tokens = config.training.global_batch_size * config.data.seq_length
    rows = [
        [name, spread([tokens / turn.seconds for turn in side.turns], "{:,.0f}"), f"{side.first_step_s:.1f} s"]
        for name, side in sides.items()
    ]
    rows += [[name, NOTHING, NOTHING] for name in reasons]
    if profile is not None:
        yield profile
    notes = [f"{name}: {reason}" for name, reason in reasons.items()]
    yield Table(f"the engine's step, {title}", ("", "tokens/s", "first step"), rows, notes)
