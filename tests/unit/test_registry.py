"""Entries by name: found, imported at first use, and refused with the nearest name or the reason."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.registry import FAMILIES, FORMATS, OBJECTIVES, Registry


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    (tmp_path / "entries_of_a_test.py").write_text("FIRST = object()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "entries_of_a_test", raising=False)
    monkeypatch.setattr("ctxlm_ds.registry.entry_points", importlib.metadata.entry_points)
    shipped = {"first": "entries_of_a_test:FIRST", "gone": "entries_of_a_test:GONE", "lost": "no_such_module_here:X"}
    return Registry("thing", "ctxlm_ds.tests.things", shipped)


def test_an_entry_is_imported_at_its_first_use(registry: Registry) -> None:
    assert "first" in registry and "second" not in registry
    assert "entries_of_a_test" not in sys.modules
    found = registry.get("first")
    assert found is sys.modules["entries_of_a_test"].FIRST and registry.get("first") is found


def test_entries_of_this_process_come_last_and_replace_none_of_ours(registry: Registry) -> None:
    entry = object()
    registry.register("second", entry)
    assert registry.get("second") is entry and "second" in registry
    registry.register("second", "entries_of_a_test:FIRST")
    assert registry.get("second") is registry.get("first")
    assert registry.names() == ("first", "gone", "lost", "second")
    assert registry.shipped_names() == ("first", "gone", "lost")
    with pytest.raises(ConfigError, match="thing first is part of ctxlm_ds; choose another name"):
        registry.register("first", entry)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("frist", r"no thing is named frist; did you mean first\? \(there are: first, gone, lost\)"),
        ("zzz", r"no thing is named zzz \(there are: first"),
        ("gone", r"thing gone \(entries_of_a_test:GONE\) cannot be imported: .*GONE"),
        ("lost", r"thing lost \(no_such_module_here:X\) cannot be imported: No module named"),
    ],
)
def test_what_cannot_be_had_is_told(registry: Registry, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        registry.get(name)


def test_a_name_of_two_packages_is_refused(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries as packages install them; the same entry may be found in two places of sys.path."""
    for package, names in {"a": ("mine", "both", "first"), "b": ("both",), "c": ("mine",)}.items():
        target = "entries_of_a_test:FIRST" if package != "b" else "entries_of_a_test:OTHER"
        folder = tmp_path / f"{package}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        lines = "".join(f"{name} = {target}\n" for name in names)
        (folder / "entry_points.txt").write_text(f"[{registry.group}]\n{lines}")
    assert registry.get("mine") is sys.modules["entries_of_a_test"].FIRST
    with pytest.raises(
        ConfigError, match=r"thing both is there 2 times \(entries_of_a_test:FIRST, .*:OTHER\); uninstall"
    ):
        registry.get("both")
    with pytest.raises(ConfigError, match="thing first is there 2 times"):
        registry.get("first")
    registry.register("both", "here")
    assert registry.names() == ("first", "gone", "lost", "both", "mine")


@pytest.mark.parametrize("registry", [FAMILIES, OBJECTIVES, FORMATS], ids=lambda registry: registry.kind)
def test_every_shipped_entry_bears_its_name(registry: Registry) -> None:
    assert [registry.get(name).name for name in registry.shipped_names()] == list(registry.shipped_names())
