"""A module's tests are found by its name, and a test file's module by the file's.

The tests of ctxlm_ds/ROOM/x.py are tests/unit/ROOM/test_x.py and test_x_ASPECT.py, those of tools/x.py are
tests/unit/tools/test_x.py, those of tools/benchmark/x.py tests/unit/tools/benchmark/test_x.py. What takes several ranks
or a user's command is in tests/dist or tests/integration under the same name,
without the room. A door of tools/ to a command of ctxlm_ds/apps/ has no code of its own, hence no tests.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from ctxlm_ds.cli import COMMANDS
from tests import mutants
from tests.mutant_table import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "tests" / "unit"
FLAT = (ROOT / "tests" / "dist", ROOT / "tests" / "integration")
DOORS = {
    path: COMMANDS[title[1]].place.partition(":")
    for path in sorted((ROOT / "tools").glob("*.py"))
    if (title := re.match(r'"""Run `ctxlm ([\w-]+)` ', path.read_text(encoding="utf-8")))
}
"""Files that only start a command: its module and the name of its function."""
CHECKOUT_FIRST = """import sys
from pathlib import Path

# A login node has the checkout and a Python; the package need not be installed there.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

"""
DOOR = """from ctxlm_ds.{module} import {function}
from ctxlm_ds.console import run_command

if __name__ == "__main__":
    run_command(main)
"""
MODULES = {
    path.relative_to(ROOT).as_posix(): path
    for pattern in ("ctxlm_ds/**/*.py", "tools/**/*.py")
    for path in ROOT.glob(pattern)
    if path.name not in ("__init__.py", "__main__.py") and path not in DOORS
}
LEAVES = Counter(path.stem for path in MODULES.values())

WITHOUT_A_FILE = {
    "ctxlm_ds/errors.py": "declares classes and exit statuses",
    "ctxlm_ds/data/fields.py": "declares a type and constants",
    "ctxlm_ds/data/stream/row_filling.py": "fills the fields that test_collate.py and objectives' tests compare",
    "tools/benchmark/datasets.py": "a side of tools/benchmark, whose test runs it",
    "tools/benchmark/loaders.py": "a side of tools/benchmark, whose test runs it",
    "tools/benchmark/saves.py": "a side of tools/benchmark, whose test runs it",
    "tools/benchmark/our_sides.py": "sides of tools/benchmark, whose test runs them",
    "tools/benchmark/plain_loop.py": "a part of the sides of tools/benchmark, whose test runs it",
    "tools/benchmark/transformers_sides.py": "sides of tools/benchmark, whose test runs them",
    "tools/train_babylm.py": "commands one after another; tests/integration/test_babylm.py runs it",
    "ctxlm_ds/training/optimizers/adamw.py": "built by test_build.py, which compares its implementations",
    "ctxlm_ds/training/optimizers/base.py": "the base of optimizers, each of which is tested",
}
CONTRACT = ("config", "layers", "export")
"""Files of a family that tests/families/test_contract.py tests, and what they share."""

OF_SEVERAL_MODULES = {
    "apps/cluster/test_common_sh.py": "slurm/common.sh",
    "apps/cluster/test_container.py": "slurm/container",
    "apps/cluster/test_route_sh.py": "slurm/route.sh",
    "export/test_fuzz_folders.py": "mutated run folders and Hugging Face folders",
    "export/test_hostile_folders.py": "run folders and Hugging Face folders",
    "apps/test_fuzz_commands.py": "damaged files of commands",
    "apps/plan/test_published.py": "the planner beside published runs",
    "recipe/test_fuzz_recipes.py": "mutated recipes and DeepSpeed files",
    "recipe/test_published_values.py": "ctxlm_ds/recipes against the papers",
    "test_docs.py": "README.md, CONTRIBUTING.md and docs/",
    "test_layout_of_tests.py": "this file",
    "test_recipes.py": "ctxlm_ds/recipes",
    "test_scripts.py": "slurm/*.sh",
}


def is_of_a_family(path: Path) -> bool:
    return path.parent.parent.name == "families" and (path.stem in CONTRACT or path.stem.split("_")[0] in CONTRACT)


def room_of(module: str) -> Path:
    """The folder of a module's unit tests."""
    return UNIT / Path(module.removeprefix("ctxlm_ds/")).parent


def files_of(module: str) -> list[Path]:
    """Existing test files of a module's name; without its room only if no other module has the name."""
    leaf = MODULES[module].stem
    folders = [room_of(module), *(FLAT if LEAVES[leaf] == 1 else ())]
    return [folder / f"test_{leaf}.py" for folder in folders if (folder / f"test_{leaf}.py").is_file()]


def test_every_module_has_tests_of_its_name() -> None:
    missing = [
        f"{module}: write {(room_of(module) / f'test_{path.stem}.py').relative_to(ROOT)}"
        for module, path in sorted(MODULES.items())
        if not (module in WITHOUT_A_FILE or is_of_a_family(path) or files_of(module))
    ]
    assert missing == []


def test_a_door_only_opens() -> None:
    assert len(DOORS) > 10
    for path, (module, _, function) in DOORS.items():
        code = path.read_text(encoding="utf-8").partition("\n\n")[2]
        opened = f"{function} as main" if function else "main"
        assert code.removeprefix(CHECKOUT_FIRST) == DOOR.format(module=module, function=opened), path


def test_nothing_is_excused_that_has_a_file_or_is_gone() -> None:
    assert [module for module in WITHOUT_A_FILE if module not in MODULES or files_of(module)] == []
    assert [name for name in OF_SEVERAL_MODULES if not (UNIT / name).is_file()] == []


def test_a_unit_test_is_named_after_a_module_of_its_room() -> None:
    rooms: dict[Path, set[str]] = {}
    for module, path in MODULES.items():
        rooms.setdefault(room_of(module), set()).add(path.stem)
    for file in sorted(UNIT.rglob("test_*.py")):
        name = file.stem.removeprefix("test_")
        leaves = rooms.get(file.parent, set())
        is_named = any(name == leaf or name.startswith(f"{leaf}_") for leaf in leaves)
        assert is_named or file.relative_to(UNIT).as_posix() in OF_SEVERAL_MODULES, (
            f"{file.relative_to(ROOT)} has the name of no module of its room ({', '.join(sorted(leaves)) or 'none'})"
        )


def test_every_mutant_names_an_expression_and_a_test_that_exist() -> None:
    table = [mutants.Mutant(*row) for row in MUTANTS]
    assert [m for m in table if mutants.find(ROOT, m) is None or not mutants.test_files(ROOT, m)] == []
