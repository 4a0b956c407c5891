"""The sample indexes beside Megatron's helpers."""

from __future__ import annotations

from tools.benchmark.samples import compare_samples


def test_benchmark_beside_megatrons_helpers_names_each_task() -> None:
    lines = list(compare_samples(300, rounds=1))
    titles = [line for line in lines if not line.startswith(" ")]
    assert {title.split(",")[0] for title in titles} == {"segment_pair", "doc_sentences", "full_sentences", "blocks"}
    ratios = [float(line.split()[1]) for line in lines if line.split()[0] == "ratio"]
    # A ratio of short rounds on a busy machine may be printed as 0.00.
    assert len(ratios) == len(titles)
