"""Run `ctxlm compare` (ctxlm_ds/apps/evaluate/compare.py)."""

from ctxlm_ds.apps.evaluate.compare import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
