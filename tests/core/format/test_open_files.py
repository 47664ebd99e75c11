"""Files that are opened: mapped, at a position, and never waited for without end."""

from __future__ import annotations

import ast
import itertools
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import source_tree
from hypothesis import given, settings
from hypothesis import strategies as st

import rbtool
from rbtool import CorruptDataError
from rbtool.core.errors import OutOfSpaceError, SchemaError
from rbtool.core.format import fs
from rbtool.core.format.files import digest_bytes, digest_file, open_regular, read_regular, require_regular
from rbtool.core.format.memmap import builder as ted_builder
from rbtool.core.format.memmap.builder import PositionedTree, RowFiles
from rbtool.core.format.memmap.tree import TreeWriter, leaf_path, read_tree
from rbtool.core.format.open_files import MappedWindow, OpenFiles, digest_mapped
from rbtool.core.format.staging import lock_folder
from rbtool.core.ted.schema import Field

FIELDS = (
    Field(("a",), "float32", (2,), "observation"),
    Field(("next", "b"), "bfloat16", (), "observation"),
    Field(("deep", "none"), "int8", (0,), "info"),
)
ROWS = 23


def columns(start: int = 0, stop: int = ROWS) -> dict:
    numbers = np.arange(ROWS * 2).reshape(ROWS, 2)
    whole = {FIELDS[0].key: numbers.astype(np.float32), FIELDS[1].key: numbers[:, 0].astype(np.uint16)}
    return {key: array[start:stop] for key, array in (whole | {FIELDS[2].key: np.empty((ROWS, 0), np.int8)}).items()}


@settings(max_examples=20, deadline=None)
@given(cuts=st.sets(st.integers(1, ROWS - 1), max_size=5), seed=st.integers(0, 9))
def test_rows_in_any_order_make_the_same_files_as_in_sequence(cuts: set[int], seed: int, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("trees")
    expected = TreeWriter(folder / "expected", FIELDS)
    expected.append(columns())
    records = expected.finish((ROWS,))
    (folder / "found").mkdir()
    bounds = [0, *sorted(cuts), ROWS]
    parts = list(itertools.pairwise(bounds))
    with (
        mock.patch.multiple(ted_builder, _CHUNK=24, _BUFFER=10),
        PositionedTree(folder / "found", FIELDS, ROWS) as tree,
    ):
        files = RowFiles(folder / "found", FIELDS)
        done: set[int] = set()
        for number in np.random.default_rng(seed).permutation(len(parts)).tolist():
            files.write(columns(*parts[number]), parts[number][0])
            done.add(number)
            front = next((parts[n][0] for n in range(len(parts)) if n not in done), ROWS)
            tree.settle_rows(front)
        files.close()
        assert tree.finish() == records
    assert read_tree(OpenFiles(folder / "found")) == read_tree(OpenFiles(folder / "expected"))
    assert all(digest_file(folder / "found" / record.path) == record.digest for record in records)


def test_rows_are_read_back(tmp_path: Path) -> None:
    with PositionedTree(tmp_path, FIELDS, ROWS) as tree:
        files = RowFiles(tmp_path, FIELDS)
        files.write(columns(5, 9), 5)
        for key, array in columns(6, 9).items():
            assert np.array_equal(tree.read(key, 6, 9), array)
        files.close()


def test_a_tree_that_cannot_be_made_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutOfSpaceError, match="are needed"):
        PositionedTree(tmp_path, FIELDS, 10**15)
    assert list(tmp_path.iterdir()) == []
    both = [Field(key, "int8", (), "info") for key in (("a%",), ("a",), ("a", "b"))]
    with pytest.raises(SchemaError, match="need the same file"):
        PositionedTree(tmp_path, both, 3)
    (tmp_path / "next").mkdir()
    (tmp_path / "next" / "b.memmap").touch()
    made = []
    create = fs.create
    monkeypatch.setattr(fs, "create", lambda path: made.append(create(path)) or made[-1])
    with pytest.raises(FileExistsError):
        PositionedTree(tmp_path, FIELDS, ROWS)
    assert not _open_on(made[0], tmp_path / leaf_path(("a",)))


