"""`PickleReader`: data come back as they are, and a pickle of anything else does nothing but fail."""

from __future__ import annotations

import collections
import contextlib
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each
from damage import processor_seconds

from rbtool.converters.files import pickle_worker
from rbtool.converters.files.pickles import PickledArray, PickledBytes, PickledList, PickledObject, PickleReader
from rbtool.core.errors import CorruptDataError, FormatError, RbtoolError, UsageError
from rbtool.core.format.converter import require_trust

ARRAYS = {
    "matrix": np.arange(6).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.float32(3.5),
    "bool": np.array([True, False]),
    "big-endian": np.arange(3, dtype=">i4"),
    "text": np.array(["ab", "c"]),
    "bytes": np.array([b"ab", b"c"]),
    "half": np.arange(4, dtype=np.float16),
}


@pytest.fixture(scope="module")
def reader() -> Iterator[PickleReader]:
    with PickleReader("a file") as opened:
        yield opened


def load(reader: PickleReader, data: bytes) -> Any:
    return reader.load(io.BytesIO(data), len(data))


@each("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@each("name", ARRAYS)
def test_arrays_come_back_with_their_type_shape_and_bytes(reader: PickleReader, name: str, protocol: int) -> None:
    array = np.asarray(ARRAYS[name])
    found = load(reader, pickle.dumps(ARRAYS[name], protocol))
    assert isinstance(found, PickledArray)
    rows = reader.rows(found)
    assert rows.dtype == array.dtype.newbyteorder("=")
    assert rows.shape == array.shape
    assert rows.tolist() == array.tolist()
    if array.ndim and len(array):
        assert reader.rows(found, 1, 2).tolist() == array[1:2].tolist()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_truth_values_other_than_0_and_1_are_damage(reader: PickleReader, protocol: int) -> None:
    odd = np.array([[0, 1], [2, 3]], np.uint8).view(bool)
    found = load(reader, pickle.dumps([odd, odd[1, :1].reshape(())], protocol))
    for one in reader.items(found):
        assert isinstance(one, PickledArray)
        with pytest.raises(CorruptDataError, match="a truth value in it is neither 0 nor 1"):
            reader.rows(one)
        with pytest.raises(CorruptDataError, match="a truth value in it is neither 0 nor 1"):
            reader.parts([one])
        if one.shape:
            assert reader.rows(one, 0, 1).tolist() == [[False, True]]


class Holder(dict[str, Any]):
    """An object with attributes, items, and what is not data."""

    def __init__(self) -> None:
        self.rows, self.nested, self.odd = np.arange(3), {"a": 1, "b": [2]}, {1.5: 2}
        self.generator, self.call = np.random.default_rng(0), print
        self["item"] = print


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_object_is_its_name_and_its_data_where_that_is_asked_for(reader: PickleReader, protocol: int) -> None:
    data = pickle.dumps(Holder(), protocol)
    with pytest.raises(FormatError, match="a pickle of more than data: it has "):
        load(reader, data)
    found = reader.load(io.BytesIO(data), len(data), objects=True)
    assert isinstance(found, PickledObject)
    assert found.name.endswith(".Holder")
    rows, nested = found.attributes["rows"], found.attributes["nested"]
    assert isinstance(rows, PickledArray)
    assert isinstance(nested, dict)
    assert (reader.rows(rows).tolist(), nested["a"]) == ([0, 1, 2], 1)
    assert found.attributes["odd"] is None
    assert found.attributes["call"] is None
    assert isinstance(found.attributes["generator"], PickledObject)
    with pytest.raises(FormatError, match="a pickle of more than data: it has "):
        load(reader, data)


def test_modules_of_both_numpy_1_and_2_are_known(reader: PickleReader) -> None:
    data = pickle.dumps(np.arange(3, dtype=np.int64), 2)
    for module in (b"numpy.core", b"numpy._core"):
        named = data.replace(b"numpy._core", module)
        assert reader.rows(load(reader, named)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_containers_come_back(reader: PickleReader, protocol: int) -> None:
    value = {"a": (1, 2.5, None, True, "é", b"\xff"), "b": collections.OrderedDict(c={1}), 3: [], "d": bytearray(b"x")}
    found = load(reader, pickle.dumps(value, protocol))
    assert reader.items(found["a"]) == [1, 2.5, None, True, "é", b"\xff"]
    assert reader.items(found["b"]["c"]) == [1]
    assert (len(found["3"]), found["d"]) == (0, b"x")


def test_lists_and_arrays_of_objects_are_read_as_far_as_asked_for(reader: PickleReader) -> None:
    found = load(reader, pickle.dumps(np.array([{}, {"a": 1}, None, [2]], dtype=object)))
    assert isinstance(found, PickledList)
    assert reader.items(found, 0, 3) == [{}, {"a": 1}, None]
    assert reader.items(reader.items(found, 3, 4)[0]) == [2]  # type: ignore[arg-type]
    circle: list[Any] = [1]
    circle.append(circle)
    found = load(reader, pickle.dumps(circle))
    again = reader.items(found)[1]
    assert isinstance(again, PickledList)
    assert (again.number, len(again)) == (found.number, 2)
    found = load(reader, deep(200_000))
    for _ in range(3):
        (found,) = reader.items(found)
    assert isinstance(found, PickledList)


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("spec", [b"b4", b"i3", b"f0"])
def test_an_element_type_that_numpy_does_not_have_is_damage(reader: PickleReader, spec: bytes) -> None:
    with pytest.raises(CorruptDataError, match="which NumPy does not support"):
        load(reader, pickle.dumps(np.zeros(0, np.float32), 2).replace(b"f4", spec))
    assert reader.items(load(reader, pickle.dumps([1]))) == [1]


def global_of(module: str, name: str, *, argument: str = "x") -> bytes:
    return f"c{module}\n{name}\n(S'{argument}'\ntR.".encode()


@each(
    ("data", "name"),
    [
        (pickle.dumps(Calls(os.system, "true")), "system"),
        (pickle.dumps(Calls(eval, "1")), "builtins.eval"),
        (pickle.dumps(Calls(getattr, 1, "real")), "builtins.getattr"),
        (pickle.dumps(Path("x")), "pathlib"),
        (pickle.dumps(np.random.default_rng(0)), "numpy.random"),
        (pickle.dumps(np.ma.masked_array([1.0])), "numpy.ma"),
        (pickle.dumps(np.zeros(2, [("a", "f4")])), "element type"),
        (pickle.dumps(np.zeros(2, "M8[s]")), "element type"),
        (global_of("numpy", "load"), "numpy.load"),
        (global_of("numpy.f2py", "crackfortran"), "numpy.f2py.crackfortran"),
        (global_of("builtins", "exec"), "builtins.exec"),
        (global_of("os", "system"), "os.system"),
        (b"\x80\x04\x8c\x05numpy\x8c\x11__builtins__.eval\x93.", "numpy.__builtins__.eval"),
        (b"cnumpy\nndarray\n.", "numpy.ndarray"),
        (b"cnumpy\nndarray\n(K\x02tR.", "numpy.ndarray"),
        (b"cnumpy\nndarray\n}\x8c\x01xK\x01sb.", "numpy.ndarray"),
        (b"Pname\n.", "outside of the pickle"),
    ],
)
def test_whatever_is_no_data_is_refused_by_name(reader: PickleReader, data: bytes, name: str) -> None:
    with pytest.raises(FormatError, match="a pickle of more than data") as raised:
        load(reader, data)
    assert name in raised.value.message
    assert reader.items(load(reader, pickle.dumps([1]))) == [1]


def deep(levels: int) -> bytes:
    return b"\x80\x04" + b"]" * levels + b"a" * (levels - 1) + b"."


def nested_dictionaries(levels: int) -> bytes:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return pickle.dumps(value)


def doubling(levels: int) -> bytes:
    """A dictionary of 2 to the power of `levels` entries, in some bytes."""
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value, "b": value}
    return pickle.dumps(value)


def circle() -> bytes:
    value: dict[str, Any] = {}
    value["a"] = value
    return pickle.dumps(value)


HOSTILE = {
    "nested dictionaries": nested_dictionaries(200),
    "doubling": doubling(20),
    "a dictionary in itself": circle(),
    "many dictionaries": b"\x80\x04" + b"}" * 20_000_000 + b"." ,
    "a memo of billions": b"\x80\x04Nr\xff\xff\xff\xff.",
    "bytes without end": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x0f.",
    "a tuple of a deep tuple as a key": b"\x80\x04}" + b")" + b"\x85" * 3_000_000 + b"K\x01s.",
    "cut": pickle.dumps(np.arange(100))[:-40],
    "no pickle": b"\x93NUMPY",
    "nothing": b"",
    "the extension registry": b"\x80\x02\x82\x01.",
    "a shape of more than its data": pickle.dumps(np.arange(3, dtype="i1")).replace(b"K\x03\x85", b"K\x7f\x85"),
    "a negative shape": b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tS'b'\ntR(K\x01(I-5\nt"
    b"cnumpy\ndtype\n(S'f4'\nI00\nI01\ntRI00\nS''\ntb.",
    "a number of a million digits": b"\x80\x02\x8b\x80\x84\x1e\x00" + b"\x7f" * 2_000_000 + b".",
}  # fmt: skip


@each("name", HOSTILE)
def test_hostile_pickles_give_one_of_our_errors_in_bounded_time(name: str) -> None:
    started = processor_seconds()
    with PickleReader("a file", memory=200 << 20) as reader, pytest.raises(CorruptDataError) as raised:
        load(reader, HOSTILE[name])
    assert "\n" not in raised.value.message
    assert processor_seconds() - started < 20


def test_memory_and_time_are_bounded() -> None:
    data = b"\x80\x04" + b"X\x10\x00\x10\x00" + b"a" * 0x100010 + b"q\x00(" + b"h\x00" * 8 + b"l."
    big = pickle.dumps([bytes(20 << 20) for _ in range(3)])
    with PickleReader("a file", memory=40 << 20) as reader, pytest.raises(CorruptDataError, match="MiB of memory"):
        load(reader, big)
    with PickleReader("a file") as reader:
        assert len(load(reader, data)) == 8

    def load_much(reader: PickleReader) -> None:
        for _ in range(1000):
            load(reader, pickle.dumps(list(range(300_000))))

    with PickleReader("a file", seconds=0.0) as reader, pytest.raises(CorruptDataError, match="took more than 0 s"):
        load_much(reader)


def test_a_cut_file_is_named(reader: PickleReader) -> None:
    with PickleReader("a file") as other, pytest.raises(CorruptDataError, match="is truncated"):
        other.load(io.BytesIO(b"abc"), 10)


@pytest.mark.parametrize(
    ("data", "size", "said"),
    [(b"abc", 10, "is truncated"), (pickle.dumps([bytes(20 << 20) for _ in range(3)]), None, "MiB of memory"),
     (b"\x80\x04]", None, "cannot be read")],
)  # fmt: skip
def test_after_damage_the_next_pickle_is_read(data: bytes, size: int | None, said: str) -> None:
    with PickleReader("a file", memory=40 << 20) as reader:
        array = load(reader, pickle.dumps(np.arange(3)))
        for _ in range(2):
            with pytest.raises(CorruptDataError, match=said):
                reader.load(io.BytesIO(data), len(data) if size is None else size)
            with contextlib.suppress(CorruptDataError):
                assert reader.rows(array).tolist() != [0, 1, 2], "what was loaded before is gone"
            assert reader.rows(load(reader, pickle.dumps(np.arange(4)))).tolist() == [0, 1, 2, 3]


CONFINED = """
import socket, sys, os
sys.path.insert(0, sys.argv[1])
import pickle_worker
pickle_worker.confine(400 << 20)
def refused(action):
    try:
        action()
    except (OSError, MemoryError):
        return True
    return False
print(refused(socket.socket), refused(lambda: open("/etc/hostname")), refused(lambda: bytearray(1 << 30)))
"""


def test_the_process_opens_no_socket_and_no_file_and_takes_no_more_memory() -> None:
    folder = str(Path(pickle_worker.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-S", "-c", CONFINED, folder],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.PIPE,
    )
    assert done.stdout.split() == ["True", "True", "True"]


def test_nothing_is_read_without_trust(tmp_path: Path) -> None:
    require_trust(tmp_path, True)
    with pytest.raises(UsageError, match="is not read") as raised:
        require_trust(tmp_path, None)
    assert "--trust-pickle" in raised.value.hint


@each("seed", range(40))
def test_mutations_give_values_or_our_errors(reader: PickleReader, seed: int) -> None:
    chance = np.random.default_rng(seed)
    data = bytearray(pickle.dumps([{"a": np.arange(5.0), "b": [1, "x", (None, 2.0)]}] * 3, int(chance.integers(6))))
    for at in chance.integers(len(data), size=int(chance.integers(1, 4))):
        data[at] = chance.integers(256)
    with PickleReader("a file", memory=200 << 20) as other, contextlib.suppress(RbtoolError):
        found = load(other, bytes(data))
        pending, left = [found], 200
        while pending and left:
            one, left = pending.pop(), left - 1
            if isinstance(one, PickledList):
                pending += other.items(one, 0, 10)
            elif isinstance(one, dict):
                pending += one.values()
            elif isinstance(one, PickledArray):
                other.rows(one)


LISTS = {
    "floats": [1.5, -2.0, float("nan")], "nested": [[1, 2], [3, 4], [5, 6]], "flags": (True, False), "both": [1, 2.5],
    "arrays": [np.arange(3, dtype="f4"), np.ones(3, "f4")], "scalars": [np.float32(1), np.float32(2)],
    "big-endian": [np.arange(3, dtype=">i4")] * 2,
}  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_numbers_are_arrays_where_asked_for(reader: PickleReader, name: str) -> None:
    data = pickle.dumps({"x": LISTS[name], "array": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "raw": b"\0\xff"})
    found = reader.load(io.BytesIO(data), len(data), pack=True)
    assert isinstance(found, dict)
    x, array, raw = found["x"], found["array"], found["raw"]
    assert isinstance(x, PickledArray)
    assert isinstance(array, PickledArray)
    assert isinstance(raw, PickledBytes)
    plain = np.array(LISTS[name])
    plain = plain.astype(plain.dtype.newbyteorder("="))
    assert x.python == (name in ("floats", "nested", "flags", "both"))
    whole = reader.parts([raw, array, x])
    assert whole[0] == b"\0\xff"
    np.testing.assert_array_equal(whole[1], np.arange(6.0).reshape(2, 3))
    for rows in (whole[2], reader.rows(x)):
        assert (rows.dtype, rows.tobytes()) == (
            plain.dtype.newbyteorder("="),
            plain.astype(plain.dtype.newbyteorder("=")).tobytes(),
        )
    assert reader.rows(x, 1, 2).tobytes() == whole[2][1:2].tobytes()


@pytest.mark.parametrize(
    "value",
    [[], [1, "x"], [[1], [1, 2]], [[]], [True, 2], [1 << 70], [None], [np.zeros(2), np.zeros(3)], {1, 2}, [[1], 2]],
)
def test_other_lists_stay_lists(reader: PickleReader, value: Any) -> None:
    data = pickle.dumps(value)
    assert isinstance(reader.load(io.BytesIO(data), len(data), pack=True), PickledList)
