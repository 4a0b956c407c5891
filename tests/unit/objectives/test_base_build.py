"""Objectives are built by their names, those of other packages too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.registry import OBJECTIVES
from tests.unit.objectives.test_base import NAME, Spans, SpanSection


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    OBJECTIVES.register(NAME, Spans)
    yield
    OBJECTIVES._added.pop(NAME)
    OBJECTIVES._loaded.pop(NAME, None)


def test_it_is_found_by_its_name() -> None:
    built = build_objective(SpanSection(weight=0.25))
    assert isinstance(built, Spans) and built.terms[1].weight == 0.25
    with pytest.raises(ConfigError, match=f"did you mean {NAME}"):
        OBJECTIVES.get(NAME + "s")
