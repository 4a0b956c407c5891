"""Run `ctxlm demo` (ctxlm_ds/apps/demo/pretrain_default.py)."""

from ctxlm_ds.apps.demo.pretrain_default import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
