"""Datasets, sample indexes and tokenizer on each node's own disk before training reads them (CTXLM_STAGE_DIR).

In: a job (or this machine alone: `python -m ctxlm_ds.cluster.staging DIR --config RECIPE`). Out: the settings that make
the run read the copies. One task a node copies; what one node cannot copy or prove is read from the shared file system
on all of them, because every rank must see the same. Staging that fails never fails the job.
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

from ctxlm_ds.cluster.context import JobContext, tell
from ctxlm_ds.cluster.steps import NODE_MARK, run_on_nodes
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
    """Copy what a job reads to all of its nodes; `a.b=c` for --set, none if everything stays in its place."""
    into, start_s = environ["CTXLM_STAGE_DIR"], time.monotonic()
    words, tasks = [into, *context.words], dict.fromkeys(nodes, 1)
    try:
        module = "ctxlm_ds.cluster.staging"
        answers, said = run_on_nodes(module, words, tasks, context.settings, environ, LIMIT_S, should_stop)
    except ClusterError as error:
        answers, said = [], [str(error)]
    if len(answers) < len(nodes):
        reasons = [line.partition("error: ")[2] for line in said if "error: " in line] or said or ["no answer"]
        tell(f"staging: {reasons[0]}; everything is read from where the recipe says")
        return []
    settings = settings_of(answers, Path(into), tell)
    copied = max(answer["copied_bytes"] for answer in answers)
    amount = f"{format_size(copied)} copied, {time.monotonic() - start_s:.0f} s"
    tell(f"staging: {Path(into) / ROOT_NAME} of {len(nodes)} nodes; {amount}")
    return settings


def settings_of(answers: Sequence[Mapping[str, Any]], into: Path, say: Callable[[str], object]) -> list[str]:
    """What makes a run read the copies that all nodes have (JSON is YAML); a line for each other item."""
    plan = answers[0]
    failed = {source: (a["node"], why) for a in reversed(answers) for source, why in a["failed"].items()}
    for source, (node, why) in failed.items():
        say(f"staging: {node}: {why}; {source} is read from where the recipe says")
    for note in plan["notes"]:
        say(f"staging: {note}")
    settings = []
    for name in ("train", "validation"):
        moved = [{**one, "path": _moved(one["path"], failed, into)} for one in plan[name]]
        if moved != plan[name]:
            settings.append(f"data.{name}={json.dumps(moved)}")
    if plan["tokenizer"] and plan["tokenizer"] not in failed:
        settings.append(f"tokenizer.path={json.dumps(_moved(plan['tokenizer'], failed, into))}")
    if plan["has_index_dir"] and not any(one["path"] in failed for one in plan["train"] + plan["validation"]):
        # Else the indexes of those that stay are found there, and the others' as well.
        settings.append("data.sample_index_dir=null")
    return settings


def _moved(source: str, failed: Mapping[str, Any], into: Path) -> str:
    return source if source in failed else str(target_of(source, into.resolve()) / Path(source).name)


def target_of(source: str, into: Path) -> Path:
    """A folder for a source's copies, different for equal names in different places."""
    path = Path(source).resolve()
    return into / ROOT_NAME / f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def stage_here(config: RunConfig, into: Path) -> dict[str, Any]:
    """This node's part: copy and prove everything that a recipe's run reads; what failed, and the recipe's sources.

    Raises:
        DataError, TokenizerError: what training itself would refuse.
    """
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
    # A name may else follow from the path.
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
    """Copy what is new, and all of it if the copy is not what `proof`, lines of sha256sum, says of the source."""
    target, check = target_of(source, into), ["sha256sum", "--check", "--quiet", "-"]
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
    """Copy aside and rename: an interrupted copy is not taken for a file. Raises OSError."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    aside = copy.with_name(f".{copy.name}.partial-{os.getpid()}")
    words = ["rsync" if shutil.which("rsync") else "cp", "-aL", str(file), str(aside)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        aside.unlink(missing_ok=True)
        raise OSError(f"{words[0]} {file}: {(done.stderr.strip().splitlines() or ['no message'])[0]}")
    os.replace(aside, copy)


def main() -> None:
    """A node's task: `DIR --config RECIPE [--set ...]`, options of ctxlm_ds.pretrain."""
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
