"""Compiled streams: the published generator's words, and code that is compiled anew when a file it calls changes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

import ctxlm_ds
from ctxlm_ds.data.numba_random import below, compiled, uniform, word_at

SPLITMIX64_FROM_ZERO = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
"""The first words of the reference implementation (Vigna, splitmix64.c) seeded with 0."""


@compiled
def _words(state: int, count: int) -> np.ndarray:
    words = np.empty(count, np.uint64)
    for number in range(count):
        words[number] = word_at(np.uint64(state), number)
    return words


@compiled
def _draws(count: int, bound: int) -> tuple[np.ndarray, np.ndarray]:
    whole, real = np.empty(count, np.int64), np.empty(count)
    for number in range(count):
        whole[number] = below(word_at(np.uint64(5), number), bound)
        real[number] = uniform(word_at(np.uint64(6), number))
    return whole, real


def test_words_are_splitmix64s() -> None:
    assert _words(0, 4).tolist() == SPLITMIX64_FROM_ZERO


def test_draws_cover_their_ranges_evenly() -> None:
    whole, real = _draws(70_000, 7)
    counts = np.bincount(whole, minlength=7)
    assert len(counts) == 7
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 22.5  # chi-squared, 6 degrees of freedom, 0.001
    assert real.min() >= 0.0 and real.max() < 1.0
    assert abs(real.mean() - 0.5) < 4 / np.sqrt(12 * len(real))


def test_a_change_in_a_called_file_is_seen(tmp_path: Path) -> None:
    """numba alone would go on with the code that it compiled before."""
    package = tmp_path / "ctxlm_ds"
    source = Path(ctxlm_ds.__path__[0])
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "data" / "caller.py").write_text(
        "from ctxlm_ds.data.numba_random import compiled, mix\nimport numpy as np\n\n"
        "@compiled\ndef call(word):\n    return mix(np.uint64(word))\n"
    )
    run = [sys.executable, "-c", "import ctxlm_ds.data.caller as c; print(c.__file__, c.call(5))"]

    def answer() -> str:
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True, env={"PYTHONPATH": "."})
        return done.stdout

    first = answer()
    assert str(package) in first or "ctxlm_ds/data/caller.py" in first
    assert answer() == first
    source_file = package / "data" / "numba_random.py"
    source_file.write_text(source_file.read_text().replace("0x94D049BB133111EB", "0x94D049BB133111ED"))
    assert answer() != first
