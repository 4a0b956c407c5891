"""What a recipe's run reads, file by file with checksums: what is to be copied to the nodes.

In: a recipe. Out: StagePlan, which travels as JSON. Runs on one node alone, because it opens every dataset; needs
neither torch nor an accelerator. Not here: copying (staging_copy.py), which node has room (staging.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxlm_ds.cluster.staging_copy import StagedFile, StageItem, StagePlan, folder_name
from ctxlm_ds.data.dataset.checksums import manifest_path
from ctxlm_ds.data.dataset.reader import IndexedDataset, dataset_file
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.source_rules import source_names

if TYPE_CHECKING:
    from ctxlm_ds.tokenizers.base import Tokenizer

META_NAME = "meta.json"


def plan_staging(config: RunConfig) -> StagePlan:
    """Datasets with those of their sample indexes that the recipe uses, then the tokenizer.

    Raises:
        DataError, TokenizerError: what training itself would refuse.
    """
    # With their libraries (numba, tokenizers): not before they are needed.
    from ctxlm_ds.data.index.location import IndexPlace
    from ctxlm_ds.data.stream.splits import held_out_parts, train_parts
    from ctxlm_ds.tokenizers.load import load_tokenizer

    tokenizer = load_tokenizer(config.tokenizer.path) if config.tokenizer.path else None
    indexes: dict[str, dict[str, Path]] = {}
    if tokenizer is not None:
        parts = [(part, False) for part in train_parts(config)] + [(p, True) for p in held_out_parts(config).values()]
        for part, held_out in parts:
            place = IndexPlace.of(part, tokenizer, config, held_out)
            indexes.setdefault(part.prefix, {})[place.directory.name] = place.directory
    prefixes = dict.fromkeys([source.path for source in config.data.train] + _validation_paths(config))
    items = [_dataset_item(prefix, list(indexes.get(prefix, {}).values())) for prefix in prefixes]
    if tokenizer is not None:
        items.append(_tokenizer_item(str(config.tokenizer.path), tokenizer))
    return StagePlan(items, *_sources(config))


def _validation_paths(config: RunConfig) -> list[str]:
    return [source.path for source in config.data.validation]


def _sources(config: RunConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]], bool]:
    """data.train and data.validation as JSON, every training source by name: a name may else follow from the path."""
    train = []
    for source, name in zip(config.data.train, source_names(config), strict=True):
        values = {"path": source.path, "weight": source.weight, "epochs": source.epochs, "name": name}
        train.append({key: value for key, value in values.items() if value is not None})
    validation = [source.model_dump(mode="json") for source in config.data.validation]
    return train, validation, config.data.sample_index_dir is not None


def _dataset_item(prefix: str, index_folders: list[Path]) -> StageItem:
    dataset = IndexedDataset(prefix)
    digests: dict[str, str] = {}
    for _, recorded in dataset.recorded_digests():
        digests = {**recorded, **digests}
    paths = [dataset_file(prefix, extension) for extension in ("bin", "idx", "json")] + [manifest_path(prefix)]
    folder = folder_name(prefix)
    files = [
        # The two small ones may differ from what the manifest says of them after a rename: their own bytes count.
        _file(path, f"{folder}/{path.name}", digests.get(path.suffix[1:]) if path.suffix in (".bin", ".idx") else None)
        for path in paths
        if path.is_file()
    ]
    missing = []
    for index in index_folders:
        if not (index / META_NAME).is_file():
            missing.append(str(index))
            continue
        recorded_files: Mapping[str, Any] = json.loads((index / META_NAME).read_text(encoding="utf-8"))["files"]
        # meta.json last: a folder without it is not taken for an index.
        for name in [*sorted(recorded_files), META_NAME]:
            digest = recorded_files[name]["sha256"] if name in recorded_files else None
            files.append(_file(index / name, f"{folder}/{index.name}/{name}", digest))
    return StageItem("dataset", prefix, f"{folder}/{Path(prefix).name}", files, missing)


def _tokenizer_item(path: str, tokenizer: Tokenizer) -> StageItem:
    folder = folder_name(path)
    files = [
        _file(Path(root) / name, f"{folder}/{(Path(root) / name).relative_to(path)}", None)
        for root, _, names in os.walk(path)
        for name in sorted(names)
    ]
    return StageItem("tokenizer", path, folder, files, [])


def _file(path: Path, target: str, digest: str | None) -> StagedFile:
    status = path.stat()
    return StagedFile(str(path.resolve()), target, status.st_size, status.st_mtime_ns, digest)
