"""The subcommands of `ctxlm`, a module each; `main.py` has the table."""
