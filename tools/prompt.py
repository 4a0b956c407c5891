"""Run `ctxlm prompt` (ctxlm_ds/apps/downstream/prompt.py)."""

from ctxlm_ds.apps.downstream.prompt import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
