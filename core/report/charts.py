"""Charts: numbers and labels as plain data, and drawings of them by matplotlib, as SVG text or as files.

NaN and infinite numbers appear as gaps in a line, missing bars and empty cells. Lines with many points are reduced to
fewer that look the same (`reduced`): spikes and gaps stay.

The same numbers give the same bytes: the user's matplotlib settings have no influence, and matplotlib's global state is
left alone.

Inline SVG keeps only the shapes that matplotlib writes, and takes colours and font from the page. Text stays text.
There are no style attributes (a strict content security policy forbids them), no scripts and no external references.
Every colour is a CSS variable `--chart-…`, which defaults to the text colour of the page.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias
from xml.etree import ElementTree

import numpy as np

from ..errors import UsageError, not_installed
from ..progress import clean, counted

Array: TypeAlias = np.ndarray[Any, Any]

_LONGEST_DESCRIBED = 60  # most characters of a name in a description
_HALVED_ABOVE = 1e307
_NAMED = 12  # most series or bars that a description names


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLabels:
    """The labels of a chart: title, axes `x` and `y`, and a text for screen readers, generated if it is empty."""

    title: str
    x: str = ""
    y: str = ""
    description: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """A line: `x` and `y`, float64 [N], `x` in ascending order."""

    name: str
    x: Array
    y: Array

    def __post_init__(self) -> None:
        x, y = (np.asarray(values, np.float64) for values in (self.x, self.y))
        if x.ndim != 1 or x.shape != y.shape:
            raise UsageError(f"x and y of a line have the shapes {x.shape} and {y.shape}, expected [N] for both")
        object.__setattr__(self, "x", x)
        object.__setattr__(self, "y", y)


@dataclass(frozen=True, slots=True)
class Lines:
    """One line for each of `series`."""

    series: Sequence[Series]
    labels: ChartLabels


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many values are in each bin: `counts` [N] between the finite `edges` [N + 1]."""

    counts: Array
    edges: Array
    labels: ChartLabels

    def __post_init__(self) -> None:
        counts, edges = np.asarray(self.counts, np.float64), np.asarray(self.edges, np.float64)
        if counts.ndim != 1 or edges.ndim != 1 or len(edges) != (len(counts) + 1 if len(counts) else len(edges)):
            raise UsageError(f"found {edges.size} edges, expected {len(counts) + 1} for {len(counts)} bins")
        if not np.isfinite(edges).all() or (edges[1:] < edges[:-1]).any() or not np.isfinite(counts).all():
            raise UsageError("expected finite edges in ascending order, and finite counts")
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "edges", edges)


@dataclass(frozen=True, slots=True)
class Bars:
    """A bar from zero to `values[i]` for each of `names`."""

    names: Sequence[str]
    values: Array
    labels: ChartLabels

    def __post_init__(self) -> None:
        values = np.asarray(self.values, np.float64)
        if values.shape != (len(self.names),):
            raise UsageError(
                f"the values have the shape {values.shape}, expected one for each of {len(self.names)} names"
            )
        object.__setattr__(self, "values", values)


@dataclass(frozen=True, slots=True)
class Heatmap:
    """`matrix` [R, C] as coloured cells; one colour for numbers above zero, another for numbers below.

    `limit` is the magnitude that gets the full colour; by default the largest in the matrix.
    """

    matrix: Array
    row_names: Sequence[str]
    column_names: Sequence[str]
    labels: ChartLabels
    limit: float | None = None

    def __post_init__(self) -> None:
        matrix = np.asarray(self.matrix, np.float64)
        if matrix.shape != (len(self.row_names), len(self.column_names)):
            names = f"{len(self.row_names)} by {len(self.column_names)}"
            raise UsageError(f"the names are for {names} cells, but the matrix has the shape {matrix.shape}")
        object.__setattr__(self, "matrix", matrix)


Chart: TypeAlias = Lines | Histogram | Bars | Heatmap


