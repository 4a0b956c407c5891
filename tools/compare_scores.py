"""Run `ctxlm scores` (ctxlm_ds/apps/downstream/compare_scores.py)."""

from ctxlm_ds.apps.downstream.compare_scores import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
