"""Run `ctxlm senses` (ctxlm_ds/commands/senses.py)."""

from ctxlm_ds.commands.senses import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
