"""The shape of a model as a Hugging Face config and back.

In: a section of a recipe and the tokenizer's ids, or a local folder's config.json. Out: the other one. Not here:
weights, and what differs by family (FamilyExport).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.base import FamilyExport, TokenIds, all_exports
from ctxlm_ds.recipe.sections import ModelSection

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class FolderModel(NamedTuple):
    """What config.json of a folder describes."""

    export: FamilyExport
    model: ModelSection
    pad_id: int


def to_hf_config(
    export: FamilyExport, model: ModelSection, hf_class: str, ids: TokenIds, dtype: str
) -> PretrainedConfig:
    """Return the config of `hf_class` for `model`, with vocab_size set; `dtype` is fp32, bf16 or fp16."""
    import transformers

    values = export.their_settings(model, ids)
    return getattr(transformers, export.config_class)(architectures=[hf_class], dtype=TORCH_DTYPES[dtype], **values)


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a local folder; raise ExportError if it is missing or not a JSON object."""
    path = folder / "config.json"
    if not path.is_file():
        raise ExportError(f"{folder} has no config.json: give a folder written by save_pretrained")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ExportError(f"{path} is not JSON ({error}): copy the model folder again") from error
    if not isinstance(values, dict):
        raise ExportError(f"{path} holds no JSON object: copy the model folder again")
    return values


def from_hf_config(folder: Path) -> FolderModel:
    """Read our settings and the padding id from a local folder of any family's model.

    Raises:
        ExportError: no family has this type of model, or it computes something that ours cannot.
    """
    values = read_hf_config(folder)
    export = _export_for(values.get("model_type"), folder)
    config = _complete(export, values, folder)
    for key, value in export.plain_settings.items():
        if values.get(key, value) != value:
            raise ExportError(
                f"{folder}/config.json: {key} is {values[key]!r}; only models with {key} {value!r} can be imported"
            )
    try:
        model = export.section.model_validate(export.our_settings(config, folder))
    except ValueError as error:
        raise ExportError(f"{folder}/config.json describes no model that can be trained here: {error}") from error
    return FolderModel(export, model, export.pad_id(config))


def _export_for(model_type: Any, folder: Path) -> FamilyExport:
    known = []
    for export in all_exports():
        if export.model_type == model_type:
            return export
        known.append(export)
    *types, last = [export.model_type for export in known]
    classes = ", ".join(name for export in known for name in export.hf_classes.values())
    raise ExportError(
        f"{folder}/config.json: model_type {model_type!r} cannot be imported; only {', '.join(types)} and {last} "
        f"({classes})"
    )


def _complete(export: FamilyExport, values: dict[str, Any], folder: Path) -> PretrainedConfig:
    """Fill in the class's defaults for what an older file left out."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    try:
        return getattr(transformers, export.config_class).from_dict(values)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ExportError(f"{folder}/config.json does not fit {export.model_type}: {error}") from error
