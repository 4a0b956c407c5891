"""The config.json of a local Hugging Face folder as settings of a model and back, and the names of its weight files.

FamilyExport has what differs by family. Imports no torch and, to read settings, no transformers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from ctxlm_ds.data.dataset.metadata import file_digest
from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.base import FamilyExport, TokenIds, all_exports
from ctxlm_ds.export.key_maps import Shape, assign
from ctxlm_ds.recipe.sections import ModelSection
from ctxlm_ds.untrusted_json import open_regular, read_json_object

if TYPE_CHECKING:
    from transformers import PretrainedConfig


EXPORT_RECORD = "exported_from.json"
"""What a Hugging Face folder was made of, so that a finished export is recognised."""
TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
OTHER_TOKENIZER = (
    "if tokens were added to the model's tokenizer, add rows with transformers (model.resize_token_embeddings, "
    "save_pretrained) or take the tokenizer without them; else it is another model's tokenizer"
)
MAX_SIZE = 1 << 24
"""No size in a config is larger; products of two such sizes are still countable."""


class FolderModel(NamedTuple):
    """What config.json of a folder describes."""

    export: FamilyExport
    model: ModelSection
    pad_id: int
    kept: dict[str, Any]
    """Settings that our model does not have, for a later export (FamilyExport.kept_settings)."""


def to_hf_config(
    export: FamilyExport,
    model: ModelSection,
    hf_class: str,
    ids: TokenIds,
    dtype: str,
    kept: Mapping[str, Any] | None = None,
    trained: Mapping[str, Any] | None = None,
) -> PretrainedConfig:
    """Return the config of a class of transformers for a model with vocab_size set, whose weights have a `dtype`.

    `kept` are settings of the folder that the weights were imported from, `trained` those that follow from the
    training. Raises ExportError if transformers refuses the settings.
    """
    kept = {key: value for key, value in (kept or {}).items() if key in export.kept_settings}
    head = {"architectures": [hf_class], "dtype": TORCH_DTYPES[dtype]}
    config = _complete(export, {**export.their_settings(model, ids), **kept, **head}, hf_class)
    # Config classes of transformers 5 leave out settings of generate(), which it still reads from config.json.
    generation = {key: value for key, value in kept.items() if value is not None and not hasattr(config, key)}
    for key, value in {**generation, **export.written_settings(model), **(trained or {})}.items():
        setattr(config, key, value)
    return config


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a local folder; raise ExportError if it is missing or not a JSON object."""
    path = folder / "config.json"
    if not path.exists():
        raise ExportError(f"{folder} has no config.json: give a folder written by save_pretrained")
    return read_json_object(path, ExportError)


def read_section(folder: Path) -> ModelSection:
    """Read our settings from a local folder as from_hf_config, without torch and transformers.

    Settings that config.json leaves out have our defaults.
    """
    return from_hf_config(folder, _with_our_defaults).model


def check_tensors(folder: Path, new_head: bool) -> None:
    """Raise ExportError if a folder's tensors are not its class's, as an import does, but before torch is loaded."""
    try:
        export, model, pad_id, _ = from_hf_config(folder, _with_our_defaults)
    except ExportError:  # with transformers' defaults the import knows more
        return
    found = [(part, list(tensor_shapes(model_files(folder / part.folder)))) for part in export.models()]
    outputs = tuple(dict.fromkeys(name for part, names in found for name in part.outputs_in(names)))
    for part, names in found:
        assign(part.key_map(model, part.shared_outputs(outputs), pad_id), names, str(folder), new_head)


Complete = Callable[[FamilyExport, dict[str, Any], object], Any]
"""Makes a config with all settings of the values that one of these files has."""


def from_hf_config(folder: Path, complete: Complete | None = None) -> FolderModel:
    """Read our settings and the padding id from a local folder of any family's model.

    Raises ExportError if no family has this type of model, or it computes something that ours cannot.
    """
    path = folder / "config.json"
    written = read_hf_config(folder)
    export = _export_for(written, path)
    settings: dict[str, Any] = {}
    try:
        for part in reversed(export.models()):
            config = _read_config(part, folder, complete or _complete)
            for key, value in part.our_settings(config, folder / part.folder).items():
                if settings.setdefault(key, value) != value:
                    raise ExportError(
                        f"{folder} does not hold one model: {key} is {value!r} in {path}, {settings[key]!r} in another "
                        "folder of it"
                    )
        model = export.section.model_validate(settings)
        pad_id = export.pad_id(config)
        vocab_size = int(model.vocab_size or 0)
        if not 0 <= pad_id < vocab_size:
            raise ValueError(f"pad_token_id {pad_id} is not one of {vocab_size} ids")
    except (AttributeError, ValueError, TypeError) as error:
        raise ExportError(f"{path} describes no model that can be trained here: {error}") from error
    kept = {key: getattr(config, key, written.get(key)) for key in export.kept_settings}
    return FolderModel(export, model, pad_id, kept)


