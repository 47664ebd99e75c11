"""No HDF5 file reads another file, or keeps its reader busy without end."""

import ast
import os
import struct
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import source_tree

import rbtool
from rbtool import CorruptDataError, FormatError
from rbtool.core.encodings.h5_open import open_h5
from rbtool.core.format.understood import understood


def _external_storage(h5: h5py.File) -> None:
    h5.create_dataset("deep/odd", (16,), np.uint8, external=[("/proc/self/environ", 0, 16)])


def _external_chain(h5: h5py.File) -> None:
    h5.create_dataset("odd", (16,), np.uint8, external=[("fifo", 0, 8), ("fifo", 8, 8)])


def _external_link(h5: h5py.File) -> None:
    h5["deep/odd"] = h5py.ExternalLink("fifo", "/")


def _soft_link(h5: h5py.File) -> None:
    h5["deep/odd"] = h5py.SoftLink("/plain")


def _dangling_link(h5: h5py.File) -> None:
    h5["deep/odd"] = h5py.SoftLink("/nowhere")


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


def _circle(h5: h5py.File) -> None:
    h5["deep/odd"] = h5["deep"]


def _circle_of_the_root(h5: h5py.File) -> None:
    h5["deep/odd"] = h5["/"]


def _bushes(h5: h5py.File) -> None:
    """2^60 paths in 60 groups."""
    group = h5.create_group("odd")
    for _ in range(60):
        lower = group.create_group("left")
        group["right"] = lower
        group = lower


def _deep(h5: h5py.File) -> None:
    h5.create_group("odd" + "/odd" * 100)


TRICKS = {
    "external storage": (_external_storage, "/deep/odd takes its data from other files"),
    "external storage in parts": (_external_chain, "/odd takes its data"),
    "an external link": (_external_link, "/deep/odd is a link"),
    "a soft link": (_soft_link, "/deep/odd is a link"),
    "a dangling link": (_dangling_link, "/deep/odd is a link"),
    "a virtual dataset": (_virtual_of("/etc/hostname"), "/deep/odd takes its data"),
    "a virtual dataset of nothing": (_virtual_of("missing.h5"), "/deep/odd takes its data"),
    "a virtual dataset of itself": (_virtual_of("."), "/deep/odd takes its data"),
    "a virtual dataset without end": (_endless_virtual, "/deep/odd takes its data"),
    "a circle": (_circle, "/deep/odd is linked from more than one place"),
    "a circle through the root": (_circle_of_the_root, "/deep/odd is linked from more than one place"),
    "a group linked twice": (_bushes, "is linked from more than one place"),
    "deep groups": (_deep, "nested more than 64 groups deep"),
}


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_what_leads_out_of_a_file_is_refused(trick: str, libver: str, tmp_path: Path) -> None:
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
    with pytest.raises(CorruptDataError, match="unable to determine object type"):
        rbtool.convert(path, tmp_path / "out", format="table", map=["observation=plain"], ends="-")
    with pytest.raises(CorruptDataError):
        rbtool.inspect(path)


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
    found = {
        source_tree.module_name(file)
        for file in source_tree.package_files()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and _opens_hdf5_to_read(node)
    }
    assert {name for name in found if "testing" not in name} == {"rbtool.core.encodings.h5_open"}
