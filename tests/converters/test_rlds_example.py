"""`Example`: lists written in every way that protobuf allows come out the same, and broken bytes are damage."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
from cases import each
from hypothesis import given
from hypothesis import strategies as st
from rlds_files import example, message, varint

from rbtool.converters.rlds import example as decoding
from rbtool.converters.rlds.example import (
    EpisodeExample,
    Example,
    ExampleParser,
    Floats,
    FoundExample,
    Ints,
    Strings,
    example_bytes,
)
from rbtool.core.errors import CorruptDataError

INT64 = np.dtype(np.int64)
UNKNOWN = (
    b"",
    varint(7 << 3) + varint(300),
    message(9, b"abc"),
    varint(8 << 3 | 5) + bytes(4),
    varint(6 << 3 | 1) + bytes(8),
)
LISTS = st.one_of(
    st.lists(st.binary(max_size=200), min_size=1, max_size=5),
    st.lists(st.floats(width=32, allow_nan=False), max_size=8).map(lambda values: np.array(values, np.float32)),
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 1), max_size=8).map(
        lambda values: np.array(values, np.int64)
    ),
)


def assert_values(found: object, expected: object) -> None:
    if isinstance(expected, list):
        assert isinstance(found, Strings)
        assert found.read(0, len(found)) == expected
        assert found.longest == max(map(len, expected))
    elif isinstance(expected, np.ndarray) and expected.dtype.kind == "f":
        assert isinstance(found, Floats)
        assert found.read(0, len(found), np.dtype(np.float32)).tobytes() == expected.tobytes()
    elif isinstance(expected, np.ndarray):
        assert isinstance(found, Ints)
        assert found.read(0, len(found), INT64).tolist() == expected.tolist()
        assert found.read(1, len(found), INT64).tolist() == expected[1:].tolist() if len(found) else True


@given(st.dictionaries(st.text(max_size=150), LISTS, max_size=6), st.booleans())
def test_lists_come_back(lists: dict[str, object], own: bool) -> None:
    found = EpisodeExample(example_bytes(lists) if own else example(lists))  # type: ignore[arg-type]
    assert set(found.names) == set(lists)
    for name, expected in lists.items():
        assert_values(found.get(name), expected)


@given(st.lists(st.integers(-5, 500), min_size=1, max_size=6), st.sampled_from(UNKNOWN), st.booleans(), st.booleans())
def test_other_encodings_of_the_same_lists(numbers: list[int], other: bytes, packed: bool, reversed_: bool) -> None:
    """Values one by one, in several packs, with fields of a newer version, and with the name after the list."""
    ints = [varint(8) + varint(number) for number in numbers]
    floats = [varint(1 << 3 | 5) + struct.pack("<f", number) for number in numbers]
    if packed:
        ints = [message(1, varint(number)) for number in numbers]
        floats = [message(1, struct.pack("<f", number)) for number in numbers]
    entries = []
    for name, kind, values in (("ints", 3, ints), ("floats", 2, floats)):
        parts = [message(1, name.encode()), message(2, other + message(kind, b"".join(values) + other) + other)]
        entries.append(message(1, b"".join((parts[::-1] if reversed_ else parts) + [other])))
    found = EpisodeExample(other + message(1, other + entries[0]) + message(1, entries[1] + other))
    assert_values(found.get("ints"), np.array(numbers, np.int64))
    assert_values(found.get("floats"), np.array(numbers, np.float32))


def test_the_last_list_of_a_name_counts_and_one_without_a_kind_is_none() -> None:
    entries = [
        message(1, message(1, b"a") + message(2, message(3, message(1, varint(number))))) for number in (1, 2)
    ] + [message(1, message(1, b"b") + message(2, b""))]
    found = EpisodeExample(message(1, b"".join(entries)))
    assert found.names == ("a",)
    assert_values(found.get("a"), np.array([2]))
    assert found.get("b") is None


@each(
    "data",
    [
        b"\x0a", b"\x0a\x05", b"\x0b\x01", message(1, b"\x0a\x7f"), message(1, message(1, message(1, b"\xff"))),
        b"\x80" * 12, message(1, message(1, message(1, b"a") + b"\x12\x03\x1a\x7f\x00")),
    ],
)  # fmt: skip
def test_broken_bytes_are_damage(data: bytes) -> None:
    with pytest.raises(CorruptDataError, match="not a sound Example"):
        EpisodeExample(data)


@pytest.mark.parametrize("packed", [b"\x80", b"\x01\xff", b"\xff" * 11 + b"\x01"])
def test_broken_numbers_are_damage(packed: bytes) -> None:
    found = EpisodeExample(message(1, message(1, message(1, b"a") + message(2, message(3, message(1, packed))))))

    def read() -> None:
        values = found.get("a")
        assert isinstance(values, Ints)
        values.read(0, len(values), INT64)

    with pytest.raises(CorruptDataError):
        read()


@each("dtype", ["bool", "uint8", "int32", "float32", "float64", "int64"])
def test_long_lists_are_read_in_parts(dtype: str) -> None:
    """Positions are found in blocks of bytes: a list with numbers of all lengths, in ranges across blocks."""
    draw = np.random.default_rng(0)
    top = {"bool": 2, "uint8": 256, "int32": 1 << 31, "float32": 1 << 24, "float64": 1 << 53, "int64": 1 << 62}[dtype]
    numbers = draw.integers(0, top, 60_000)
    numbers[::3] = draw.integers(0, 2, 20_000)
    found = EpisodeExample(example_bytes({"a": numbers})).get("a")
    assert isinstance(found, Ints)
    for start, stop in ((0, 60_000), (0, 1), (59_999, 60_000), (12_345, 47_110), (20_000, 20_000)):
        values = found.read(start, stop, np.dtype(dtype))
        assert values.dtype == dtype
        assert values.tolist() == numbers[start:stop].astype(dtype).tolist()


def all_values(found: Example) -> dict[str, object]:
    made: dict[str, object] = {}
    for name in found.names:
        values = found.get(name)
        assert values is not None
        made[name] = values.read(0, len(values)) if isinstance(values, Strings) else values.values.tobytes()
    return made


def outcome(parse: Callable[[], Example]) -> dict[str, object] | str:
    try:
        return all_values(parse())
    except CorruptDataError as error:
        return error.message


@given(st.dictionaries(st.text(max_size=150), LISTS, max_size=6), st.dictionaries(st.text(), LISTS, max_size=2))
def test_compiled_loops_find_the_same(lists: dict[str, object], others: dict[str, object]) -> None:
    parser = ExampleParser(is_compiled=True)
    for given_ in (lists, lists, {**others, **lists}, others, lists):
        data = example_bytes(given_)  # type: ignore[arg-type]
        assert all_values(parser.parse(data)) == all_values(EpisodeExample(data))
    assert isinstance(parser.parse(data), FoundExample) == bool(lists or others)


@given(
    st.dictionaries(st.sampled_from(["a", "steps/b", "c"]), LISTS, min_size=1),
    st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=3),
    st.integers(0, 4),
)
def test_compiled_loops_make_the_same_of_damage(
    lists: dict[str, object], changes: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(example_bytes(lists))  # type: ignore[arg-type]
    parser = ExampleParser(is_compiled=True)
    parser.parse(bytes(data))
    for at, byte in changes:
        data[at % len(data)] = byte
    damaged = bytes(data[: len(data) - cut])
    assert outcome(lambda: parser.parse(damaged)) == outcome(lambda: EpisodeExample(damaged))


def test_both_decodings_of_varints_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.array([*(1 << bit for bit in range(63)), -1, -(1 << 63), 0, 127, 128, (1 << 63) - 1])
    packed = EpisodeExample(example_bytes({"a": numbers})).get("a")
    assert isinstance(packed, Ints)
    assert decoding.warm() is not None
    compiled = packed.values
    monkeypatch.setattr(decoding, "_loops", None)
    assert packed.values.tolist() == compiled.tolist() == numbers.tolist()


@each("count", [0, 1, 31, 255, 256, 257, 5_000])
@each("top", [2, 128, 129, 1 << 20, 1 << 62])
def test_compiled_loops_count_integers(count: int, top: int) -> None:
    """Many bytes are counted at once, also where each number has several."""
    numbers = np.random.default_rng(count).integers(top // 2, top, count)
    parser, data = ExampleParser(is_compiled=True), example_bytes({"a": numbers})
    parser.parse(data)
    found = parser.parse(data)
    assert isinstance(found, FoundExample)
    assert_values(found.get("a"), numbers)


def test_compiled_loops_take_no_bytes() -> None:
    parser = ExampleParser(is_compiled=True)
    parser.parse(example_bytes({"a": np.ones(3, np.int64)}))
    assert not parser.parse(b"").names


def test_many_strings_and_names_that_come_later() -> None:
    parser = ExampleParser(is_compiled=True)
    for count in (1, 500, 3, 2_000):
        lists = {f"name {number}": [b"x" * number] * number for number in range(1, 3)} | {"all": [b"ab"] * count}
        assert all_values(parser.parse(example_bytes(lists))) == lists
