"""Run `ctxlm batch` (ctxlm_ds/apps/text/show_batch.py)."""

from ctxlm_ds.apps.text.show_batch import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
