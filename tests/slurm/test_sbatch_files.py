"""Every batch script in slurm/ is accepted by a real Slurm as it is: options, sizes, limits (sbatch --test-only)."""

from __future__ import annotations

import pytest

from tests.slurm.cluster import ROOT, Cluster

pytestmark = pytest.mark.slurm
SCRIPTS = sorted(path.relative_to(ROOT) for path in (ROOT / "slurm").rglob("*.sbatch"))


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_sbatch_takes_the_script(script: object, cluster: Cluster) -> None:
    """Planned on a partition of 128 nodes with 8 GPUs each that exist on paper only."""
    planned = cluster.run("sbatch", "--test-only", "--partition=paper", script, "recipe.yaml", check=False)
    assert planned.returncode == 0 and "to start at" in planned.stderr, planned.stderr


def test_a_script_that_asks_for_what_no_node_has_is_refused(cluster: Cluster) -> None:
    """The test above can fail."""
    script = "slurm/pretrain.sbatch"
    asked = cluster.run("sbatch", "--test-only", "--partition=paper", "--gpus-per-node=9", script, check=False)
    assert asked.returncode != 0 and "not available" in asked.stderr
