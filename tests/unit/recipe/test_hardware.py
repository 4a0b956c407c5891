"""GPUs by name and from files, and the speed of rings over a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.hardware import GPUS, LINK_SHARE, Cluster, Gpu, find_gpu

OWN = """
memory_gib: 24
tflops_16bit: 165
tflops_fp32: 82.6
memory_gb_per_s: 1008
nvlink_gb_per_s: 64
inter_node_gbit_per_s: 10
"""


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_names_in_any_case() -> None:
    assert [find_gpu(gpu.name.lower()) for gpu in GPUS] == list(GPUS)


def test_figures_are_of_the_order_of_the_data_sheets() -> None:
    for gpu in GPUS:
        sold = int(gpu.name.split("-")[1]) if "-" in gpu.name else {"H100": 80, "H200": 141}[gpu.name]
        assert 0.9 * sold < gpu.memory_gib <= sold
        assert 5 < gpu.tflops_16bit / gpu.tflops_fp32 < 20


@pytest.mark.parametrize(
    ("name", "near"),
    [("A100-8", "A100-80"), ("H20", "H200"), ("V100", "V100-32"), ("a100", "A100-40 or A100-80"), ("H1000", "H100")],
)
def test_an_unknown_gpu_is_told_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean {near}\?"):
        find_gpu(name)


def test_a_gpu_of_ones_own(tmp_path: Path) -> None:
    gpu = find_gpu(write(tmp_path / "rtx4090.yaml", OWN))
    assert (gpu.name, gpu.memory_gib, gpu.has_bf16) == ("rtx4090", 24, True)
    assert 0 < gpu.matrix_efficiency < 1


def test_a_wrong_description_is_told_whole(tmp_path: Path) -> None:
    text = OWN.replace("memory_gib: 24", "memory_gb: 24").replace("1008", "fast") + "matrix_efficiency: 2\n"
    with pytest.raises(ConfigError) as caught:
        find_gpu(write(tmp_path / "own.yaml", text))
    message = str(caught.value)
    for words in (
        "memory_gb: unknown setting; did you mean memory_gib?",
        "memory_gib: missing",
        'memory_gb_per_s: "fast": Input should be a valid number',
        "matrix_efficiency: 2: Input should be less than or equal to 1",
    ):
        assert words in message


def test_a_file_that_is_not_there_or_no_section(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        find_gpu(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="expected a section"):
        find_gpu(write(tmp_path / "list.yaml", "- 1\n"))


def test_rings_within_a_node_and_over_several() -> None:
    gpu = Gpu("toy", 80, 100, 10, 1000, 600, 1600, 0.5)
    cluster = Cluster(gpu, 4, 8)
    nvlink, node = 300e9 * LINK_SHARE, 200e9 * LINK_SHARE
    assert cluster.ring_bytes_per_s(8, 1) == nvlink
    assert cluster.ring_bytes_per_s(2, 4) == nvlink
    # One ring over all GPUs has the whole adapter bandwidth; eight rings beside each other share it.
    assert cluster.ring_bytes_per_s(32, 1) == node
    assert cluster.ring_bytes_per_s(4, 8) == node / 8
    assert cluster.ring_bytes_per_s(16, 2) == node / 2
    assert (cluster.pair_bytes_per_s(8), cluster.pair_bytes_per_s(16)) == (nvlink, node / 8)
