"""Run `ctxlm sentences` (ctxlm_ds/commands/sentence_embeddings.py)."""

from ctxlm_ds.commands.sentence_embeddings import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
