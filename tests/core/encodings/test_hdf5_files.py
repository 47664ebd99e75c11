"""No HDF5 file reads another file or keeps its reader busy without end; rows and values are those that h5py reads."""

from __future__ import annotations

import ast
import os
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
import source_tree
from cases import each

from rbtool import CorruptDataError, FormatError, RbtoolError
from rbtool.core.encodings.hdf5_files import H5Rows, HeapValues, open_h5
from rbtool.core.format.files import understood

DAMAGED = (OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError)
"""What libhdf5 and h5py raise on damaged files."""


def _external_storage(h5: h5py.File) -> None:
    h5.create_dataset("deep/odd", (16,), np.uint8, external=[("/proc/self/environ", 0, 16)])


def _external_chain(h5: h5py.File) -> None:
    h5.create_dataset("odd", (16,), np.uint8, external=[("fifo", 0, 8), ("fifo", 8, 8)])


def _virtual_of(place: str) -> Callable[[h5py.File], None]:
    def make(h5: h5py.File) -> None:
        layout = h5py.VirtualLayout((16,), np.uint8)
        layout[:] = h5py.VirtualSource(place, "deep/odd", (16,))
        h5.create_virtual_dataset("deep/odd", layout)

    return make


def _endless_virtual(h5: h5py.File) -> None:
    layout = h5py.VirtualLayout((16,), np.uint8, maxshape=(None,))
    source = h5py.VirtualSource("fifo", "odd", (16,), maxshape=(None,))
    layout[: h5py.h5s.UNLIMITED] = source[: h5py.h5s.UNLIMITED]
    h5.create_virtual_dataset("deep/odd", layout)


def _bushes(h5: h5py.File) -> None:
    """2^60 paths in 60 groups."""
    group = h5.create_group("odd")
    for _ in range(60):
        lower = group.create_group("left")
        group["right"] = lower
        group = lower


def _linked(target: Callable[[h5py.File], Any]) -> Callable[[h5py.File], None]:
    return lambda h5: h5.__setitem__("deep/odd", target(h5))


TRICKS: dict[str, tuple[Callable[[h5py.File], Any], str]] = {
    "external storage": (_external_storage, "/deep/odd takes its data from other files"),
    "external storage in parts": (_external_chain, "/odd takes its data"),
    "an external link": (_linked(lambda h5: h5py.ExternalLink("fifo", "/")), "/deep/odd is a link"),
    "a soft link": (_linked(lambda h5: h5py.SoftLink("/plain")), "/deep/odd is a link"),
    "a dangling link": (_linked(lambda h5: h5py.SoftLink("/nowhere")), "/deep/odd is a link"),
    "a virtual dataset": (_virtual_of("/etc/hostname"), "/deep/odd takes its data"),
    "a virtual dataset of nothing": (_virtual_of("missing.h5"), "/deep/odd takes its data"),
    "a virtual dataset of itself": (_virtual_of("."), "/deep/odd takes its data"),
    "a virtual dataset without end": (_endless_virtual, "/deep/odd takes its data"),
    "a circle": (_linked(lambda h5: h5["deep"]), "/deep/odd is linked from more than one place"),
    "a circle through the root": (_linked(lambda h5: h5["/"]), "/deep/odd is linked from more than one place"),
    "a group linked twice": (_bushes, "is linked from more than one place"),
    "deep groups": (lambda h5: h5.create_group("odd" + "/odd" * 100), "nested more than 64 groups deep"),
}


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_links_and_storage_outside_the_file_are_refused(trick: str, libver: str, tmp_path: Path) -> None:
    make, sentence = TRICKS[trick]
    os.mkfifo(tmp_path / "fifo")  # opening it blocks for ever
    with h5py.File(tmp_path / "odd.h5", "w", libver=libver) as h5:
        h5["plain"], h5["deep/plain"] = np.arange(3), np.arange(3)
        make(h5)
    with pytest.raises(CorruptDataError, match=sentence):
        open_h5(tmp_path / "odd.h5")


def test_external_storage_that_states_a_place_in_the_file_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "odd.h5", "w") as h5:
        h5["plain"] = np.arange(8)
        place = h5["plain"].id.get_offset()
        h5.create_dataset("odd", (64,), np.uint8, external=[("/proc/self/environ", 0, 64)])
    data = (tmp_path / "odd.h5").read_bytes()
    layout, size = b"\x03\x01", struct.pack("<Q", 64)
    assert data.count(layout + b"\xff" * 8 + size) == 1
    data = data.replace(layout + b"\xff" * 8 + size, layout + struct.pack("<Q", place) + size)
    (tmp_path / "odd.h5").write_bytes(data)
    with pytest.raises(CorruptDataError, match="/odd takes its data from other files"):
        open_h5(tmp_path / "odd.h5")


