"""Run `ctxlm prompt` (ctxlm_ds/commands/prompt.py)."""

from ctxlm_ds.commands.prompt import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
