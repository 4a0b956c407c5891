"""Run `ctxlm corpus` (ctxlm_ds/commands/prepare_corpus.py)."""

from ctxlm_ds.commands.prepare_corpus import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
