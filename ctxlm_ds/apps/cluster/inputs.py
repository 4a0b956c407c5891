"""What a run reads, listed for slurm/stage.sh, which copies it.

`python -m ctxlm_ds.apps.cluster.inputs DIR RECIPE [options of ctxlm_ds.pretrain]` prints lines of fields separated by
tabs: `copy SOURCE FOLDER`; `sum` and a line of sha256sum; `set A.B=C`, a setting that makes the run read the copies.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.apps.plan.check_run import index_places, parse_arguments
from ctxlm_ds.errors import ConfigError, CtxlmError, DataError
from ctxlm_ds.recipe.sections import DataSection
from ctxlm_ds.untrusted_json import read_json_object

if TYPE_CHECKING:
    from ctxlm_ds.data.index.build import IndexPlace

ROOT_NAME = "ctxlm-staged"
DATA_ENDS = ("bin", "idx", "spans")


def staging_lines(
    data: DataSection, places: Iterable[IndexPlace | CtxlmError], folders: Mapping[str, str | None], into: Path
) -> Iterator[str]:
    """Yield the lines for datasets, finished sample indexes and folders by setting, with the digests on record."""
    from ctxlm_ds.data.dataset.reader import IndexedDataset
    from ctxlm_ds.recipe.source_rules import source_names

    indexes = _finished_indexes(places)
    sources = [one.path for one in data.train] + [one.path for one in data.validation]
    for source in dict.fromkeys(sources):
        folder = copy_of(source, into).parent
        digests = ChainMap(*(recorded for _, recorded in IndexedDataset(source).recorded_digests()))
        for end in (*DATA_ENDS, "json", "sha256"):
            if (file := Path(f"{source}.{end}")).is_file():
                yield f"copy\t{file.absolute()}\t{folder}"
                yield from [f"sum\t{digests[end]}  {folder / file.name}"] if end in digests else []
        for index in (index for index, prefix in indexes.items() if prefix == source):
            yield f"copy\t{index.absolute()}\t{folder}"
            for name, recorded in read_json_object(index / "meta.json", DataError)["files"].items():
                yield f"sum\t{recorded['sha256']}  {folder / index.name / name}"
    train = [{**dict(one), "name": name} for one, name in zip(data.train, source_names(data), strict=True)]
    settings: dict[str, Any] = {"data.train": train, "data.validation": list(map(dict, data.validation))}
    for values in settings["data.train"] + settings["data.validation"]:
        values["path"] = str(copy_of(values["path"], into))
    for name, path in folders.items():
        if path is not None:
            yield f"copy\t{Path(path).absolute()}\t{copy_of(path, into).parent}"
            settings[name] = str(copy_of(path, into))
    if data.sample_index_dir is not None:
        settings["data.sample_index_dir"] = None
    yield from (f"set\t{name}={json.dumps(value)}" for name, value in settings.items())


def copy_of(source: str, into: Path) -> Path:
    """Return the place of a source's copy, different for equal names in different folders."""
    path = Path(source).resolve()
    folder = f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    return into.resolve() / ROOT_NAME / folder / Path(source).name


def _finished_indexes(places: Iterable[IndexPlace | CtxlmError]) -> dict[Path, str]:
    """Return the prefix of the dataset of each sample index that is built; every node will build the others."""
    found = {}
    for place in places:
        if isinstance(place, CtxlmError):
            raise place
        if (place.directory / "meta.json").is_file():
            found[place.directory] = str(place.dataset.prefix)
    return found


def main() -> None:
    """Print the lines for slurm/stage.sh."""
    from ctxlm_ds.apps.cluster.job_context import of_task, pretrain_words
    from ctxlm_ds.recipe.load import load_config
    from ctxlm_ds.recipe.phases import run_phases

    arguments = parse_arguments(pretrain_words(of_task(sys.argv[2:], os.environ)))
    config = load_config(arguments.config, arguments.set)
    path = config.tokenizer.path
    folders = {"tokenizer.path": path, "teacher.path": config.teacher.path}
    lines: list[str] = []
    for phase in run_phases(config):
        rows = phase.config.row_settings
        if rows.data.train != config.data.train or rows.data.validation != config.data.validation:
            text = "its sources differ from the recipe's, and copies replace those only; do not stage this run"
            raise ConfigError(f"{config.name}, {phase.describe()}: {text} (CTXLM_STAGE_TO)")
        places = () if path is None else index_places(rows, path, config.model.vocab_size)
        lines += staging_lines(rows.data, places, folders, Path(sys.argv[1]))
    sys.stdout.write("".join(f"{line}\n" for line in dict.fromkeys(lines)))


if __name__ == "__main__":
    from ctxlm_ds.console import run_command

    run_command(main)
