"""Text in HDF5 files is read as h5py reads it, and never from a damaged heap."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from rbtool.core.encodings.h5_open import open_h5
from rbtool.core.encodings.h5_values import HeapValues
from rbtool.core.encodings.stored_columns import DAMAGED
from rbtool.core.errors import RbtoolError

TEXT = h5py.string_dtype()
WORDS = ["one", "", "three", "vier"]
PAIR = np.dtype([("name", TEXT), ("number", "i4")])


def _dense(file: h5py.File) -> None:
    for number in range(40):
        file["group"].attrs[f"other{number}"] = f"text {number}"


def _compact(file: h5py.File) -> None:
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.set_layout(h5py.h5d.COMPACT)
    kind, space = h5py.h5t.py_create(TEXT, logical=True), h5py.h5s.create_simple((4,))
    h5py.Dataset(h5py.h5d.create(file.id, b"x", kind, space, made))[:] = WORDS


def _ragged(file: h5py.File) -> None:
    rows = file.create_dataset("x", (2,), h5py.vlen_dtype("i4"))
    rows[0], rows[1] = [1, 2, 3], [4]


ATTRIBUTES: dict[str, Any] = {
    "text": "some text", "words": np.array(WORDS, TEXT), "bytes": np.array([b"a", b"bc"], TEXT), "empty": "",
    "pair": np.array([("a", 1), ("bc", 2)], PAIR), "number": 3, "numbers": np.arange(3), "fixed": np.bytes_(b"abc"),
    "null": h5py.Empty("f4"), "no words": h5py.Empty(TEXT),
}  # fmt: skip
DATASETS: dict[str, Callable[[h5py.File], Any]] = {
    "contiguous": lambda file: file.create_dataset("x", data=WORDS, dtype=TEXT),
    "two dimensions": lambda file: file.create_dataset("x", data=[WORDS, WORDS[::-1]], dtype=TEXT),
    "chunked": lambda file: file.create_dataset("x", data=WORDS, dtype=TEXT, chunks=(3,)),
    "gzip": lambda file: file.create_dataset("x", data=WORDS, dtype=TEXT, chunks=(3,), compression="gzip"),
    "compact": _compact,
    "single": lambda file: file.create_dataset("x", data="some text"),
    "ragged": _ragged,
    "pairs": lambda file: file.create_dataset("x", data=np.array([("a", 1), ("bc", 2)], PAIR)),
    "filled": lambda file: file.create_dataset("x", (3,), TEXT, fillvalue="nothing"),
}
FORMS: list[dict[str, Any]] = [
    {"libver": "earliest"}, {"libver": "latest"}, {"libver": "latest", "track_order": True}, {"userblock_size": 512}
]  # fmt: skip


@contextmanager
def opened(path: Path) -> Iterator[tuple[h5py.File, HeapValues]]:
    with h5py.File(open_h5(path)) as file, closing(HeapValues(file.id)) as values:
        yield file, values


def heap_is_endless(path: Path) -> Path:
    """Let the first object of each heap state no size."""
    data, at = bytearray(path.read_bytes()), -1
    while (at := data.find(b"GCOL", at + 1)) >= 0:
        data[at + 16 : at + 32] = bytes(16)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("form", range(len(FORMS)))
@pytest.mark.parametrize("dense", [False, True])
def test_attributes_are_those_of_h5py(form: int, dense: bool, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", **FORMS[form]) as file:
        file.create_group("group", track_order=True).attrs.update(ATTRIBUTES)
        _dense(file) if dense else None
    with h5py.File(tmp_path / "a.h5") as plain, opened(tmp_path / "a.h5") as (file, values):
        for name, expected in plain["group"].attrs.items():
            np.testing.assert_equal(values.attribute(file["group"].id, name), expected)


@pytest.mark.parametrize("form", range(len(FORMS)))
@pytest.mark.parametrize("kind", DATASETS)
def test_datasets_are_those_of_h5py(form: int, kind: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", **FORMS[form]) as file:
        DATASETS[kind](file)
    with h5py.File(tmp_path / "a.h5") as plain, opened(tmp_path / "a.h5") as (_, values):
        assert repr(values.dataset("x")[()]) == repr(plain["x"][()])
        if plain["x"].shape:
            assert repr(values.dataset("x", 1, 2)[1:2]) == repr(plain["x"][1:2])


@pytest.mark.parametrize("form", range(len(FORMS)))
@pytest.mark.parametrize("name", [name for name, value in ATTRIBUTES.items() if name in ("text", "words", "pair")])
def test_attributes_in_an_endless_heap_are_refused(form: int, name: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", **FORMS[form]) as file:
        file.create_group("group").attrs[name] = ATTRIBUTES[name]
        _dense(file)
    heap_is_endless(tmp_path / "a.h5")
    with opened(tmp_path / "a.h5") as (file, values), pytest.raises(DAMAGED, match="heap"):
        values.attribute(file["group"].id, name)


@pytest.mark.parametrize("form", range(len(FORMS)))
@pytest.mark.parametrize("kind", DATASETS)
def test_datasets_in_an_endless_heap_are_refused(form: int, kind: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", **FORMS[form]) as file:
        DATASETS[kind](file)
    heap_is_endless(tmp_path / "a.h5")
    why = r"heap|does not say where its data are"
    with pytest.raises((*DAMAGED, RbtoolError), match=why), opened(tmp_path / "a.h5") as (_, values):
        values.dataset("x")[()]


def test_a_virtual_dataset_in_an_endless_heap_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        layout = h5py.VirtualLayout((16,), np.uint8)
        layout[:] = h5py.VirtualSource("other.h5", "odd", (16,))
        file.create_virtual_dataset("x", layout)
    with pytest.raises(RbtoolError, match="heap"):
        open_h5(heap_is_endless(tmp_path / "a.h5"))


@pytest.mark.parametrize("kind", ["contiguous", "chunked", "compact", "single", "ragged", "filled", "attribute"])
def test_a_text_that_states_another_length_is_refused(kind: str, tmp_path: Path) -> None:
    """libhdf5 clears 4 GiB for it, and compares the length then."""
    with h5py.File(tmp_path / "a.h5", "w", libver="earliest") as file:
        file.attrs["x"] = "none"
        file.attrs.update({"x": "text"} if kind == "attribute" else {})
        None if kind == "attribute" else DATASETS[kind](file)
    data = bytearray((tmp_path / "a.h5").read_bytes())
    heap = struct.pack("<Q", data.rfind(b"GCOL"))
    for at in [at for at in range(4, len(data)) if data[at : at + 8] == heap and 0 < data[at + 8] < 9]:
        data[at - 4 : at] = b"\xf0\xff\xff\xff"
    (tmp_path / "a.h5").write_bytes(data)
    why = r"is not in the heap|does not say where"
    with pytest.raises((*DAMAGED, RbtoolError), match=why), opened(tmp_path / "a.h5") as (file, values):
        values.attribute(file["/"].id, "x") if kind == "attribute" else values.dataset("x")[()]


@pytest.mark.parametrize("kind", ["contiguous", "chunked", "attribute", "words"])
def test_text_of_an_unknown_kind_is_refused(kind: str, tmp_path: Path) -> None:
    """libhdf5 crashes where it reads such a value."""
    with h5py.File(tmp_path / "a.h5", "w", libver="earliest") as file:
        if kind in DATASETS:
            DATASETS[kind](file)
        else:
            file.attrs["x"] = "text" if kind == "attribute" else np.array(WORDS, TEXT)
    data = (tmp_path / "a.h5").read_bytes()
    assert b"\x19\x01" in data
    (tmp_path / "a.h5").write_bytes(data.replace(b"\x19\x01", b"\x19\x03"))
    why = "its type is damaged|does not say where"
    with pytest.raises((*DAMAGED, RbtoolError), match=why), opened(tmp_path / "a.h5") as (file, values):
        values.dataset("x")[()] if kind in DATASETS else values.attribute(file["/"].id, "x")


def test_an_interpreter_that_holds_a_file_ends_well(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.attrs["x"] = "text"
    script = (
        "import sys, h5py, pathlib; from rbtool.core.encodings.h5_open import open_h5;"
        "from rbtool.core.encodings.h5_values import HeapValues;"
        "file = h5py.File(open_h5(pathlib.Path(sys.argv[1]))); values = HeapValues(file.id);"
        "print(values.attribute(file['/'].id, 'x'))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "a.h5")], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "text\n", "")
