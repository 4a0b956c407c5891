"""Run `ctxlm convert` (ctxlm_ds/apps/convert/convert_checkpoint.py)."""

from ctxlm_ds.apps.convert.convert_checkpoint import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
