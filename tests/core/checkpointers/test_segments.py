"""Checkpoints in segments: what changed is written, the rest is shared; what is loaded is mapped."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import flip
from tensordict import TensorDict

from rbtool.core.buffers.base import ReplayBuffer
from rbtool.core.checkpointers import segments
from rbtool.core.checkpointers.segments import block_rows
from rbtool.core.errors import CorruptDataError
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.tensor import TensorStorage

ROWS = 64


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have segments of a few rows."""
    monkeypatch.setattr(segments, "_FEWEST_BYTES", 128)


def steps(count: int = ROWS, first: int = 0) -> TensorDict:
    numbers = torch.arange(first, first + count)
    flags = (numbers % 3 == 0).unsqueeze(-1)
    return TensorDict({"a": numbers, "next": {"b": torch.stack([numbers, -numbers], -1).double(), "c": flags}}, [count])


def ring(kind: Callable[..., Any] = LazyTensorStorage, rows: int = ROWS, **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=kind(ROWS, **options))
    buffer.extend(steps(rows))
    return buffer


def inodes(path: Path) -> dict[int, int]:
    """The inode of each segment's file, by the number of the segment."""
    folder = path / "storage" if (path / "storage").is_dir() else path
    return {int(file.stem.partition("-")[2]): file.stat().st_ino for file in sorted(folder.glob("segment-*"))}


def shared(path: Path, dump: Callable[[], object]) -> list[int]:
    """Dump again; list the numbers of segments whose files are those of before."""
    before = inodes(path)
    with contextlib.ExitStack() as stack:
        for file in (path / "storage").glob("segment-*"):  # open, so that no inode comes again
            stack.enter_context(file.open("rb"))
        dump()
    return [number for number, inode in inodes(path).items() if before.get(number) == inode]


def runs(path: Path) -> dict[int, list[list[int]]]:
    """The runs of rows in each segment, by its number."""
    document = json.loads((path / "storage" / "segments.json").read_text())
    return {segment["number"]: segment["runs"] for segment in document["segments"]}


def rows_of(source: Any) -> list[Any]:
    leaves = source[torch.arange(len(source))] if len(source) else TensorDict({}, [0])
    return [(str(key), leaf.tolist()) for key, leaf in sorted(leaves.items(True, True), key=str)]


def content(path: Path) -> list[Any]:
    other = ReplayBuffer(storage=LazyTensorStorage(ROWS))
    other.loads(path)
    return rows_of(other)


def test_blocks_are_a_power_of_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_FEWEST_BYTES", 1 << 19)
    assert block_rows(1_000_000, 758) == 1024
    assert block_rows(10_000_000, 758) == 16_384
    assert block_rows(1_000, 758) == 1024
    assert block_rows(8, 1 << 30) == 1


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_the_next_dump_writes_the_rows_that_changed(tmp_path: Path, kind: Any) -> None:
    buffer, path = ring(kind), tmp_path / "saved"
    buffer.dumps(path)
    assert len(inodes(path)) == 8
    assert shared(path, lambda: buffer.dumps(path)) == list(range(8))
    buffer.extend(steps(11, 100))
    assert shared(path, lambda: buffer.dumps(path)) == list(range(1, 8))
    assert runs(path)[8] == [[0, 11]]
    assert content(path) == rows_of(buffer)
    buffer.storage[torch.tensor([30, 27])] = steps(2, 300)
    assert shared(path, lambda: buffer.dumps(path)) == [1, 2, 4, 5, 6, 7, 8]
    assert runs(path)[9] == [[24, 32]]  # a whole block: the rows are here and there
    assert content(path) == rows_of(buffer)
    assert not any(file.stat().st_mode & 0o222 for file in (path / "storage").glob("segment-*"))


def view(buffer: ReplayBuffer) -> None:
    buffer.storage[3:5]["a"].fill_(7)


def array(buffer: ReplayBuffer) -> None:
    buffer.storage[40]["next", "b"].numpy()[0] = 9


def zero_dimensions(buffer: ReplayBuffer) -> None:
    buffer.storage[torch.tensor(33)]["a"].fill_(12)


