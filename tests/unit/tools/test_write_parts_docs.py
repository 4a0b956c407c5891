"""tools/write_parts_docs.py writes docs/parts.md from code, with the shapes of fields and outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import write_parts_docs
from tools.write_parts_docs import render_module, render_parts

MODULE = '''"""Norms; h width."""
_HIDDEN = 1
"""Private."""
EPS = 1e-5
"""Added to the variance."""
class Norm(nn.Module):
    """Normalises."""
    ids: list[int]  # [h], ascending
    def __init__(self, width: int, eps: float = EPS) -> None:
        """Make it."""
    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., h]
        to *the* same `<*>` <shape>."""
    def _inner(self) -> None:
        """Private."""
'''


def test_the_page_in_docs_is_up_to_date() -> None:
    assert (write_parts_docs.ROOT / "docs" / "parts.md").read_text(encoding="utf-8") == render_parts()


def test_public_names_have_arguments_and_docstrings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_parts_docs, "ROOT", tmp_path)
    (tmp_path / "norms.py").write_text(MODULE)
    lines = [
        "### `norms`", "", "Norms; h width.", "", "- `EPS = 1e-05` Added to the variance.",
        "- `Norm(width: int, eps: float=EPS)` Normalises. Make it.", "    - `ids: list[int]` [h], ascending",
        "    - `forward(x: Tensor) -> Tensor` Map x [..., h] to \\*the\\* same `<*>` &lt;shape>.",
    ]  # fmt: skip
    assert render_module("norms", ()).splitlines() == lines
    assert render_module("norms", ("Norm",)).splitlines() == lines[:4] + lines[5:]
