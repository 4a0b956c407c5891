"""The two container definitions: alike, complete, and with the versions that were tested. Neither is built here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
FOLDER = ROOT / "slurm" / "container"
APPTAINER = (FOLDER / "ctxlm_ds.def").read_text()
DOCKER = (FOLDER / "Dockerfile").read_text()
INSTALL = (FOLDER / "install.sh").read_text()
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#")


def sections(text: str) -> dict[str, list[str]]:
    """An apptainer definition by section; the header is ''."""
    found: dict[str, list[str]] = {"": []}
    for line in text.splitlines():
        if line.startswith("%"):
            found[line[1:].strip()] = []
        elif line.strip() and not line.startswith("#"):
            found[list(found)[-1]].append(line.strip())
    return found


def instructions(text: str) -> list[tuple[str, str]]:
    """A Dockerfile's instructions in order."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def arguments() -> tuple[dict[str, str], dict[str, str]]:
    """Build arguments of both."""
    mine = dict(line.split("=", 1) for line in sections(APPTAINER)["arguments"])
    docker = dict(value.split("=", 1) for name, value in instructions(DOCKER) if name == "ARG")
    return mine, docker


def test_the_definition_has_what_apptainer_needs() -> None:
    found = sections(APPTAINER)
    header = dict(line.split(": ", 1) for line in found[""])
    assert header["Bootstrap"] == "docker"
    assert set(found) == {"", "arguments", "files", "post", "environment", "runscript", "test"}
    assert re.fullmatch(r"nvidia/cuda:\{\{ CUDA \}\}-cudnn-devel-ubuntu22\.04", header["From"])
    used = set(re.findall(r"\{\{ (\w+) \}\}", APPTAINER))
    assert used == set(arguments()[0])


def test_both_build_the_same() -> None:
    mine, docker = arguments()
    assert mine == docker
    assert ("FROM", "nvidia/cuda:${CUDA}-cudnn-devel-ubuntu22.04") in instructions(DOCKER)
    copied = [value.split() for name, value in instructions(DOCKER) if name == "COPY"]
    by_docker = {source for words in copied for source in words[:-1]}
    by_apptainer = {line.split()[0] for line in sections(APPTAINER)["files"]}
    assert by_docker == by_apptainer
    for source in by_docker:
        assert (ROOT / source).exists(), source
    for line in sections(APPTAINER)["files"]:
        source, target = line.split()
        assert target == ("/opt/install.sh" if source.endswith("install.sh") else f"/opt/ctxlm_ds/{source}")
    assert "bash /opt/install.sh /opt/ctxlm_ds" in DOCKER


@pytest.mark.parametrize("text", [APPTAINER, DOCKER])
def test_torch_is_for_the_images_cuda(text: str) -> None:
    """In the defaults, and in the line for V100."""
    cuda = re.findall(r"CUDA=(\d+)\.(\d+)\.\d+", text)
    index = re.findall(r"TORCH_INDEX=cu(\d+)", text)
    assert len(cuda) == len(index) == 2
    pairs = [f"{major}{minor}" for major, minor in cuda]
    assert sorted(pairs) == sorted(index)


def test_versions_are_those_of_constraints_txt() -> None:
    for text in (APPTAINER, DOCKER, INSTALL):
        for name, version in re.findall(r"\b([A-Za-z][\w.-]*)==([\w.]+)", text):
            assert PINS[name] == version
    for line in INSTALL.splitlines():
        if "pip install" in line and "apex" not in line:
            assert "-c constraints.txt" in line, line
    assert "torch" in PINS and "deepspeed" in PINS


def test_python_is_the_tested_one_and_allowed() -> None:
    found = re.search(r"^python=3\.(\d+)", INSTALL, re.MULTILINE)
    assert found is not None
    lowest = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert lowest is not None and int(found[1]) >= int(lowest[1])
    assert f"Python 3.{found[1]}," in (ROOT / "constraints.txt").read_text()


def test_apex_is_nvidias_with_its_extensions() -> None:
    assert "https://github.com/NVIDIA/apex" in INSTALL
    build = next(line for line in INSTALL.splitlines() if line.startswith("APEX_CPP_EXT=1"))
    assert "APEX_CUDA_EXT=1" in build
    assert "pip install -v --no-build-isolation /tmp/apex" in INSTALL
    assert not re.search(r"pip install .*\bapex\b(?<!/tmp/apex)", INSTALL), "apex of PyPI is something else"
