"""One node's part of staging: `srun python -m ctxlm_ds.cluster.staging_node plan|room|copy FOLDER ...`.

In: FOLDER on the shared file system, which holds plan.json after `plan`. Out: FOLDER/room-NODE.json, copy-NODE.json.
`plan` runs on one node, the others on all of them, one task a node. Not here: which items are copied (staging.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxlm_ds.atomic import write_text
from ctxlm_ds.cluster.preflight_rank import node_name
from ctxlm_ds.cluster.staging_copy import StagePlan, copy_items, room
from ctxlm_ds.errors import EXIT_USER_ERROR, CtxlmError

PLAN_NAME = "plan.json"


def answer_file(folder: Path, stage: str, node: str) -> Path:
    """Where a node leaves its answer."""
    return folder / f"{stage}-{node}.json"


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of a task."""
    parser = argparse.ArgumentParser(prog="python -m ctxlm_ds.cluster.staging_node")
    parser.add_argument("stage", choices=("plan", "room", "copy"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--into", type=Path, help="folder on the node's own disk")
    parser.add_argument("--items", default="", help="numbers of the plan's items to copy, 0,2,3")
    given = list(sys.argv[1:] if argv is None else argv)
    # `plan FOLDER -- OPTIONS of ctxlm_ds.pretrain`
    end = given.index("--") if "--" in given else len(given)
    arguments = parser.parse_args(given[:end])
    if arguments.stage == "plan":
        try:
            write_text(arguments.folder / PLAN_NAME, make_plan(given[end + 1 :]).to_json())
        except CtxlmError as error:
            sys.stderr.write(f"error: {error}\n")
            sys.exit(EXIT_USER_ERROR)
        return
    plan = StagePlan.from_json((arguments.folder / PLAN_NAME).read_text(encoding="utf-8"))
    answer: Any
    if arguments.stage == "room":
        answer = room(plan.items, arguments.into)
    else:
        answer = copy_items([plan.items[int(number)] for number in arguments.items.split(",")], arguments.into)
    write_text(answer_file(arguments.folder, arguments.stage, node_name()), json.dumps(answer, indent=1) + "\n")


def make_plan(words: Sequence[str]) -> StagePlan:
    """The plan for a command line of ctxlm_ds.pretrain."""
    from ctxlm_ds.cluster.staging_plan import plan_staging
    from ctxlm_ds.pretrain import parse_arguments
    from ctxlm_ds.recipe.load import load_config

    arguments = parse_arguments(words)
    return plan_staging(load_config(arguments.config, arguments.set))


if __name__ == "__main__":
    main()
