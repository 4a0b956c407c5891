"""Run `ctxlm plan` (ctxlm_ds/apps/plan/plan_run.py)."""

from ctxlm_ds.apps.plan.plan_run import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
