"""docs/config.md: complete, and compared by the tool."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ctxlm_ds.recipe.describe import all_settings
from tools.write_config_docs import render_reference

ROOT = Path(__file__).resolve().parents[3]


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/write_config_docs.py", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def is_listed_as(path: str, row: str) -> bool:
    """A setting is listed by its path; one of a list's item by its name."""
    return path == row or ("[]" in path and path.rsplit(".", 1)[-1] == row)


def test_every_setting_is_on_the_page_with_a_meaning() -> None:
    rows = {}
    for line in render_reference().splitlines():
        if line.startswith("| `"):
            name, default, expects, meaning = (
                cell.strip() for cell in line.replace("\\|", "/").strip("| ").split(" | ")
            )
            rows[name.strip("`")] = (default, expects, meaning)
    assert [path for path in all_settings() if not any(is_listed_as(path, row) for row in rows)] == []
    assert all(len(meaning) > 10 for _, _, meaning in rows.values())
    assert rows["optimizer.betas"][:2] == ("`[0.9, 0.999]`", "a list of 2: a number from 0 to 1, a number from 0 to 1")
    assert rows["training.max_tokens"][:2] == ("`null`", "a whole number from 1 to 1,000,000,000,000,000 or null")


def test_the_page_in_docs_is_up_to_date() -> None:
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == render_reference()


def test_the_tool_writes_and_compares(tmp_path: Path) -> None:
    page = tmp_path / "config.md"
    missing = run_tool("--check", "--output", str(page))
    assert missing.returncode == 2
    assert "write_config_docs.py" in missing.stderr
    assert run_tool("--output", str(page)).returncode == 0
    assert run_tool("--check", "--output", str(page)).returncode == 0
    page.write_text(page.read_text().replace("bf16", "bf61", 1))
    assert run_tool("--check", "--output", str(page)).returncode == 2
