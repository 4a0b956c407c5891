"""Names of the Python interface."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

import ctxlm_ds


@pytest.mark.parametrize("name", ctxlm_ds.__all__)
def test_a_name_is_never_that_of_a_module(name: str) -> None:
    """Once imported, a module would replace the function or class of its name."""
    assert callable(getattr(ctxlm_ds, name))
    assert find_spec(f"ctxlm_ds.{name}") is None
