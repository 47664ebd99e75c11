"""Text formatting: numbers, sizes, sparklines, aligned tables and wrapped lines."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

from ..core.progress import CONTROL, clean, counted
from ..core.progress import readable_size as size

Style: TypeAlias = Literal["", "bold", "dim", "red", "green", "yellow", "cyan"]

_BLOCKS = "▁▂▃▄▅▆▇█"
_RAW_BYTE = re.compile(r"[\udc80-\udcff]")  # surrogate escapes of file names that are not UTF-8
_SHOWN = 3
_LISTED = 10
_GAP = "  "


class Styled(NamedTuple):
    """Text and its style, which applies if colours are enabled."""

    text: str
    style: Style = ""


Cell: TypeAlias = str | Styled
Line: TypeAlias = Sequence[Cell]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with aligned columns. `right` are right-aligned columns, `glued` ones that stay with the previous column.

    On a narrow screen each row becomes a block: columns without room continue in indented lines below, also aligned.
    Nothing is left out or cut.
    """

    rows: Sequence[Line]
    right: frozenset[int] = frozenset()
    glued: frozenset[int] = frozenset()
    indent: int = 4

    def lines(self, width: int | None = None) -> list[list[Cell]]:
        """Format the rows for `width` columns; one line each if that is None."""
        return [line for block in self.blocks(width) for line in block]

    def blocks(self, width: int | None = None) -> list[list[list[Cell]]]:
        """Format the rows; return the lines of each."""
        wide = self._widths()
        spans = self._spans(wide, width)
        return [self._block(row, wide, spans, width) for row in self.rows]

    @property
    def width(self) -> int:
        """The columns of the screen that the table needs."""
        wide = self._widths()
        return sum(wide) + len(_GAP) * (len(wide) - 1)

    def _widths(self) -> list[int]:
        columns = max((len(row) for row in self.rows), default=0)
        return [max(width_of(row[n]) for row in self.rows if n < len(row)) for n in range(columns)]

    def _spans(self, wide: Sequence[int], width: int | None) -> list[range]:
        """Return the range of columns of each line of a block."""
        starts = [0]
        for column in range(1, len(wide)):
            end = next((n for n in range(column + 1, len(wide)) if n not in self.glued), len(wide))
            first, indent = starts[-1], self.indent if len(starts) > 1 else 0
            taken = indent + sum(wide[first:end]) + len(_GAP) * (end - first - 1)
            if column not in self.glued and taken > (width or math.inf):
                starts.append(column)
        return [range(*pair) for pair in pairwise([*starts, len(wide)])]

    def _block(self, row: Line, wide: Sequence[int], spans: Sequence[range], width: int | None) -> list[list[Cell]]:
        lines: list[list[Cell]] = []
        for span in spans:
            cells = row[span.start : span.stop]
            if lines and not any(map(_cleaned, cells)):
                continue
            line = self._line(cells, wide[span.start : span.stop], span.start)
            lines += folded([" " * self.indent, *line] if lines else line, width, self.indent)
        return lines

    def _line(self, row: Line, wide: Sequence[int], first: int) -> list[Cell]:
        line: list[Cell] = []
        for column, cell in enumerate(row):
            text, style = cell if isinstance(cell, Styled) else (cell, "")
            text = clean(text)
            blank = " " * (wide[column] - width_of(text))
            last = not any(map(_cleaned, row[column + 1 :]))
            padded = blank + text if first + column in self.right else text if last else text + blank
            line += [Styled(padded, style), *([] if last else [_GAP])]  # type: ignore[arg-type]
            if last:
                break
        return line


def clean_lines(text: str) -> str:
    """Make control characters visible in text of several lines, such as a traceback."""
    return "\n".join(map(clean, text.split("\n")))


def clean_bytes(text: str) -> str:
    """Make undecodable bytes visible: a terminal can read one as the start of an escape sequence."""
    return _RAW_BYTE.sub(lambda found: f"\\x{ord(found[0]) - 0xDC00:02x}", text)


def clean_json(text: str) -> str:
    """Escape control characters in a JSON document; outside of strings it has none but line ends."""
    return "\n".join(CONTROL.sub(lambda found: json.dumps(found[0])[1:-1], line) for line in text.split("\n"))


def width_of(cell: Cell) -> int:
    """Return the columns of a text on the screen: two for wide characters, none for combining ones."""
    text = _cleaned(cell)
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # pages of help need no rich

    return cell_len(text)


def _cleaned(cell: Cell) -> str:
    return clean(cell.text if isinstance(cell, Styled) else cell)


