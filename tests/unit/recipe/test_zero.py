"""ZeRO's settings as the engine and the planner read them."""

from __future__ import annotations

from typing import Any

import pytest

from ctxlm_ds.recipe.zero import DEEPSPEED_BUCKET, ZeroSettings, bucket_hints


def zero(**section: Any) -> ZeroSettings:
    return ZeroSettings.of_json({"zero_optimization": section}, 1024)


def test_defaults_are_deepspeeds() -> None:
    assert ZeroSettings.of_json({}, None).stage == 0
    found = zero(stage=3)
    assert (found.overlap_comm, found.reduce_bucket, found.prefetch_bucket) == (True, DEEPSPEED_BUCKET, 50_000_000)
    assert (found.persistence_threshold, found.max_reuse_distance) == (100_000, 1_000_000_000)
    assert not zero(stage=2).overlap_comm and zero(stage=2, overlap_comm=True).overlap_comm
    assert not (found.offload_optimizer or found.offload_parameters)


def test_given_sizes_and_those_that_follow_from_the_width() -> None:
    hints = bucket_hints(1024)
    found = zero(stage=3, reduce_bucket_size="auto", stage3_prefetch_bucket_size=7)
    assert (found.reduce_bucket, found.prefetch_bucket) == (hints["reduce_bucket_size"], 7)


@pytest.mark.parametrize(("device", "offloads"), [("cpu", True), ("nvme", True), ("none", False)])
def test_offloads(device: str, offloads: bool) -> None:
    found = zero(stage=3, offload_optimizer={"device": device, "nvme_path": "/disk"}, offload_param={"device": device})
    assert (found.offload_optimizer, found.offload_parameters) == (offloads, offloads)
    assert found.nvme_paths.get("offload_optimizer") == ("/disk" if device == "nvme" else None)
