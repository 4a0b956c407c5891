"""Passes of every family on fake CUDA tensors, for a process of their own, which loads the device guard before torch.

    python -c "from tests.unit.apps.verify import fake_passes; fake_passes.main(FILE, SELECTION)"

writes them to FILE: those of the cases `few`, or `complete`.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ctxlm_ds.apps.verify.device_guard import load_device_guard

CAPABILITIES = {(7, 5): "fp16", (8, 0): "bf16", (9, 0): "bf16", (10, 0): "bf16"}
"""Turing, Ampere, Hopper and Blackwell, with the 16-bit type that each multiplies."""
ROWS = 2
SMALL = ("model.num_layers=1", f"training.micro_batch_size={ROWS}")
OF_DECODER = (*SMALL, "model.num_decoder_layers=1")
RECIPES: dict[str, tuple[str, ...]] = {
    "bert": ("bert-base", *SMALL),
    "roberta": ("roberta-base", *SMALL),
    "xlm_roberta": ("xlm-roberta-base", *SMALL),
    "albert": ("albert-base", *SMALL),
    "electra": ("electra-small", *SMALL, "model.generator_num_layers=1"),
    "distilbert": ("distilbert-base", *SMALL),
    "tinybert": ("tinybert-4l", SMALL[1]),
    "modernbert": ("modernbert-base", "model.num_layers=2", SMALL[1]),
    "t5": ("t5-v1_1-base", *OF_DECODER),
    "bart": ("bart-base", *OF_DECODER),
    "mbart": ("mbart-base", *OF_DECODER),
    "xlnet": ("xlnet-base", *SMALL),
    "unilm": ("unilm-base", *SMALL),
    "megatron_bert": ("bert-base", "model.family=megatron_bert", *SMALL),
    "gpt2": ("gpt2-small", *SMALL),
    "gpt1": ("gpt1", *SMALL),
    "llama": ("llama-1b", *SMALL),
    "elmo": ("elmo-original", *SMALL, "data.seq_length=4"),
}
"""Family -> a shipped recipe with its widths, heads and lengths, and few layers and rows."""
PACKED = "data.packing=true", "data.max_sequences_per_row=4"
ALONE, SHARED = ({shares: (f"data.reset_at_documents={shares}".lower(),)} for shares in (False, True))
SHARING: dict[str, dict[bool, tuple[str, ...]]] = {
    **{name: {False: (), True: PACKED} for name in ("bert", "roberta", "albert", "electra", "unilm", "tinybert")},
    "modernbert": {False: ("data.packing=false",), True: PACKED},
    "gpt2": ALONE | SHARED,
    "llama": ALONE | SHARED,
    "gpt1": SHARED,
}
"""Whether sequences share rows -> settings; other families run as their recipes say."""
OF_EVERY_ROW = ("bert", "llama", "t5")
"""Families with LayerNorm and RMSNorm, plain and gated activations, dropout, recomputed layers, a bias of scores."""


class Case(NamedTuple):
    """One model on one device."""

    family: str
    shares_rows: bool
    capability: tuple[int, int]


CASES = [
    Case(family, shares_rows, capability)
    for family in RECIPES
    for shares_rows in SHARING.get(family, (False,))
    for capability in CAPABILITIES
    if capability >= (8, 0) or shares_rows or True not in SHARING.get(family, ())
]
"""By parts: before Ampere a family runs on shared rows if it can, and on rows of one sequence else."""
FEW = [
    case for case in CASES
    if case.family in OF_EVERY_ROW
    or (case.capability == (9, 0) and case.shares_rows == max(SHARING.get(case.family, (False,))))
]  # fmt: skip
"""Every family on Hopper, on shared rows if it can; families with all kinds of layers on every device."""


class Outcome(NamedTuple):
    """What became of a case."""

    config: Any
    kernels: dict[str, str]
    done: Any
    """A FakePass; None if an earlier device took the same kernels in the same type."""


def config_of(family: str, shares_rows: bool, precision: str, *settings: str) -> Any:
    from ctxlm_ds.recipe.load import load_config

    recipe, *own = RECIPES[family]
    rows = SHARING.get(family, {False: ()})[shares_rows]
    return load_config(recipe, [*own, *rows, f"training.precision={precision}", *settings])


def run_families(cases: Sequence[Case]) -> dict[Case, Outcome]:
    """The families of the cases with what `auto` chooses on their devices."""
    from ctxlm_ds.apps.verify.fake_cuda import FakeModel, fake_cuda

    found: dict[Case, Outcome] = {}
    ran: list[Any] = []
    for case in cases:
        precision = CAPABILITIES[case.capability]
        config = config_of(case.family, case.shares_rows, precision)
        with fake_cuda(case.capability):
            model = FakeModel(config)
            what = (case.family, case.shares_rows, precision, model.kernels)
            done = None if what in ran else model.run()
        ran.append(what)
        found[case] = Outcome(config, what[-1], done)
    return found


def rows_that_run(config: Any) -> dict[str, list[str]]:
    """Operation that a model's layers ask for -> its rows that can compute all that they ask for."""
    from ctxlm_ds.apps.verify.fake_cuda import FakeModel
    from ctxlm_ds.kernels import dispatch
    from ctxlm_ds.process.patches import replaced

    needs: dict[str, list[Any]] = {}

    def noting(operation: str, asked: str, table: Any, need: Any) -> Any:
        needs.setdefault(operation, []).append(need)
        return choose(operation, asked, table, need)

    choose = dispatch.choose
    with replaced(dispatch, "choose", noting):
        FakeModel(config)
    return {
        operation: [row.name for row in dispatch.OPERATIONS[operation] if not any(map(row.why_not, asked))]
        for operation, asked in needs.items()
    }


