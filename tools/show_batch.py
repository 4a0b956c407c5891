"""Run `ctxlm batch` (ctxlm_ds/apps/text/sample_rows.py)."""

from ctxlm_ds.apps.text.sample_rows import batch as main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
