"""Copies datasets, sample indexes and tokenizer to each node's own disk before training (CTXLM_STAGE_DIR).

In: a job (or this machine alone: `python -m ctxlm_ds.cluster.staging DIR --config RECIPE`). Out: the settings that make
the run read the copies. One task per node copies. A source that one node cannot copy or verify is read from the shared
file system on all of them, because every rank must see the same. Staging that fails never fails the job.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.cluster.job_context import JobContext, log
from ctxlm_ds.cluster.srun import NODE_MARK, run_on_nodes
from ctxlm_ds.console import format_size
from ctxlm_ds.errors import ClusterError

if TYPE_CHECKING:
    from ctxlm_ds.recipe.schema import RunConfig

ROOT_NAME = "ctxlm-staged"
LIMIT_S = 24 * 3600.0
SPARE_BYTES = 1 << 28  # left free on the disk


def run_staging(
    context: JobContext, nodes: Sequence[str], environ: Mapping[str, str], should_stop: Callable[[], bool]
) -> list[str]:
    """Copy what a job reads to all of its nodes; return `a.b=c` for --set, none if nothing is copied."""
    into, start_s = environ["CTXLM_STAGE_DIR"], time.monotonic()
    words, tasks = [into, *context.words], dict.fromkeys(nodes, 1)
    try:
        module = "ctxlm_ds.cluster.staging"
        answers, output = run_on_nodes(module, words, tasks, context.settings, environ, LIMIT_S, should_stop)
    except ClusterError as error:
        answers, output = [], [str(error)]
    if len(answers) < len(nodes):
        reasons = [line.partition("error: ")[2] for line in output if "error: " in line] or output or ["no answer"]
        log(f"staging: {reasons[0]}; everything is read from where the recipe says")
        return []
    settings = settings_of(answers, Path(into), log)
    copied = max(answer["copied_bytes"] for answer in answers)
    amount = f"{format_size(copied)} copied, {time.monotonic() - start_s:.0f} s"
    log(f"staging: {Path(into) / ROOT_NAME} of {len(nodes)} nodes; {amount}")
    return settings


def settings_of(answers: Sequence[Mapping[str, Any]], into: Path, say: Callable[[str], object]) -> list[str]:
    """Return settings that make a run read the copies that all nodes have (JSON is YAML); explain the others."""
    plan = answers[0]
    failed = {source: (a["node"], why) for a in reversed(answers) for source, why in a["failed"].items()}
    for source, (node, why) in failed.items():
        say(f"staging: {node}: {why}; {source} is read from where the recipe says")
    for note in plan["notes"]:
        say(f"staging: {note}")
    settings = []
    for name in ("train", "validation"):
        copies = {one["path"]: str(copy_of(one["path"], into)) for one in plan[name] if one["path"] not in failed}
        moved = [{**one, "path": copies.get(one["path"], one["path"])} for one in plan[name]]
        if moved != plan[name]:
            settings.append(f"data.{name}={json.dumps(moved)}")
    if plan["tokenizer"] and plan["tokenizer"] not in failed:
        settings.append(f"tokenizer.path={json.dumps(str(copy_of(plan['tokenizer'], into)))}")
    if plan["has_index_dir"] and not any(one["path"] in failed for one in plan["train"] + plan["validation"]):
        settings.append("data.sample_index_dir=null")
    return settings


def copy_of(source: str, into: Path) -> Path:
    """Return the place of a source's copy, different for equal names in different folders."""
    path = Path(source).resolve()
    folder = f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    return into.resolve() / ROOT_NAME / folder / Path(source).name


