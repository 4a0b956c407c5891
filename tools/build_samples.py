"""Run `ctxlm samples` (ctxlm_ds/apps/text/indexed_dataset.py)."""

from ctxlm_ds.apps.text.indexed_dataset import samples as main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
