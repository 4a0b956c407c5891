"""Run `ctxlm batch` (ctxlm_ds/apps/text/indexed_dataset.py)."""

from ctxlm_ds.apps.text.indexed_dataset import batch as main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