def test_a_group_that_cannot_be_listed_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "odd.h5", "w", libver="earliest") as h5:
        h5["deep/plain"] = np.arange(8)
    data = (tmp_path / "odd.h5").read_bytes()
    (tmp_path / "odd.h5").write_bytes(data.replace(b"SNOD", b"????", 1))
    with pytest.raises(CorruptDataError, match="the group / cannot be listed"):
        open_h5(tmp_path / "odd.h5")


def test_a_root_that_is_no_group_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "odd.h5"
    with h5py.File(path, "w", libver="earliest") as h5:
        h5["plain"], h5["text"] = np.arange(3.0), ["a", "b", "c"]
    data = bytearray(path.read_bytes())
    assert data[112:114] == b"\x11\0"  # the message of the root that makes it a group
    data[112:114] = b"\0\0"
    path.write_bytes(data)
    with pytest.raises(CorruptDataError, match="unable to determine object type"), understood(path):
        open_h5(path)


def test_plain_files_are_opened(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "plain.h5", "w") as h5:
        h5["rows"] = np.arange(9)
        h5["same"] = h5["rows"]  # two names for the same dataset are harmless
        h5.create_dataset("small", data=np.arange(9), chunks=True, compression="gzip")
        h5.create_dataset("compact", data=[b"text"])
        h5.create_dataset("nothing", (0, 3), float)
        h5["type"] = np.dtype("f8")
        h5.attrs["one"] = h5["rows"].ref
    with h5py.File(open_h5(tmp_path / "plain.h5")) as h5:
        assert h5["same"][:].tolist() == h5["small"][:].tolist() == list(range(9))


def test_a_fifo_is_no_hdf5_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "odd.h5")
    with pytest.raises(FormatError, match=r"odd\.h5 is a FIFO, expected a regular file"):
        open_h5(tmp_path / "odd.h5")


def _opens_hdf5_to_read(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in {"open", "File"}:
        return False
    name = ast.unparse(call.func)
    if name == "h5f.open":
        return True
    if not name.endswith("h5py.File"):
        return False
    opened = isinstance(call.args[0], ast.Call) and ast.unparse(call.args[0].func) == "open_h5"
    return not opened and [ast.unparse(mode) for mode in call.args[1:2]] != ["'w'"]


def test_hdf5_is_opened_to_read_in_one_module_only() -> None:
    texts = {file: file.read_text(encoding="utf-8") for file in source_tree.package_files()}
    found = {
        source_tree.module_name(file)
        for file, text in texts.items()
        if "h5py.File(" in text or "h5f.open(" in text  # to parse all takes 5 s
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and _opens_hdf5_to_read(node)
    }
    assert {name for name in found if "testing" not in name} == {"rbtool.core.encodings.hdf5_files"}


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


any_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))


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


