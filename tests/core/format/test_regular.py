"""A FIFO, a socket or a device in the place of a file ends in a sentence, and never in a wait without end."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import source_tree
from gymnasium import spaces
from minari_oracle import make_episode, write_minari
from waiting import HANG

import rbtool
from rbtool.core.encodings.save import save_checkpoint
from rbtool.core.errors import RbtoolError
from rbtool.core.format import fs
from rbtool.core.format.digest import open_regular, read_regular, require_regular
from rbtool.core.format.staging import lock_folder
from rbtool.core.open_steps import open_steps
from rbtool.core.testing.datasets import write_walks


@pytest.fixture(autouse=True)
def no_wait() -> Iterator[None]:
    signal.alarm(int(HANG))
    yield
    signal.alarm(0)


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


def _ted(place: Path) -> None:
    write_walks(place, [(3, "terminated"), (2, "open")])


def _packed(place: Path) -> None:
    _ted(place.with_name("plain"))
    rbtool.convert(_minari_of(place, "hdf5"), place, layout="packed")


def _saved(form: str) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        _ted(place.with_name("plain"))
        with open_steps(place.with_name("plain")) as reader:
            save_checkpoint(reader, place, form)

    return make


def _minari_of(place: Path, form: str) -> Path:
    box = spaces.Box(-1, 1, (2,), np.float64)
    episodes = [make_episode(box, box, 3, np.random.default_rng(1))]
    return write_minari(place.parent, "made/box-v0", box, box, episodes, data_format=form)


def _minari(form: str) -> Callable[[Path], None]:
    return lambda place: shutil.move(_minari_of(place, form), place) and None


KINDS = {
    "ted": _ted, "packed": _packed, "flat": _saved("flat"), "nested": _saved("nested"), "h5": _saved("h5"),
    "hdf5": _minari("hdf5"), "arrow": _minari("arrow"), "parquet": _minari("parquet"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_may_be_a_fifo(kind: str, tmp_path: Path) -> None:
    KINDS[kind](tmp_path / "sound")
    files = [path for path in (tmp_path / "sound", *(tmp_path / "sound").rglob("*")) if path.is_file()]
    read: list[Callable[[Path], object]] = [rbtool.inspect]
    if kind in {"hdf5", "arrow", "parquet"}:
        read.append(lambda place: rbtool.convert(place, tmp_path / "made", force=True))
    else:
        read += [rbtool.check, rbtool.stats]
    for file in files:
        file.rename(tmp_path / "aside")
        os.mkfifo(file)
        for use in read:
            try:
                use(tmp_path / "sound")
            except (RbtoolError, FileNotFoundError):
                continue
        (tmp_path / "aside").replace(file)


READERS = {"core/format/fs.py", "core/format/digest.py", "core/format/staging.py"}
USERS_OWN = {"core/progress.py", "core/preprocess/operations/program.py"}  # may be `<(command)`
SYSTEMS = {"core/storages/dataset.py"}
QUICK = {"cli/complete.py"}  # which looks at the kind of a file first, and imports nothing
OWN = {
    "__init__.py",
    "converters/d4rl/datasets.py",
    "converters/ogbench/file.py",
    "core/report/page.py",
}  # files of the package itself


def _opens_to_read(call: ast.Call) -> bool:
    last = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if last not in {"memmap", "open", "read_bytes", "read_text"}:
        return False
    name = ast.unparse(call.func)
    if name.endswith((".read_bytes", ".read_text")):
        return not name.startswith("self._source")  # a dataset of an HDF5 file
    if name == "os.open":
        return not {"os.devnull", "os.O_RDONLY | os.O_DIRECTORY"} & {ast.unparse(word) for word in call.args}
    return name in {"open", "io.open", "np.memmap"} and not isinstance(call.args[0], ast.Constant)


def test_files_are_opened_to_read_in_one_module_only() -> None:
    found = {
        file.relative_to(source_tree.ROOT).as_posix()
        for file in source_tree.package_files()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and _opens_to_read(node)
    }
    assert {name for name in found if "testing" not in name} <= READERS | USERS_OWN | SYSTEMS | QUICK | OWN
