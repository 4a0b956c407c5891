"""A job's settings in its environment: wrong ones are named, and the list of them is whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ctxlm_ds.apps.cluster.settings import OWN_VARIABLES, PREFLIGHT, VARIABLES, misspelt, read_preflight, read_settings
from ctxlm_ds.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [("CTXLM_RESTART", "perhaps"), ("CTXLM_MAX_RESTARTS", "0"), ("CTXLM_RESTART_DELAY_S", "soon"),
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


def test_thresholds_come_from_the_environment() -> None:
    found = read_preflight({"CTXLM_PREFLIGHT_MAX_CLOCK_S": "0.5", "CTXLM_PREFLIGHT": "1", "CTXLM_PREFLIGHT_MIB": ""})
    assert found == {**PREFLIGHT, "MAX_CLOCK_S": 0.5}
    for wrong in ("soon", "-1", "nan"):
        with pytest.raises(ConfigError, match=f"CTXLM_PREFLIGHT_LIMIT_S={wrong}: expected a number, 0 or more"):
            read_preflight({"CTXLM_PREFLIGHT_LIMIT_S": wrong})
    assert "did you mean CTXLM_PREFLIGHT_MIN_BANDWIDTH?" in misspelt({"CTXLM_PREFLIGHT_MIN_BANDWITH": "1"})[0]