def histogram_of(values: Array, labels: ChartLabels, bins: int = 20) -> Histogram:
    """Count the finite values of an array of any shape in equal bins, as `np.histogram` does.

    Whole numbers in a small range get one bin each, centred on the number. If all values are equal, there is one bin of
    width 1; without values there are no bins.
    """
    flat = np.asarray(values).reshape(-1)
    flat = flat.astype(np.uint8) if flat.dtype.kind == "b" else flat
    finite = flat[np.isfinite(flat)]
    if not len(finite):
        return Histogram(np.zeros(0), np.zeros(0), labels)
    low, high = finite.min(), finite.max()
    if flat.dtype.kind in "iub" and int(high) - int(low) < bins:
        edges = np.arange(int(low), int(high) + 2) - 0.5
        return Histogram(np.bincount((finite - low).astype(np.int64)), edges, labels)
    if low == high:
        value = float(low)
        return Histogram(np.array([len(finite)]), np.array([value - 0.5, value + 0.5]), labels)
    # Values are scaled by a power of two, which is exact, because the range could overflow float64.
    finite = finite.astype(np.float64)
    power = 2 if max(abs(float(low)), abs(float(high))) > _HALVED_ABOVE else 0
    scaled = np.ldexp(finite, -power)
    try:
        counts, edges = np.histogram(scaled, bins=bins)
    except ValueError:  # fewer floats lie between the extremes than there are bins
        counts, edges = np.array([len(scaled)]), np.array([scaled.min(), scaled.max()])
    return Histogram(counts, np.ldexp(edges, power), labels)


def description(chart: Chart) -> str:
    """Describe a chart in words and numbers, for readers who cannot see it."""
    if chart.labels.description:
        return chart.labels.description
    if isinstance(chart, Histogram):
        return _of_histogram(chart)
    if isinstance(chart, Lines):
        return _listed(f"{shortened(one.name, _LONGEST_DESCRIBED)}: {_range(one.y)}" for one in chart.series)
    if isinstance(chart, Bars):
        return _listed(
            f"{shortened(name, _LONGEST_DESCRIBED)}: {shown(value)}"
            for name, value in zip(chart.names, chart.values, strict=True)
        )
    rows, columns = chart.matrix.shape
    return f"{rows} rows by {columns} columns; {_range(chart.matrix)}"


def _of_histogram(chart: Histogram) -> str:
    if not chart.counts.sum():
        return "no values"
    top = int(chart.counts.argmax())
    sums = f"{counted(int(chart.counts.sum()), 'value')} in {counted(len(chart.counts), 'bin')}"
    first, last, low, high = (shown(chart.edges[place]) for place in (0, -1, top, top + 1))
    return f"{sums} from {first} to {last}; most, {shown(chart.counts[top])}, are from {low} to {high}"


def _range(values: Array) -> str:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return "no values"
    apart = values.size - finite.size
    note = f", {apart:,} not finite" if apart else ""
    return f"{counted(finite.size, 'value')} from {shown(finite.min())} to {shown(finite.max())}{note}"


def _listed(parts: Iterable[str]) -> str:
    every = list(parts)
    more = f"; and {len(every) - _NAMED} more" if len(every) > _NAMED else ""
    return "; ".join(every[:_NAMED]) + more if every else "no values"


def shown(value: float) -> str:
    """Format a number to four significant digits; whole numbers in full."""
    if np.isnan(value):
        return "NaN"
    return f"{value:,.0f}" if abs(value) < 1e9 and value == round(value) else f"{value:.4g}"


def readable(text: str) -> str:
    """Escape control characters and lone surrogates, which SVG, PNG and PDF cannot hold."""
    kept = clean(text).encode("utf-8", "backslashreplace").decode("utf-8")
    return kept.replace("\ufffe", "\\ufffe").replace("\uffff", "\\uffff")


def shortened(text: str, most: int) -> str:
    """Shorten a readable name to at most `most` characters by cutting out its middle."""
    text = readable(text)
    if len(text) <= most:
        return text
    end = (most - 1) // 2
    return f"{text[: most - 1 - end]}…{text[len(text) - end :]}"


