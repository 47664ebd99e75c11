"""Numbers as a page shows them: rounded for people, exact for programs."""

from __future__ import annotations

from ..charts.marks import shown as rounded
from .html import Html, element


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
