"""For every test: one thread a process, no network, and no warnings that only a library's authors can act on."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from functools import cache

import cpuinfo
import pytest
from hypothesis import HealthCheck, settings

from ctxlm_ds.process.launch import use_own_build_folder

# Before torch is imported anywhere: a parent with threads makes forked ranks hang, and thread counts change sums.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Compile in this process: each of the processes that would compile for it imports torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
# A tenth of the time went into collecting what the imports made, again and again: nothing of it is ever garbage.
gc.disable()
# DeepSpeed asks for each CPU optimizer, and the answer takes a process.
cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)
# A time limit or a slow example says more of the machine than of what is tested.
SLOW_MACHINE = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("any machine", deadline=None, suppress_health_check=SLOW_MACHINE)
settings.load_profile("any machine")
# The folder that `make operators` has built into, also for tests that load an operator in this process.
use_own_build_folder()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run the contract suite for the families and objectives that this installed package registers, and no others"
    parser.addoption("--package", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Find what the package registers before its cases are collected."""
    if config.getoption("--package"):
        from tests.families import packages

        packages.choose(config.getoption("--package"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what --package does not ask for."""
    if config.getoption("--package"):
        items[:] = [item for item in items if item.path.name == "test_contract.py" and hasattr(item, "callspec")]


def pytest_collection_finish() -> None:
    """Leave what was imported out of every later collection, and autograd without threads."""
    gc.freeze()
    if (torch := sys.modules.get("torch")) is not None:
        # At the first backward pass autograd starts a thread for each device, also for the fake one that a CUDA build
        # without a GPU has after torch.compile; no fork could compute gradients then.
        torch.ones(1, requires_grad=True).sum().backward()
    gc.enable()


@pytest.fixture(autouse=True)
def threads_as_found() -> None:
    """Give every test the same number of threads, whatever an earlier one set."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(autouse=True)
def untouched_logger() -> None:
    """Let the project's logger pass its records on, whatever an earlier test made of it: caplog sees each once."""
    logger = logging.getLogger("ctxlm_ds")
    logger.handlers[:] = []
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


@pytest.fixture(autouse=True, scope="session")
def shared_ranks() -> Iterator[None]:
    """End the ranks that tests shared."""
    yield
    if runner := sys.modules.get("tests.dist.runner"):
        runner.SHARED.close()


@pytest.fixture(autouse=True, scope="session")
def quiet_libraries() -> None:
    """Libraries log only what is wrong."""
    for name in ("deepspeed", "DeepSpeed", "megatron", "transformers", "datasets", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
