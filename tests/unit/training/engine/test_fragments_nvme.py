"""What a run on an NVMe disk needs is said before it starts; tests/dist/test_fragments_nvme.py trains with one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.errors import ConfigError, KernelError
from ctxlm_ds.training.engine.fragments import prepare_folders
from ctxlm_ds.training.engine.runtime import load_async_io


def test_a_disk_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not_mounted: no such folder on this host.*NVME_PATH"):
        prepare_folders({"offload_optimizer": str(tmp_path / "not_mounted" / "run-1")})
    assert not prepare_folders({})


def test_missing_headers_are_said_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: False)
    with pytest.raises(KernelError, match="apt-get install libaio-dev"):
        load_async_io()