def reduced(series: Series, columns: int) -> Series:
    """Reduce a line to at most five points in each of `columns` equal parts of the x axis.

    Kept are the first, last, lowest and highest point of each part. If a part is one pixel wide, the line looks the
    same as with all points (Jugel et al., "M4: A Visualization-Oriented Time Series Data Aggregation", 2014). The
    first point that is not finite is kept, too, so that the line keeps its gap. A line with at most four points per
    part is returned unchanged.
    """
    known = np.isfinite(series.x)
    x, y = series.x[known], series.y[known]
    if len(x) <= 4 * columns:
        return series if known.all() else Series(series.name, x, y)
    span = x[-1] / 2 - x[0] / 2  # halved, because x[-1] - x[0] could overflow
    part = np.zeros(len(x), np.int64) if span <= 0 else ((x / 2 - x[0] / 2) / span * columns).astype(np.int64)
    part = np.minimum(part, columns - 1)
    starts = np.flatnonzero(np.r_[True, part[1:] != part[:-1]])
    kept = np.unique(np.concatenate([starts, np.r_[starts[1:], len(x)] - 1, *_extremes(y, starts)]))
    return Series(series.name, x[kept], y[kept])


def _extremes(y: Array, starts: Array) -> list[Array]:
    """Return the indices of each part's first lowest, first highest and first non-finite value, if it has one."""
    finite = np.isfinite(y)
    lengths = np.diff(np.r_[starts, len(y)])
    found = []
    for reduce, other in ((np.minimum, np.inf), (np.maximum, -np.inf)):
        best = np.repeat(reduce.reduceat(np.where(finite, y, other), starts), lengths)
        found.append(_first_of_parts(finite & (y == best), starts))
    return [*found, _first_of_parts(~finite, starts)]


def _first_of_parts(chosen: Array, starts: Array) -> Array:
    places = np.flatnonzero(chosen)
    parts = np.searchsorted(starts, places, side="right")
    first: Array = places[np.r_[True, parts[1:] != parts[:-1]]] if len(places) else places
    return first


_SVG = "http://www.w3.org/2000/svg"
_FONT = re.compile(r"(?P<size>[\d.]+)px.*")
_NUMBER = re.compile(r"-?\d+\.\d+")
_INSIDE = re.compile(r"url\(#(?P<id>[^)]+)\)")
_MEASURED = frozenset({"d", "x", "y", "width", "height", "transform", "font-size", "stroke-width", "stroke-dasharray"})
_LONG = 2000  # characters of an attribute from which numbers are rounded to tenths
_LEFT_OUT = frozenset({"metadata", "style"})
_NOT_TURNED = re.compile(r"rotate\(-?0 [^)]*\)")
_DEFAULTS = {"stroke-linejoin": "round", "stroke-dashoffset": "0"}


def page_svg(drawn: bytes, name: str, title: str, description: str, colours: Mapping[str, str]) -> str:
    """Turn matplotlib's SVG into an element for a page; ids get the prefix `name`, colours are mapped by `colours`."""
    root = _plain(ElementTree.fromstring(drawn))
    size = root.attrib["viewBox"].split()
    attributes = {
        "xmlns": _SVG,
        "class": "chart",
        "viewBox": root.attrib["viewBox"],
        "width": size[2],
        "height": size[3],
        "role": "img",
        "aria-labelledby": f"{name}-title {name}-desc",
        "font-family": "var(--chart-font, inherit)",
        "stroke-linejoin": "round",
    }
    page = ElementTree.Element("svg", attributes)
    for tag, text in (("title", title), ("desc", description)):
        ElementTree.SubElement(page, tag, id=f"{name}-{tag}").text = readable(text)
    page.extend(_children(root, colours))
    _rename(page, name)
    return ElementTree.tostring(page, encoding="unicode")


def file_svg(drawn: bytes, title: str, description: str) -> bytes:
    """Turn matplotlib's SVG into a file with its own colours, a generic font, and a title."""
    text = page_svg(drawn, "chart", title, description, {}).replace("var(--chart-font, inherit)", "sans-serif")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'.encode()


