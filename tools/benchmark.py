"""Run `ctxlm benchmark` (ctxlm_ds/commands/benchmark.py)."""

from ctxlm_ds.commands.benchmark import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