def contents(buffer: ReplayBuffer) -> None:
    buffer.storage.contents["a"][1] = 7


def state(buffer: ReplayBuffer) -> None:
    buffer.storage.state_dict()["_storage"]["a"][2] = 7


DEEDS: dict[str, Callable[[ReplayBuffer], Any]] = {
    "add": lambda buffer: buffer.add(steps(1, 500)[0]),
    "wrap": lambda buffer: (buffer.extend(steps(60, 100)), buffer.extend(steps(60, 200))),
    "row": lambda buffer: buffer.storage.__setitem__(5, steps(1, 50)[0]),
    "rows": lambda buffer: buffer.__setitem__(torch.tensor([60, 1]), steps(2, 70)),
    "entry": lambda buffer: buffer.__setitem__("a", torch.zeros(ROWS).long()),
    "new entry": lambda buffer: buffer.__setitem__("new", torch.ones(ROWS)),
    "many rows": lambda buffer: [buffer.storage.__setitem__(n % 4, steps(1, n)[0]) for n in range(100)],
    "empty": lambda buffer: (buffer.empty(), buffer.extend(steps(3, 9))),
    "shorter": lambda buffer: buffer.storage.set_length(20),
    "state loaded": lambda buffer: buffer.storage.load_state_dict(ring().storage.state_dict()),
    "a view": view,
    "an array": array,
    "a row by a tensor": zero_dimensions,
    "the contents": contents,
    "the state": state,
}


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("deed", DEEDS)
def test_no_change_is_missed(tmp_path: Path, kind: Any, deed: str) -> None:
    if deed == "new entry" and kind is LazyMemmapStorage:
        deed = "row"
    buffer, path = ring(kind), tmp_path / "saved"
    buffer.dumps(path)
    for _ in range(2):
        DEEDS[deed](buffer)
        buffer.dumps(path)
        assert content(path) == rows_of(buffer)


def test_a_reference_is_good_for_edits_after_any_number_of_dumps(tmp_path: Path) -> None:
    buffer, path = ring(), tmp_path / "saved"
    held = buffer.storage[:]
    for number in range(3):
        buffer.dumps(path)
        held["a"][9 * number] = -1 - number
        assert len(shared(path, lambda: buffer.dumps(path))) == 7
        assert content(path) == rows_of(buffer)


def test_given_memory_is_compared(tmp_path: Path) -> None:
    data = steps()
    buffer, path = ReplayBuffer(storage=TensorStorage(data)), tmp_path / "saved"
    buffer.dumps(path)
    data["next", "b"][13] = 5
    assert shared(path, lambda: buffer.dumps(path)) == [0, 2, 3, 4, 5, 6, 7]
    assert content(path) == rows_of(buffer)


def test_files_that_others_may_open_are_compared(tmp_path: Path) -> None:
    buffer, path = ring(LazyMemmapStorage, scratch_dir=tmp_path / "maps"), tmp_path / "saved"
    buffer.dumps(path)
    TensorDict.load_memmap(tmp_path / "maps")["a"][20] = 5
    assert len(shared(path, lambda: buffer.dumps(path))) == 7
    assert content(path) == rows_of(buffer)


def write_elsewhere(buffer: ReplayBuffer) -> None:
    buffer.extend(steps(3, 300))
    buffer.storage[8:9]["a"].fill_(1)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_writes_of_other_processes_are_seen(tmp_path: Path, start: str) -> None:
    buffer, path = ring(LazyMemmapStorage), tmp_path / "saved"
    buffer.dumps(path)
    process = multiprocessing.get_context(start).Process(target=write_elsewhere, args=(buffer,))
    process.start()
    process.join()
    assert process.exitcode == 0
    buffer.dumps(path)
    assert content(path) == rows_of(buffer)
    assert buffer.storage[8]["a"] == 1


# Whose checkpoint it is ----------------------------------------------------------------------------


def test_the_checkpoint_of_another_buffer_is_replaced_whole(tmp_path: Path) -> None:
    buffer, path = ring(), tmp_path / "saved"
    buffer.dumps(path)
    shutil.copytree(path, tmp_path / "backup")
    other = ring(rows=40)
    assert shared(path, lambda: other.dumps(path)) == []
    assert shared(path, lambda: buffer.dumps(path)) == []
    buffer.extend(steps(30, 100))
    buffer.dumps(path)
    shutil.rmtree(path)
    (tmp_path / "backup").rename(path)
    buffer.dumps(path)
    assert content(path) == rows_of(buffer)