def _plain(element: ElementTree.Element) -> ElementTree.Element:
    """Return a copy of an element without XML namespaces."""
    for one in element.iter():
        one.tag = one.tag.rpartition("}")[2]
        one.attrib = {key.rpartition("}")[2]: value for key, value in one.attrib.items()}
    return element


def _children(element: ElementTree.Element, colours: Mapping[str, str]) -> list[ElementTree.Element]:
    """Return the children of an element; groups without attributes are replaced by their content."""
    found: list[ElementTree.Element] = []
    for child in element:
        if child.tag in _LEFT_OUT:
            continue
        inner = _children(child, colours)
        attributes = _attributes(child, colours)
        if child.tag in {"g", "defs"}:
            attributes.pop("id", None)
            if not inner or (child.tag == "g" and not attributes):
                found += inner
                continue
        copy = ElementTree.Element(child.tag, attributes)
        copy.text = readable(child.text) if child.tag == "text" and child.text else None
        copy.extend(inner)
        found.append(copy)
    return found


def _attributes(element: ElementTree.Element, colours: Mapping[str, str]) -> dict[str, str]:
    given = dict(element.attrib)
    for part in filter(None, given.pop("style", "").split(";")):
        key, _, value = (word.strip() for word in part.partition(":"))
        if key == "font" and (font := _FONT.search(value)):
            key, value = "font-size", font["size"]
        if key != "font-family" and _DEFAULTS.get(key) != value:
            given[key] = colours.get(value, value.removesuffix("px") if key == "font-size" else value)
    if "transform" in given and _NOT_TURNED.fullmatch(given["transform"]):
        del given["transform"]
    return {key: _rounded(" ".join(value.split())) if key in _MEASURED else value for key, value in given.items()}


def _rounded(text: str) -> str:
    """Round the numbers in an attribute to hundredths of a pixel, in a long one to tenths."""
    places = 2 if len(text) < _LONG else 1
    return _NUMBER.sub(lambda found: f"{round(float(found[0]), places) + 0.0:g}", text)


def _rename(page: ElementTree.Element, name: str) -> None:
    """Renumber the ids that are referred to, remove the others, and keep those that begin with `name`."""
    refers = [found["id"] for one in page.iter() for value in one.attrib.values() for found in _INSIDE.finditer(value)]
    refers += [one.attrib["href"].removeprefix("#") for one in page.iter() if "href" in one.attrib]
    known = {old: f"{name}-{number}" for number, old in enumerate(dict.fromkeys(refers))}
    for one in page.iter():
        if one.tag in {"title", "desc"}:
            continue
        if "id" in one.attrib:
            old = one.attrib.pop("id")
            one.attrib |= {"id": known[old]} if old in known else {}
        if "href" in one.attrib:
            one.attrib["href"] = f"#{known[one.attrib['href'].removeprefix('#')]}"
        if clip := _INSIDE.fullmatch(one.attrib.get("clip-path", "")):
            one.attrib["clip-path"] = f"url(#{known[clip['id']]})"


class Colour(NamedTuple):
    """A colour on a light page and on a dark one."""

    light: str
    dark: str


COLOURS: Mapping[str, Colour] = MappingProxyType(
    {
        "ink": Colour("#1f2328", "#e6edf3"),
        "muted": Colour("#59636e", "#9da7b1"),
        "grid": Colour("#d9dee3", "#30363d"),
        "paper": Colour("#ffffff", "#0d1117"),
        "1": Colour("#0969da", "#58a6ff"),
        "2": Colour("#bc4c00", "#f0883e"),
        "3": Colour("#1a7f37", "#3fb950"),
        "4": Colour("#8250df", "#bc8cff"),
        "5": Colour("#bf3989", "#f778ba"),
        "6": Colour("#7a6400", "#d4b72c"),
        "above": Colour("#0a6adb", "#59a7ff"),
        "below": Colour("#bd4d01", "#f1893f"),
    }
)
"""The colours of charts; a page sets them as `--chart-NAME`. No two names have the same value."""

