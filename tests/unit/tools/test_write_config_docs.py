"""tools/write_config_docs.py writes docs/config.md and compares with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/write_config_docs.py", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_the_page_in_docs_is_up_to_date() -> None:
    # In a process of its own: other tests register entries.
    done = run_tool("--check")
    assert done.returncode == 0 and done.stdout.endswith("config.md is up to date\n"), done.stderr


def test_the_tool_writes_and_compares(tmp_path: Path) -> None:
    page = tmp_path / "config.md"
    missing = run_tool("--check", "--output", str(page))
    assert missing.returncode == 2
    assert "write_config_docs.py" in missing.stderr
    assert run_tool("--output", str(page)).returncode == 0
    assert run_tool("--check", "--output", str(page)).returncode == 0
    page.write_text(page.read_text().replace("bf16", "bf61", 1))
    assert run_tool("--check", "--output", str(page)).returncode == 2
