"""The wheel is complete: `ctxlm` works from an environment that has never seen the checkout."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("ctxlm_ds", "ds_configs", "slurm", "pyproject.toml", "setup.py", "README.md", "LICENSE")
Call = Callable[..., subprocess.CompletedProcess[str]]


def run(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    return subprocess.run([str(word) for word in words], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel; the packages that it needs are those of the present environment."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "source").mkdir()
    for name in SOURCES:  # the build writes into its source
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / "source" / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, folder / "source")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    offline = ("--no-deps", "--no-index")
    built = run(*pip, "wheel", *offline, "--no-build-isolation", "-w", folder, folder / "source", cwd=folder)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    made = run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    assert made.returncode == 0, made.stderr
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    python = folder / "venv" / "bin" / "python"
    done = run(*pip, "--python", python, "install", "--no-compile", *offline, wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(folder / "source")
    return folder / "venv"


@pytest.fixture
def call(installed: Path, tmp_path: Path) -> Call:
    """`ctxlm` in an empty folder."""
    return lambda *words: run(installed / "bin" / "ctxlm", *words, cwd=tmp_path)


def test_the_package_is_the_installed_one(installed: Path, tmp_path: Path) -> None:
    code = "import sys, ctxlm_ds; print(ctxlm_ds.__file__, *sys.path, sep='\\n')"
    found = run(installed / "bin" / "python", "-c", code, cwd=tmp_path).stdout.splitlines()
    assert found[0].startswith(str(installed)) and str(ROOT) not in found
    package = Path(found[0]).parent
    for name in ("ds_configs", "slurm"):
        listed = {path.relative_to(ROOT / name) for path in (ROOT / name).rglob("*") if path.is_file()}
        assert {path.relative_to(package / name) for path in (package / name).rglob("*") if path.is_file()} == listed
    sources = [path for end in ("py", "yaml", "json", "cpp") for path in (ROOT / "ctxlm_ds").rglob(f"*.{end}")]
    assert len(sources) > 300 and all((package / path.relative_to(ROOT / "ctxlm_ds")).is_file() for path in sources)
    assert os.access(package / "slurm" / "route.sh", os.X_OK) and (package / "py.typed").is_file()


def test_what_ships_is_found_by_name(call: Call) -> None:
    version = call("--version")
    assert version.stdout.startswith("ctxlm ") and version.stdout[6].isdigit(), version.stderr
    recipes = call("recipes").stdout.splitlines()
    assert len(recipes) == len(list((ROOT / "ctxlm_ds" / "recipes").glob("*.yaml")))
    checked = call("pretrain", "--config", "bert-laptop", "--deepspeed_config", "zero2", "--check")
    assert checked.returncode == 0 and "bert-laptop" in checked.stdout, checked.stderr
    wrong = call("pretrain", "--config", "bert-laptop", "--deepspeed_config", "zero22", "--check")
    assert wrong.returncode == 2 and "did you mean zero2" in wrong.stderr and "pipeline" in wrong.stderr
