"""A FIFO, a socket or a device in the place of a file ends in a sentence, and never in a wait without end."""

from __future__ import annotations

import ast
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import source_tree
from waiting import HANG

import rbtool
from rbtool.core.format import fs
from rbtool.core.format.digest import open_regular, read_regular, require_regular
from rbtool.core.format.staging import lock_folder


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


READERS = {"core/format/fs.py", "core/format/digest.py", "core/format/staging.py"}
USERS_OWN = {"core/progress.py", "core/preprocess/operations/program.py"}  # may be `<(command)`
SYSTEMS = {"core/storages/dataset.py"}
QUICK = {"cli/complete.py"}  # which looks at the kind of a file first, and imports nothing
OWN = {
    "__init__.py",
    "converters/d4rl/datasets.py",
    "converters/ogbench/datasets.py",
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
