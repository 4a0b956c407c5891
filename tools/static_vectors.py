"""Run `ctxlm word2vec` (ctxlm_ds/commands/static_vectors.py)."""

from ctxlm_ds.commands.static_vectors import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
