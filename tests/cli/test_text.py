"""Numbers, sizes, sparklines and columns as text."""

from __future__ import annotations

import json
import math

from cases import each
from hypothesis import example, given
from hypothesis import strategies as st

from rbtool.cli.text import (
    Styled,
    Table,
    amount,
    clean_bytes,
    clean_json,
    clean_lines,
    folded,
    number,
    sparkline,
    vector,
    width_of,
)
from rbtool.core.format.manifest import space_text
from rbtool.core.progress import clean, counted
from rbtool.core.progress import readable_size as size

CELLS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@each(
    ("value", "text"),
    [
        (0, "0"), (1234567, "1,234,567"), (True, "true"), (0.0, "0"), (-1.0, "-1"), (0.031, "0.031"), (3.14159, "3.14"),
        (268.16, "268.2"), (2880.4, "2,880"), (1e12, "1.00e+12"), (2.5e-7, "2.50e-07"), (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)  # fmt: skip
def test_numbers_have_separators_and_four_figures(value, text):
    assert number(value) == text


@given(st.floats(-1e300, 1e300))
def test_numbers_keep_at_least_two_figures(value):
    assert math.isclose(float(number(value).replace(",", "")), value, rel_tol=0.05)


@each(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (5_400_000, "5.4 MB"), (999_960, "1.0 MB"), (3.2e15, "3200 TB")],
)
def test_sizes_have_decimal_units(count, text):
    assert size(count) == text


def test_counts_have_separators_and_plurals():
    assert [counted(1, "step"), counted(6704, "step"), counted(0, "step")] == ["1 step", "6,704 steps", "0 steps"]
    assert [amount(6704, "steps"), amount(12_100_000, "bytes")] == ["6,704 steps", "12.1 MB"]


@each(("histogram", "line"), [((0, 1, 7, 14), " ▁▄█"), ((0, 0), "  "), ((), ""), ((3, 3), "██"), ((1, 10**6), "▁█")])
def test_a_sparkline_has_a_block_for_each_bin(histogram, line):
    assert sparkline(histogram) == line


@each(
    ("value", "text"),
    [
        ([0.25, -1.0], "[ 0.250 -1.000]"), ([1, 2, 3, 4], "[1 2 3 4]"), ([[1, 2], [3, 4], [5, 6]], "[1 2 3 … of 6]"),
        ([1234.5, 0.5], "[ 1234.5  0.5]"), ([True, False], "[true false]"), ([], "[]"), (7, "7"), ("go", "go"),
        ({"shape": [8, 8, 3], "min": 0, "max": 255, "mean": 127.26}, "8×8×3 of 0 … 255, mean 127.3"),
    ],
)  # fmt: skip
def test_values_of_a_leaf_are_short(value, text):
    assert vector(value) == text


def plain(line):
    """The text of a line of cells."""
    return "".join(cell.text if isinstance(cell, Styled) else cell for cell in line)


@example([[" ", ""]])
@given(st.lists(st.lists(CELLS, min_size=1, max_size=4), min_size=1, max_size=5))
def test_a_table_keeps_all_words_and_ends_no_line_with_blanks(rows):
    for row, line in zip(rows, Table(rows).lines(), strict=True):
        text = plain(line)
        assert text.split() == " ".join(map(clean, row)).split()
        last = next((cell for cell in map(clean, reversed(row)) if cell), "")
        assert not text.endswith(" ") or last.endswith(" ")


def test_columns_are_aligned_by_display_width() -> None:
    lines = Table([["日本", "x"], ["ab", "y"], ["abcdef", "z"]]).lines()
    assert [*map(plain, lines)] == ["日本    x", "ab      y", "abcdef  z"]
    lines = folded(["TED013  digests  ", "d/observation.memmap was changed"], 24, 4)
    assert "".join(cell.text for cell in lines[0] if isinstance(cell, Styled)) == "TED013  digests"


@each(
    ("width", "shown"),
    [
        (None, ["next.reward  float64  8 B  1  …  2", "x            bool     1 B"]),
        (34, ["next.reward  float64  8 B  1  …  2", "x            bool     1 B"]),
        (33, ["next.reward  float64  8 B", "    1  …  2", "x            bool     1 B"]),
        (20, ["next.reward  float64", "    8 B  1  …  2", "x            bool", "    1 B"]),
        (12, ["next.reward", "    float64", "    8 B", "    1  …  2", "x", "    bool", "    1 B"]),
    ],
)
def test_columns_without_room_continue_below(width, shown):
    rows = [["next.reward", "float64", "8 B", "1", "…", "2"], ["x", "bool", "1 B", "", "", ""]]
    table = Table(rows, right=frozenset({2}), glued=frozenset({4, 5}))
    assert [*map(plain, table.lines(width))] == shown


@given(st.lists(st.lists(CELLS, min_size=1, max_size=5), min_size=1, max_size=4), st.integers(1, 60))
def test_a_narrow_table_keeps_everything(rows, width):
    texts = [*map(plain, Table(rows).lines(width))]
    assert "".join("".join(texts).split()) == "".join("".join(clean(cell) for row in rows for cell in row).split())


@each(
    ("width", "shown"),
    [
        (None, ["ends     3 ends · 12 made · 1 cut   292 kB"]),
        (42, ["ends     3 ends · 12 made · 1 cut   292 kB"]),
        (41, ["ends     3 ends · 12 made · 1 cut", "         292 kB"]),
        (30, ["ends     3 ends · 12 made ·", "         1 cut   292 kB"]),
        (20, ["ends     3 ends ·", "         12 made ·", "         1 cut", "         292 kB"]),
    ],
)
def test_a_long_line_is_broken_between_its_parts(width, shown):
    lines = folded([Styled("ends     ", "dim"), "3 ends · 12 made · 1 cut   292 kB"], width, 9)
    assert [*map(plain, lines)] == shown
    assert lines[0][0] == Styled("ends     ", "dim")


@given(st.lists(CELLS, max_size=6), st.integers(1, 40), st.integers(0, 6))
def test_a_broken_line_keeps_every_word(cells, width, indent):
    lines = folded(cells, width, indent)
    texts = [*map(plain, lines)]
    assert "".join(" ".join(texts).split()) == "".join("".join(map(clean, cells)).split())
    assert all(width_of(text) <= width or " " not in text[indent:].strip() for text in texts[1:])


@each(
    ("text", "shown"),
    [
        ("a\x1b[31mb", r"a\x1b[31mb"), ("a\nb", r"a\nb"), ("é ✓", "é ✓"), ("\x9b", r"\x9b"),
        ("a\u202eb", r"a\u202eb"), ("a\u2067b\u200b", r"a\u2067b\u200b"), ("\U000e0041", r"\U000e0041"),
        ("\N{WOMAN}\u200d\N{ROCKET}", "\N{WOMAN}\u200d\N{ROCKET}"),
    ],
)  # fmt: skip
def test_control_characters_are_escaped(text, shown):
    assert clean(text) == shown
    assert json.loads(clean_json(json.dumps(text, ensure_ascii=False))) == text
    assert clean_json(json.dumps(text, ensure_ascii=False)).count("\\") == shown.count("\\") * (1 + ("U" in shown))


def test_bytes_and_line_breaks_are_escaped():
    assert clean_bytes("caf\udce9 \udc9b31m é") == r"caf\xe9 \x9b31m é"
    assert clean_lines("a\n\x1bb\n") == "a\n\\x1bb\n"


def _box(low, high, dtype="float64"):
    return {
        "type": "Box", "dtype": dtype, "shape": [len(low)] if isinstance(low, list) else [], "low": low, "high": high,
    }  # fmt: skip


@each(
    ("space", "text"),
    [
        (_box([-1, -1], [1, 1], "float32"), "Box(2) float32 [-1, 1]"),
        (_box(["-inf"], ["inf"]), "Box(1) float64 unbounded"),
        (_box([-1, -2], [1, 1]), "Box(2) float64 within [-2, 1]"),
        (_box(["-inf", -2], ["inf", 1]), "Box(2) float64 bounded in part"),
        (_box(0, 1), "Box() float64 [0, 1]"),
        ({"type": "Discrete", "dtype": "int64", "start": 0, "n": 4}, "Discrete(4)"),
        ({"type": "Discrete", "dtype": "int64", "start": 2, "n": 5}, "Discrete(5, start 2)"),
        ({"type": "MultiDiscrete", "nvec": [3, 4], "start": [0, 0]}, "MultiDiscrete([3, 4])"),
        ({"type": "MultiBinary", "n": [2, 2]}, "MultiBinary([2, 2])"),
        ({"type": "Text", "max_length": 9, "min_length": 1, "charset": "ab"}, "Text(max_length 9, min_length 1)"),
        ({"type": "Dict", "subspaces": {"a": _box(0, 1)}}, "Dict(a: Box() float64 [0, 1])"),
        ({"type": "Tuple", "subspaces": [{"type": "MultiBinary", "n": 3}, _box(0, 1)]},
         "Tuple(MultiBinary(3), Box() float64 [0, 1])"),
    ],
)  # fmt: skip
def test_spaces_have_a_short_text(space, text):
    assert space_text(space) == text
