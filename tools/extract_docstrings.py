"""Run `ctxlm docstrings` (ctxlm_ds/apps/text/extract_docstrings.py)."""

from ctxlm_ds.apps.text.extract_docstrings import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
