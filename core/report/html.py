"""Elements of the page as HTML, escaped, and numbers: rounded for people, exact for programs."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TypeAlias

from ..charts.marks import readable
from ..charts.marks import shown as rounded


class Html(str):
    """Markup: what `element` and `joined` return, and nothing that comes from a dataset."""

    __slots__ = ()


Child: TypeAlias = str | None
_VOID = frozenset({"br", "col", "img", "input", "line", "meta", "path", "polyline"})


def text(value: str) -> Html:
    """Escape a text; control characters, and those that turn the direction of writing, become visible."""
    return value if isinstance(value, Html) else Html(html.escape(readable(value)))


def joined(children: Iterable[Child], between: str = "") -> Html:
    """Join markup and texts, which are escaped."""
    return Html(text(between).join(text(child) for child in children if child is not None))


def element(tag: str, *children: Child, **attributes: str | float | bool | None) -> Html:
    """Write an element. Attributes are escaped; `class_` is `class`, and `_` becomes `-`.

    True is an attribute without a value; False and None leave it out.
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
    """Write a table that scrolls by itself where the page is too narrow; the first cell of a row is its head."""

    def cells(row: Iterable[Child]) -> Iterable[Html]:
        for place, cell in enumerate(row):
            yield element("th", cell, scope="row") if row_heads and not place else element("td", cell)

    head = element("thead", element("tr", *(element("th", one, scope="col") for one in heads)))
    body = element("tbody", *(element("tr", *cells(row)) for row in rows))
    inner = element("table", element("caption", label, class_="unseen"), head, body, class_=class_ or None)
    return element("div", inner, class_="scroll", tabindex=0, role="region", aria_label=label)


def shown(value: float | None) -> str:
    """Write whole numbers in full up to nine digits, others with four digits; a dash for None."""
    return "–" if value is None else rounded(value)


def number(value: float | None) -> Html | str:
    """Write a number with its exact value for programs, where that is longer."""
    short = shown(value)
    return short if value is None or repr(value) == short else element("data", short, value=repr(value))


def share(part: int, whole: int) -> str:
    """Write a share in per cent: neither 0 % of something nor 100 % of not all."""
    if not whole:
        return "–"
    percent = 100 * part / whole
    if part and percent < 0.1:
        return "< 0.1 %"
    if part < whole and percent > 99.9:
        return "> 99.9 %"
    return f"{percent:.1f} %".replace(".0 %", " %")
