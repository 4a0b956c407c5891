"""Run the data tools on damaged datasets and damaged inputs, each in a forked process with limits on memory and time.

Run by tests/integration/test_mutated_files.py: python -m tests.tool_mutations FOLDER SEED COUNT. It prints the outcomes
and the largest figures as JSON, and ends with an AssertionError at the first case that is not handled.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from ctxlm_ds.console import run_command
from tests.indexed_mutations import mutate, write_legacy
from tests.sample_data import random_documents, write_dataset
from tests.text import make_documents
from tests.unit.data.sources.source_mutations import make_case

ROOT = Path(__file__).parents[1]
MEMORY_BYTES = 2 << 30
SECONDS_EACH = 60


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Runner:
    """Runs tools in forked processes and keeps the largest memory and time."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.most_bytes = 0
        self.most_seconds = 0.0
        self.tools = {name: _tool(name) for name in ("inspect_dataset", "merge_datasets", "preprocess_data")}

    def run(self, name: str, arguments: Sequence[str | Path]) -> int:
        """Return the exit status, 0 or 2; anything else, a traceback or too much memory fails."""
        start_s = time.monotonic()
        process = os.fork()
        if process == 0:
            self._child(name, arguments)
        _, status, usage = os.wait4(process, 0)
        self.most_seconds = max(self.most_seconds, time.monotonic() - start_s)
        self.most_bytes = max(self.most_bytes, usage.ru_maxrss * 1024)
        text = self.log.read_text(errors="replace")
        code = os.waitstatus_to_exitcode(status)
        case = f"{name} {list(map(str, arguments))}: status {code}, {usage.ru_maxrss} kB\n{text[-3000:]}"
        refused = any(line.startswith("error: ") for line in text.splitlines())
        assert code in (0, 2) and (code == 2) == refused and "Traceback" not in text, case
        assert usage.ru_maxrss * 1024 < MEMORY_BYTES, case
        return code

    def _child(self, name: str, arguments: Sequence[str | Path]) -> None:
        status = 1
        try:
            handle = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (virtual + MEMORY_BYTES,) * 2)
            signal.alarm(SECONDS_EACH)  # a hang ends the process by the signal
            sys.argv = [name, *map(str, arguments)]
            run_command(self.tools[name].main)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def dataset_case(runner: Runner, folder: Path, rng: random.Random) -> str:
    """Damage one file of a dataset, verify it, show it and join it with a good one."""
    kind = rng.choice(("one", "one-legacy"))
    has_json = kind == "one" and rng.random() < 0.5
    extensions = ("bin", "idx", "json", "sha256") if has_json else ("bin", "idx")
    good, other = ({end: (folder / f"{name}.{end}").read_bytes() for end in extensions} for name in (kind, "two"))
    changed = mutate(good, other, rng)
    case = folder / "case"
    for end, content in changed.items():
        (case / f"data.{end}").write_bytes(content)
    statuses = [runner.run("inspect_dataset", [case / "data", "--show", "2", "--first", "1", "--verify"])]
    if rng.random() < 0.5:
        inputs = [folder / ("two" if has_json else "two-bare"), case / "data"]
        statuses.append(runner.run("merge_datasets", ["--input", *inputs, "--output-prefix", case / "out"]))
        assert (case / "out.idx").exists() == (statuses[-1] == 0)
        assert not list(case.glob("out.partial*"))
    return f"dataset: {statuses}"


def input_case(runner: Runner, folder: Path, rng: random.Random) -> str:
    """Damage one input file and preprocess it."""
    name, content = make_case(rng)
    path = folder / "case" / name
    path.write_bytes(content)
    options = [option for option in ("--split-sentences", "--append-eod", "--keep-newlines") if rng.random() < 0.5]
    if rng.random() < 0.7:
        options += ["--max-bad-records", rng.choice(("1000000", "20"))]
    if ".wiki" in name:
        options += ["--input-format", "wikiextractor"]
    output = folder / "case" / "out"
    arguments = ["--input", path, "--tokenizer", folder / "tokenizer", "--output-prefix", output, "--workers", "1"]
    status = runner.run("preprocess_data", [*arguments, *options])
    assert bool(list(output.parent.glob("out_*.idx"))) == (status == 0)
    assert not list(output.parent.glob("out_*.partial"))
    return f"input: {status}"


def main() -> None:
    folder, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if (setup := os.fork()) == 0:  # the parent of the cases starts no threads
        _prepare(folder)
        os._exit(0)
    assert os.waitpid(setup, 0)[1] == 0
    runner, rng = Runner(folder / "log"), random.Random(seed)
    outcomes: Counter[str] = Counter()
    for number in range(count):
        shutil.rmtree(folder / "case", ignore_errors=True)
        (folder / "case").mkdir()
        outcomes[(dataset_case, input_case)[number % 2](runner, folder, rng)] += 1
    figures = {"outcomes": outcomes, "most_bytes": runner.most_bytes, "most_seconds": runner.most_seconds}
    json.dump(figures, sys.stdout)


def _prepare(folder: Path) -> None:
    from ctxlm_ds.tokenizers.train import train_tokenizer

    for name, documents_seed in (("one", 1), ("two", 2)):
        documents = random_documents(6, sentences=4, tokens=8, seed=documents_seed)
        facts = {"vocab_size": 1000, "inputs": ["a.jsonl"], "tokenizer_path": "none", "bad_records": 2}
        write_dataset(folder / name, documents, eod_id=3, metadata=facts)
    write_legacy(folder / "one-legacy", documents)
    for extension in ("bin", "idx"):
        shutil.copy(folder / f"two.{extension}", folder / f"two-bare.{extension}")
    train_tokenizer("bpe", make_documents(40, seed=7), 500, folder / "tokenizer")


if __name__ == "__main__":
    main()
