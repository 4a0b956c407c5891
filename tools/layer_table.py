"""Run `ctxlm layers` (ctxlm_ds/commands/layer_table.py)."""

from ctxlm_ds.commands.layer_table import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
