"""Known noise is dropped; all else stays."""

from __future__ import annotations

import warnings

import pytest

from ctxlm_ds.process.launch import quiet_libraries, without_known_prints


def test_only_known_noise_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        quiet_libraries()
        name = "`torch.distributed.all_gather_into_tensor` is deprecated. Please use another."
        warnings.warn(name, FutureWarning, stacklevel=1)
        warnings.warn("something new is deprecated", FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["something new is deprecated"]
    with without_known_prints():
        print("SEED_LAYERS=False BASE_SEED=1234")
        print("Using topology:", object())
        print("something else")
        print("unfinished", end="")
    assert capsys.readouterr().out == "something else\nunfinished"
