"""Arrays of Python objects in npy files: what is read from their pickles, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rbtool.converters.files.numpy_files import NpyFile, NpzFile
from rbtool.core.errors import CorruptDataError, FormatError


def objects(values: list[Any], shape: tuple[int, ...] | None = None) -> Any:
    """An array of exactly these objects."""
    array = np.empty(len(values), object)
    for number, value in enumerate(values):
        array[number] = value
    return array if shape is None else array.reshape(shape)


def unpickled(array: Any, folder: Path) -> Any:
    np.save(folder / "a.npy", array, allow_pickle=True)
    with NpyFile(folder / "a.npy") as file:
        assert file.is_pickled
        file.unpickle()
        assert not file.is_pickled
        rows = file.read(0, len(array))
        assert (file.header.dtype, file.header.shape) == (rows.dtype, rows.shape)
        np.testing.assert_array_equal(file.read(1, len(array)), rows[1:])
        return rows


@each(
    ("values", "dtype"),
    [
        ([True, False, True], "bool"),
        ([1, -(2**63), 2**63 - 1], "int64"),
        ([0, 2**64 - 1], "uint64"),
        ([0.1, math.inf, -0.0], "float64"),
        ([1, 0.5, 2**53], "float64"),
        (["a", "b\0", "\ud800"], "object"),
        ([np.float32(0.1), np.float32(2)], "float32"),
        ([np.uint8(7), np.uint8(255)], "uint8"),
        ([np.bool_(True), np.bool_(False)], "bool"),
    ],
)
def test_scalars_keep_their_values(values: list[Any], dtype: str, tmp_path: Path) -> None:
    rows = unpickled(objects(values), tmp_path)
    assert rows.dtype == dtype
    assert rows.tolist() == values


@each("dtype", ["<f4", ">f8", "u1", "i8", "?", "c8"])
@each("shape", [(3,), (2, 0), (2, 3)])
def test_arrays_of_one_form_are_stacked(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    parts = [(np.arange(math.prod(shape)).reshape(shape) * number % 5).astype(dtype) for number in range(4)]
    parts[2] = np.asfortranarray(parts[2])
    rows = unpickled(objects(parts), tmp_path)
    assert rows.dtype == np.dtype(dtype).newbyteorder("=")
    np.testing.assert_array_equal(rows, np.stack(parts))


@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_of_several_axes_keeps_its_order(order: str, tmp_path: Path) -> None:
    array = np.array(np.arange(12).reshape(4, 3).tolist(), object, order=order)  # type: ignore[call-overload]
    np.testing.assert_array_equal(unpickled(array, tmp_path), np.arange(12).reshape(4, 3))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(values=st.lists(st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False)), min_size=1, max_size=6))
def test_numbers_come_back_exactly_or_are_refused(values: list[Any], tmp_path: Path) -> None:
    if {type(value) for value in values} == {int}:
        lost = min(values) < -(2**63) or max(values) >= (2**63 if min(values) < 0 else 2**64)
    else:
        lost = any(float(value) != value for value in values)
    if lost:
        with pytest.raises(FormatError, match=r"do not fit|no float equals"):
            unpickled(objects(values), tmp_path)
    else:
        assert unpickled(objects(values), tmp_path).tolist() == values


@each(
    ("values", "why"),
    [
        ([1, None], "elements of different types: NoneType, int"),
        ([True, 1], "elements of different types: bool, int"),
        (["1", 1.0], "elements of different types: float, str"),
        ([None, None], "elements of type NoneType"),
        ([{}, {"a": 1}], "elements of type dict"),
        ([[1], [2]], "elements of type a container"),
        ([2**64, 1], "whole numbers that do not fit into 64 bits"),
        ([2**53 + 1, 0.5], "the whole number 9007199254740993 among floats"),
        ([np.zeros(2), np.zeros(3)], r"float64 \[2\] first, and float64 \[3\] as element 1"),
        ([np.zeros(2), np.zeros(2, np.float32)], "different types or shapes"),
        ([np.zeros(2), 1.0], "different types or shapes"),
        ([1.0, np.zeros(2)], "elements of different types"),
        ([np.array(["a"]), np.array(["b"])], "which are not numbers"),
        ([Path("a"), Path("b")], "more than data: it has pathlib"),
        ([], "empty array of Python objects"),
    ],
)
def test_what_no_array_holds_is_refused(values: list[Any], why: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", objects(values), allow_pickle=True)
    with NpyFile(tmp_path / "a.npy") as file:
        with pytest.raises(FormatError, match=why):
            file.unpickle()
        assert file.is_pickled


def test_an_array_that_is_repeated_does_not_fill_memory(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", objects([np.zeros(1 << 20)] * 1000), allow_pickle=True)
    assert (tmp_path / "a.npy").stat().st_size < 10 << 20
    with NpyFile(tmp_path / "a.npy") as file, pytest.raises(FormatError, match="more than 268,435,456 bytes"):
        file.unpickle()


def test_a_header_of_another_shape_is_damage(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", objects([1, 2, 3]), allow_pickle=True)
    data = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(data.replace(b"(3,)", b"(4,)"))
    with NpyFile(tmp_path / "a.npy") as file, pytest.raises(CorruptDataError, match="does not have the shape"):
        file.unpickle()


def test_an_array_of_npz_is_read_and_verified(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=objects([1, 2, 3]), y=np.arange(3))
    with NpzFile(tmp_path / "a.npz") as file:
        file.unpickle("x")
        assert file.form("x") == (np.dtype(np.int64), (3,))
        assert not file.is_pickled("x")
        assert file.whole("x", 100).tolist() == file.read("x", 0, 3).tolist() == [1, 2, 3]
        file.verify_read()
