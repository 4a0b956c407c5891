"""The check of circles, imports of applications and sizes, on small packages and on this one."""

from __future__ import annotations

from pathlib import Path

from tools.check_structure import find_problems

ROOT = Path(__file__).resolve().parents[3]


def package(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / "ctxlm_ds" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_late_imports_make_circles_of_files_and_of_rooms(tmp_path: Path) -> None:
    late = "def f():\n    from ctxlm_ds.data.a import x\n"
    root = package(tmp_path, data__a="from ctxlm_ds.models.b import y\n", models__b=late)
    assert find_problems(root) == [
        "circle of files: ctxlm_ds.data.a, ctxlm_ds.models.b", "circle of rooms: data, models",
    ]  # fmt: skip


def test_imports_for_annotations_make_no_circle(tmp_path: Path) -> None:
    annotated = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ctxlm_ds.data.a import x\n"
    assert find_problems(package(tmp_path, data__a="import ctxlm_ds.data.b\n", data__b=annotated)) == []


def test_only_commands_name_applications(tmp_path: Path) -> None:
    named = "X = 'ctxlm_ds.apps.plan.plan:Planner'\n"
    late = "import ctxlm_ds.apps.plan.plan\n"
    root = package(tmp_path, run=named, pretrain=named, apps__plan__plan="", models__x=late)
    assert find_problems(root) == [
        "ctxlm_ds/models/x.py: names ctxlm_ds.apps.plan.plan",
        "ctxlm_ds/run.py: names ctxlm_ds.apps.plan.plan:Planner",
    ]


def test_long_files_and_functions_are_found(tmp_path: Path) -> None:
    body = "def f():\n" + "    x = 1\n" * 40
    found = find_problems(package(tmp_path, run=body, data__long="\n" * 401, data__f=body + "    x = 1\n" * 20))
    files = [line.partition(":")[0].removeprefix("ctxlm_ds/") for line in found]
    assert files == ["data/f.py", "data/long.py", "run.py"]


def test_recipes_are_counted(tmp_path: Path) -> None:
    functions = "".join(f"def f{number}(config: 'RunConfig | None', other: int): ...\n" for number in range(51))
    assert find_problems(package(tmp_path, data__a=functions)) == ["51 parameters of type RunConfig, more than 50"]
