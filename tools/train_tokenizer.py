"""Run `ctxlm tokenizer` (ctxlm_ds/apps/text/train_tokenizer.py)."""

from ctxlm_ds.apps.text.train_tokenizer import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
