"""Run `ctxlm tokenizer-report` (ctxlm_ds/apps/text/tokenizer_report.py)."""

from ctxlm_ds.apps.text.tokenizer_report import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
