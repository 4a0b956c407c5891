"""Real text that every installation has."""

from __future__ import annotations

import sysconfig
from itertools import islice
from pathlib import Path

from ctxlm_ds.apps.text.extract_docstrings import module_prose


def docstrings(count: int) -> list[str]:
    """The prose of modules of the standard library, a paragraph a line."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = ("\n".join(module_prose(path)) for path in paths)
    return list(islice((text for text in texts if len(text) > 300), count))
