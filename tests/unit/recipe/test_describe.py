"""docs/config.md is complete."""

from __future__ import annotations

from ctxlm_ds.recipe.describe import KNOWN_ELSEWHERE, all_settings, explain_unknown
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


def test_every_name_of_another_system_means_an_existing_setting() -> None:
    names = [name for names in KNOWN_ELSEWHERE.values() for name in names.split()]
    settings = {*all_settings(), "data.train", "data.validation"}
    assert len(names) == len(set(names)) and settings.issuperset(KNOWN_ELSEWHERE)
    assert explain_unknown(("model", "ffn_hidden_size"), {}) == (
        "; did you mean model.intermediate_size?", "model.intermediate_size"
    )  # fmt: skip
    assert explain_unknown(("model", "n_embd"), {})[1] == "model.hidden_size"