def folded(line: Line, width: int | None, indent: int) -> list[list[Cell]]:
    """Wrap a line at `width` columns between its parts, else between words; continuation lines are indented."""
    cells = [cell if isinstance(cell, Styled) else Styled(cell) for cell in line]
    letters = [Styled(letter, cell.style) for cell in cells for letter in clean(cell.text)]
    lines: list[list[Cell]] = []
    text = "".join(letter.text for letter in letters)
    room = width or width_of(text)
    while width_of(text) > room and (cut := _break(text, room, 0 if lines else indent)):
        lines.append([*([" " * indent] if lines else []), *_joined(letters[: len(text[:cut].rstrip(" "))])])
        rest = text[cut:].lstrip(" ")
        letters, text, room = letters[len(text) - len(rest) :], rest, max(1, (width or 0) - indent)
    return [*lines, [*([" " * indent] if lines else []), *_joined(letters)]]


TITLE = 9
"""The width, in columns, of a title in front of its text."""


def titled(title: str, text: str, width: int | None, style: Style = "dim") -> list[list[Cell]]:
    """Wrap a text behind its title; continuation lines are indented to the start of the text."""
    return folded([Styled(f"{title:<{TITLE - 1}} ", style), text], width, TITLE)


def _break(text: str, room: int, least: int) -> int:
    """Return where to wrap: after a part that ends in the last two thirds, else after a word; 0 for nowhere.

    Parts end before ` · ` and before three spaces.
    """
    fits = next((n for n in range(len(text), 0, -1) if width_of(text[:n]) <= room), 0)
    parts = [found.end() for found in re.finditer(r" ·(?= )|(?= {3})", text) if fits // 3 < found.end() <= fits]
    words = [found.start() for found in re.finditer(r"(?<! ) ", text) if found.start() > least]
    fitting = [cut for cut in parts if cut > least] or [cut for cut in words if cut <= fits]
    return max(fitting) if fitting else min(words, default=0)  # a word wider than the room is not split


def _joined(letters: Sequence[Styled]) -> list[Cell]:
    same = [(style, list(group)) for style, group in groupby(letters, key=lambda letter: letter.style)]
    return [Styled("".join(letter.text for letter in group), style) for style, group in same]


def first_of(texts: Sequence[str]) -> list[str]:
    """Return the first of many texts, then a line with the number of the others, which `--json` lists."""
    more = len(texts) - _LISTED
    return [*texts] if more <= 1 else [*texts[:_LISTED], f"and {more:,} more, which --json lists"]


def ago(seconds: float) -> str:
    """Format an age: `3 days ago`; under a minute `just now`."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"{counted(int(seconds // length), unit)} ago"
    return "just now"


def amount(count: float, unit: str) -> str:
    """Format an amount of progress: bytes as a size, other units in full."""
    return size(count) if unit == "bytes" else f"{count:,.0f} {unit.removesuffix('s') if count == 1 else unit}"


def kind_cells(dtype: str, shape: Sequence[int], role: str) -> list[Cell]:
    """Format the dtype and shape of a field; frames of kept videos are `video`, without a shape."""
    if role == "video":
        return [Styled("video", "cyan"), ""]
    return [Styled(dtype, "cyan"), f"[{', '.join(map(str, shape))}]"]


def number(value: float) -> str:
    """Format a number to about three significant digits."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) or not math.isfinite(value):
        return f"{value:,}"
    if value and not 1e-3 <= abs(value) < 1e9:
        return f"{value:.2e}"
    places = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 0.1 or not value else 4
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def vector(value: Any) -> str:
    """Format the value of one leaf at one step: numbers, the first few of many, or the range of an image."""
    if isinstance(value, dict):
        shape = "×".join(str(side) for side in value["shape"])
        return f"{shape} of {number(value['min'])} … {number(value['max'])}, mean {number(value['mean'])}"
    if isinstance(value, list):
        flat = list(_flat(value))
        few = len(flat) <= _SHOWN + 1
        shown = flat if few else flat[:_SHOWN]
        return f"[{' '.join(_alike(shown))}{'' if few else f' … of {len(flat)}'}]"
    return number(value) if isinstance(value, int | float) else str(value)


def _alike(values: Sequence[Any]) -> list[str]:
    """Format numbers with equal decimals, so that other steps align below them."""
    if not any(isinstance(value, float) for value in values):
        return [number(value) if isinstance(value, int) else str(value) for value in values]
    top = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if top >= 1e6:
        return [f"{value: .2e}" for value in values]
    return [f"{value: .{3 if top < 10 else 1}f}" for value in values]


def _flat(value: Iterable[Any]) -> Iterable[Any]:
    for item in value:
        yield from _flat(item) if isinstance(item, list) else (item,)


def sparkline(histogram: Sequence[int]) -> str:
    """Draw counts as a row of blocks; zero is blank, any other count has a block."""
    top = max(histogram, default=0)
    return "".join(_BLOCKS[math.ceil(count / top * len(_BLOCKS)) - 1] if count else " " for count in histogram)
