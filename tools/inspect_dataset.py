"""Run `ctxlm inspect` (ctxlm_ds/apps/text/inspect_dataset.py)."""

from ctxlm_ds.apps.text.inspect_dataset import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
