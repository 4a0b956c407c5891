"""Pages: commands that can be typed, links that lead somewhere, guides of one screen. Files that are named exist."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.unit.documented_commands import ROOT, Shown, refusal, shown_commands

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
TARGETS = frozenset(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"(?<![\w/.<{$*-])((?:[\w-]+/)+[\w-]+\.(?:py|md|sh|sbatch|json|yaml))(?![\w/*-])")
PLACEHOLDER = re.compile(r"[A-Z]|(/|_)x\.")
OF_FAIRSEQ = ("data/denoising_dataset.py", "data/mask_tokens_dataset.py")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> list[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    texts = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text) for text in HEADING.findall(_prose(page))]
    return [re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-") for text in texts]


def broken_links(page: Path) -> list[str]:
    """Links of a page to a file or heading that does not exist; addresses of the web pass."""
    broken = []
    for link in LINK.findall(_prose(page)):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not link.startswith(("http://", "https://")) and (
            not target.exists() or (anchor and anchor not in anchors(target))
        ):
            broken.append(link)
    return broken


def missing_files(text: str) -> list[str]:
    """Named files that do not exist although their folder does, in the checkout or, of modules, in the package."""
    missing = []
    for file in FILE.findall(text):
        places = [ROOT / file, *([ROOT / "ctxlm_ds" / file] if file.endswith(".py") else [])]
        is_ours = any(place.parent.is_dir() for place in places) and file not in OF_FAIRSEQ
        if is_ours and not PLACEHOLDER.search(file) and not any(place.is_file() for place in places):
            missing.append(file)
    return missing


def _prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_exists(page: Path) -> None:
    refused = {" ".join((shown.place, *shown.words)): refusal(shown, TARGETS) for shown in shown_commands(page)}
    assert {command: why for command, why in refused.items() if why} == {}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_every_named_file_exists() -> None:
    """In pages, docstrings and comments."""
    patterns = ("ctxlm_ds/**/*.py", "ctxlm_ds/**/*.yaml", "tools/**/*.py", "slurm/**/*.sh", "slurm/**/*.sbatch")
    files = [*PAGES, ROOT / "Makefile", *(path for pattern in patterns for path in ROOT.glob(pattern))]
    missing = {name(path): missing_files(path.read_text(encoding="utf-8")) for path in files}
    assert {file: names for file, names in missing.items() if names} == {}


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_a_guide_is_one_screen(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 50


def test_every_page_is_found_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(_prose(index))}
    assert [name(page) for page in PAGES[2:] if page != index and page.resolve() not in linked] == []
    assert len(GUIDES) == 4


def test_the_api_page_names_what_exists() -> None:
    named = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(named) > 5 and [pkgutil.resolve_name(name) for name in named]


@pytest.mark.skipif(find_spec("material") is None, reason="the extra docs is not installed")
def test_the_site_builds(tmp_path: Path) -> None:
    """A page without a place in the nav, or a link or anchor that leads nowhere, is an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    pages = list((tmp_path / "site").rglob("index.html"))
    assert len(pages) == len(PAGES) - 2
    assert [page for page in pages if "```" in page.read_text(encoding="utf-8")] == [], "a fence that is no code"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("    ctxlm pretrian --config bert-base", "ctxlm has no command pretrian"),
        ("    ctxlm tokenizer-reprot --input a", "ctxlm has no command tokenizer-reprot"),
        ("    ctxlm pretrain --config bert-base --chekc", "unrecognized arguments: --chekc"),
        ("    ctxlm pretrain --config bert-bsae", "no ctxlm_ds/recipes/bert-bsae.yaml"),
        ("    ctxlm pretrain --config bert-base --set model.layers=2", "no setting model.layers"),
        ("    deepspeed --module ctxlm_ds.pretrain --config ./x --deepspeed_config zero9", "no ds_configs/zero9.json"),
        ("    ctxlm status && ctxlm merge --outptu b --input a --output-prefix c", "unrecognized arguments: --outptu"),
        ("    $ python tools/no_such.py --input a", "no file tools/no_such.py"),
        ("    sbatch -N 2 slurm/pretrain.sbatch bert-base \\\n        --sett a.b=c", "unrecognized arguments: --sett"),
        ("Text with `python tools/merge_datasets.py --inptu`.", "unrecognized arguments: --inptu"),
        ("    ctxlm convert to-hf --checkpoint runs/a", "the following arguments are required: --output"),
        ("    ctxlm convert to-hfx --checkpoint runs/a …", "argument command: invalid choice: 'to-hfx'"),
        ("    make docz", "no target docz"),
    ],
)  # fmt: skip
def test_a_command_that_does_not_exist_is_found(line: str, why: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{line}\n")
    refused = [refusal(shown, TARGETS) for shown in shown_commands(page)]
    assert any(text and text.startswith(why) for text in refused), refused


def test_parsing_runs_nothing(tmp_path: Path) -> None:
    out = tmp_path / "recipe.yaml"
    shown = Shown("here", ("ctxlm", "init", "--family", "bert", "--data", "x", "--output", str(out)), False)
    assert refusal(shown, TARGETS) is None and not out.exists()


def test_a_file_that_is_gone_is_found() -> None:
    text = (
        "`tests/dist/test_plan.py`, data/sample.py, data/collate.py, `docs/gone.md`; tools/x.py, fairseq/a.py"
    )
    assert missing_files(text) == ["data/collate.py", "docs/gone.md"]


def test_a_link_without_a_target_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `name`: of *it*\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#a-name-of-it) [b](other.md#gone) [c](none.md) [d](#none)\n```\n[e](x.md)\n```\n")
    assert broken_links(page) == ["other.md#gone", "none.md", "#none"]
