import pytest

from ctxlm_ds.apps.init.samples import steps_of_samples
from ctxlm_ds.recipe.schema import TrainingConfig

RAMP = (8, 8, 20000)


def test_samples_are_divided_by_the_batch_without_a_ramp():
    assert steps_of_samples(1000, 64, None) == 15


@pytest.mark.parametrize("samples", [3000, 20000, 20100, 100000])
def test_steps_along_a_ramp_read_the_samples_but_for_an_incomplete_step(samples):
    training = TrainingConfig(global_batch_size=64, batch_ramp=RAMP)
    steps = steps_of_samples(samples, 64, RAMP)
    assert abs(training.rows_after(steps) - samples) < 64
    assert steps > samples // 64


@pytest.mark.parametrize("ramp", [(8, 8), ("a", 8, 100), (8, 0, 100), (64, 8, 100), (1, 1, 10**12)])
def test_a_ramp_that_cannot_be_followed_gives_no_steps(ramp):
    assert steps_of_samples(10**12, 64, ramp) is None
