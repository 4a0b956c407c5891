"""Every batch script in slurm/ is accepted by a real Slurm as it is: options, sizes, limits (sbatch --test-only).

So are the options of every profile.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from ctxlm_ds.apps.cluster.submit import PROFILE_LINE
from tests.slurm.cluster import ROOT, Cluster

pytestmark = pytest.mark.slurm
PROFILES = sorted((ROOT / "slurm" / "profiles").glob("*.sh"))
SCRIPTS = sorted(path.relative_to(ROOT) for path in (ROOT / "slurm").rglob("*.sbatch"))


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_sbatch_takes_the_script(script: object, cluster: Cluster) -> None:
    """Planned on a partition of 128 nodes with 8 GPUs each that exist on paper only."""
    planned = cluster.run("sbatch", "--test-only", "--partition=paper", script, "recipe.yaml", check=False)
    assert planned.returncode == 0 and "to start at" in planned.stderr, planned.stderr


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_sbatch_takes_the_options_of_a_profile(profile: Path, cluster: Cluster) -> None:
    options = shlex.split("\n".join(PROFILE_LINE.findall(profile.read_text())), comments=True)
    words = ["--test-only", "--partition=paper", *options, "slurm/pretrain.sbatch", "recipe.yaml"]
    planned = cluster.run("sbatch", *words, check=False)
    assert options and planned.returncode == 0 and "to start at" in planned.stderr, planned.stderr


def test_a_script_that_asks_for_what_no_node_has_is_refused(cluster: Cluster) -> None:
    """The test above can fail."""
    script = "slurm/pretrain.sbatch"
    asked = cluster.run("sbatch", "--test-only", "--partition=paper", "--gpus-per-node=9", script, check=False)
    assert asked.returncode != 0 and "not available" in asked.stderr
