"""Run `ctxlm embed` (ctxlm_ds/commands/embed.py)."""

from ctxlm_ds.commands.embed import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
