"""The data of the golden runs, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.run_case import prepare_data


@pytest.fixture(scope="session")
def golden_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the text, its tokenizers and datasets; runs go into its runs/."""
    return prepare_data(tmp_path_factory.mktemp("golden"))