def _open_on(descriptor: int, path: Path) -> bool:
    """Tell whether the descriptor is open on that file, and not closed or taken for something else since."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


LEAF = Field(("a",), "uint16", (3,), "observation")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mapped") / "rows"
    path.write_bytes(b"!" + np.arange(30_000, dtype=np.uint16).tobytes())
    return path


@pytest.fixture(scope="module")
def small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rbtool.core.format.open_files._PART", 8192)
        patch.setattr("rbtool.core.format.open_files._MAPPED", 8192)
        yield


@pytest.mark.usefixtures("small_parts")
@given(asked=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)), max_size=6))
@settings(deadline=None, max_examples=50)
def test_rows_are_those_of_the_file(file: Path, asked: list[tuple[int, int]]) -> None:
    whole = np.arange(30_000, dtype=np.uint16).reshape(-1, 3)
    window, descriptor = MappedWindow(), os.open(file, os.O_RDONLY)
    for start, stop in map(sorted, asked):
        found = window.rows((descriptor, 1), file, LEAF, start, stop)
        np.testing.assert_array_equal(found, whole[start:stop])
        assert not found.flags.writeable or not found.size
    window.close()
    os.close(descriptor)


@pytest.mark.usefixtures("small_parts")
def test_rows_beyond_the_end_are_refused(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    with pytest.raises(CorruptDataError, match="6 bytes too early"):
        MappedWindow().rows((descriptor, 1), file, LEAF, 9_000, 10_001)
    os.close(descriptor)


@pytest.mark.usefixtures("small_parts")
def test_digests_are_those_of_reading(file: Path) -> None:
    with open(file, "rb") as opened:
        for start in (0, 1, 8192, 60_000, 60_001):
            assert digest_mapped(opened.fileno(), file, start) == digest_bytes(file.read_bytes()[start:]), start
    file.with_name("small").write_bytes(b"abc")
    with OpenFiles(file.parent) as files:
        for name in ("rows", "small"):
            assert files.digest(name) == digest_file(file.with_name(name))


# A FIFO, a socket or a device in the place of a file ends in a sentence, and never in a wait without end.


@pytest.mark.parametrize("use", [open_regular, read_regular, require_regular])
def test_only_regular_files_are_opened(tmp_path: Path, use: Callable[[Path], object], monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    Path("link").symlink_to("fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        for name, kind in {"fifo": "a FIFO", "link": "a FIFO", "socket": "a socket", "/dev/zero": "a device"}.items():
            with pytest.raises(rbtool.FormatError, match=f"{name} is {kind}, expected a regular file"):
                use(Path(name))


def test_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"data")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "file") == read_regular(tmp_path / "link") == b"data"
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none")
    folder = os.open(tmp_path, os.O_RDONLY)
    for name, problem in {"link": rbtool.CorruptDataError, "none": FileNotFoundError}.items():
        with pytest.raises(problem, match=str(tmp_path / name)):
            open_regular(tmp_path / name, within=folder)
    os.close(folder)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(IsADirectoryError) as raised:
        read_regular(tmp_path)
    assert (raised.value.filename, len(list(Path("/proc/self/fd").iterdir()))) == (str(tmp_path), before)


def test_locks_and_writes_do_not_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    os.close(lock_folder(tmp_path / "fifo"))
    with pytest.raises(OSError, match="fifo"):
        fs.open_to_fill(tmp_path / "fifo")
    descriptor = fs.open_to_append(tmp_path / "fifo")
    with pytest.raises(BlockingIOError):
        fs.write(descriptor, memoryview(bytes(1 << 20)), tmp_path / "fifo")
    os.close(descriptor)


READERS = {"core/format/fs.py", "core/format/files.py", "core/format/staging.py"}
USERS_OWN = {"core/progress.py", "core/preprocess/operations/program.py"}  # may be `<(command)`
SYSTEMS = {"core/format/threads.py"}
QUICK = {"cli/complete.py"}  # which looks at the kind of a file first, and imports nothing
OTHERS = {"converters/lance/table_process.py"}  # the process of pylance, which imports nothing: files of an export
OWN = {"__init__.py", "core/report/page.py"}  # files of the package itself


def _opens_to_read(call: ast.Call) -> bool:
    last = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if last not in {"memmap", "open", "read_bytes", "read_text"}:
        return False
    name = ast.unparse(call.func)
    if name.endswith((".read_bytes", ".read_text")):
        # a dataset of an HDF5 file, and a table beside the module
        return not name.startswith("self._source") and name != "_TABLE.read_text"
    if name == "os.open":
        return not {"os.devnull", "os.O_RDONLY | os.O_DIRECTORY"} & {ast.unparse(word) for word in call.args}
    return name in {"open", "io.open", "np.memmap"} and not isinstance(call.args[0], ast.Constant)


def test_files_are_opened_to_read_in_one_module_only() -> None:
    texts = {file: file.read_text(encoding="utf-8") for file in source_tree.package_files()}
    found = {
        file.relative_to(source_tree.ROOT).as_posix()
        for file, text in texts.items()
        if re.search(r"\b(memmap|open|read_bytes|read_text)\(", text)  # to parse all takes 5 s
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and _opens_to_read(node)
    }
    assert {name for name in found if "testing" not in name} <= READERS | USERS_OWN | SYSTEMS | QUICK | OTHERS | OWN
