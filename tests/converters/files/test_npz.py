"""`NpzFile` and `NpyFile` give the rows that NumPy wrote, in bounded memory, and refuse what is damaged or absurd."""

from __future__ import annotations

import io
import os
import random
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each
from conversions import refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from shard_files import random_vd4rl, write_vd4rl

from rbtool.converters.files.numpy_files import NpyFile, NpzFile, array_names, begins_as_zip
from rbtool.core.errors import CorruptDataError, FormatError, MissingKeyError, RbtoolError, SchemaError
from rbtool.core.format.locate import open_source
from rbtool.core.verbs.check import check
from rbtool.core.verbs.convert import convert

DTYPES = st.one_of(
    npst.boolean_dtypes(),
    npst.integer_dtypes(endianness="?"),
    npst.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    npst.unicode_string_dtypes(endianness="<", max_len=5),
)
ARRAYS = DTYPES.flatmap(lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=1, max_dims=4, min_side=0)))


def _same(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> bool:
    native = expected.astype(expected.dtype.newbyteorder("="))
    return found.dtype == native.dtype and found.shape == native.shape and found.tobytes() == native.tobytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    arrays=st.lists(ARRAYS, min_size=1, max_size=4), packed=st.booleans(), fortran=st.booleans(),
    cuts=st.lists(st.integers(0, 10), min_size=1, max_size=8),
)  # fmt: skip
def test_rows_are_those_that_numpy_wrote(
    tmp_path: Path, arrays: list[np.ndarray[Any, Any]], packed: bool, fortran: bool, cuts: list[int]
) -> None:
    arrays = [np.asfortranarray(array) if fortran else array for array in arrays]
    path = tmp_path / "a.npz"
    (np.savez_compressed if packed else np.savez)(path, **{f"a{number}": array for number, array in enumerate(arrays)})
    with NpzFile(path) as file:
        assert file.names == tuple(f"a{number}" for number in range(len(arrays)))
        for name, array in zip(file.names, arrays, strict=True):
            assert file.form(name) == (array.dtype.newbyteorder("="), array.shape)
            assert not file.is_pickled(name)
            assert _same(file.whole(name, 1 << 20), array)
            for start in cuts:  # also backwards
                start = min(start, len(array))
                assert _same(file.read(name, start, len(array)), array[start:])
    np.save(tmp_path / "a.npy", arrays[0])
    with NpyFile(tmp_path / "a.npy") as single:
        assert _same(single.whole(1 << 20), arrays[0])
        assert _same(single.read(0, len(arrays[0]) // 2), arrays[0][: len(arrays[0]) // 2])


@each("save", [np.savez, np.savez_compressed])
def test_rows_across_blocks_are_whole(tmp_path: Path, save: Callable[..., None]) -> None:
    rows = np.random.default_rng(0).integers(0, 7, (5_000, 37, 4)).astype(np.int16)
    save(tmp_path / "a.npz", rows=rows)
    with NpzFile(tmp_path / "a.npz") as file:
        for start, stop in [(0, 3), (3, 1_200), (1_100, 4_999), (4_999, 5_000), (0, 5_000), (2, 3), (5_000, 5_000)]:
            assert np.array_equal(file.read("rows", start, stop), rows[start:stop])


@each("save", [np.savez, np.savez_compressed])
def test_memory_is_that_of_the_rows_read(tmp_path: Path, save: Callable[..., None]) -> None:
    rows = np.arange(64, dtype=np.uint8)[:, None] + np.arange(1 << 20, dtype=np.uint8)
    save(tmp_path / "a.npz", rows=rows)
    with NpzFile(tmp_path / "a.npz") as file:
        file.form("rows")
        tracemalloc.start()
        try:
            for start in range(64):
                assert np.array_equal(file.read("rows", start, start + 1)[0], rows[start])
            assert tracemalloc.get_traced_memory()[1] < 6 << 20
        finally:
            tracemalloc.stop()


def test_ascending_reads_unpack_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "a.npz", rows=np.random.default_rng(0).random((20_000, 16)))
    size, read = (tmp_path / "a.npz").stat().st_size, 0
    plain = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal read
        read += (count := plain(descriptor, buffers, offset))
        return count

    monkeypatch.setattr(os, "preadv", counted)
    with NpzFile(tmp_path / "a.npz") as file:
        for start in range(0, 20_000, 100):
            file.read("rows", start, start + 100)
    assert read <= size


def test_a_pickle_is_named_and_never_unpacked(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return exec, ("raise SystemExit('unpickled')",)

    np.savez(tmp_path / "a.npz", infos=np.array([Bomb(), 1], object), plain=np.arange(3))
    with NpzFile(tmp_path / "a.npz") as file:
        assert (file.is_pickled("infos"), file.is_pickled("plain")) == (True, False)
        assert file.form("infos") == (np.dtype(object), (2,))
        for read in (lambda: file.read("infos", 0, 1), lambda: file.whole("infos", 1 << 20)):
            with pytest.raises(FormatError, match="'infos' is a pickle of Python objects"):
                read()
        assert b"exec" in file.raw("infos", 1 << 20)
        assert file.read("plain", 1, 3).tolist() == [1, 2]


def test_what_is_asked_for_has_to_be_there(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", rewards=np.zeros(3), one=np.float32(2))
    with NpzFile(tmp_path / "a.npz") as file:
        with pytest.raises(MissingKeyError, match="did you mean 'rewards'"):
            file.form("reward")
        with pytest.raises(SchemaError, match=r"rows of .*'rewards' are 2:4, expected within 3"):
            file.read("rewards", 2, 4)
        with pytest.raises(FormatError, match="single value"):
            file.read("one", 0, 1)
        assert file.whole("one", 4) == np.float32(2)
        with pytest.raises(FormatError, match="24 bytes, at most 23"):
            file.whole("rewards", 23)
    file.close()


def test_members_that_are_no_arrays_are_listed_apart(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{"obs/state": np.zeros(3)})
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr("notes.txt", "hello")
    with NpzFile(tmp_path / "a.npz") as file:
        assert file.names == ("obs/state",)
        assert file.others == ("notes.txt",)


def test_a_large_array_in_fortran_order_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, (33 << 20)), np.uint8).T)
    with NpyFile(tmp_path / "a.npy") as file, pytest.raises(FormatError, match=r"Fortran order.* and has 69,206,016"):
        file.read(0, 1)


