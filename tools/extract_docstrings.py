"""Run `ctxlm docstrings` (ctxlm_ds/commands/extract_docstrings.py)."""

from ctxlm_ds.commands.extract_docstrings import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
