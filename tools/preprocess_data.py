"""Run `ctxlm preprocess` (ctxlm_ds/apps/text/preprocess_data.py)."""

from ctxlm_ds.apps.text.preprocess_data import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
