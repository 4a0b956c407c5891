"""Run `ctxlm samples` (ctxlm_ds/apps/text/build_samples.py)."""

from ctxlm_ds.apps.text.build_samples import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
