"""Run `ctxlm status` (ctxlm_ds/apps/cluster/run_status.py)."""

import sys
from pathlib import Path

# A login node has the checkout and a Python; the package need not be installed there.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ctxlm_ds.apps.cluster.run_status import main
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