def test_names_of_arrays_never_raises(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    os.mkfifo(tmp_path / "fifo")
    for name in ("", "nothing", "text", "fifo"):
        assert array_names(tmp_path / name) == (), name
    np.savez(tmp_path / "a.npz", a=1, b=2)
    assert array_names(tmp_path / "a.npz") == ("a", "b")
    assert begins_as_zip(tmp_path / "a.npz")


def _npy(header: str, data: bytes = b"", version: int = 1) -> bytes:
    text = header.encode("latin-1")
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + data


def _described(descr: str = "'<f4'", shape: str = "(2,)", fortran: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"


@each(
    ("data", "why"),
    [
        (b"", "does not begin with the header"),
        (b"hello, this is text", "does not begin with the header"),
        (_npy(_described(), b"\0" * 8, version=9), "version 9"),
        (_npy(_described())[:40], "its header is cut"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "expected at most 10,000"),
        (_npy("__import__('os').system('true')"), "cannot be read"),
        (_npy("(" * 4000), "cannot be read"),
        (_npy("{'descr': '<f4', 'fortran_order': False}"), "cannot be read"),
        (_npy(_described(shape="(-2,)"), b"\0" * 8), "states no shape"),
        (_npy(_described(shape="(2.0,)"), b"\0" * 8), "states no shape"),
        (_npy(_described(shape=f"({10**30},)")), "no array has"),
        (_npy(_described(shape=f"({1 << 62}, 4, 0)")), "no array has"),
        (_npy(_described(shape="(3,)"), b"\0" * 8), "is 12 bytes, and 8 follow"),
        (_npy(_described(shape="(1,)"), b"\0" * 8), "is 4 bytes, and 8 follow"),
        (_npy(_described("'spam'"), b"\0" * 8), "cannot be read"),
        (_npy(_described("'|a4'"), b"\0" * 8), "cannot be read"),  # NumPy warns of this name
        (_npy(_described(fortran="1"), b"\0" * 8), "order of elements"),
        (_npy(_described("('<f4', (2,))", "(1,)"), b"\0" * 8), "arrays themselves"),
    ],
)
def test_headers_that_make_no_sense_are_refused(data: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(data)
    with pytest.raises(FormatError, match=why):
        NpyFile(tmp_path / "a.npy")
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", data)
    with NpzFile(tmp_path / "a.npz") as file, pytest.raises(FormatError, match=why):
        file.form("a")


def test_headers_of_every_version_are_read(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        (tmp_path / "a.npy").write_bytes(_npy(_described(), np.float32([1, 2]).tobytes(), version))
        with NpyFile(tmp_path / "a.npy") as file:
            assert file.read(0, 2).tolist() == [1, 2]
    (tmp_path / "a.npy").write_bytes(_npy(_described(shape="(2L,)"), np.float32([1, 2]).tobytes()))
    with NpyFile(tmp_path / "a.npy") as file:
        assert file.read(1, 2).tolist() == [2]


def test_a_truth_value_is_zero_or_one(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(_npy(_described("'|b1'"), b"\1\2"))
    with NpyFile(tmp_path / "a.npy") as file, pytest.raises(CorruptDataError, match="neither 0 nor 1"):
        file.read(0, 2)


def _zip(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytearray:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return bytearray(path.read_bytes())


def _array(values: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(values), allow_pickle=False)
    return file.getvalue()


@each("name", ["../a.npy", "/a.npy", "x/../../a.npy", "a\\b.npy"])
def test_names_that_lead_out_of_a_folder_are_refused(name: str, tmp_path: Path) -> None:
    _zip(tmp_path / "a.npz", {name: _array([1])})
    with pytest.raises(CorruptDataError, match="out of the archive"):
        NpzFile(tmp_path / "a.npz")


def test_entries_of_folders_are_passed_over(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.mkdir("folder")
        archive.write(tmp_path / "a.npy", "a.npy")
    with NpzFile(tmp_path / "a.npz") as file:
        assert (file.names, file.read("a", 0, 3).tolist()) == (("a",), [0, 1, 2])


def test_a_name_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", _array([1]))
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a.npy", _array([2]))
    with pytest.raises(CorruptDataError, match="is in it twice"):
        NpzFile(tmp_path / "a.npz")


@each("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compression_is_refused(tmp_path: Path, method: int) -> None:
    _zip(tmp_path / "a.npz", {"a.npy": _array(np.zeros(100))}, method)
    with pytest.raises(CorruptDataError, match="expected stored or deflated"):
        NpzFile(tmp_path / "a.npz")


def _states(data: bytearray, size: int) -> bytearray:
    """Have the list of members state another size of the only one."""
    at = data.rindex(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", size)
    return data


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """A member that states 4 GB in a few bytes, and one that unpacks to more than it states."""
    path = tmp_path / "a.npz"
    rows = _npy(_described("'|u1'", f"({(4 << 30) - 200},)"))
    data = _zip(path, {"a.npy": rows})
    path.write_bytes(_states(data, len(rows) + (4 << 30) - 200))
    with pytest.raises(CorruptDataError, match=r"more than .* compressed bytes can unpack to"):
        NpzFile(path)
    bomb = _npy(_described("'|u1'", "(100,)")) + bytes(50 << 20)
    data = _zip(path, {"a.npy": bomb})
    path.write_bytes(_states(data, len(bomb) - (50 << 20) + 100))
    tracemalloc.start()
    try:
        with NpzFile(path) as file, pytest.raises(CorruptDataError, match="does not unpack to the"):
            file.read("a", 0, 100)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_what_was_cut_or_changed_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, rows=np.arange(1000))
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    with pytest.raises(CorruptDataError, match="it was cut"):
        NpzFile(path)
    path.write_bytes(b"no archive")
    with pytest.raises(FormatError, match="is not an npz file: it begins with b'no a'"):
        NpzFile(path)
    at = whole.index(np.arange(1000).tobytes()) + 4000
    path.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
    with NpzFile(path) as file:
        file.read("rows", 0, 100)
        with pytest.raises(CorruptDataError, match="another checksum"):
            file.read("rows", 100, 1000)
        with pytest.raises(CorruptDataError, match="another checksum"):
            file.verify()
    path.write_bytes(whole)
    with NpzFile(path) as file:
        file.verify()


def test_a_member_under_the_name_of_another_is_refused(tmp_path: Path) -> None:
    data = _zip(tmp_path / "a.npz", {"a.npy": _array([1]), "b.npy": _array([2])})
    second = data.rindex(b"PK\x01\x02")
    data[second + 42 : second + 46] = bytes(4)  # where a.npy is
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(CorruptDataError, match="another name where it is stored"):
        NpzFile(tmp_path / "a.npz")


def test_a_list_that_lacks_a_member_is_refused(tmp_path: Path) -> None:
    """The list has no checksum: here the comment of the first member takes the second one in."""
    data = _zip(tmp_path / "a.npz", {"a.npy": _array([1]), "b.npy": _array([2])})
    first, second, end = data.index(b"PK\x01\x02"), data.rindex(b"PK\x01\x02"), data.rindex(b"PK\x05\x06")
    data[first + 32 : first + 34] = (end - second).to_bytes(2, "little")
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(CorruptDataError, match="it states 2 arrays, and lists 1"):
        NpzFile(tmp_path / "a.npz")


def _read_all(path: Path) -> dict[str, bytes]:
    with NpzFile(path) as file:
        return {name: file.read(name, 0, file.form(name)[1][0]).tobytes() for name in file.names}


@each("save", [np.savez, np.savez_compressed])
def test_mutations_give_the_same_rows_or_our_errors(tmp_path: Path, save: Callable[..., None]) -> None:
    path = tmp_path / "a.npz"
    generator = np.random.default_rng(1)
    save(path, observations=generator.integers(0, 9, (40, 3)), flags=generator.random(40) < 0.1)
    sound, rows = path.read_bytes(), _read_all(path)
    draw, refused = random.Random(2), 0
    for _ in range(600):
        data = bytearray(sound)
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data[: draw.randrange(len(data))] if draw.random() < 0.1 else data)
        try:
            found = _read_all(path)
        except RbtoolError:
            refused += 1
            continue
        assert all(rows.get(name, value) == value for name, value in found.items())
    assert refused > 200


Array = np.ndarray[Any, Any]
Save = Callable[..., None]
ROWS = 40


def _numbers(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).normal(size=shape)


def _ogbench(path: Path, save: Save) -> Path:
    marks = np.isin(np.arange(ROWS), (11, 25, ROWS - 1)).astype("f4")
    save(path, observations=_numbers(ROWS, 3), actions=_numbers(ROWS, 2), terminals=marks, qpos=_numbers(ROWS, 2))
    return path


def _vd4rl(path: Path, save: Save) -> Path:
    return write_vd4rl(path.with_suffix(""), random_vd4rl([9, 4]), packed=save is np.savez_compressed)


def _imitation(path: Path, save: Save) -> Path:
    save(path, obs=_numbers(ROWS + 3, 3), acts=_numbers(ROWS, 2), rews=_numbers(ROWS), indices=np.array([9, 21]),
         terminal=np.array([True, False, True]))  # fmt: skip
    return path


def _sb3(path: Path, save: Save, *, position: int = 13, full: bool = False) -> Path:
    save(path, observations=_numbers(20, 2, 3), next_observations=_numbers(20, 2, 3), actions=_numbers(20, 2, 1),
         rewards=_numbers(20, 2), dones=(_numbers(20, 2) > 0.8).astype("f4"), timeouts=np.zeros((20, 2), "f4"),
         pos=np.array(position), full=np.array(full))  # fmt: skip
    return path


def _full_ring(path: Path, save: Save) -> Path:
    return _sb3(path, save, position=7, full=True)


def _table(path: Path, save: Save) -> Path:
    save(path, o=_numbers(ROWS, 3), a=_numbers(ROWS, 2), r=_numbers(ROWS), d=np.arange(ROWS) % 10 == 9)
    return path


TABLE = {"map": ["observation=o", "action=a", "next.reward=r"], "ends": "d"}
FORMATS = {
    "ogbench": (_ogbench, "actions"), "vd4rl": (_vd4rl, "reward"), "imitation": (_imitation, "acts"),
    "sb3": (_sb3, "rewards"), "sb3 ring": (_full_ring, "rewards"), "table": (_table, "a"),
}  # fmt: skip
"""How to write a file of each format, and the array in it that is damaged."""


def _rows(path: Path, kind: str) -> list[Array]:
    """Read all steps as a conversion does."""
    choice: dict[str, Any] = {"format": "table", "options": TABLE} if kind == "table" else {}
    with open_source(path, **choice) as reader:
        numbers = reader.facts().episode_numbers
        return [array for part in reader.blocks(numbers) for _, array in sorted(part.columns.items())]


def _spans(file: Path) -> list[tuple[str, int, int]]:
    """The places of the bytes of each member."""
    data = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        found = []
        for member in archive.infolist():
            at = member.header_offset
            start = at + 30 + int.from_bytes(data[at + 26 : at + 28], "little")
            start += int.from_bytes(data[at + 28 : at + 30], "little")
            found.append((member.filename, start, start + member.compress_size))
    return found


@each("kind", FORMATS)
@each("save", [np.savez, np.savez_compressed])
def test_a_bit_that_flipped_is_found_wherever_it_is(tmp_path: Path, kind: str, save: Save) -> None:
    path = FORMATS[kind][0](tmp_path / "a.npz", save)
    expected = _rows(path, kind)
    file = sorted(path.iterdir())[0] if path.is_dir() else path
    sound = file.read_bytes()
    draw, named = random.Random(0), list[tuple[str, str]]()
    for name, start, stop in _spans(file):
        places = {start, stop - 1, min(start + 129, stop - 1), *(draw.randrange(start, stop) for _ in range(5))}
        for place in sorted(places):
            file.write_bytes(sound[:place] + bytes([sound[place] ^ 1 << draw.randrange(8)]) + sound[place + 1 :])
            try:
                found = _rows(path, kind)
            except CorruptDataError as error:
                named.append((name.removesuffix(".npy"), str(error)))
                continue
            assert all(map(np.array_equal, found, expected)), f"{name}: byte {place - start} of {stop - start}"
            assert len(found) == len(expected)
    assert named
    assert [one for one, said in named if one not in said] == []
    file.write_bytes(sound)
    assert all(map(np.array_equal, _rows(path, kind), expected))


@each("kind", FORMATS)
@each("save", [np.savez, np.savez_compressed])
def test_nothing_is_published_of_a_damaged_file(tmp_path: Path, kind: str, save: Save) -> None:
    write, named = FORMATS[kind]
    path = write(tmp_path / "a.npz", save)
    file = sorted(path.iterdir())[0] if path.is_dir() else path
    start, stop = next(span[1:] for span in _spans(file) if span[0] == f"{named}.npy")
    data = bytearray(file.read_bytes())
    data[start + 150 if save is np.savez else (start + stop) // 2] ^= 0x40
    file.write_bytes(data)
    given: dict[str, Any] = {"format": "table", **TABLE} if kind == "table" else {}
    refused(path, named, CorruptDataError, **given)
    refused(path, named, CorruptDataError, episodes="0", **given)
    try:
        errors = check(path, **given).errors
    except CorruptDataError:  # of a file that cannot be opened
        errors = 1
    assert errors
    if kind == "vd4rl":  # a file is an episode
        made = convert(path, tmp_path / "made", skip_bad=True, **given)
        assert made.episodes == 1
        assert any("episode 0 is left out" in note for note in made.notes)
        return
    refused(path, "", CorruptDataError, skip_bad=True, **given)


@each("kind", ["ogbench", "sb3", "imitation"])
@each("place", [0, 8, 20, 40])
def test_the_array_whose_header_is_damaged_is_named(tmp_path: Path, kind: str, place: int) -> None:
    path = FORMATS[kind][0](tmp_path / "a.npz", np.savez)
    sound = path.read_bytes()
    for name, start, _ in _spans(path):
        path.write_bytes(sound[: start + place] + bytes([sound[start + place] ^ 0x10]) + sound[start + place + 1 :])
        with pytest.raises(CorruptDataError, match=name.removesuffix(".npy")):
            _rows(path, kind)
