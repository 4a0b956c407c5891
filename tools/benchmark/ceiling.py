"""The speed of large matrix products, the ceiling of what a training step can reach on the device."""

from __future__ import annotations

from dataclasses import dataclass

from tools.benchmark.turns import StepDone

SIDES = {"cpu": 2048, "cuda": 8192}
"""Rows and columns of the square matrices."""
PRODUCTS = {"cpu": 4, "cuda": 20}
"""Products of a step."""


def step_flops(device: str) -> int:
    """Return the operations of a step."""
    return PRODUCTS[device] * 2 * SIDES[device] ** 3


@dataclass(frozen=True)
class MatrixProducts:
    """Products of two large square matrices."""

    precision: str
    threads: int

    def run(self, step_done: StepDone) -> None:
        """Take steps forever."""
        import torch

        from ctxlm_ds.kernels.dispatch import DTYPES

        torch.set_num_threads(self.threads)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        shape = (SIDES[device], SIDES[device])
        left, right = (torch.randn(shape, device=device).to(DTYPES[self.precision]) for _ in range(2))
        product = torch.empty_like(left)
        while True:
            for _ in range(PRODUCTS[device]):
                torch.mm(left, right, out=product)
            step_done()
