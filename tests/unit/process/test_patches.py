"""A replaced attribute comes back, also after an error; a function is compiled at its first call."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ctxlm_ds.process.patches import compile_at_first_call, replaced


def test_what_was_replaced_comes_back() -> None:
    holder = SimpleNamespace(step=1)
    with pytest.raises(ValueError, match="x"), replaced(holder, "step", 2), replaced(holder, "other", 3):
        assert (holder.step, holder.other) == (2, 3)
        raise ValueError("x")
    assert vars(holder) == {"step": 1}


def test_a_function_is_compiled_once_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function: compiled.append(function) or function)
    double = compile_at_first_call(lambda x, by=2: by * x)
    assert compiled == []
    assert [double(3), double(3, by=4)] == [6, 12] and len(compiled) == 1
