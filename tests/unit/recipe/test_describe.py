"""docs/config.md is complete."""

from __future__ import annotations

from ctxlm_ds.recipe.describe import all_settings
from tools.write_config_docs import render_reference


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
