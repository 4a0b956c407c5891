"""The name of a shard of the input."""

from __future__ import annotations

import pytest

from ctxlm_ds.data.sources.types import InputShard
from ctxlm_ds.errors import DataError


def test_shards_are_named_i_of_n() -> None:
    assert InputShard.parse("3/16") == InputShard(3, 16)
    for wrong in ("16/16", "-1/4", "1", "0/0", "a/b", "1/2/3"):
        with pytest.raises(DataError, match="shard"):
            InputShard.parse(wrong)