def run_named_rows() -> list[tuple[str, dict[str, str], Any]]:
    """Passes in which a recipe names each row that runs on Hopper, whether `auto` takes it or not."""
    from ctxlm_ds.apps.verify.fake_cuda import FakeModel, fake_cuda

    found = []
    for family in OF_EVERY_ROW:
        shares_rows = family in SHARING
        with fake_cuda((9, 0)):
            rows = rows_that_run(config_of(family, shares_rows, "bf16"))
            for number in range(max(map(len, rows.values()))):
                names = {operation: able[number % len(able)] for operation, able in rows.items()}
                settings = [f"kernels.{operation}={name}" for operation, name in names.items()]
                found.append((family, names, FakeModel(config_of(family, shares_rows, "bf16", *settings)).run()))
    return found


def run_without_fake_form() -> list[str]:
    """What is said of a product that has no fake form, and of one whose shape depends on values."""
    import torch

    from ctxlm_ds.apps.verify.fake_cuda import FakeModel, fake_cuda
    from ctxlm_ds.errors import VerifyError
    from ctxlm_ds.kernels import linear
    from ctxlm_ds.process.patches import replaced

    library = torch.library.Library("toy", "FRAGMENT")
    library.define("product(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")

    said = []
    for function in (torch.ops.toy.product, lambda x, weight, bias=None: x[x != 0]):
        with fake_cuda((9, 0)), replaced(linear, "torch_linear", function):
            try:
                FakeModel(config_of("bert", False, "bf16")).run()
            except VerifyError as error:
                said.append(str(error))
    return said


def operators_without_fake_form() -> tuple[list[str], list[str]]:
    """Every operator of this package, by name, and those that no fake tensor can pass."""
    import importlib
    import pkgutil

    import torch
    from torch._library.simple_registry import singleton

    from ctxlm_ds import kernels

    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        importlib.import_module(module.name)
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(("ctxlm::", "ctxlm_ds::"))]
    return names, [name for name in names if singleton.find(name).fake_impl.kernel is None]


def a_kernel_of_a_later_device() -> Any:
    """What `ctxlm verify` says of a recipe that names a kernel which its GPU cannot run."""
    from ctxlm_ds.apps.plan.layouts import Layout
    from ctxlm_ds.apps.plan.plan import Planner
    from ctxlm_ds.apps.verify.parts import model
    from ctxlm_ds.recipe.hardware import GPUS, Cluster

    config = config_of("bert", False, "fp16", "kernels.attention=varlen")
    with ThreadPoolExecutor() as apart:
        (finding,) = model(Planner(config, Cluster(GPUS[0], 1, 1)), Layout(1), (7, 0), apart)
    return finding


def main(path: str, selection: str) -> None:
    load_device_guard()
    families = run_families(FEW if selection == "few" else CASES)
    said = run_without_fake_form(), a_kernel_of_a_later_device()
    parts = families, run_named_rows(), *said, operators_without_fake_form()
    Path(path).write_bytes(pickle.dumps(parts))
