"""Run `ctxlm tokenizer` (ctxlm_ds/apps/text/tokenizers.py)."""

from ctxlm_ds.apps.text.tokenizers import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
