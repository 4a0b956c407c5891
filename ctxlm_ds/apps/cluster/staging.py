"""Copies datasets, sample indexes, tokenizer and teacher to each node's own disk before training (CTXLM_STAGE_DIR).

In: a job (or this machine alone: `python -m ctxlm_ds.apps.cluster.staging DIR --config RECIPE`). Out: the settings that
make the run read the copies. One task per node copies (rsync, or cp if it is missing) and verifies with sha256sum. If
one node cannot, all nodes read everything from the original place, because every rank must see the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.apps.cluster.job_context import JobContext, log
from ctxlm_ds.apps.cluster.srun import NODE_MARK, run_on_nodes
from ctxlm_ds.console import format_size
from ctxlm_ds.errors import ClusterError

if TYPE_CHECKING:
    from ctxlm_ds.recipe.schema import RunConfig

ROOT_NAME = "ctxlm-staged"
DATA_ENDS = ("bin", "idx", "spans")
NODE = os.environ.get("SLURMD_NODENAME", "this node")
LIMIT_S = 24 * 3600.0
SPARE_BYTES = 1 << 28  # left free on the disk
RSYNC = ("rsync", "--recursive", "--copy-links", "--times", "--ignore-times")
CP = ("cp", "--recursive", "--dereference", "--preserve=timestamps", "--remove-destination")
SHA256SUM = ("sha256sum", "--check", "--quiet", "-")


def run_staging(
    context: JobContext, nodes: Sequence[str], environ: Mapping[str, str], should_stop: Callable[[], bool]
) -> list[str]:
    """Copy what a job reads to all of its nodes; return `a.b=c` for --set, none if a node fails."""
    into, start_s = environ["CTXLM_STAGE_DIR"], time.monotonic()
    try:
        answers, output = run_on_nodes(
            "ctxlm_ds.apps.cluster.staging", [into, *context.words], dict.fromkeys(nodes, 1), context.settings, environ,
            LIMIT_S, should_stop,
        )  # fmt: skip
    except ClusterError as error:
        answers, output = [], [str(error)]
    if len(answers) < len(nodes):
        reasons = [line.partition("error: ")[2] for line in output if "error: " in line] or output or ["no answer"]
        log(f"staging: {reasons[0]}; everything is read from where the recipe says")
        return []
    for folder in answers[0]["missing"]:
        log(f"staging: {folder} is not built yet; every node will build its own")
    copied, seconds = max(answer["copied_bytes"] for answer in answers), time.monotonic() - start_s
    log(f"staging: {into}/{ROOT_NAME} of {len(nodes)} nodes; {format_size(copied)} copied, {seconds:.0f} s")
    return list(answers[0]["settings"])


def copy_of(source: str, into: Path) -> Path:
    """Return the place of a source's copy, different for equal names in different folders."""
    path = Path(source).resolve()
    folder = f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    return into.resolve() / ROOT_NAME / folder / Path(source).name


