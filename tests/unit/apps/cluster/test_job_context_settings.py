"""A job's settings in its environment: wrong ones are named, and the list of them is whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ctxlm_ds.apps.cluster.job_context import OWN_VARIABLES, VARIABLES, misspelt, read_settings
from ctxlm_ds.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [("CTXLM_RESTART", "successor"), ("CTXLM_MAX_RESTARTS", "0"), ("CTXLM_RESTART_DELAY_S", "soon"),
     ("CTXLM_SRUN_OPTIONS", "--comment='open")],
)  # fmt: skip
def test_wrong_settings_are_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        read_settings({name: value})


def test_two_kinds_of_containers_are_refused() -> None:
    with pytest.raises(ConfigError, match="one of them"):
        read_settings({"CTXLM_CONTAINER": "a.sif", "CTXLM_PYXIS": "b.sqsh"})


def test_misspelt_variables_are_told() -> None:
    environ = {"CTXLM_MAX_RESTART": "9", "CTXLM_RESTART": "off", "CTXLM_ATTEMPT": "x", "CTXLM_OF_OUR_SITE": "1"}
    assert misspelt(environ) == ["CTXLM_MAX_RESTART is no setting and is ignored; did you mean CTXLM_MAX_RESTARTS?"]


def test_the_list_of_variables_is_whole() -> None:
    root = Path(__file__).resolve().parents[4]
    files = [path for folder in ("ctxlm_ds", "slurm") for path in (root / folder).rglob("*") if path.is_file()]
    texts = [path.read_text(encoding="utf-8") for path in files if path.suffix in (".py", ".sh", ".sbatch")]
    named = {name for text in texts for name in re.findall(r"CTXLM_[A-Z_]*[A-Z]", text)}
    assert named == {*VARIABLES, *OWN_VARIABLES}
