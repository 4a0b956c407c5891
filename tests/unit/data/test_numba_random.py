"""Draws belong to their key; compiled code is compiled again when a file it calls changes."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import numba
import numpy as np
import pytest

import ctxlm_ds
from ctxlm_ds.data.numba_random import Permutation, below, compiled, hash_words, stream, stream_key, uniform, word_at

SPLITMIX64_FROM_ZERO = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
"""The first words of the reference implementation (Vigna, splitmix64.c) seeded with 0."""


def test_words_are_splitmix64s() -> None:
    assert [int(np.uint64(word_at(np.uint64(0), number))) for number in range(4)] == SPLITMIX64_FROM_ZERO


def called_in(folder: Path) -> int:
    """What the copy of the package in a folder answers, in a process that has imported numba."""
    for name in [name for name in sys.modules if name.startswith("ctxlm_ds")]:
        del sys.modules[name]
    numba.config.CACHE_DIR = ""  # that of NUMBA_CACHE_DIR, where the project's own folders are not used
    sys.path.insert(0, str(folder))
    caller = import_module("ctxlm_ds.data.caller")
    assert str(caller.__file__).startswith(str(folder))
    return int(caller.call(5))


def test_a_change_in_a_called_file_is_seen(tmp_path: Path) -> None:
    """numba alone would go on with the code that it compiled before."""
    package = tmp_path / "ctxlm_ds"
    source = Path(ctxlm_ds.__path__[0])
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "data" / "caller.py").write_text(
        "from ctxlm_ds.data.numba_random import compiled, mix\nimport numpy as np\n\n"
        "@compiled\ndef call(word):\n    return mix(np.uint64(word))\n"
    )

    def answer() -> int:
        with ProcessPoolExecutor(1, get_context("fork")) as fork:
            return fork.submit(called_in, tmp_path).result()

    first = answer()
    assert answer() == first
    source_file = package / "data" / "numba_random.py"
    source_file.write_text(source_file.read_text().replace("0x94D049BB133111EB", "0x94D049BB133111ED"))
    assert answer() != first


def test_one_of_several_processes_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    loop = compiled(draw.py_func)
    fork = get_context("fork")
    together, misses = fork.Barrier(3), fork.SimpleQueue()

    def call() -> None:
        together.wait()
        loop(np.uint64(1), 2, 3, 4, 5)
        misses.put(sum(loop.stats.cache_misses.values()))

    processes = [fork.Process(target=call) for _ in range(3)]
    for process in processes:
        process.start()
    assert sorted(misses.get() for _ in processes) == [0, 0, 1]
    for process in processes:
        process.join()


def test_no_lock_is_taken_in_a_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    user = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: user)
    folder = tmp_path / f"ctxlm-{user}"
    folder.mkdir()
    loop = compiled(draw.py_func)
    loop(np.uint64(1), 2, 3, 4, 5)
    assert not list(folder.iterdir()) and len(list(tmp_path.glob("tmp*/*"))) == 1


def test_numbers_below_a_bound_reach_it() -> None:
    """Above 2^32 (tokens of a large dataset) too, where 32 bits of a word are too few."""
    words = np.random.default_rng(0).integers(0, 2**64, 10_000, dtype=np.uint64)
    for bound in (1, 10, 1 << 32, (1 << 32) + 1, 33 * 10**9, 1 << 45):
        found = np.array([below(word, bound) for word in words[: 1000 if bound < 1 << 32 else None]])
        assert found.min() >= 0 and found.max() < bound
        assert abs(found.mean() / bound - (1 - 1 / bound) / 2) < 0.02
    assert below(np.uint64(2**64 - 1), (1 << 33) + 1) == 1 << 33


def test_keys_depend_on_every_part_and_its_type() -> None:
    keys = [(1, "a"), (2, "a"), (1, "b"), (1, "a1"), (1, "a", 1), (1, "a", 2), (1, "a", "1"), (1, "a", 1, 2)]
    assert hash_words(2, *keys[0]).tolist() == hash_words(2, *keys[0]).tolist()
    assert len({tuple(hash_words(2, *key).tolist()) for key in keys}) == len(keys)


@compiled
def draw(key: np.uint64, first: int, second: int, third: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    state = stream(key, first, second, third)
    words, numbers, dice = np.empty(count, np.uint64), np.empty(count), np.empty(count, np.int64)
    for number in range(count):
        words[number] = word_at(state, number)
        numbers[number] = uniform(words[number])
        dice[number] = below(words[number], 6)
    return words, numbers, dice


def test_streams_of_different_keys_share_nothing() -> None:
    key = stream_key(1, "mask")
    streams = [draw(key, *triple, 500)[0] for triple in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1 << 40, 7, 7))]
    streams.append(draw(stream_key(2, "mask"), 0, 0, 0, 500)[0])
    assert len(np.unique(np.concatenate(streams))) == 6 * 500
    assert np.array_equal(draw(key, 0, 1, 0, 20)[0], streams[2][:20])


def test_words_are_uniform_within_a_stream_and_across_streams() -> None:
    key = stream_key(3, "test")
    across = [draw(key, number, 0, 0, 1) for number in range(20_000)]
    for words, numbers, dice in (draw(key, 5, 6, 7, 20_000), tuple(map(np.concatenate, zip(*across, strict=True)))):
        assert numbers.min() >= 0.0 and numbers.max() < 1.0
        assert abs(numbers.mean() - 0.5) < 4 * np.sqrt(1 / 12 / 20_000)
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / np.sqrt(20_000)
        counts = np.bincount(dice, minlength=6)
        assert len(counts) == 6 and np.abs(counts - 20_000 / 6).max() < 5 * np.sqrt(20_000 * 5 / 36)
        ones = np.array([(words >> np.uint64(bit)) & np.uint64(1) for bit in range(64)]).mean(axis=1)
        assert np.abs(ones - 0.5).max() < 5 * 0.5 / np.sqrt(20_000)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 100, 4097])
def test_permutation_is_a_bijection(size: int) -> None:
    permutation = Permutation(size, 1, "order", 0)
    assert sorted(permutation[np.arange(size)].tolist()) == list(range(size))


def test_permutation_is_computed_anywhere_and_changes_with_its_key() -> None:
    size = 1 << 40
    positions = np.array([0, 1, size - 1, 123_456_789_012])
    one, other = Permutation(size, 1, "order", 0), Permutation(size, 1, "order", 1)
    assert np.array_equal(one[positions], [one[positions[k : k + 1]][0] for k in range(4)])
    assert not np.array_equal(one[positions], other[positions])
    assert one[positions].min() >= 0 and one[positions].max() < size


def test_permutations_are_uniform_over_places() -> None:
    """Over many keys each element comes equally often to each place; neighbours do not stay together."""
    size, keys = 10, 4000
    counts = np.zeros((size, size))
    for key in range(keys):
        counts[np.arange(size), Permutation(size, key, "order")[np.arange(size)]] += 1
    expected = keys / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    degrees = (size - 1) ** 2
    assert abs(chi_square - degrees) < 5 * np.sqrt(2 * degrees)
    order = Permutation(100_000, 5, "order")[np.arange(100_000)]
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert (np.abs(np.diff(order)) == 1).mean() < 1e-3
