"""The test cluster: one for the session, mended after every test; and the jobs that run on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.conftest import prepare
from tests.slurm.cluster import Cluster
from tests.slurm.runs import Runs


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Nodes n1 to n3 of a real Slurm; skips where one cannot be started."""
    with Cluster.started(3) as running:
        yield running


@pytest.fixture(autouse=True)
def mended(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test that used the cluster: no jobs, every node idle."""
    yield
    if "cluster" in request.fixturenames:
        running: Cluster = request.getfixturevalue("cluster")
        running.heal()


@pytest.fixture(scope="session")
def runs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Text, tokenizer and datasets for jobs, made once."""
    route = prepare(tmp_path_factory.mktemp("route"), "wordpiece").warm_up()
    return Runs(cluster, route, tmp_path_factory.mktemp("runs"))
