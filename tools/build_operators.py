"""Run `ctxlm operators` (ctxlm_ds/cli.py)."""

from ctxlm_ds.cli import build_operators as main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