def test_two_places_in_turn(tmp_path: Path) -> None:
    buffer, one, other = ring(), tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        buffer.dumps(path)
    assert not set(inodes(one).values()) & set(inodes(other).values())
    buffer.extend(steps(3, 100))
    assert len(shared(one, lambda: buffer.dumps(one))) == 8
    buffer.extend(steps(3, 200))
    assert len(shared(other, lambda: buffer.dumps(other))) == 8
    assert content(other) == rows_of(buffer)


def test_a_copy_of_a_storage_writes_everything(tmp_path: Path) -> None:
    buffer, path = ring(), tmp_path / "saved"
    buffer.dumps(path)
    copy = pickle.loads(pickle.dumps(buffer))
    copy.extend(steps(5, 90))
    assert shared(path, lambda: copy.dumps(path)) == []
    assert content(path) == rows_of(copy)


def test_a_dump_that_fails_shares_nothing_wrong_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, path = ring(), tmp_path / "saved"
    buffer.dumps(path)
    buffer.extend(steps(3, 100))
    with monkeypatch.context() as patched:
        patched.setattr(type(buffer.writer), "dumps", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            buffer.dumps(path)
    buffer.extend(steps(3, 200))
    assert len(shared(path, lambda: buffer.dumps(path))) == 8
    assert runs(path)[8] == [[0, 6]]
    assert content(path) == rows_of(buffer)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_where_there_are_no_links_all_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    buffer, path = ring(), tmp_path / "saved"
    buffer.dumps(path)
    buffer.extend(steps(3, 100))

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    assert shared(path, lambda: buffer.dumps(path)) == []
    assert content(path) == rows_of(buffer)


@pytest.mark.parametrize("how", ["writable", "cut", "gone", "a link"])
def test_only_whole_files_that_nobody_writes_are_shared(tmp_path: Path, how: str) -> None:
    buffer, path = ring(), tmp_path / "saved"
    buffer.dumps(path)
    file = path / "storage" / "segment-00003.memmap"
    file.chmod(0o644)
    if how == "cut":
        os.truncate(file, 5)
        file.chmod(0o444)
    elif how in {"gone", "a link"}:
        file.rename(tmp_path / "kept")
        file.symlink_to(tmp_path / "kept") if how == "a link" else None
    if how == "a link":
        file.unlink()  # a dump refuses links
    assert 3 not in shared(path, lambda: buffer.dumps(path))
    assert content(path) == rows_of(buffer)


# Loading -------------------------------------------------------------------------------------------


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have even the smallest blocks mapped, and verify nothing unless it is asked for."""
    monkeypatch.setattr(segments, "_MAPPED_FROM", 1)
    monkeypatch.setattr(segments, "_ALWAYS_VERIFIED", -1)
    monkeypatch.setattr(segments, "_FEWEST_BYTES", 1 << 18)


MANY = 40_000


@pytest.mark.usefixtures("mapped")
@pytest.mark.parametrize("capacity", [MANY, MANY + 1, 3 * MANY])
def test_mapped_rows_are_edited_in_private(tmp_path: Path, capacity: int) -> None:
    buffer, path = ReplayBuffer(storage=LazyTensorStorage(MANY)), tmp_path / "saved"
    buffer.extend(steps(MANY - 7))
    buffer.dumps(path)
    other = ReplayBuffer(storage=LazyTensorStorage(capacity))
    other.loads(path)
    assert str(path / "storage" / "segment-00000.memmap") in Path("/proc/self/maps").read_text()
    assert rows_of(other) == rows_of(buffer)
    other.extend(steps(10, 100))
    assert len(other) == min(capacity, MANY + 3)
    third = ReplayBuffer(storage=LazyTensorStorage(MANY))
    third.loads(path, verify=True)
    assert rows_of(third) == rows_of(buffer)
    assert len(shared(path, lambda: other.dumps(path))) == len(inodes(path)) - 1
    third = ReplayBuffer(storage=LazyTensorStorage(capacity))
    third.loads(path, verify=True)
    assert rows_of(third) == rows_of(other)


@pytest.mark.usefixtures("mapped")
def test_rows_from_anywhere_on_are_mapped(tmp_path: Path) -> None:
    """Whole pages of a run that starts within one: the rest is copied, and the rows next to it are from other files."""
    buffer, path = ReplayBuffer(storage=LazyTensorStorage(MANY)), tmp_path / "saved"
    buffer.extend(steps(MANY + 333))
    buffer.dumps(path)
    for count in (5001, 20_003):
        buffer.extend(steps(count, 7 * count))
        buffer.dumps(path)
    other = ReplayBuffer(storage=LazyTensorStorage(MANY))
    other.loads(path)
    mapped = Path("/proc/self/maps").read_text()
    assert len(inodes(path)) > 2
    assert all(f"{path}/storage/segment-{number:05}.memmap" in mapped for number in inodes(path))
    assert rows_of(other) == rows_of(buffer)


@pytest.mark.usefixtures("mapped")
def test_damaged_bytes_are_found_on_request(tmp_path: Path) -> None:
    buffer, path = ReplayBuffer(storage=LazyTensorStorage(MANY)), tmp_path / "saved"
    buffer.extend(steps(MANY))
    buffer.dumps(path)
    (path / "storage" / "segment-00001.memmap").chmod(0o644)
    flip(path / "storage" / "segment-00001.memmap", 100)
    other = ReplayBuffer(storage=LazyTensorStorage(MANY))
    with pytest.raises(CorruptDataError, match=r"segment-00001.memmap does not hold the bytes that were saved"):
        other.loads(path, verify=True)
    assert len(other) == 0
    memmaps = ReplayBuffer(storage=LazyMemmapStorage(MANY))
    with pytest.raises(CorruptDataError):  # bytes that are copied are verified in any case
        memmaps.loads(path)
    os.truncate(path / "storage" / "segment-00001.memmap", 4096)
    with pytest.raises(CorruptDataError, match="4,096 bytes, expected"):
        other.loads(path)


def read_and_write(buffer: ReplayBuffer) -> None:
    assert int(buffer.storage[torch.tensor([5])]["a"]) == 5
    buffer.extend(steps(2, 900))


@pytest.mark.usefixtures("mapped")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_loaded_rows_are_shared_as_others_are(tmp_path: Path, start: str) -> None:
    buffer, path = ReplayBuffer(storage=LazyTensorStorage(MANY)), tmp_path / "saved"
    buffer.extend(steps(MANY))
    buffer.dumps(path)
    other = ReplayBuffer(storage=LazyTensorStorage(MANY))
    other.loads(path)
    other.storage.share()
    process = multiprocessing.get_context(start).Process(target=read_and_write, args=(other,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert other.storage[torch.tensor([0, 1, 2])]["a"].tolist() == [900, 901, 2]
    other.dumps(path)
    buffer.loads(path)
    assert rows_of(buffer) == rows_of(other)


def test_references_stay_good_where_somebody_has_some(tmp_path: Path) -> None:
    buffer, path = ring(), tmp_path / "saved"
    buffer.dumps(path)
    other = ring()
    held = other.storage[0:4]
    held["a"].fill_(9)
    other.loads(path)
    assert held["a"].tolist() == [0, 1, 2, 3]


def test_a_file_system_of_others_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "can_map", lambda _: False)
    buffer, path = ring(rows=50), tmp_path / "saved"
    buffer.dumps(path)
    assert content(path) == rows_of(buffer)


def test_a_full_ring_in_a_larger_storage_is_written_anew(tmp_path: Path) -> None:
    buffer, path = ring(), tmp_path / "saved"
    buffer.extend(steps(10, 100))
    buffer.dumps(path)
    other = ReplayBuffer(storage=LazyTensorStorage(2 * ROWS))
    other.loads(path)
    assert other.storage[torch.arange(ROWS)]["a"].tolist() == [*range(10, ROWS), *range(100, 110)]
    assert shared(path, lambda: other.dumps(path)) == []
