"""Build DeepSpeed's CPU operators (CPUAdam, FusedAdam, async_io) in this environment's build folder, once.

Without this the first process that needs an operator compiles it, which takes minutes. An operator that cannot be
built is reported; the status is 0 all the same, because only some layouts need one.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial


def main() -> None:
    """Build what is missing."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from ctxlm_ds.process.build_locks import clear_stale_build_locks, use_own_build_folder

    folder = use_own_build_folder()
    print(f"building DeepSpeed's operators in {folder} (minutes the first time, seconds later)", flush=True)
    clear_stale_build_locks()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from ctxlm_ds.errors import KernelError
    from ctxlm_ds.process.library_noise import without_known_prints
    from ctxlm_ds.training.engine.runtime import deepspeed_adam, load_async_io

    builds: dict[str, Callable[[], object]] = {
        "CPUAdam": partial(deepspeed_adam, True),
        "FusedAdam": partial(deepspeed_adam, False),
        "async_io": load_async_io,
    }
    for name, build in builds.items():
        try:
            with without_known_prints():
                build()
        except KernelError as error:
            print(f"{name} is not available: {error}")
