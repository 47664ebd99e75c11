"""HTML elements with everything escaped, and numbers: rounded for readers, exact for programs."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TypeAlias

from ..charts.marks import readable
from ..charts.marks import shown as rounded


class Html(str):
    """Markup that may be inserted unescaped: made by `element` and `joined`, never taken from a dataset."""

    __slots__ = ()


Child: TypeAlias = str | None
_VOID = frozenset({"br", "col", "img", "input", "line", "meta", "path", "polyline"})


def text(value: str) -> Html:
    """Escape a text, and make control characters and those that change the writing direction visible."""
    return value if isinstance(value, Html) else Html(html.escape(readable(value)))


def joined(children: Iterable[Child], between: str = "") -> Html:
    """Join markup and texts; texts are escaped."""
    return Html(text(between).join(text(child) for child in children if child is not None))


def element(tag: str, *children: Child, **attributes: str | float | bool | None) -> Html:
    """Return an element; attribute values are escaped.

    In attribute names `class_` stands for `class`, and `_` for `-`. The value True makes an attribute without a value;
    False and None leave the attribute out.
    """
    given = []
    for name, value in attributes.items():
        key = name.rstrip("_").replace("_", "-")
        if value is True:
            given.append(f" {key}")
        elif value is not None and value is not False:
            given.append(f' {key}="{text(str(value))}"')
    start = f"<{tag}{''.join(given)}>"
    return Html(start if tag in _VOID else f"{start}{joined(children)}</{tag}>")


def table(
    heads: Iterable[Child], rows: Iterable[Iterable[Child]], *, label: str, row_heads: bool = True, class_: str = ""
) -> Html:
    """Return a table that scrolls by itself if the page is too narrow; the first cell of a row is its heading."""

    def cells(row: Iterable[Child]) -> Iterable[Html]:
        for place, cell in enumerate(row):
            yield element("th", cell, scope="row") if row_heads and not place else element("td", cell)

    head = element("thead", element("tr", *(element("th", one, scope="col") for one in heads)))
    body = element("tbody", *(element("tr", *cells(row)) for row in rows))
    inner = element("table", element("caption", label, class_="unseen"), head, body, class_=class_ or None)
    return element("div", inner, class_="scroll", tabindex=0, role="region", aria_label=label)


def shown(value: float | None) -> str:
    """Format a number: whole numbers of up to nine digits in full, others to four digits, None as a dash."""
    return "–" if value is None else rounded(value)


def number(value: float | None) -> Html | str:
    """Return a rounded number; if rounding changed it, as a `<data>` element with the exact value."""
    short = shown(value)
    return short if value is None or repr(value) == short else element("data", short, value=repr(value))


def share(part: int, whole: int) -> str:
    """Format a share in per cent; never "0 %" if it is more than nothing, nor "100 %" if it is not all."""
    if not whole:
        return "–"
    percent = 100 * part / whole
    if part and percent < 0.1:
        return "< 0.1 %"
    if part < whole and percent > 99.9:
        return "> 99.9 %"
    return f"{percent:.1f} %".replace(".0 %", " %")
