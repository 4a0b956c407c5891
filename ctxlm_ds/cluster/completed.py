"""Whether a run has trained to its end: `python -m ctxlm_ds.cluster.completed RUN_DIR`, exit status 0 or 1.

For scripts with several phases. Needs the standard library only.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ctxlm_ds.process.run_history import END, START, read_history


def is_completed(run_dir: Path) -> bool:
    """Whether the run's last start ended with the last step done; one that goes on further has not."""
    ends = [event for event in read_history(run_dir) if event["event"] in (START, END)]
    return bool(ends) and ends[-1]["event"] == END and bool(ends[-1].get("completed"))


def main() -> None:
    """Entry point."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m ctxlm_ds.cluster.completed RUN_DIR\n")
        sys.exit(2)
    sys.exit(0 if is_completed(Path(sys.argv[1])) else 1)


if __name__ == "__main__":
    main()
