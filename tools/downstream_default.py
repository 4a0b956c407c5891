"""Run `ctxlm demo-downstream` (ctxlm_ds/apps/demo/downstream_default.py)."""

from ctxlm_ds.apps.demo.downstream_default import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
