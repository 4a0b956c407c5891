"""Run `ctxlm embed` (ctxlm_ds/apps/downstream/embed.py)."""

from ctxlm_ds.apps.downstream.embed import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
