"""Files of torch.save: what is read, what stays closed, and damage."""

from __future__ import annotations

import enum
import os
from argparse import Namespace
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.foreign.torch_files import Opaque, flatten, read_torch_file


class Kind(enum.Enum):
    ENCODER = 1


class Settings:
    def __init__(self) -> None:
        self.width = 3


class Harmful:
    """Runs a program when it is unpickled without care."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.witness),)


@pytest.mark.parametrize("is_zip", [True, False])
def test_plain_values_are_read_and_objects_are_opaque(is_zip: bool, tmp_path: Path) -> None:
    table = defaultdict(list, {"a": 1})
    content = {"args": Namespace(heads=4, kind=Kind.ENCODER), "cfg": Settings(), "table": table, "x": torch.arange(3.0)}
    torch.save(content, tmp_path / "file.pt", _use_new_zipfile_serialization=is_zip)
    found = read_torch_file(tmp_path / "file.pt")
    assert found["args"].heads == 4 and torch.equal(found["x"], content["x"])
    assert isinstance(found["args"].kind, Opaque) and found["args"].kind.arguments == (1,)
    assert isinstance(found["cfg"], Opaque) and found["cfg"].state == {"width": 3}
    assert found["table"] == {"a": 1} and type(found["table"]) is dict


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize(("protocol", "reason"), [(2, "mkdir whose module posix is blocked"), (4, "pickle protocol")])
def test_no_code_runs(is_zip: bool, protocol: int, reason: str, tmp_path: Path) -> None:
    """The error names what was refused and gives no advice to trust the file."""
    witness, path = tmp_path / "witness", tmp_path / "file.pt"
    torch.save({"model": Harmful(witness)}, path, pickle_protocol=protocol, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(ExportError) as caught:
        read_torch_file(path)
    assert "cannot be read" in str(caught.value) and reason in str(caught.value)
    assert not witness.exists() and "weights_only" not in str(caught.value)


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_a_cut_file_is_one_error(share: float, is_zip: bool, tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"x": torch.arange(1000.0)}, path, _use_new_zipfile_serialization=is_zip)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(ExportError, match=r"file\.pt: cannot be read as a file of torch\.save"):
        read_torch_file(path)


def test_other_files_are_one_error(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("not a pickle")
    torch.save([1, 2], tmp_path / "list.pt")
    os.mkfifo(tmp_path / "pipe.pt")
    messages = {"none": "missing", "list": "holds list, not the dict"}
    for name, message in (messages | dict.fromkeys(("text", "pipe"), "cannot be read")).items():
        with pytest.raises(ExportError, match=message):
            read_torch_file(tmp_path / f"{name}.pt")


def test_flatten_joins_names() -> None:
    one = torch.ones(1)
    assert flatten({"a": {"b": one, "c": None}, "d.e": one, "f": 3}) == {"a.b": one, "d.e": one}


def test_a_dict_that_contains_itself_is_one_error() -> None:
    values: dict[str, Any] = {}
    values["a"] = values
    with pytest.raises(ExportError, match="levels or 1,000,000 entries of dicts"):
        flatten(values)


def test_a_small_file_of_very_much_is_one_error() -> None:
    """One dict many times, whose entries would never end, and a tensor of one number many times."""
    inner: dict[str, Any] = {}
    for _ in range(18):
        inner = {str(number): inner for number in range(10)}
    with pytest.raises(ExportError, match="levels or 1,000,000 entries of dicts"):
        flatten(inner)
    with pytest.raises(ExportError, match="model.weight: a tensor larger than what the file stores"):
        flatten({"model": {"weight": torch.zeros(1).expand(10**7, 10**7)}})
    part = torch.ones(4, 4)[1:, 1:]
    assert flatten({"a": part}) == {"a": part}
