"""Triton's kernels of a recipe in the interpreter: right ones, and a wrong one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ctxlm_ds.recipe.load import load_config
from tests.unit.kernels.triton.interpreter import in_interpreter

pytestmark = pytest.mark.long
SETTINGS = "model.vocab_size=256", "model.num_layers=2", "model.hidden_size=64", "model.intermediate_size=96"


def comparison(precision: str) -> dict[str, object]:
    from ctxlm_ds.apps.verify.interpreted import compare

    heads = "model.num_attention_heads=2", "model.num_key_value_heads=1", "data.seq_length=16"
    config = load_config("llama-laptop", [*SETTINGS, *heads, f"training.precision={precision}"])
    return compare(config, ["add_norm", "bias_gelu", "rotary", "cross_entropy"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@in_interpreter
def test_right_kernels_have_the_errors_of_torch(precision: str) -> None:
    found = comparison(precision)
    assert found["right"] and 0 < float(str(found["torch"])) < (1e-5 if precision == "fp32" else 0.1), found


@in_interpreter
def test_a_wrong_kernel_is_found() -> None:
    from ctxlm_ds.apps.verify import interpreted
    from ctxlm_ds.process.patches import replaced

    row = interpreted.OPERATIONS["bias_gelu"][0]

    def wrong(need: object) -> object:
        kernel = row.make(need)  # type: ignore[arg-type]
        return lambda x, activation: kernel(x, activation) * 1.01

    tables = interpreted.OPERATIONS | {"bias_gelu": (replace(row, make=wrong),)}
    with replaced(interpreted, "OPERATIONS", tables):
        found = comparison("fp32")
    assert not found["right"]
