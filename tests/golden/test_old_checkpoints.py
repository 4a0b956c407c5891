"""A new run takes its weights from a checkpoint of each family that the code of checkpoints/ left (`initialize_from`).

checkpoints/FAMILY is one complete checkpoint, checkpoints/weights.json a digest of each of its weights by name.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.cases import OLD_FAMILIES, new_run
from tests.golden.run_case import checkpoint_figures, last_checkpoint, train

CHECKPOINTS = Path(__file__).parent / "checkpoints"


@pytest.mark.parametrize("family", OLD_FAMILIES)
def test_a_new_run_takes_the_weights(golden_data: Path, family: str) -> None:
    """What it saves after one step at a learning rate of 0 are the weights that it began with."""
    recipe = new_run(family, str(CHECKPOINTS / family))
    train(golden_data, recipe, zero_stage=0)
    saved = checkpoint_figures(last_checkpoint(golden_data, recipe))
    assert saved["weights"] == json.loads((CHECKPOINTS / "weights.json").read_text())[family]
