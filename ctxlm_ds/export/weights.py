"""Where weights come from, under our names: a checkpoint, or a Hugging Face folder through its table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from ctxlm_ds.console import logger
from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.hf_config import from_hf_config, read_hf_config
from ctxlm_ds.export.key_maps import Row, Shape, assign
from ctxlm_ds.export.safetensors_files import SafetensorsFolder


class WeightSource(Protocol):
    """Full parameters under our names, read one at a time."""

    def names(self) -> Sequence[str]: ...

    def shape(self, name: str) -> Shape: ...

    def read_full(self, name: str) -> torch.Tensor: ...


class HuggingFaceWeights:
    """A local folder of a class that some family's export knows, under our names."""

    def __init__(self, folder: Path) -> None:
        """Raise ExportError if the folder is none of them, or holds no safetensors."""
        self.export, self.model, self.pad_id = from_hf_config(folder)
        self._files = SafetensorsFolder(folder)
        file_names = self._files.names()
        self.outputs = self.export.outputs_in(file_names)
        self.key_map = self.export.key_map(self.model, self.outputs, self.pad_id)
        self._assignment = assign(self.key_map, file_names, str(folder))
        self._rows: dict[str, Row] = {row.ours: row for row in self.key_map.rows}
        self._check_doubles(folder)
        self._report(folder)

    def names(self) -> list[str]:
        """List our parameters."""
        return list(self._rows)

    def shape(self, name: str) -> Shape:
        """Return the shape of one of our parameters."""
        return self._rows[name].our_shape(lambda theirs: self._files.shape(self._assignment.stored[theirs]))

    def read_full(self, name: str) -> torch.Tensor:
        """Read one of our parameters in fp32, put together from theirs."""
        return self._rows[name].to_ours(self._read)

    def _read(self, name: str) -> torch.Tensor:
        return self._files.read(self._assignment.stored[name])

    def _check_doubles(self, folder: Path) -> None:
        for alias, name in self._assignment.doubles.items():
            if not torch.equal(self._files.read(alias), self._files.read(name)):
                raise ExportError(
                    f"{folder}: {alias} and {name} differ, but are one tensor in {self.key_map.hf_class}; "
                    "a model with an untied output embedding cannot be imported"
                )

    def _report(self, folder: Path) -> None:
        declared = read_hf_config(folder).get("architectures")
        logger.info("%s read as %s (config.json says %s)", folder, self.key_map.hf_class, declared)
        if self._assignment.unused:
            logger.info("not part of %s: %s", self.key_map.hf_class, ", ".join(self._assignment.unused))
        for warning in self.export.import_warnings(self._read):
            logger.warning("%s: %s", folder, warning)
