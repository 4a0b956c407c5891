"""Run `ctxlm teacher` (ctxlm_ds/commands/teacher_outputs.py)."""

from ctxlm_ds.commands.teacher_outputs import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