@any_form
@pytest.mark.parametrize("dense", [False, True])
def test_attributes_are_those_of_h5py(form: dict[str, Any], dense: bool, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", **form) as file:
        file.create_group("group", track_order=True).attrs.update(ATTRIBUTES)
        if dense:
            _dense(file)
    with h5py.File(tmp_path / "a.h5") as plain, opened(tmp_path / "a.h5") as (file, values):
        for name, expected in plain["group"].attrs.items():
            np.testing.assert_equal(values.attribute(file["group"].id, name), expected)


@any_form
@pytest.mark.parametrize("kind", DATASETS)
def test_datasets_are_those_of_h5py(form: dict[str, Any], kind: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", **form) as file:
        DATASETS[kind](file)
    with h5py.File(tmp_path / "a.h5") as plain, opened(tmp_path / "a.h5") as (_, values):
        assert repr(values.dataset("x")[()]) == repr(plain["x"][()])
        if plain["x"].shape:
            assert repr(values.dataset("x", 1, 2)[1:2]) == repr(plain["x"][1:2])


@any_form
@pytest.mark.parametrize("name", ["text", "words", "pair"])
def test_attributes_in_an_endless_heap_are_refused(form: dict[str, Any], name: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", **form) as file:
        file.create_group("group").attrs[name] = ATTRIBUTES[name]
        _dense(file)
    heap_is_endless(tmp_path / "a.h5")
    with opened(tmp_path / "a.h5") as (file, values), pytest.raises(DAMAGED, match="heap"):
        values.attribute(file["group"].id, name)


@any_form
@pytest.mark.parametrize("kind", DATASETS)
def test_datasets_in_an_endless_heap_are_refused(form: dict[str, Any], kind: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", **form) as file:
        DATASETS[kind](file)
    heap_is_endless(tmp_path / "a.h5")
    why = r"heap|has an unreadable header"
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
        file.attrs["x"] = "text" if kind == "attribute" else "none"
        if kind != "attribute":
            DATASETS[kind](file)
    data = bytearray((tmp_path / "a.h5").read_bytes())
    heap = struct.pack("<Q", data.rfind(b"GCOL"))
    for at in [at for at in range(4, len(data)) if data[at : at + 8] == heap and 0 < data[at + 8] < 9]:
        data[at - 4 : at] = b"\xf0\xff\xff\xff"
    (tmp_path / "a.h5").write_bytes(data)
    why = r"is not in the heap|unreadable header"
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
    why = "its type is damaged|unreadable header"
    with pytest.raises((*DAMAGED, RbtoolError), match=why), opened(tmp_path / "a.h5") as (file, values):
        values.dataset("x")[()] if kind in DATASETS else values.attribute(file["/"].id, "x")


def test_an_interpreter_that_holds_a_file_ends_well(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.attrs["x"] = "text"
    script = (
        "import sys, h5py, pathlib; from rbtool.core.encodings.hdf5_files import open_h5;"
        "from rbtool.core.encodings.hdf5_files import HeapValues;"
        "file = h5py.File(open_h5(pathlib.Path(sys.argv[1]))); values = HeapValues(file.id);"
        "print(values.attribute(file['/'].id, 'x'))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "a.h5")], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "text\n", "")


DTYPES = ["<f4", ">f4", "<f8", ">i2", "u1", "i1", "<i8", "?", "<f2", "<c8"]


def assert_as_h5py(path: Path, *, direct: bool) -> None:
    file = h5py.File(open_h5(path))
    with file:
        dataset = file["group/rows"]
        rows = H5Rows(dataset, path)
        assert (rows._descriptor >= 0) == direct
        for start, stop in ((0, 40), (3, 17), (39, 40), (5, 5)):
            expected = np.empty((stop - start, *dataset.shape[1:]), dataset.dtype.newbyteorder("="))
            if expected.size:
                dataset.read_direct(expected, np.s_[start:stop])
            found = rows.read(start, stop)
            assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


@each("dtype", DTYPES)
@each("options", [{}, {"chunks": (7, 3)}, {"compression": "gzip"}, {"fletcher32": True}])
def test_rows_of_any_type_and_layout_are_those_of_h5py(dtype: str, options: dict[str, Any], tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    values = (draw.normal(size=(40, 3)) * 50).astype(dtype)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("group/rows", data=values, **options)
    assert_as_h5py(tmp_path / "a.h5", direct=not options and not dtype.startswith(">"))


def test_rows_in_odd_places_are_those_of_h5py(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=1024) as file:
        file["group/rows"] = np.arange(80, dtype=np.float32).reshape(40, 2)
    assert_as_h5py(tmp_path / "a.h5", direct=True)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("group/rows", (40, 2), np.float32, fillvalue=3)
    assert_as_h5py(tmp_path / "a.h5", direct=False)
    stored = h5py.h5t.NATIVE_INT32.copy()
    stored.set_precision(20)
    compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    compact.set_layout(h5py.h5d.COMPACT)
    for kind, dtype, how in ((stored, np.int32, None), (h5py.h5t.NATIVE_FLOAT, np.float32, compact)):
        with h5py.File(tmp_path / "a.h5", "w") as file:
            group = file.create_group("group")
            dataset = h5py.h5d.create(group.id, b"rows", kind, h5py.h5s.create_simple((40,)), how)
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(-20, 20, dtype=dtype))
        assert_as_h5py(tmp_path / "a.h5", direct=False)


def test_a_file_that_is_cut_while_it_is_open_is_damage(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["rows"] = np.arange(4000, dtype=np.float32)
    with h5py.File(open_h5(tmp_path / "a.h5")) as file:
        rows = H5Rows(file["rows"], tmp_path / "a.h5")
        with (tmp_path / "a.h5").open("r+b") as other:
            other.truncate(5000)
        with pytest.raises(CorruptDataError, match="bytes before the rows of '/rows': it was cut"):
            rows.read(0, 4000)