SUFFIXES = (".svg", ".png", ".pdf")
"""Suffixes of the files that charts can be saved to."""

_SERIES = tuple(name for name in COLOURS if name.isdigit())
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))  # tell lines apart without colours
_IN_PAGE = {
    colour.light: f"var(--chart-{name}, {'Canvas' if name == 'paper' else 'currentColor'})"
    for name, colour in COLOURS.items()
}
_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rbtool",
    "pdf.fonttype": 42,
    "text.parse_math": False,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor", "axes.labelcolor"), COLOURS["muted"].light),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), COLOURS["grid"].light),
    **dict.fromkeys(("axes.titlecolor", "text.color", "legend.labelcolor"), COLOURS["ink"].light),
}
_DOTS = 2  # pixels of a PNG per unit of size
_LONGEST = 36  # most characters of a name at an axis or in a legend
_FEW = 60  # up to so many bins or points can be told apart
_WIDTH, _HEIGHT, _ROW = 560, 240, 22
_HUGE = 150  # larger powers of ten are scaled down: matplotlib squares numbers


def style_sheet() -> str:
    """Return the CSS that sets the colours of charts, for light and dark mode."""

    def rule(shades: dict[str, str]) -> str:
        return ":root{" + "".join(f"--chart-{name}:{shade};" for name, shade in shades.items()) + "}"

    light, dark = ({name: getattr(colour, page) for name, colour in COLOURS.items()} for page in ("light", "dark"))
    return f"{rule(light)}\n@media (prefers-color-scheme:dark){{{rule(dark)}}}\n.chart{{max-width:100%;height:auto}}\n"


def inline_svg(chart: Chart, *, name: str = "", width: int = _WIDTH, height: int | None = None) -> str:
    """Draw a chart as an `<svg>` element for a page, with a title and a description for screen readers.

    Colours are `var(--chart-…)`, see `COLOURS` and `style_sheet`.

    Args:
        chart: what to draw.
        name: prefix of all ids in the element; by default derived from the content, so that different charts differ.
        width: in CSS pixels.
        height: in CSS pixels; by default as much as the chart needs.

    Raises:
        UsageError: matplotlib is not installed.
    """
    drawn = _drawn([chart], "svg", "", width, [height or _height(chart)])
    name = name or f"chart-{hashlib.sha256(drawn).hexdigest()[:12]}"
    return page_svg(drawn, re.sub(r"[^\w-]", "-", name), chart.labels.title, description(chart), _IN_PAGE)


def file_bytes(charts: Sequence[Chart], suffix: str, *, title: str = "", width: int = 800) -> bytes:
    """Draw charts below each other, and return the content of the file.

    Args:
        charts: what to draw.
        suffix: the kind of file, one of `SUFFIXES`.
        title: the title of the file.
        width: in CSS pixels.

    Raises:
        UsageError: the suffix is unknown, or matplotlib is not installed.
    """
    if suffix not in SUFFIXES:
        raise UsageError(f"the suffix is {suffix or 'missing'}, expected one of {', '.join(SUFFIXES)}")
    drawn = _drawn(charts, suffix[1:], title, width, [_height(chart) for chart in charts])
    if suffix != ".svg":
        return drawn
    words = [f"{chart.labels.title}: {description(chart)}" for chart in charts]
    return file_svg(drawn, title or charts[0].labels.title, ". ".join(words))


def _height(chart: Chart) -> int:
    if isinstance(chart, Bars):
        return 70 + _ROW * max(1, len(chart.names))
    return 130 + _ROW * max(1, len(chart.row_names)) if isinstance(chart, Heatmap) else _HEIGHT