def stage_here(config: RunConfig, into: Path) -> dict[str, Any]:
    """Copy and verify everything that a recipe's run reads to this node; return what failed, and the sources."""
    from ctxlm_ds.data.dataset.checksums import manifest_text
    from ctxlm_ds.data.dataset.reader import IndexedDataset
    from ctxlm_ds.data.index.build import IndexPlace
    from ctxlm_ds.data.stream.run_datasets import held_out_parts, train_parts
    from ctxlm_ds.recipe.source_rules import source_names
    from ctxlm_ds.tokenizers.load import load_tokenizer

    tokenizer = load_tokenizer(config.tokenizer.path) if config.tokenizer.path else None
    parts = [(part, False) for part in train_parts(config)] + [(p, True) for p in held_out_parts(config).values()]
    places = [IndexPlace.of(part, tokenizer, config, held_out) for part, held_out in parts] if tokenizer else []
    indexes = {place.directory: str(place.dataset.prefix) for place in places}
    missing = [folder for folder in indexes if not (folder / "meta.json").is_file()]
    named = zip(config.data.train, source_names(config), strict=True)
    given = [{"path": one.path, "weight": one.weight, "epochs": one.epochs, "name": name} for one, name in named]
    train = [{key: value for key, value in values.items() if value is not None} for values in given]
    answer: dict[str, Any] = {
        "train": train, "validation": [source.model_dump(mode="json") for source in config.data.validation],
        "tokenizer": config.tokenizer.path and str(config.tokenizer.path), "failed": {}, "copied_bytes": 0,
        "has_index_dir": config.data.sample_index_dir is not None, "node": os.environ.get("SLURMD_NODENAME", "here"),
        "notes": [f"{folder} is not built yet; every node will build its own" for folder in missing],
    }  # fmt: skip
    for source in dict.fromkeys(one["path"] for one in [*train, *answer["validation"]]):
        digests: dict[str, str] = {}
        for _, recorded in IndexedDataset(source).recorded_digests():
            digests = {**recorded, **digests}
        name, files = Path(source).name, [Path(f"{source}.{end}") for end in ("bin", "idx", "json", "sha256")]
        proof = manifest_text({f"{name}.{end}": digests[end] for end in ("bin", "idx") if end in digests})
        folders = [folder for folder, prefix in indexes.items() if prefix == source and folder not in missing]
        for folder in folders:
            recorded_files = json.loads((folder / "meta.json").read_text(encoding="utf-8"))["files"]
            proof += manifest_text({f"{folder.name}/{file}": one["sha256"] for file, one in recorded_files.items()})
        _stage(answer, source, [file for file in files if file.is_file()] + folders, proof, into)
    if answer["tokenizer"]:
        _stage(answer, answer["tokenizer"], [Path(answer["tokenizer"])], "", into)
    return answer


def _stage(answer: dict[str, Any], source: str, paths: list[Path], proof: str, into: Path) -> None:
    """Copy what is new, and everything once more if the copy does not match `proof`, lines of sha256sum."""
    target, check = copy_of(source, into).parent, ["sha256sum", "--check", "--quiet", "-"]
    files = [(path, file) for path in paths for file in (path.rglob("*") if path.is_dir() else [path])]
    copies = {file: target / file.relative_to(path.parent) for path, file in files if file.is_file()}
    try:
        target.mkdir(parents=True, exist_ok=True)
        for again in (False, True):
            new = {file: copy for file, copy in copies.items() if again or _mark(file) != _mark(copy)}
            needed, free = sum(file.stat().st_size for file in new), shutil.disk_usage(target).free - SPARE_BYTES
            if needed > max(0, free):
                sizes = f"{format_size(needed)} are needed, {format_size(max(0, free))} are free"
                raise OSError(f"no room for {source} in {into}: {sizes}")
            for file, copy in new.items():
                _copy(file, copy)
            answer["copied_bytes"] += needed
            done = subprocess.run(check, cwd=target, input=proof, capture_output=True, text=True, check=False)
            if not proof or done.returncode == 0:
                return
        raise OSError(f"sha256sum: {' '.join(done.stdout.split())}; the file is damaged, restore it or make it again")
    except OSError as error:
        answer["failed"][source] = f"{error.filename}: {error.strerror}" if error.filename else str(error)


def _mark(path: Path) -> tuple[int, int] | None:
    return (path.stat().st_size, int(path.stat().st_mtime)) if path.is_file() else None


def _copy(file: Path, copy: Path) -> None:
    """Copy to another name and rename, so that an interrupted copy is not taken for a file. Raises OSError."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    partial = copy.with_name(f".{copy.name}.partial-{os.getpid()}")
    try:
        shutil.copy2(file, partial)
        os.replace(partial, copy)
    finally:
        partial.unlink(missing_ok=True)


def main() -> None:
    """Run a node's task: `DIR --config RECIPE [--set ...]`, options of ctxlm_ds.pretrain."""
    from ctxlm_ds.pretrain import parse_arguments
    from ctxlm_ds.recipe.load import load_config

    arguments = parse_arguments(sys.argv[2:])
    answer = stage_here(load_config(arguments.config, arguments.set), Path(sys.argv[1]))
    if "SLURM_STEP_ID" in os.environ:
        sys.stdout.write(NODE_MARK + json.dumps(answer) + "\n")
    else:  # by hand: what to give to --set
        settings = settings_of([answer], Path(sys.argv[1]), lambda line: sys.stderr.writelines((line, "\n")))
        sys.stdout.writelines(line + "\n" for line in settings)


if __name__ == "__main__":
    from ctxlm_ds.console import run_command

    run_command(main)
