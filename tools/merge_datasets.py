"""Run `ctxlm merge` (ctxlm_ds/apps/text/merge_datasets.py)."""

from ctxlm_ds.apps.text.merge_datasets import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
