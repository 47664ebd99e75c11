"""Charts: their numbers, and their drawings as SVG for a page and as files, read by an XML parser and Pillow."""

from __future__ import annotations

import io
import re
import sys
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from rbtool.core.errors import UsageError
from rbtool.core.report.charts import (
    COLOURS,
    SUFFIXES,
    Bars,
    Chart,
    ChartLabels,
    Heatmap,
    Histogram,
    Lines,
    Series,
    description,
    file_bytes,
    histogram_of,
    inline_svg,
    reduced,
    style_sheet,
)

SVG = "{http://www.w3.org/2000/svg}"
LABELS = ChartLabels(title="Return", x="step", y="value")


def line(*values: float, name: str = "reward") -> Series:
    return Series(name, np.arange(len(values)), np.array(values, float))


CHARTS: dict[str, Chart] = {
    "histogram": histogram_of(np.random.default_rng(0).normal(size=100), LABELS),
    "one bin": Histogram(np.array([3]), np.array([0.0, 1.0]), LABELS),
    "a bin without width": Histogram(np.array([3]), np.array([2.0, 2.0]), LABELS),
    "no bins": histogram_of(np.zeros(0), LABELS),
    "huge bins": histogram_of(np.array([-1.7e308, 1.7e308]), LABELS),
    "lines": Lines([line(1, 2, np.nan, 4), line(2, 2, 2, 2, name="a $x_1$ & <b> \x1b[31m \ud800")], LABELS),
    "one point": Lines([line(1)], LABELS),
    "no lines": Lines([], LABELS),
    "nothing finite": Lines([line(np.nan, np.inf)], LABELS),
    "huge lines": Lines([line(-1.7e308, 1.7e308, 5)], LABELS),
    "tiny lines": Lines([line(5e-324, 0, 5e-324)], LABELS),
    "many lines": Lines([line(n, n + 1, name=f"observation[{n}]") for n in range(40)], LABELS),
    "bars": Bars(["a", "b" * 500, "c"], np.array([1, -2.5, np.nan]), LABELS),
    "no bars": Bars([], np.zeros(0), LABELS),
    "heatmap": Heatmap(np.array([[1, -0.5], [np.nan, np.inf]]), ["a", "b"], ["c", "d" * 300], LABELS),
    "no heatmap": Heatmap(np.zeros((0, 0)), [], [], LABELS),
}


@pytest.fixture(params=CHARTS)
def chart(request: pytest.FixtureRequest) -> Chart:
    return CHARTS[request.param]


def test_inline_svg_uses_colours_of_the_page_and_loads_nothing(chart: Chart) -> None:
    text = inline_svg(chart)
    found = ElementTree.fromstring(text)
    assert not re.search(r"#[0-9a-f]{6}|style=|<style|<script|xlink|rgb\(", text, re.IGNORECASE)
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert set(re.findall(r"--chart-(\w+)", text)) <= {*COLOURS, "font"}
    assert found.attrib["role"] == "img"
    assert found.find(f"{SVG}title").text == chart.labels.title
    assert found.find(f"{SVG}desc").text


def test_inline_svg_is_reproducible_with_ids_of_its_own(chart: Chart) -> None:
    text = inline_svg(chart, name="first")
    assert text == inline_svg(chart, name="first")
    other = inline_svg(chart, name="second")
    ids, others = (set(re.findall(r' id="([^"]+)"', one)) for one in (text, other))
    assert ids.isdisjoint(others)
    assert all(one.startswith("first-") for one in ids)
    assert set(re.findall(r"(?:url\(|href=\")#([^\")]+)", text)) <= ids


def test_files_are_reproducible() -> None:
    charts = [CHARTS["lines"], CHARTS["heatmap"]]
    for suffix in SUFFIXES:
        assert file_bytes(charts, suffix, title="cartpole") == file_bytes(charts, suffix, title="cartpole"), suffix


def test_files_have_colours_and_a_size() -> None:
    text = file_bytes([CHARTS["lines"]], ".svg").decode()
    assert "var(" not in text
    assert COLOURS["1"].light in text
    picture = Image.open(io.BytesIO(file_bytes([CHARTS["histogram"]], ".png", width=400)))
    assert picture.width == 800
    assert len(picture.convert("RGB").getcolors(1 << 20)) > 10
    with pytest.raises(UsageError, match=r"\.svg, \.png, \.pdf"):
        file_bytes([CHARTS["bars"]], ".jpg")


def test_texts_stay_text_and_long_names_are_shortened() -> None:
    texts = [one.text for one in ElementTree.fromstring(inline_svg(CHARTS["lines"])).iter(f"{SVG}text")]
    assert {"step", "value", "reward", r"a $x_1$ & <b> \x1b[31m \ud800"} <= set(texts)
    texts = [one.text or "" for one in ElementTree.fromstring(inline_svg(CHARTS["bars"])).iter(f"{SVG}text")]
    assert any(re.fullmatch("b{5,40}…b{5,40}", one) for one in texts)


