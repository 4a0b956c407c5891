"""The report's charts as SVG, and its page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ctxlm_ds.apps.report.charts import overlaid, page, points_of, run_charts, svg, table, ticks
from ctxlm_ds.process.run_files import read_lines
from ctxlm_ds.training.hooks.curves import Chart, terminal_picture

RECORDS = [
    {"step": 1, "loss": 6.0, "masked_lm": 6.0, "masked_lm_accuracy": 0.0, "learning_rate": 0.0},
    {"step": 5, "loss": None, "masked_lm": None, "masked_lm_accuracy": None, "learning_rate": 2e-3},
    {"step": 10, "loss": 4.0, "masked_lm": 4.0, "masked_lm_accuracy": 0.25, "learning_rate": 1e-3,
     "grad_norm": 2.5, "tokens_per_second": 800.0},
    {"step": 10, "eval/dev/masked_lm_loss": 4.5, "eval/dev/masked_lm_accuracy": 0.2, "eval/dev/loss": 4.5},
]  # fmt: skip
CHART = Chart("loss", {"training": [(1, 6.0), (6, 5.0), (11, 4.0)], "dev": [(11, 4.5)]})


def test_charts_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    records = list(read_lines(tmp_path / "metrics.jsonl"))
    loss, accuracy, rate, norm, speed = run_charts(records, "masked_lm")
    assert loss == Chart("loss (nats)", {"training": [(1, 6.0), (10, 4.0)], "dev": [(10, 4.5)]})
    assert accuracy.curves["dev"] == [(10, 0.2)]
    assert rate.curves == {"learning_rate": [(1, 0.0), (5, 2e-3), (10, 1e-3)]}
    assert norm.curves == {"grad_norm": [(10, 2.5)]} and speed.curves == {"tokens_per_second": [(10, 800.0)]}
    assert points_of(records, "missing") == []


def test_the_loss_of_several_terms_is_that_of_the_log() -> None:
    records = [
        {"step": 1, "loss": 8.97, "masked_lm": 8.28, "next_sentence": 0.69},
        {"step": 2, "loss": 8.27, "masked_lm": 7.56, "next_sentence": 0.71},
        {"step": 2, "eval/dev/loss": 8.3, "eval/dev/masked_lm_loss": 7.6},
    ]
    whole, of_term = run_charts(records, "masked_lm")[:2]
    assert whole == Chart("loss (nats)", {"training": [(1, 8.97), (2, 8.27)], "dev": [(2, 8.3)]})
    assert of_term.title == "masked_lm loss (nats)"
    assert of_term.curves == {"training": [(1, 8.28), (2, 7.56)], "dev": [(2, 7.6)]}


def test_runs_are_overlaid_by_title() -> None:
    one = [Chart("loss", {"training": [(1, 6.0)], "dev": [(1, 5.0)]}), Chart("rate", {"rate": [(1, 0.1)]})]
    other = [Chart("loss", {"training": [(2, 7.0)]})]
    assert overlaid({"a": one, "b": other}) == [
        Chart("loss", {"a training": [(1, 6.0)], "a dev": [(1, 5.0)], "b training": [(2, 7.0)]}),
        Chart("rate", {"a": [(1, 0.1)]}),
    ]


def test_svg_places_curves_between_its_axes() -> None:
    root = ElementTree.fromstring(svg(CHART))
    lines = [line for line in root.iter() if line.get("class") == "curve"]
    places = [[tuple(map(float, point.split(","))) for point in (line.get("points") or "").split()] for line in lines]
    assert places == [[(56.0, 12.0), (313.0, 132.0), (570.0, 252.0)], [(570.0, 192.0)]]
    texts = [text.text for text in root.iter() if text.tag == "text"]
    assert {"training 4", "dev 4.5"} <= set(texts)


def test_labels_are_within_the_picture() -> None:
    curves = {f"{'a long name of a run ' * (number % 3)}{number}": [(1.0, 2.0), (5.0, 1.0)] for number in range(30)}
    root = ElementTree.fromstring(svg(Chart("loss", curves)))
    width, height = map(float, (root.get("viewBox") or "").split()[2:])
    labels = [text for text in root.iter() if text.tag == "text" and text.get("x") == "576"]
    assert len(labels) == 30
    for label in labels:
        assert 576 + 7 * len(label.text or "") < width and float(label.get("y") or 0) < height


@pytest.mark.parametrize(
    "chart",
    [Chart("nothing", {}), Chart("a point", {"a": [(3, 0.0)]}), Chart("no point", {"a": []})],
    ids=lambda chart: chart.title,
)
def test_charts_with_hardly_a_point(chart: Chart) -> None:
    ElementTree.fromstring(svg(chart))
    assert len(terminal_picture(chart, lines=4)) == 8


def test_ticks_are_round() -> None:
    assert ticks(0.0, 1.0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(3.1, 6.4) == pytest.approx([4, 5, 6])
    assert ticks(1, 5000) == pytest.approx([1000, 2000, 3000, 4000, 5000])
    assert ticks(-1e-3, 1e-3, 3) == pytest.approx([-1e-3, 0, 1e-3])


def test_page_is_complete_and_refers_to_nothing() -> None:
    text = page("A <run>", {"Curves": [svg(CHART)], "Texts": [table(["a", "b"], [("<b>x</b> & y", "z")])]})
    root = ElementTree.fromstring(re.sub("<!doctype html>|<meta [^>]*>", "", text))  # every element is closed
    assert {"A <run>", "Curves", "<b>x</b> & y"} <= set(root.itertext())
    assert not {"script", "link", "img", "iframe"} & {element.tag for element in root.iter()}
    assert not {"href", "src", "xlink:href"} & {name for element in root.iter() for name in element.attrib}
    assert "url(" not in text and "@import" not in text and "http" not in text
