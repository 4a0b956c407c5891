"""A replaced attribute comes back, also after an error; torch compiles, and imports what compiles, only when needed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
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


@pytest.mark.long
def test_dynamo_is_imported_only_when_something_compiles() -> None:
    code = """
        import sys, torch
        from ctxlm_ds.process.patches import import_dynamo_late

        def train(steps):
            weight = torch.nn.Parameter(torch.arange(6.0))
            optimizer = torch.optim.AdamW([weight], lr=0.1)
            seen = []
            optimizer.register_step_post_hook(lambda *_: seen.append(torch.is_grad_enabled()))
            for _ in range(steps):
                with torch.enable_grad():
                    loss = (weight * weight).sum()
                loss.backward()
                optimizer.step(lambda: seen.append(torch.is_grad_enabled()))
            return weight.detach(), seen, torch.is_grad_enabled()

        import_dynamo_late()
        import_dynamo_late()
        marked = torch.library.custom_op("tests::double", torch.clone, mutates_args=(), schema="(Tensor x) -> Tensor")
        marked.register_kernel("cpu", lambda x: 3 * x)
        marked.register_fake(torch.empty_like)
        early = train(3), marked(torch.ones(2))
        assert "torch._dynamo" not in sys.modules

        @torch.compile(backend="eager")
        def compiled(x):
            assert torch.compiler.is_compiling()
            return marked(x) + 1

        assert compiled(torch.ones(2)).tolist() == [4, 4]
        late = train(3), marked(torch.ones(2))
        assert torch.optim.Optimizer.add_param_group.__wrapped__.__dynamo_disable
        assert torch.equal(early[0][0], late[0][0]) and early[0][1:] == late[0][1:], (early, late)
        assert torch.equal(early[1], late[1])
        del torch._compile.getattr
        assert torch.equal(train(3)[0], early[0][0])
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
