"""The choice of a row: the first that suits and runs, or the named one, which must run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ctxlm_ds.errors import KernelError
from ctxlm_ds.kernels import implementation
from ctxlm_ds.kernels.implementation import Implementation, choose, tag_compiled_code
from tests.unit.kernels.test_dispatch import ON_CPU


def test_auto_takes_the_first_row_that_suits_and_runs() -> None:
    table = (
        Implementation("unsuitable", lambda need: 0, suits=lambda need: False),
        Implementation("broken", lambda need: 1, lambda need: "it is broken"),
        Implementation("good", lambda need: 2),
        Implementation("also_good", lambda need: 3),
    )
    assert [choose("work", name, table, ON_CPU).name for name in ("auto", "unsuitable", "also_good")] == [
        "good", "unsuitable", "also_good",
    ]  # fmt: skip
    with pytest.raises(KernelError, match=r"kernels\.work: `broken` cannot run here: it is broken\..*`good` here"):
        choose("work", "broken", table, ON_CPU)


def test_stored_code_of_other_sources_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two versions of the kernels have other tags, which are part of torch.compile's keys; the user's tag stays."""
    monkeypatch.setattr(implementation, "__file__", str(tmp_path / "implementation.py"))
    tags = []
    for source in ("x = 1", "x = 1", "x = 2"):
        (tmp_path / "triton").mkdir(exist_ok=True)
        (tmp_path / "triton" / "rows.py").write_text(source)
        with torch.compiler.config.patch(cache_key_tag="user"):
            tag_compiled_code.__wrapped__()
            tags.append(torch.compiler.config.cache_key_tag)
    assert tags[0] == tags[1] != tags[2] and all(tag.startswith("user ctxlm_ds kernels ") for tag in tags)
