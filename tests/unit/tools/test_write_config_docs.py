"""tools/write_config_docs.py writes docs/config.md and compares with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.integration.route import Finished, call_here
from tools.write_config_docs import main

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_in_docs_is_up_to_date() -> None:
    # In a process of its own: other tests register entries.
    command = [sys.executable, "tools/write_config_docs.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("config.md is up to date\n"), done.stderr


def test_the_tool_writes_and_compares(tmp_path: Path) -> None:
    page = tmp_path / "config.md"

    def run_tool(*words: str) -> Finished:
        return call_here(main, "write_config_docs.py", *words, "--output", page)

    missing = run_tool("--check")
    assert missing.returncode == 2
    assert "write_config_docs.py" in missing.stderr
    assert run_tool().returncode == 0
    assert run_tool("--check").returncode == 0
    page.write_text(page.read_text().replace("bf16", "bf61", 1))
    assert run_tool("--check").returncode == 2
