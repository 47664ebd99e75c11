"""Charts as SVG for a page and as files, read back by an XML parser and Pillow."""

from __future__ import annotations

import io
import re
import sys
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from PIL import Image

from rbtool.core.charts.figure import (
    COLOURS,
    SUFFIXES,
    Bars,
    Chart,
    ChartLabels,
    Heatmap,
    Histogram,
    Lines,
    Series,
    file_bytes,
    histogram_of,
    inline_svg,
    style_sheet,
)
from rbtool.core.errors import UsageError

SVG = "{http://www.w3.org/2000/svg}"


def labelled(title: str = "Return") -> ChartLabels:
    return ChartLabels(title=title, x="step", y="value")


def line(*values: float, name: str = "reward") -> Series:
    return Series(name, np.arange(len(values)), np.array(values, float))


CHARTS: dict[str, Chart] = {
    "histogram": histogram_of(np.random.default_rng(0).normal(size=100), labelled()),
    "one bin": Histogram(np.array([3]), np.array([0.0, 1.0]), labelled()),
    "a bin without width": Histogram(np.array([3]), np.array([2.0, 2.0]), labelled()),
    "no bins": histogram_of(np.zeros(0), labelled()),
    "huge bins": histogram_of(np.array([-1.7e308, 1.7e308]), labelled()),
    "lines": Lines([line(1, 2, np.nan, 4), line(2, 2, 2, 2, name="a $x_1$ & <b> \x1b[31m \ud800")], labelled()),
    "one point": Lines([line(1)], labelled()),
    "no lines": Lines([], labelled()),
    "nothing finite": Lines([line(np.nan, np.inf)], labelled()),
    "huge lines": Lines([line(-1.7e308, 1.7e308, 5)], labelled()),
    "tiny lines": Lines([line(5e-324, 0, 5e-324)], labelled()),
    "many lines": Lines([line(n, n + 1, name=f"observation[{n}]") for n in range(40)], labelled()),
    "bars": Bars(["a", "b" * 500, "c"], np.array([1, -2.5, np.nan]), labelled()),
    "no bars": Bars([], np.zeros(0), labelled()),
    "heatmap": Heatmap(np.array([[1, -0.5], [np.nan, np.inf]]), ["a", "b"], ["c", "d" * 300], labelled()),
    "no heatmap": Heatmap(np.zeros((0, 0)), [], [], labelled()),
}


@pytest.fixture(params=CHARTS)
def chart(request: pytest.FixtureRequest) -> Chart:
    return CHARTS[request.param]


def test_a_page_gets_colours_of_its_own_and_nothing_from_elsewhere(chart: Chart) -> None:
    text = inline_svg(chart)
    found = ElementTree.fromstring(text)
    assert not re.search(r"#[0-9a-f]{6}|style=|<style|<script|xlink|rgb\(", text, re.IGNORECASE)
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert set(re.findall(r"--chart-(\w+)", text)) <= {*COLOURS, "font"}
    assert found.attrib["role"] == "img"
    assert found.find(f"{SVG}title").text == chart.labels.title
    assert found.find(f"{SVG}desc").text


def test_the_same_chart_has_the_same_bytes_and_ids_of_its_own(chart: Chart) -> None:
    text = inline_svg(chart, name="first")
    assert text == inline_svg(chart, name="first")
    other = inline_svg(chart, name="second")
    ids, others = (set(re.findall(r' id="([^"]+)"', one)) for one in (text, other))
    assert ids.isdisjoint(others)
    assert all(one.startswith("first-") for one in ids)
    assert set(re.findall(r"(?:url\(|href=\")#([^\")]+)", text)) <= ids


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_charts_are_saved_with_the_same_bytes(suffix: str) -> None:
    charts = [CHARTS["lines"], CHARTS["heatmap"]]
    assert file_bytes(charts, suffix, title="cartpole") == file_bytes(charts, suffix, title="cartpole")


def test_files_have_colours_and_a_size() -> None:
    text = file_bytes([CHARTS["lines"]], ".svg").decode()
    assert "var(" not in text
    assert COLOURS["1"].light in text
    picture = Image.open(io.BytesIO(file_bytes([CHARTS["histogram"]], ".png", width=400)))
    assert picture.width == 800
    assert len(picture.convert("RGB").getcolors(1 << 20)) > 10
    with pytest.raises(UsageError, match=r"\.svg, \.png, \.pdf"):
        file_bytes([CHARTS["bars"]], ".jpg")


def test_text_stays_text_and_long_names_are_cut() -> None:
    texts = [one.text for one in ElementTree.fromstring(inline_svg(CHARTS["lines"])).iter(f"{SVG}text")]
    assert {"step", "value", "reward", r"a $x_1$ & <b> \x1b[31m \ud800"} <= set(texts)
    texts = [one.text or "" for one in ElementTree.fromstring(inline_svg(CHARTS["bars"])).iter(f"{SVG}text")]
    assert any(re.fullmatch("b{5,40}…b{5,40}", one) for one in texts)


def test_settings_of_the_user_have_no_influence_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    before = inline_svg(CHARTS["lines"])
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 30)
    assert inline_svg(CHARTS["lines"]) == before
    assert matplotlib.rcParams["font.size"] == 30
    assert "matplotlib.pyplot" not in sys.modules


def test_the_style_sheet_sets_every_colour_twice() -> None:
    text = style_sheet()
    assert all(text.count(f"--chart-{name}:") == 2 for name in COLOURS)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="charts need matplotlib") as caught:
        inline_svg(CHARTS["bars"])
    assert caught.value.hint == "pip install 'rbtool[plot]'"
