"""Run `ctxlm operators` (ctxlm_ds/apps/machine/build_operators.py)."""

from ctxlm_ds.apps.machine.build_operators import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
