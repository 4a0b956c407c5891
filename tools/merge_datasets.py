"""Run `ctxlm merge` (ctxlm_ds/commands/merge_datasets.py)."""

from ctxlm_ds.commands.merge_datasets import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