def stage_here(config: RunConfig, into: Path) -> dict[str, Any]:
    """Copy what a run reads to this node, and verify it. Raises ClusterError if it does not fit or is damaged."""
    from ctxlm_ds.data.dataset.checksums import manifest_text
    from ctxlm_ds.data.dataset.reader import IndexedDataset
    from ctxlm_ds.data.index.build import IndexPlace
    from ctxlm_ds.data.stream.run_datasets import held_out_parts, train_parts
    from ctxlm_ds.recipe.source_rules import source_names
    from ctxlm_ds.tokenizers.load import load_tokenizer

    tokenizer = load_tokenizer(config.tokenizer.path) if config.tokenizer.path else None
    parts = [(part, False) for part in train_parts(config.data)] + [
        (p, True) for p in held_out_parts(config.data).values()
    ]
    places = (
        [IndexPlace.of(part, tokenizer, config.row_settings, held_out) for part, held_out in parts] if tokenizer else []
    )
    indexes = {place.directory: str(place.dataset.prefix) for place in places}
    missing = [folder for folder in indexes if not (folder / "meta.json").is_file()]
    copied_bytes = 0
    sources = [one.path for one in config.data.train] + [one.path for one in config.data.validation]
    for source in dict.fromkeys(sources):
        digests = ChainMap(*(recorded for _, recorded in IndexedDataset(source).recorded_digests()))
        proof = manifest_text({f"{Path(source).name}.{end}": digests[end] for end in DATA_ENDS if end in digests})
        folders = [folder for folder, prefix in indexes.items() if prefix == source and folder not in missing]
        for folder in folders:
            recorded_files = json.loads((folder / "meta.json").read_text(encoding="utf-8"))["files"]
            proof += manifest_text({f"{folder.name}/{file}": one["sha256"] for file, one in recorded_files.items()})
        files = [file for end in (*DATA_ENDS, "json", "sha256") if (file := Path(f"{source}.{end}")).is_file()]
        copied_bytes += _stage(files + folders, copy_of(source, into).parent, proof)
    train = [
        {**dict(one), "name": name} for one, name in zip(config.data.train, source_names(config.data), strict=True)
    ]
    settings: dict[str, Any] = {"data.train": train, "data.validation": list(map(dict, config.data.validation))}
    for values in settings["data.train"] + settings["data.validation"]:
        values["path"] = str(copy_of(values["path"], into))
    if config.tokenizer.path:
        copy = copy_of(str(config.tokenizer.path), into)
        copied_bytes += _stage([Path(config.tokenizer.path)], copy.parent, "")
        settings["tokenizer.path"] = str(copy)
    if config.teacher.path is not None:  # the run compares its fingerprint over all ranks
        copy = copy_of(config.teacher.path, into)
        copied_bytes += _stage([Path(config.teacher.path)], copy.parent, "")
        settings["teacher.path"] = str(copy)
    if config.data.sample_index_dir is not None:
        settings["data.sample_index_dir"] = None
    words = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    return {"settings": words, "copied_bytes": copied_bytes, "missing": list(map(str, missing))}


def _stage(paths: Sequence[Path], target: Path, proof: str) -> int:
    """Copy what is new, once more if it does not match `proof`, lines of sha256sum; return the number of bytes."""
    files = [(path, file) for path in paths for file in (path.rglob("*") if path.is_dir() else [path])]
    copies = {file: target / file.relative_to(path.parent) for path, file in files if file.is_file()}
    target.mkdir(parents=True, exist_ok=True)
    for again in (False, True):
        new = [file for file, copy in copies.items() if again or _size_and_time(file) != _size_and_time(copy)]
        needed, free = sum(file.stat().st_size for file in new), shutil.disk_usage(target).free - SPARE_BYTES
        if needed > max(0, free):
            sizes = f"{format_size(needed)} needed, {format_size(max(0, free))} free"
            raise ClusterError(f"{NODE}: no room for {paths[0]} in {target}: {sizes}")
        copy = [*(RSYNC if shutil.which("rsync") else CP), *map(str, paths), f"{target}/"]
        why = (_run(copy) if new else "") or (_run(SHA256SUM, target, proof) if proof else "")
        if not why:
            return needed
    raise ClusterError(f"{NODE}: {paths[0]}: {why}; if the file is damaged, restore it or make it again")


def _size_and_time(path: Path) -> tuple[int, int] | None:
    return (path.stat().st_size, int(path.stat().st_mtime)) if path.is_file() else None


def _run(words: Sequence[str], folder: Path | None = None, stdin: str = "") -> str:
    done = subprocess.run(words, cwd=folder, input=stdin, capture_output=True, text=True, check=False)
    return f"{words[0]}: {' '.join((done.stdout or done.stderr).split())}" if done.returncode else ""


def main() -> None:
    """Run a node's task, or by hand print the settings: `DIR --config RECIPE`, options of ctxlm_ds.pretrain."""
    from ctxlm_ds.apps.plan.check_run import parse_arguments
    from ctxlm_ds.recipe.load import load_config

    arguments = parse_arguments(sys.argv[2:])
    answer = stage_here(load_config(arguments.config, arguments.set), Path(sys.argv[1]))
    lines = [NODE_MARK + json.dumps(answer)] if "SLURM_STEP_ID" in os.environ else answer["settings"]
    sys.stdout.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    from ctxlm_ds.console import run_command

    run_command(main)
