"""The fenced blocks of a documentation page, so that tests run what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.integration.route import BIN, ROOT, Finished, environment

BLOCK = re.compile(r"^```(\w+) ?([\w.]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def write_files(page: str, folder: Path) -> None:
    """Write the blocks that have a file's name into a folder."""
    for _, name, text in _blocks(page):
        if name:
            (folder / name).write_text(text)


def commands(page: str) -> str:
    """Return the shell commands of a page, a line for each."""
    text = "".join(text for language, _, text in _blocks(page) if language == "sh")
    return text.replace("\\\n", " ")


def code(page: str) -> str:
    """Return the Python of a page that is no file."""
    return "".join(text for language, name, text in _blocks(page) if language == "python" and not name)


def shell(command: str, folder: Path, check: bool = True, **extra: str) -> Finished:
    """Run a command of a page as a user would in a folder of their own; packages that it installs stay there."""
    site = folder / "site"
    variables = environment(
        PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}", PYTHONPATH=f"{site}{os.pathsep}{ROOT}", PIP_TARGET=str(site),
        PIP_NO_DEPS="1", PIP_NO_BUILD_ISOLATION="0", PIP_DISABLE_PIP_VERSION_CHECK="1", **extra,
    )  # fmt: skip
    done = subprocess.run(
        command, shell=True, cwd=folder, env=variables, capture_output=True, text=True, timeout=240, check=False
    )
    if check:
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done


def _blocks(page: str) -> list[tuple[str, str, str]]:
    return BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
