"""What was made with other settings: refused, or put aside so that it can be made again.

In: a plan and its verdicts. Out: renamed files and folders; nothing is removed but the record of how they were made.
Not here: how a change is found (pipeline_verdict.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ctxlm_ds.cluster.pipeline_records import all_records
from ctxlm_ds.cluster.pipeline_steps import Plan
from ctxlm_ds.cluster.pipeline_verdict import State, Verdict
from ctxlm_ds.errors import ClusterError


def refuse_changed(plan: Plan, verdicts: Mapping[str, Verdict]) -> None:
    """Nothing that is there is made again without being asked for.

    Raises:
        ClusterError: lists every step that would be made again, and why.
    """
    changed = [verdict for verdict in verdicts.values() if verdict.state is State.CHANGED]
    if not changed:
        return
    lines = [f"  {verdict.step}: {text}" for verdict in changed for text in verdict.differences]
    busy = sorted({job.job_id for verdict in changed for job in verdict.jobs})
    if busy:
        remedy = f"Wait for the jobs, or cancel them (scancel {' '.join(busy)}), then run this again."
    else:
        remedy = (
            "Put the recipe back, choose another pipeline.output_dir, or run this again with --redo: these steps and "
            "what is made of them are made again, and what is there is kept under another name."
        )
    raise ClusterError(f"{plan.folder} was made otherwise, in {len(changed)} step{'s' if len(changed) > 1 else ''}:\n"
                       + "\n".join(lines) + f"\n{remedy}")  # fmt: skip


def places_to_clear(plan: Plan, verdicts: Mapping[str, Verdict]) -> dict[str, list[Path]]:
    """By step: files and folders that are in the way of making it again, those of its old records too."""
    found: dict[str, list[Path]] = {}
    for verdict in verdicts.values():
        if verdict.state is not State.CHANGED:
            continue
        outputs = [*plan.outputs(verdict.step)]
        for record in all_records(plan.folder, verdict.step).values():
            outputs += [output for output in record.outputs if output not in outputs]
        places = dict.fromkeys(Path(place) for output in outputs for place in output.places())
        found[verdict.step] = [place for place in places if os.path.lexists(place)]
    return found


def make_room(plan: Plan, verdicts: Mapping[str, Verdict]) -> list[tuple[Path, Path]]:
    """Rename what is in the way (beside itself, so that nothing is lost or copied) and forget how it was made.

    Returns:
        Old and new places.

    Raises:
        ClusterError: a job is at one of the steps.
    """
    if any(verdict.jobs for verdict in verdicts.values() if verdict.state is State.CHANGED):
        refuse_changed(plan, verdicts)
    mark = time.strftime("replaced-%Y%m%d-%H%M%S")
    moved = []
    for name, places in places_to_clear(plan, verdicts).items():
        for place in places:
            aside = _aside(place, mark)
            os.rename(place, aside)
            moved.append((place, aside))
        for path in all_records(plan.folder, name):
            path.unlink()
    return moved


def as_if_cleared(plan: Plan, verdicts: Mapping[str, Verdict]) -> dict[str, Verdict]:
    """The verdicts after make_room(), for a preview.

    Raises:
        ClusterError: a job is at one of the steps.
    """
    changed = {verdict.step: verdict for verdict in verdicts.values() if verdict.state is State.CHANGED}
    if any(verdict.jobs for verdict in changed.values()):
        refuse_changed(plan, verdicts)
    found = dict(verdicts)
    for name in changed:
        tasks = tuple(range(len(plan.by_name[name].tasks)))
        found[name] = replace(verdicts[name], state=State.TO_DO, tasks=tasks, differences=())
    return found


def _aside(place: Path, mark: str) -> Path:
    """`train_text_sentence.bin` -> `train_text_sentence.MARK.bin`, so that a dataset still opens."""
    stem, dot, ending = place.name.partition(".")
    aside = place.with_name(f"{stem}.{mark}{dot}{ending}")
    number = 1
    while os.path.lexists(aside):
        number += 1
        aside = place.with_name(f"{stem}.{mark}-{number}{dot}{ending}")
    return aside