def _drawn(charts: Sequence[Chart], form: str, title: str, width: int, heights: Sequence[int]) -> bytes:
    """Return the file that matplotlib writes; sizes are in CSS pixels."""
    with _matplotlib() as figure_class:
        size = (width / 72, (sum(heights) + (30 if title else 0)) / 72)
        figure = figure_class(figsize=size, layout="constrained", facecolor=COLOURS["paper"].light)
        figure.patch.set_visible(form != "svg" or bool(title))
        if title:
            figure.suptitle(shortened(title, width // 8), x=0.01, ha="left", fontsize=13)
        for axes, chart in zip(
            figure.subplots(len(charts), 1, squeeze=False, height_ratios=heights)[:, 0], charts, strict=True
        ):
            axes.set_facecolor("none")
            axes.set_title(shortened(chart.labels.title, width // 7))
            axes.set_xlabel(shortened(chart.labels.x, width // 8))
            axes.set_ylabel(shortened(chart.labels.y, 40))
            _DRAW[type(chart)](axes, chart, width)
        file = io.BytesIO()
        nothing = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
        figure.savefig(file, format=form, dpi=72 * _DOTS if form == "png" else 72, metadata=nothing)
    return file.getvalue()


def require_matplotlib() -> tuple[Any, Callable[..., Any]]:
    """Import matplotlib, and return it and its class of figures; UsageError if it is not installed."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise not_installed("charts need matplotlib", "plot", error) from error
    return matplotlib, Figure


@contextmanager
def _matplotlib() -> Iterator[Callable[..., Any]]:
    """Yield the class of figures under fixed settings; warnings about letters missing in a font are suppressed."""
    matplotlib, figure_class = require_matplotlib()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain: Any = {key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith("backend")}
        with matplotlib.rc_context(plain | _SETTINGS):
            yield figure_class


def _draw_lines(axes: Any, chart: Lines, width: int) -> None:
    _grid(axes)
    series = [reduced(one, width) for one in chart.series]
    x_power, y_power = _power(*(one.x for one in series)), _power(*(one.y for one in series))
    seen = False
    for place, one in enumerate(series):
        finite = np.isfinite(one.y)
        x, y = one.x / 10.0**x_power, np.where(finite, one.y, np.nan) / 10.0**y_power
        style = {
            "color": COLOURS[_SERIES[place % len(_SERIES)]].light,
            "linestyle": _DASHES[place // len(_SERIES) % len(_DASHES)],
        }
        seen |= bool(finite.any())
        axes.plot(x, y, linewidth=1.3, label=shortened(one.name, _LONGEST), **style)
        alone = finite & ~np.r_[False, finite[:-1]] & ~np.r_[finite[1:], False]
        dots = finite if len(x) <= _FEW else alone
        axes.plot(x[dots], y[dots], linestyle="none", marker="o", markersize=2.5, color=style["color"])
    for axis, power, values in ((axes.xaxis, x_power, "x"), (axes.yaxis, y_power, "y")):
        whole = all(_are_whole(getattr(one, values)) for one in series)
        axis.get_major_locator().set_params(integer=whole and not power)
        _scale(axis, power)
    if not seen:
        _nothing(axes)
    elif len(series) > 1:
        columns = max(1, width // 150)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0)
        axes.set_title(axes.get_title(loc="left"), pad=6 + 14 * math.ceil(len(series) / columns))


def _draw_histogram(axes: Any, chart: Histogram, width: int) -> None:
    _grid(axes, "y")
    if not chart.counts.sum():
        _nothing(axes)
        return
    power = _power(chart.edges)
    edges = chart.edges / 10.0**power
    if edges[0] == edges[-1]:  # all values are equal: give the bin a width
        half = max(abs(edges[0]), 1.0) / 2
        edges = np.linspace(edges[0] - half, edges[0] + half, len(edges))
    line = COLOURS["paper"].light if len(chart.counts) <= _FEW else "none"
    axes.bar(
        edges[:-1], chart.counts, np.diff(edges), align="edge", color=COLOURS["1"].light, edgecolor=line, linewidth=0.8
    )
    axes.yaxis.get_major_locator().set_params(integer=True)
    _scale(axes.xaxis, power)


def _draw_bars(axes: Any, chart: Bars, width: int) -> None:
    _grid(axes, "x")
    power = _power(chart.values)
    values = np.where(np.isfinite(chart.values), chart.values, np.nan) / 10.0**power
    if not np.isfinite(values).any():
        _nothing(axes)
        return
    places = np.arange(len(values))
    colours = [COLOURS["below" if value < 0 else "above"].light for value in values]
    axes.barh(places, values, color=colours, height=0.7)
    for place, value in zip(places, values, strict=True):
        end = max(value, 0.0) if np.isfinite(value) else 0.0  # a label left of a negative bar would cover the names
        label = axes.annotate(
            shown(chart.values[place]), (end, place), (3, 0), textcoords="offset points", ha="left", va="center",
            fontsize=9,
        )  # fmt: skip
        label.set_in_layout(False)
    axes.margins(x=0.25)  # room for the labels
    axes.set_yticks(places, [shortened(name, _LONGEST) for name in chart.names])
    axes.set_ylim(len(values) - 0.4, -0.6)
    _scale(axes.xaxis, power)


def _draw_heatmap(axes: Any, chart: Heatmap, width: int) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle

    finite = np.isfinite(chart.matrix)
    if not chart.matrix.size:
        _nothing(axes)
        return
    top = chart.limit or float(np.abs(chart.matrix[finite]).max(initial=0.0)) or 1.0
    strength = np.clip(np.where(finite, chart.matrix, 0.0) / top, -1, 1)
    cells = [(row, column) for row in range(chart.matrix.shape[0]) for column in range(chart.matrix.shape[1])]
    colours = [
        to_rgba(COLOURS["below" if strength[cell] < 0 else "above"].light, round(abs(float(strength[cell])), 3))
        for cell in cells
    ]
    shapes = [Rectangle((column - 0.5, row - 0.5), 1, 1) for row, column in cells]
    axes.add_collection(
        PatchCollection(shapes, facecolor=colours, edgecolor=COLOURS["grid"].light, linewidth=0.5, antialiased=False)
    )
    rows, columns = chart.matrix.shape
    if columns * 44 <= width - 8 * _LONGEST // 2:
        for cell in cells:
            ink = COLOURS["paper" if abs(strength[cell]) > 0.6 else "ink"].light
            axes.text(cell[1], cell[0], shown(chart.matrix[cell]), ha="center", va="center",
                      color=ink, fontsize=8)  # fmt: skip
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
    axes.set_xticks(range(columns), [shortened(name, _LONGEST // 2) for name in chart.column_names], rotation=45,
                    ha="right", rotation_mode="anchor")  # fmt: skip
    axes.set_yticks(range(rows), [shortened(name, _LONGEST) for name in chart.row_names])
    axes.spines[:].set_visible(False)


_DRAW: Mapping[type, Callable[[Any, Any, int], None]] = {
    Lines: _draw_lines, Histogram: _draw_histogram, Bars: _draw_bars, Heatmap: _draw_heatmap,
}  # fmt: skip


def _grid(axes: Any, which: str = "both") -> None:
    axes.grid(axis=which, linewidth=0.6)


def _nothing(axes: Any) -> None:
    """Draw a note that there are no data."""
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", va="center", color=COLOURS["muted"].light)


def _are_whole(values: Array) -> bool:
    finite = values[np.isfinite(values)]
    return bool((finite == np.rint(finite)).all())


def _power(*values: Array) -> int:
    """Return the power of ten that numbers are divided by before they are drawn; 0 unless they are huge."""
    top = max((float(np.abs(one[np.isfinite(one)]).max(initial=0.0)) for one in values), default=0.0)
    exponent = math.floor(math.log10(top)) if top else 0
    return exponent if exponent > _HUGE else 0


def _scale(axis: Any, power: int) -> None:
    """Label the ticks of an axis whose numbers were divided by a power of ten."""
    if power:
        axis.set_major_formatter(lambda value, _: f"{value:.3g}e{power}" if value else "0")