def test_settings_of_matplotlib_are_neither_used_nor_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = inline_svg(CHARTS["lines"])
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 30)
    assert inline_svg(CHARTS["lines"]) == before
    assert matplotlib.rcParams["font.size"] == 30
    assert "matplotlib.pyplot" not in sys.modules


def test_the_style_sheet_sets_every_colour_twice() -> None:
    text = style_sheet()
    assert all(text.count(f"--chart-{name}:") == 2 for name in COLOURS)


def test_a_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="charts need matplotlib") as caught:
        inline_svg(CHARTS["bars"])
    assert caught.value.hint == "pip install 'rbtool[plot]'"


def test_bins_are_those_of_numpy_or_one_per_integer() -> None:
    values = np.random.default_rng(0).normal(size=1000)
    chart = histogram_of(values, LABELS, bins=15)
    counts, edges = np.histogram(values, bins=15)
    assert np.array_equal(chart.counts, counts)
    assert np.array_equal(chart.edges, edges)
    chart = histogram_of(np.array([3, 5, 5, 4, 5], np.int32), LABELS)
    assert (chart.counts.tolist(), chart.edges.tolist()) == ([1, 1, 3], [2.5, 3.5, 4.5, 5.5])
    chart = histogram_of(np.full(7, 2.5), LABELS)
    assert (chart.counts.tolist(), chart.edges.tolist()) == ([7], [2, 3])
    assert histogram_of(np.array([0.3, 0.1 + 0.2, 0.3]), LABELS).counts.sum() == 3
    assert histogram_of(np.array([np.nan, 1, np.inf, 2, -np.inf]), LABELS).counts.sum() == 2
    assert len(histogram_of(np.array([np.nan, np.inf]), LABELS).counts) == 0


def test_values_of_every_dtype_are_counted() -> None:
    for kind in (np.bool_, np.uint8, np.int64, np.uint64, np.float32):
        assert histogram_of(np.array([[0, 1], [1, 1]], kind), LABELS).counts.sum() == 4


@given(arrays.arrays(np.float64, st.integers(1, 30), elements=st.floats(allow_nan=False, allow_infinity=False)))
def test_finite_values_of_any_size_are_counted(values: np.ndarray) -> None:
    chart = histogram_of(values, LABELS)
    assert chart.counts.sum() == len(values)
    assert np.isfinite(chart.edges).all()


def test_a_description_has_the_numbers() -> None:
    bins = Histogram(np.array([1, 3]), np.array([0, 1, 2]), LABELS)
    for chart, text in (
        (bins, "4 values in 2 bins from 0 to 2; most, 3, are from 1 to 2"),
        (Lines([line(1, np.nan, -2.5, np.inf)], LABELS), "reward: 2 values from -2.5 to 1, 2 not finite"),
        (Bars(["a", "b"], np.array([1, np.nan]), LABELS), "a: 1; b: NaN"),
        (Heatmap(np.eye(2), "ab", "cd", LABELS), "2 rows by 2 columns; 4 values from 0 to 1"),
    ):
        assert description(chart) == text


def test_arrays_that_do_not_fit_together_are_refused() -> None:
    for make in (
        lambda: Series("a", np.arange(3), np.arange(4)),
        lambda: Histogram(np.ones(2), np.arange(2), LABELS),
        lambda: Histogram(np.ones(2), np.array([0, np.nan, 1]), LABELS),
        lambda: Bars(["a"], np.ones(2), LABELS),
        lambda: Heatmap(np.ones((2, 2)), "ab", "c", LABELS),
    ):
        with pytest.raises(UsageError):
            make()


@settings(max_examples=60)
@given(arrays.arrays(np.float64, st.integers(0, 400), elements=st.floats(width=32)), st.integers(1, 20))
def test_a_reduced_line_keeps_extremes_and_gaps(values: np.ndarray, columns: int) -> None:
    whole = Series("a", np.arange(len(values)), values)
    part = reduced(whole, columns)
    assert len(part.x) <= 5 * columns
    assert np.array_equal(part.y, values[part.x.astype(int)], equal_nan=True)
    if len(values) <= 4 * columns:
        assert len(part.x) == len(values)
        return
    column = np.minimum(np.arange(len(values)) / (len(values) - 1) * columns, columns - 1).astype(int)
    for number in range(columns):
        every, kept = values[column == number], part.y[column[part.x.astype(int)] == number]
        assert np.isfinite(every).all() == np.isfinite(kept).all()
        for extreme in (np.min, np.max):
            if (finite := every[np.isfinite(every)]).size:
                assert extreme(kept[np.isfinite(kept)]) == extreme(finite)


def test_spikes_and_vertical_lines_keep_their_extremes() -> None:
    values = np.zeros(1_000_000)
    values[123_456] = 7
    part = reduced(Series("a", np.arange(len(values)), values), 80)
    assert (part.y.max(), part.x[part.y.argmax()]) == (7, 123_456)
    part = reduced(Series("a", np.zeros(50), np.arange(50)), 3)
    assert (part.y.min(), part.y.max()) == (0, 49)
