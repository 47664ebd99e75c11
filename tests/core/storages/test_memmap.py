from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_scripts import run_forked
from tensordict import NonTensorData, TensorDict, tensorclass

import rbtool.core.checkpointers  # noqa: F401 - storages find theirs
from rbtool.core.errors import CorruptDataError, OutOfSpaceError, SchemaError
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage
from rbtool.core.testing.storages import StorageFillTests, StorageTests, same


@tensorclass
class Step:
    observation: torch.Tensor
    action: torch.Tensor


def steps(rows: int = 10, first: int = 0) -> TensorDict:
    numbers = torch.arange(first, first + rows)
    return TensorDict({"a/b": numbers, "next": {"c": torch.stack([numbers, -numbers], -1).double()}}, [rows])


def filled(storage: LazyMemmapStorage) -> LazyMemmapStorage:
    storage.set(range(10), steps())
    storage.last_cursor = None
    return storage


class TestTemporary(StorageTests):
    def make(self) -> LazyMemmapStorage:
        return filled(LazyMemmapStorage(25))


class TestFills(StorageFillTests):
    def make_empty(self, max_size: int, ndim: int) -> LazyMemmapStorage:
        return LazyMemmapStorage(max_size, ndim=ndim)


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_tensordict_opens_the_scratch_dir(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(20, scratch_dir=tmp_path / "maps")
    storage.set(range(10), steps().set("task", NonTensorData("door", batch_size=[10])))
    opened = TensorDict.load_memmap(tmp_path / "maps")
    assert (opened.batch_size, opened["task"]) == ((20,), "door")
    assert same(opened[:10].exclude("task"), steps())
    assert files(tmp_path / "maps") == [
        "a%2Fb.memmap", "meta.json", "next/c.memmap", "next/meta.json", "task/meta.json"
    ]  # fmt: skip


def test_tensordict_opens_tensorclasses(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(5, scratch_dir=tmp_path / "maps")
    row = Step(torch.ones(2), torch.tensor(7), batch_size=[])
    storage.set(0, TensorDict({"in": row}))
    opened = TensorDict.load_memmap(tmp_path / "maps")
    assert (type(opened["in"]), opened["in"].action.tolist()) == (Step, [7, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (torch.ones(2), ["_-single-tensor-_.memmap"]),
        ({"a.b": torch.ones(2), "c": [torch.ones(2)], "../d": (torch.ones(2),)}, [
            "..%2Fd/0.memmap", "a.b.memmap", "c/0.memmap"
        ]),
    ],
)  # fmt: skip
def test_nests_have_a_file_a_leaf_inside_the_folder(tmp_path: Path, data: Any, expected: list[str]) -> None:
    LazyMemmapStorage(5, scratch_dir=tmp_path / "maps").set(range(2), data)
    assert files(tmp_path) == [f"maps/{name}" for name in expected]


def test_files_take_room_as_rows_are_written(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(1 << 20, scratch_dir=tmp_path / "maps")
    storage.set(range(2), torch.ones(2, 256, dtype=torch.float64))
    found = (tmp_path / "maps" / "_-single-tensor-_.memmap").stat()
    assert found.st_size == 1 << 31
    assert 4096 <= found.st_blocks * 512 < 1 << 24


def test_what_lies_in_the_way_is_left_alone(tmp_path: Path) -> None:
    filled(LazyMemmapStorage(25, scratch_dir=tmp_path))
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    other = LazyMemmapStorage(25, scratch_dir=tmp_path)
    with pytest.raises(RuntimeError, match="already exists; left unchanged"):
        other.set(range(2), steps(2))
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before
    assert (len(other), other.initialized) == (0, False)


def test_existsok_replaces_files_and_whoever_has_them_keeps_theirs(tmp_path: Path) -> None:
    old = filled(LazyMemmapStorage(25, scratch_dir=tmp_path))
    new = LazyMemmapStorage(5, scratch_dir=tmp_path, existsok=True)
    new.set(range(2), steps(2, 50))
    assert same(old[:], steps())
    assert same(TensorDict.load_memmap(tmp_path)[:2], steps(2, 50))


@pytest.mark.parametrize("device", ["cuda", "meta", torch.device("cuda:0")])
def test_other_devices_are_refused(device: Any) -> None:
    with pytest.raises(ValueError, match="for a memory map"):
        LazyMemmapStorage(10, device=device)


# Removing files ------------------------------------------------------------------------------------


def test_a_temporary_folder_goes_with_its_storage() -> None:
    storage = filled(LazyMemmapStorage(25))
    folder = storage.scratch_dir
    assert folder is not None
    assert folder.is_dir()
    del storage
    gc.collect()
    assert not folder.exists()


@pytest.mark.parametrize("auto_cleanup", [None, True])
def test_a_scratch_dir_goes_when_asked_and_only_with_our_files(tmp_path: Path, auto_cleanup: bool | None) -> None:
    (tmp_path / "maps").mkdir()
    (tmp_path / "maps" / "mine.txt").write_text("kept")
    storage = filled(LazyMemmapStorage(25, scratch_dir=tmp_path / "maps", auto_cleanup=auto_cleanup))
    del storage
    gc.collect()
    assert (files(tmp_path) == ["maps/mine.txt"]) is bool(auto_cleanup)


def test_cleanup_removes_temporary_files_at_once() -> None:
    storage = filled(LazyMemmapStorage(25))
    assert storage.cleanup() is True
    assert storage.scratch_dir is not None
    assert not storage.scratch_dir.exists()
    assert storage.cleanup() is False
    assert same(storage[:], steps())


LEAVING = """
import os, signal, sys, torch
from rbtool import LazyMemmapStorage
storage = LazyMemmapStorage(25, scratch_dir=sys.argv[1], auto_cleanup=True)
storage.set(0, torch.ones(3))
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
child = os.fork()
if not child:
    if sys.argv[2] == "exit":
        sys.exit(0)
    os.kill(os.getpid(), signal.SIGTERM)
os.waitpid(child, 0)
assert os.path.isfile(sys.argv[1] + "/_-single-tensor-_.memmap")
storage.set(1, torch.ones(3))
"""


@pytest.mark.parametrize("how", ["exit", "signal"])
def test_a_forked_child_never_removes_the_files_of_its_parent(tmp_path: Path, how: str) -> None:
    done = run_forked(LEAVING, tmp_path / "maps", how)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "maps").exists()  # the parent did, when it left


# Space ---------------------------------------------------------------------------------------------

LIMITED = """
import resource, sys, torch
from tensordict import TensorDict
from rbtool.core.errors import OutOfSpaceError
from rbtool import LazyMemmapStorage
sys.dont_write_bytecode = True  # under the limit, Python would cut a compiled module, and read it ever after
storage = LazyMemmapStorage(1 << 16, scratch_dir=sys.argv[1])
rows = TensorDict({"x": torch.ones(2, 64)}, [2])
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
try:
    storage.set(range(2), rows)
except OutOfSpaceError as error:
    print(error.exit_code, storage.initialized, len(storage))
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
storage.set(range(2), rows)
print(len(storage))
"""


def test_a_limit_on_file_size(tmp_path: Path) -> None:
    done = run_forked(LIMITED, tmp_path / "maps")
    assert done.stdout.splitlines() == ["6 False 0", "2"], done.stderr


def test_a_full_disk_is_an_error_and_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    storage = LazyMemmapStorage(1 << 20, scratch_dir=tmp_path / "maps")
    storage.set(range(10), steps())
    real, room = os.posix_fallocate, 1 << 23

    def full(descriptor: int, start: int, length: int) -> None:
        if start + length > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor, start, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    many = steps(200_000)
    storage.set(range(10, 210_010), steps(210_000))  # twice as much would not fit
    before = (len(storage), storage.log.now, storage.last_cursor)
    with pytest.raises(OutOfSpaceError, match="no space is left"):
        storage.set(range(len(storage), len(storage) + 400_000), steps(400_000))
    assert (len(storage), storage.log.now, storage.last_cursor) == before
    room = 1 << 40
    storage.set(range(len(storage), len(storage) + 200_000), many)
    assert len(storage) == 410_010


def test_file_systems_that_take_no_blocks_ahead_get_zeros(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unsupported(descriptor: int, start: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    storage = LazyMemmapStorage(1 << 16, scratch_dir=tmp_path / "maps")
    storage.set(range(10), steps())
    storage.set(range(10, 60_010), steps(60_000))
    assert same(storage[:10], steps())
    assert same(storage[10:], steps(60_000))


# Processes -----------------------------------------------------------------------------------------


def extend(storage: LazyMemmapStorage) -> None:
    assert same(storage[:], steps())
    storage.set(range(10, 15), steps(5, 10))


@pytest.mark.parametrize(
    ("method", "temporary"),
    [("fork", True), ("fork", False), *(pytest.param("spawn", one, marks=pytest.mark.slow) for one in (True, False))],
)
def test_a_child_extends_the_same_rows(tmp_path: Path, method: str, temporary: bool) -> None:
    storage = filled(LazyMemmapStorage(20, scratch_dir=None if temporary else tmp_path / "maps"))
    child = multiprocessing.get_context(method).Process(target=extend, args=(storage,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert same(storage[torch.arange(15)], steps(15))
    storage.set(range(15, 17), steps(2, 15))
    assert same(TensorDict.load_memmap(storage.scratch_dir)[:17], steps(17)) or temporary


def test_a_plain_pickle_holds_the_rows_and_has_files_of_its_own(tmp_path: Path) -> None:
    storage = filled(LazyMemmapStorage(20, scratch_dir=tmp_path / "maps"))
    other = pickle.loads(pickle.dumps(storage))
    assert other.scratch_dir not in (None, storage.scratch_dir)
    other.set(0, steps()[9])
    assert same(storage[:], steps())
    assert same(other[1:10], steps()[1:])
    storage.cleanup()
    assert len(pickle.dumps(filled(LazyMemmapStorage(1 << 20)))) < 1 << 27


def test_a_file_that_was_cut_is_an_error_in_the_child_not_its_end(tmp_path: Path) -> None:
    storage = filled(LazyMemmapStorage(20, scratch_dir=tmp_path / "maps"))
    assert storage._maps is not None
    os.truncate(tmp_path / "maps" / "next" / "c.memmap", 8)
    with pytest.raises(CorruptDataError, match="8 bytes, expected 320"):
        storage._maps.open()


def test_keys_that_need_the_same_file_are_refused(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(5, scratch_dir=tmp_path / "maps")
    with pytest.raises(SchemaError, match="need the same file"):
        storage.set(0, {"a": torch.ones(2), "a.memmap": [torch.ones(2)]})
    assert files(tmp_path) == []
