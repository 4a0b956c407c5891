"""Writes what later code is compared with: `python -m tests.golden.make_figures figures [checkpoints]`.

Run it in the root of the repository on the commit whose figures are to be kept, never to make a failing test pass.
`figures` adds the streams and runs that figures.json lacks; an entry that is to be made again is removed first.
`checkpoints` writes checkpoints/: a checkpoint of a run of each family, and digests of
its weights; they stand for what users have on their disks, so that those of an older commit are kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import tempfile
from pathlib import Path

from tests.golden.cases import CASES, OLD_FAMILIES, STREAMS, Case, old_run
from tests.golden.run_case import (
    Figures,
    checkpoint_figures,
    last_checkpoint,
    machine,
    prepare_data,
    run_figures,
    stream_figures,
    train,
)

HERE = Path(__file__).resolve().parent
LENGTH_BYTES = 8
"""At the beginning of a safetensors file: the length of its header, which is a multiple of it."""


def write_figures(data: Path) -> None:
    """figures.json, a line for each stream and each run; a run names another machine than the first."""
    path = HERE / "figures.json"
    kept: Figures = json.loads(path.read_text())
    streams: Figures = {name: kept["streams"].get(name) or stream_figures(data, name) for name in STREAMS}
    runs: Figures = {case.name: kept["runs"].get(case.name) or new_figures(data, case, kept) for case in CASES}
    sections = [f'"machine": {json.dumps(kept["machine"])}']
    for title, entries in (("streams", streams), ("runs", runs)):
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
        sections.append(f'"{title}": {{\n{lines}\n}}')
    path.write_text("{\n" + ",\n".join(sections) + "\n}\n")


def new_figures(data: Path, case: Case, kept: Figures) -> Figures:
    """Those of a run, with the machine if it is another one."""
    here = machine()
    return run_figures(data, case) | ({} if here == kept["machine"] else {"machine": here})


def write_checkpoints(data: Path) -> None:
    """checkpoints/FAMILY and checkpoints/weights.json."""
    weights: Figures = {}
    for family in OLD_FAMILIES:
        case = old_run(family)
        train(data, case.recipe(), case.zero_stage)
        kept = HERE / "checkpoints" / family
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(last_checkpoint(data, case.recipe()), kept)
        shrink(kept)
        weights[family] = checkpoint_figures(kept)["weights"]
    (HERE / "checkpoints" / "weights.json").write_text(json.dumps(weights, indent=1) + "\n")


def shrink(checkpoint: Path) -> None:
    """Take out the room that is kept free for a longer header, a quarter of a MiB a file; nothing else changes."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for path in checkpoint.glob("*.safetensors"):
        content = path.read_bytes()
        end = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
        header = content[LENGTH_BYTES:end].rstrip()
        header = header.ljust(-(-len(header) // LENGTH_BYTES) * LENGTH_BYTES)
        content = len(header).to_bytes(LENGTH_BYTES, "little") + header + content[end:]
        path.write_bytes(content)
        manifest["files"][path.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["figures", "checkpoints"])
    what = parser.parse_args().what
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        data = prepare_data(Path(folder))
        if "figures" in what:
            write_figures(data)
        if "checkpoints" in what:
            write_checkpoints(data)


if __name__ == "__main__":
    main()
