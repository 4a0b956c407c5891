"""tools/run_status.py on a login node: what it says of a job that runs, waits in the queue, and is complete."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import ROOT
from tests.slurm.runs import Job, Runs

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def status(job: Job) -> dict[str, Any]:
    words = (sys.executable, ROOT / "tools" / "run_status.py", job.run_dir, "--json")
    (found,) = json.loads(job.cluster.run(*words).stdout)
    return dict(found)


def test_from_running_through_the_queue_to_the_end(runs: Runs, tmp_path: Path) -> None:
    job = runs.submit(tmp_path, nodes=1, training={"max_steps": 200})
    job.wait_for_step(15)
    found = status(job)
    assert (found["state"], found["job_id"], found["restarts"], found["of"]) == ("running", job.id, 0, 200)
    assert found["step"] >= 15 and found["loss"] > 0 and found["tokens_per_second"] > 0 and found["left_s"] > 0
    assert found["log"] == str(job.log)
    # Held, or it might be back before anybody looks.
    runs.cluster.scontrol("requeuehold", job.id)
    # Slurm takes a moment to clear the node; until then the job's own word on its requeue stands.
    held = f"job {job.id} is "
    job.wait_for(lambda: status(job)["state"] == "queued" and held in status(job)["why"], "the job in the queue")
    waiting = status(job)
    assert waiting["left_s"] is None and waiting["checkpoint_problem"] is None
    runs.cluster.scontrol("release", job.id)
    assert job.end() == "COMPLETED", job.explain()
    done = status(job)
    assert (done["state"], done["step"], done["restarts"]) == ("completed", 200, 1)
    assert (done["checkpoint"], done["why"]) == ("step-00000200", "training.max_steps (200) reached")
