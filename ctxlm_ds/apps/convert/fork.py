"""Branch off a run: another run that begins with one of its checkpoints, data position and optimizer included.

    ctxlm fork RUN NEW                                   # its newest checkpoint that verifies
    ctxlm fork RUN@1000 NEW --set schedule.name=wsd training.max_steps=1200

Nothing starts: `ctxlm pretrain --config NEW/config.yaml` continues. The files are linked, not copied, where the file
system can; the run may continue and remove its own. Without changed settings the branch continues bitwise as the run.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ctxlm_ds.atomic import output_folder
from ctxlm_ds.checkpoint.folders import CHECKPOINTS_DIR, LATEST_NAME, find_verified, list_checkpoints, step_of
from ctxlm_ds.checkpoint.manifest import MANIFEST_NAME, read_manifest, verify
from ctxlm_ds.checkpoint.saved_state import RECIPE_NAME, phase_to_train, refuse_changed_settings, saved_state
from ctxlm_ds.console import logger, setup_logging
from ctxlm_ds.errors import CheckpointError, ConfigError
from ctxlm_ds.process.run_files import FORK_RECORD
from ctxlm_ds.recipe.load import dump_config, load_config
from ctxlm_ds.recipe.phases import run_phases

NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("run", metavar="RUN[@STEP]", help="folder of a run, and the step of one of its checkpoints")
    add("new", type=Path, metavar="NEW", help="folder of the branch, which must not exist")
    add("--set", nargs="+", action="extend", default=[], metavar="A.B=C", help="settings of the branch")
    arguments = parser.parse_args()
    setup_logging()
    step = fork(arguments.run, arguments.new, arguments.set)
    print(f"wrote {arguments.new}, which begins at step {step:,}")
    print(f"next: ctxlm pretrain --config {arguments.new / 'config.yaml'}")


def fork(run: str, new: Path, overrides: Sequence[str] = ()) -> int:
    """Write a run folder with a recipe and one checkpoint of another run (`RUN` or `RUN@STEP`); return its step.

    Raises:
        ConfigError: a setting is wrong.
        CheckpointError: `new` exists, there is no such intact checkpoint, or a setting cannot change in a run.
    """
    if new.exists():
        raise CheckpointError(f"{new} exists; give another folder for the branch")
    source = checkpoint_of(run)
    settings = [*overrides, f"run_dir={new.absolute()}"]
    recipe = source / RECIPE_NAME
    config = load_config(recipe if recipe.is_file() else source / "config.yaml", settings)
    phases, phase = run_phases(config), saved_state(source).phase
    if phase_to_train(source, phases) == phase:
        refuse_changed_settings(source, phases[phase].config)
    logger.info("branching off %s", source)
    with output_folder(new, replace=False) as folder:
        checkpoints = folder / CHECKPOINTS_DIR
        link_checkpoint(source, checkpoints / source.name)
        (checkpoints / LATEST_NAME).write_text(source.name + "\n", encoding="utf-8")
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        record = {"checkpoint": str(source.resolve()), "step": step_of(source), "settings": list(overrides)}
        (folder / FORK_RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return step_of(source)


def checkpoint_of(run: str) -> Path:
    """Return the checkpoint that `RUN` or `RUN@STEP` names. Raises CheckpointError, which lists the kept steps."""
    name, mark, step = run.rpartition("@")
    if not mark or Path(run).is_dir():
        return find_verified(Path(run))[0]
    if not step.isdecimal():
        raise ConfigError(f"{run}: after @ stands the number of a step, such as {name}@1000")
    if not Path(name).is_dir():
        raise CheckpointError(f"{name}: no such folder; give a run")
    found = list_checkpoints(Path(name) / CHECKPOINTS_DIR)
    if int(step) not in found:
        kept = ", ".join(map(str, found)) or "none"
        raise CheckpointError(f"{name} has no checkpoint of step {step}; it has kept: {kept}")
    return find_verified(found[int(step)])[0]


def link_checkpoint(source: Path, target: Path) -> None:
    """Link or copy the files of a checkpoint, which its run may remove meanwhile."""
    try:
        for name in (*read_manifest(source).files, MANIFEST_NAME):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source / name, target / name)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                shutil.copyfile(source / name, target / name)
        verify(target, quick=True)
    except FileNotFoundError:
        raise CheckpointError(f"{source} was removed by its run meanwhile; fork a later step") from None