def _read_config(export: FamilyExport, folder: Path, complete: Complete) -> Any:
    """Read the config of one class; `folder` is that of the model."""
    place = folder / export.folder
    if export.folder and not place.is_dir():
        (first,), (hf_class,) = export.models()[0].hf_classes.values(), export.hf_classes.values()
        raise ExportError(
            f"{folder} has no folder {export.folder}: {first} is trained with its {hf_class}, which belongs there and "
            f"which no option replaces; if {folder} holds it, give the folder of {first} that has it as {export.folder}"
        )
    values, path = read_hf_config(place), place / "config.json"
    if values.get("model_type") != export.model_type:
        raise ExportError(f"{path}: model_type {values.get('model_type')!r} is not {export.model_type}")
    config = complete(export, values, path)
    for key, value in export.plain_settings.items():
        if values.get(key, value) != value:
            raise ExportError(f"{path}: {key} is {values[key]!r}; only models with {key} {value!r} can be imported")
    for key in export.settings.values():
        size = getattr(config, key)
        if isinstance(size, (int, float)) and size > MAX_SIZE:
            raise ExportError(f"{path}: {key} is {size}, more than {MAX_SIZE:,}; correct the file")
    return config


def _with_our_defaults(export: FamilyExport, values: dict[str, Any], where: object) -> Any:
    fields = export.section.model_fields
    defaults = {theirs: fields[ours].default for ours, theirs in export.settings.items()}
    defaults[export.activation_key] = export.activations[fields["hidden_activation"].default]
    return SimpleNamespace(**{"pad_token_id": None, **defaults, **values})


def _export_for(values: Mapping[str, Any], path: Path) -> FamilyExport:
    model_type = values.get("model_type")
    known: dict[str, FamilyExport] = {}
    for export in all_exports():
        if export.claims(values):
            return export
        known.setdefault(export.model_type, export)
    if isinstance(model_type, str) and model_type in known:
        return known[model_type]
    *types, last = known
    parts = [part for export in known.values() for part in export.models()]
    classes = ", ".join(name for part in parts for name in part.hf_classes.values())
    raise ExportError(
        f"{path}: model_type {model_type!r} cannot be imported; only {', '.join(types)} and {last} ({classes})"
    )


def _complete(export: FamilyExport, values: dict[str, Any], where: object) -> PretrainedConfig:
    """Make a config of transformers, with the class's defaults for what is not given."""
    import transformers

    try:
        return getattr(transformers, export.config_class).from_dict(values)
    except Exception as error:  # transformers raises many classes for values of a wrong type
        raise ExportError(f"{where}: the settings do not fit {export.model_type}: {error}") from error


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
NAME_BYTES = 255
"""Longest name of a file."""


def model_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a local Hugging Face folder; raise ExportError if they are not complete."""
    index = folder / INDEX_FILE
    if not index.exists() and not (folder / SINGLE_FILE).exists():
        if pickled := sorted(path.name for path in folder.glob("pytorch_model*.bin")):
            raise ExportError(
                f"{folder} holds its weights as a pickle ({pickled[0]}), which can run any code when it is read; if "
                "you trust its source, load it once with transformers' from_pretrained and save it with "
                "save_pretrained, which writes model.safetensors, then give that folder"
            )
        neither = f"neither {SINGLE_FILE} nor {INDEX_FILE}"
        raise ExportError(f"{folder} has {neither}: give a folder written by save_pretrained")
    is_single = (folder / SINGLE_FILE).exists()  # which transformers reads first
    paths = [folder / name for name in ([SINGLE_FILE] if is_single else _indexed_files(index))]
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise ExportError(f"{missing[0]} is missing although {index.name} lists it: copy the folder again")
    return paths


def tensor_shapes(paths: Sequence[Path]) -> dict[str, tuple[Path, Shape]]:
    """Return the file and shape of each tensor of safetensors files; raise ExportError if a file is damaged."""
    shapes: dict[str, tuple[Path, Shape]] = {}
    for path in paths:
        try:
            open_regular(path).close()
            with safe_open(path, framework="np") as handle:
                shapes |= {name: (path, tuple(handle.get_slice(name).get_shape())) for name in handle.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise ExportError(f"{path} is damaged ({error}): copy it again") from error
    return shapes


def fingerprint(folder: Path) -> str:
    """Return sha256 (hex) of config.json and the weight files; raise ExportError if one cannot be read."""
    digest = hashlib.sha256()
    for path in (folder / "config.json", *model_files(folder)):
        try:
            open_regular(path).close()
            digest.update(bytes.fromhex(file_digest(path)))
        except OSError as error:
            raise ExportError(f"{path}: cannot be read ({error.strerror or error}); copy it again") from error
    return digest.hexdigest()


def _indexed_files(index: Path) -> list[str]:
    """Return the names of the files that an index lists, all of which must be in its folder."""
    weight_map = read_json_object(index, ExportError).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ExportError(f"{index} is not an index of safetensors files (no weight_map of file names): copy it again")
    for name in names:
        if Path(name).name != name or "\0" in name or name == ".." or len(name.encode(errors="replace")) > NAME_BYTES:
            raise ExportError(f"{index}: the file {name!r:.80} is not in the model's folder; give a folder you trust")
    return sorted(set(names))
