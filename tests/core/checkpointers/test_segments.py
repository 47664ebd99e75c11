"""Checkpoints in segments: what changed is written, the rest is shared and merged; damage is refused."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import multiprocessing
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import flip
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from waiting import HANG

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.checkpointers import segments
from rbtool.core.checkpointers.segments import (
    Segment,
    SegmentFolder,
    SegmentManifest,
    block_rows,
    common,
    count_of,
    cut,
    joined,
    merged,
    without,
    written,
)
from rbtool.core.errors import CorruptDataError, FormatError, RbtoolError, SchemaError
from rbtool.core.format.documents import document_digest
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.storages.write_log import WriteLog

ROWS = 64


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have segments of a few rows."""
    monkeypatch.setattr(segments, "_FEWEST_BYTES", 128)


def steps(count: int = ROWS, first: int = 0) -> TensorDict:
    numbers = torch.arange(first, first + count)
    flags = (numbers % 3 == 0).unsqueeze(-1)
    return TensorDict({"a": numbers, "next": {"b": torch.stack([numbers, -numbers], -1).double(), "c": flags}}, [count])


def ring(kind: Callable[..., Any] = LazyTensorStorage, rows: int = ROWS, capacity: int = ROWS) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=kind(capacity))
    buffer.extend(steps(rows))
    return buffer


def loaded(path: Path, capacity: int = ROWS, kind: Callable[..., Any] = LazyTensorStorage, **options: Any) -> Any:
    buffer = ReplayBuffer(storage=kind(capacity))
    buffer.loads(path, **options)
    return buffer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "saved"


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
    small = len(source) <= ROWS  # lists are read where a test fails, and take long
    found = sorted(leaves.items(True, True), key=str)
    return [(str(key), leaf.dtype, leaf.tolist() if small else leaf.numpy().tobytes()) for key, leaf in found]


def require_saved(buffer: ReplayBuffer, path: Path) -> None:
    """The checkpoint holds the rows of the buffer."""
    assert rows_of(loaded(path)) == rows_of(buffer)


def test_blocks_are_a_power_of_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_FEWEST_BYTES", 1 << 19)
    assert block_rows(1_000_000, 758) == 1024
    assert block_rows(10_000_000, 758) == 16_384
    assert block_rows(1_000, 758) == 1024
    assert block_rows(8, 1 << 30) == 1


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_the_next_dump_writes_the_rows_that_changed(path: Path, kind: Any) -> None:
    buffer = ring(kind)
    buffer.dumps(path)
    assert len(inodes(path)) == 8
    assert shared(path, lambda: buffer.dumps(path)) == list(range(8))
    buffer.extend(steps(11, 100))
    assert shared(path, lambda: buffer.dumps(path)) == list(range(1, 8))
    assert runs(path)[8] == [[0, 11]]
    require_saved(buffer, path)
    buffer.storage[torch.tensor([30, 27])] = steps(2, 300)
    assert shared(path, lambda: buffer.dumps(path)) == [1, 2, 4, 5, 6, 7, 8]
    assert runs(path)[9] == [[24, 32]]  # a whole block: the rows are here and there
    require_saved(buffer, path)
    assert not any(file.stat().st_mode & 0o222 for file in (path / "storage").glob("segment-*"))


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
    "a view": lambda buffer: buffer.storage[3:5]["a"].fill_(7),
    "an array": lambda buffer: buffer.storage[40]["next", "b"].numpy().fill(9),
    "a row by a tensor": lambda buffer: buffer.storage[torch.tensor(33)]["a"].fill_(12),
    "the contents": lambda buffer: buffer.storage.contents["a"][1].fill_(7),
    "the state": lambda buffer: buffer.storage.state_dict()["_storage"]["a"][2].fill_(7),
}


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("deed", DEEDS)
def test_every_change_is_saved(path: Path, kind: Any, deed: str) -> None:
    if deed == "new entry" and kind is LazyMemmapStorage:
        deed = "row"
    buffer = ring(kind)
    buffer.dumps(path)
    for _ in range(2):
        DEEDS[deed](buffer)
        buffer.dumps(path)
        require_saved(buffer, path)


def test_a_reference_is_good_for_edits_after_any_number_of_dumps(path: Path) -> None:
    buffer = ring()
    held = buffer.storage[:]
    for number in range(3):
        buffer.dumps(path)
        held["a"][9 * number] = -1 - number
        assert len(shared(path, lambda: buffer.dumps(path))) == 7
        require_saved(buffer, path)


def test_memory_that_was_given_is_compared(path: Path) -> None:
    data = steps()
    buffer = ReplayBuffer(storage=TensorStorage(data))
    buffer.dumps(path)
    data["next", "b"][13] = 5
    assert shared(path, lambda: buffer.dumps(path)) == [0, 2, 3, 4, 5, 6, 7]
    require_saved(buffer, path)


def test_files_that_others_may_open_are_compared(tmp_path: Path, path: Path) -> None:
    buffer = ring(partial(LazyMemmapStorage, scratch_dir=tmp_path / "maps"))
    buffer.dumps(path)
    TensorDict.load_memmap(tmp_path / "maps")["a"][20] = 5
    assert len(shared(path, lambda: buffer.dumps(path))) == 7
    require_saved(buffer, path)


def write_elsewhere(buffer: ReplayBuffer) -> None:
    buffer.extend(steps(3, 300))
    buffer.storage[8:9]["a"].fill_(1)


def run_elsewhere(start: str, target: Callable[[ReplayBuffer], None], buffer: ReplayBuffer) -> None:
    process = multiprocessing.get_context(start).Process(target=target, args=(buffer,))
    process.start()
    process.join(HANG)
    assert process.exitcode == 0


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_writes_of_other_processes_are_seen(path: Path, start: str) -> None:
    buffer = ring(LazyMemmapStorage)
    buffer.dumps(path)
    run_elsewhere(start, write_elsewhere, buffer)
    buffer.dumps(path)
    require_saved(buffer, path)
    assert buffer.storage[8]["a"] == 1


# Whose checkpoint it is ----------------------------------------------------------------------------


def test_the_checkpoint_of_another_buffer_is_replaced_whole(tmp_path: Path, path: Path) -> None:
    buffer = ring()
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
    require_saved(buffer, path)


def test_two_checkpoints_of_a_buffer_are_kept_up_to_date_independently(tmp_path: Path) -> None:
    buffer, one, other = ring(), tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        buffer.dumps(path)
    assert not set(inodes(one).values()) & set(inodes(other).values())
    buffer.extend(steps(3, 100))
    assert len(shared(one, lambda: buffer.dumps(one))) == 8
    buffer.extend(steps(3, 200))
    assert len(shared(other, lambda: buffer.dumps(other))) == 8
    require_saved(buffer, other)


def test_a_copy_of_a_storage_writes_everything(path: Path) -> None:
    buffer = ring()
    buffer.dumps(path)
    copy = pickle.loads(pickle.dumps(buffer))
    copy.extend(steps(5, 90))
    assert shared(path, lambda: copy.dumps(path)) == []
    require_saved(copy, path)


def test_a_dump_that_fails_shares_nothing_wrong_later(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = ring()
    buffer.dumps(path)
    buffer.extend(steps(3, 100))
    with monkeypatch.context() as patched:
        patched.setattr(type(buffer.writer), "dumps", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            buffer.dumps(path)
    buffer.extend(steps(3, 200))
    assert len(shared(path, lambda: buffer.dumps(path))) == 8
    assert runs(path)[8] == [[0, 6]]
    require_saved(buffer, path)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_everything_is_written_where_files_cannot_be_linked(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    buffer = ring()
    buffer.dumps(path)
    buffer.extend(steps(3, 100))

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    assert shared(path, lambda: buffer.dumps(path)) == []
    require_saved(buffer, path)


@pytest.mark.parametrize("how", ["writable", "cut", "gone", "a link"])
def test_only_whole_files_that_nobody_writes_are_shared(tmp_path: Path, path: Path, how: str) -> None:
    buffer = ring()
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
    require_saved(buffer, path)


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
def test_mapped_rows_are_edited_in_private(path: Path, capacity: int) -> None:
    buffer = ring(rows=MANY - 7, capacity=MANY)
    buffer.dumps(path)
    other = loaded(path, capacity)
    assert str(path / "storage" / "segment-00000.memmap") in Path("/proc/self/maps").read_text()
    assert rows_of(other) == rows_of(buffer)
    other.extend(steps(10, 100))
    assert len(other) == min(capacity, MANY + 3)
    assert rows_of(loaded(path, MANY, verify=True)) == rows_of(buffer)
    assert len(shared(path, lambda: other.dumps(path))) == len(inodes(path)) - 1
    assert rows_of(loaded(path, capacity, verify=True)) == rows_of(other)


@pytest.mark.usefixtures("mapped")
def test_runs_that_start_within_a_page_are_mapped(path: Path) -> None:
    """Whole pages of a run that starts within one: the rest is copied, and the rows next to it are from other files."""
    buffer = ring(rows=MANY + 333, capacity=MANY)
    buffer.dumps(path)
    for count in (5001, 20_003):
        buffer.extend(steps(count, 7 * count))
        buffer.dumps(path)
    other = loaded(path, MANY)
    mapped = Path("/proc/self/maps").read_text()
    assert len(inodes(path)) > 2
    assert all(f"{path}/storage/segment-{number:05}.memmap" in mapped for number in inodes(path))
    assert rows_of(other) == rows_of(buffer)


@pytest.mark.usefixtures("mapped")
def test_damaged_bytes_are_found_on_request(path: Path) -> None:
    buffer = ring(rows=MANY, capacity=MANY)
    buffer.dumps(path)
    file = path / "storage" / "segment-00001.memmap"
    file.chmod(0o644)
    flip(file, 100)
    other = ReplayBuffer(storage=LazyTensorStorage(MANY))
    with pytest.raises(CorruptDataError, match=r"segment-00001.memmap does not hold the bytes that were saved"):
        other.loads(path, verify=True)
    assert len(other) == 0
    with pytest.raises(CorruptDataError):  # bytes that are copied are verified in any case
        loaded(path, MANY, LazyMemmapStorage)
    os.truncate(file, 4096)
    with pytest.raises(CorruptDataError, match="4,096 bytes, expected"):
        other.loads(path)


def read_and_write(buffer: ReplayBuffer) -> None:
    assert int(buffer.storage[torch.tensor([5])]["a"]) == 5
    buffer.extend(steps(2, 900))


@pytest.mark.usefixtures("mapped")
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_loaded_rows_are_shared_as_others_are(path: Path, start: str) -> None:
    buffer = ring(rows=MANY, capacity=MANY)
    buffer.dumps(path)
    other = loaded(path, MANY)
    other.storage.share()
    run_elsewhere(start, read_and_write, other)
    assert other.storage[torch.tensor([0, 1, 2])]["a"].tolist() == [900, 901, 2]
    other.dumps(path)
    buffer.loads(path)
    assert rows_of(buffer) == rows_of(other)


def test_a_load_fills_the_memory_that_callers_have_references_to(path: Path) -> None:
    buffer = ring()
    buffer.dumps(path)
    other = ring()
    held = other.storage[0:4]
    held["a"].fill_(9)
    other.loads(path)
    assert held["a"].tolist() == [0, 1, 2, 3]


def test_segments_are_read_where_they_cannot_be_mapped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "can_map", lambda _: False)
    buffer = ring(rows=50)
    buffer.dumps(path)
    require_saved(buffer, path)


def test_a_full_ring_in_a_larger_storage_is_written_anew(path: Path) -> None:
    buffer = ring()
    buffer.extend(steps(10, 100))
    buffer.dumps(path)
    other = loaded(path, 2 * ROWS)
    assert other.storage[torch.arange(ROWS)]["a"].tolist() == [*range(10, ROWS), *range(100, 110)]
    assert shared(path, lambda: other.dumps(path)) == []


def full() -> LazyTensorStorage:
    storage = LazyTensorStorage(ROWS)
    storage.set(range(ROWS), torch.arange(ROWS))
    return storage


def test_documents_that_other_programs_write_into_a_checkpoint_are_refused(path: Path) -> None:
    full().dumps(path)
    (path / "storage_metadata.json").write_text('{"metadata": {}, "is_pytree": false, "len": 3}')
    with pytest.raises(CorruptDataError, match=r"storage_metadata\.json does not belong to the checkpoint"):
        LazyTensorStorage(ROWS).loads(path)
    shutil.rmtree(path / ".rbtool")
    (path / "segments.json").write_text('{"format_version": 99}')
    with pytest.raises(FormatError, match="format version 99"):
        LazyTensorStorage(ROWS).loads(path)


@pytest.mark.parametrize(("before", "after"), [('"length": 64', '"length": 63'), ('"ndim": 1', '"ndim": 2')])
def test_a_changed_list_of_segments_is_refused(path: Path, before: str, after: str) -> None:
    full().dumps(path)
    text = (path / "segments.json").read_text()
    assert before in text
    (path / "segments.json").write_text(text.replace(before, after))
    for _ in range(2):
        with pytest.raises(CorruptDataError):
            LazyTensorStorage(ROWS).loads(path)
        shutil.rmtree(path / ".rbtool", ignore_errors=True)


@pytest.mark.parametrize("target", ["aside", "nowhere"])
@pytest.mark.parametrize("name", ["segments.json", "segment-00000.memmap"])
def test_a_symbolic_link_in_the_place_of_a_file_is_refused(tmp_path: Path, path: Path, name: str, target: str) -> None:
    full().dumps(path)
    (path / name).rename(tmp_path / "aside")
    (path / name).symlink_to(tmp_path / target)
    storage = full()
    with pytest.raises(RbtoolError) as caught:
        storage.loads(path)
    if (name, target) != ("segments.json", "nowhere"):  # without its list, it is none of these checkpoints
        assert isinstance(caught.value, CorruptDataError)
        assert str(caught.value).startswith(f"{path / name} is a symbolic link, expected a regular file")
    assert len(storage) == ROWS


def test_a_folder_in_the_place_of_a_segment_is_refused(path: Path) -> None:
    storage = full()
    storage.dumps(path)
    (path / "segment-00000.memmap").unlink()
    (path / "segment-00000.memmap").mkdir()
    with pytest.raises(CorruptDataError, match=r"segment-00000.memmap is a folder, expected a regular file"):
        storage.loads(path)
    assert len(storage) == ROWS


def test_an_error_of_the_disk_names_the_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full().dumps(tmp_path / "saved")

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(segments, "digest_descriptor", fail)
    with pytest.raises(OSError, match=r"saved/segment-0000\d\.memmap") as caught:
        LazyTensorStorage(ROWS).loads(tmp_path / "saved")
    assert caught.value.errno == errno.EIO


def test_other_dimensions_are_refused(tmp_path: Path) -> None:
    full().dumps(tmp_path / "saved")
    with pytest.raises(SchemaError, match="saved with ndim=1, but this storage has ndim=2"):
        LazyTensorStorage(ROWS, ndim=2).loads(tmp_path / "saved")


def overlapping(first: Segment, *others: Segment) -> tuple[Segment, ...]:
    start, stop = first.runs[0]
    return (replace(first, runs=((start, stop), (stop - 1, stop + 1))), *others)


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda *every: every[1:],
        lambda *every: every[::-1],
        overlapping,
        lambda *every: (*every, Segment(every[-1].number + 1, ())),
    ],
    ids=["a gap", "disordered", "overlapping", "an empty one"],
)
def test_segments_that_do_not_have_all_rows_are_refused(path: Path, spoilt: Callable[..., tuple[Segment, ...]]) -> None:
    storage = full()
    storage.dumps(path)
    with SegmentFolder.opened(path) as opened:
        found = opened.manifest
    shutil.rmtree(path / ".rbtool")
    (path / "segments.json").unlink()
    replace(found, segments=spoilt(*found.segments)).save(path)
    with pytest.raises(CorruptDataError, match=r"segments\.json does not list segments for all 64 rows"):
        LazyTensorStorage(ROWS).loads(path)
    storage.dumps(path)  # nothing of it is used
    LazyTensorStorage(ROWS).loads(path, verify=True)


DATA = Path(__file__).parents[2] / "data" / "checkpoints" / "segments-1"
"""A ring of 40 rows to which 50 were written, saved in format version 1 by rbtool at commit 77c84da2."""


def test_format_version_1_is_read_and_written_as_version_2(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again = ReplayBuffer(storage=LazyTensorStorage(40))
    shutil.copytree(DATA, path)
    monkeypatch.setattr(segments, "_MAPPED_FROM", 1)
    for _ in range(2):
        again.loads(path, verify=True)
        found = again.storage[torch.arange(40)]
        numbers = torch.cat([torch.arange(40, 50), torch.arange(10, 40)])
        assert torch.equal(found["a"], numbers)
        assert torch.equal(found["next", "b"], torch.stack([numbers, -numbers], -1).double())
        assert torch.equal(found["next", "c"], (numbers % 3 == 0).unsqueeze(-1))
        assert again.writer.cursor == 10
        again.dumps(path)  # in the form of today
        assert json.loads((path / "storage" / "segments.json").read_text())["format_version"] == 2


@pytest.mark.parametrize(("entry", "value"), [("segment_rows", 0), ("segment_rows", 64), ("digests", [])])
def test_format_version_1_with_other_segments_is_refused(path: Path, entry: str, value: Any) -> None:
    shutil.copytree(DATA / "storage", path)
    shutil.rmtree(path / ".rbtool")
    document = json.loads((path / "segments.json").read_text()) | {entry: value}
    document["digest"] = document_digest(document, "digest")
    (path / "segments.json").write_text(json.dumps(document))
    with pytest.raises(CorruptDataError):
        LazyTensorStorage(40).loads(path)


@pytest.mark.parametrize("write", [lambda buffer, *rows: buffer.storage.set(*rows), ReplayBuffer.__setitem__])
def test_an_index_that_is_used_again_changes_nothing(path: Path, write: Callable[..., None]) -> None:
    """The log held the caller's index: filled with other rows before the dump, the rows of before were not written."""
    buffer, index = ring(), torch.tensor([30, 27])
    buffer.dumps(path)
    write(buffer, index, steps(2, 300))
    index.zero_()
    buffer.dumps(path)
    require_saved(buffer, path)


@pytest.mark.parametrize(
    ("method", "write"),
    [
        ("changed", lambda buffer: buffer.__setitem__(torch.tensor([30]), steps(1, 300))),
        ("wrote", lambda buffer: buffer.extend(steps(5, 300))),
    ],
)
def test_a_write_that_is_interrupted_before_it_is_counted_is_saved(
    path: Path, monkeypatch: pytest.MonkeyPatch, method: str, write: Callable[[ReplayBuffer], Any]
) -> None:
    buffer = ring()
    buffer.dumps(path)
    count, interrupts = getattr(WriteLog, method), iter([KeyboardInterrupt])

    def interrupted(*arguments: Any) -> None:
        for interrupt in interrupts:
            raise interrupt
        count(*arguments)

    monkeypatch.setattr(WriteLog, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(buffer)
    buffer.dumps(path)
    require_saved(buffer, path)


def test_open_files_are_closed_if_another_one_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, made, kept = ring(), list[Any](), segments.LeafFile

    def make(*arguments: Any, **options: Any) -> Any:
        if len(made) == 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made.append(kept(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(segments, "LeafFile", make)
    with pytest.raises(OSError, match="Too many open files"):
        buffer.dumps(tmp_path / "saved")
    assert [one.descriptor for one in made] == [-1] * 3


RING_ROWS, BLOCK = 4096, 4
SLOW = pytest.mark.slow


@pytest.fixture
def many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have as many blocks as a large storage has, of four rows, without waiting for the disk."""
    monkeypatch.setattr(segments, "_FEWEST_BYTES", 8 * BLOCK)
    monkeypatch.setattr(segments, "_MAPPED_FROM", 1)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def document(path: Path) -> SegmentManifest:
    folder = path / "storage"
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return SegmentManifest.load(folder, descriptor)
    finally:
        os.close(descriptor)


class Ring:
    """A full buffer of numbers, its checkpoint, and how many rows each dump wrote."""

    def __init__(self, path: Path) -> None:
        self.path, self.number = path, 0
        self.buffer = ReplayBuffer(storage=LazyTensorStorage(RING_ROWS))
        self.extend(RING_ROWS)
        self.buffer.dumps(path)

    def extend(self, count: int) -> None:
        if count:
            self.buffer.extend(torch.arange(self.number, self.number + count))
        self.number += count

    def dump(self) -> int:
        """Dump; return how many rows were written."""
        before = {segment.number for segment in document(self.path).segments}
        self.buffer.dumps(self.path)
        return sum(segment.rows for segment in document(self.path).segments if segment.number not in before)

    def require_same(self) -> None:
        every = torch.arange(RING_ROWS)
        assert torch.equal(loaded(self.path, RING_ROWS, verify=True).storage[every], self.buffer.storage[every])

    def require_few(self) -> None:
        """Few segments, of which little is kept for nothing."""
        found = document(self.path)
        assert len(found.segments) <= 60
        assert sum(segment.rows for segment in found.segments) <= RING_ROWS * 5 // 4 + BLOCK


@pytest.mark.parametrize(
    ("count", "times"),
    [(1, 4.5), (41, 2.5), (3000, 1.4), *(pytest.param(*one, marks=SLOW) for one in ((4, 3.5), (40, 2.5), (400, 1.5)))],
)
@pytest.mark.usefixtures("many_blocks")
def test_rows_are_written_a_few_times(tmp_path: Path, count: int, times: float) -> None:
    ring, taken = Ring(tmp_path / "saved"), list[int]()
    for number in range(80):  # more than there may be segments
        ring.extend(count)
        taken.append(ring.dump())
        ring.require_few()
        if not number % 30:
            ring.require_same()
    ring.require_same()
    assert sum(taken) <= times * count * len(taken)
    assert sorted(taken)[len(taken) // 2] == count  # most dumps write the new rows and no more


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SLOW) for seed in (1, 2))])
@pytest.mark.usefixtures("many_blocks")
def test_checkpoints_stay_small_and_right_for_writes_of_all_sizes(tmp_path: Path, seed: int) -> None:
    draw, ring = random.Random(seed), Ring(tmp_path / "saved")
    for number in range(120):
        ring.extend(draw.choice([0, 1, 3, 40, 41, 700, RING_ROWS + 5]))
        if draw.random() < 0.3:
            rows = torch.tensor([draw.randrange(RING_ROWS) for _ in range(draw.choice([1, 2, 30]))])
            ring.buffer.storage[rows] = -torch.arange(number, number + len(rows))
        ring.dump()
        ring.require_few()
        if draw.random() < 0.1:
            ring.require_same()
    ring.require_same()


@pytest.mark.usefixtures("many_blocks")
def test_rows_that_were_lent_cost_little_more(tmp_path: Path) -> None:
    """A segment of which some rows are in later ones cannot be compared with memory: the rest of it is written."""
    ring = Ring(tmp_path / "saved")
    view = ring.buffer.storage[:RING_ROWS]
    taken = list[int]()
    for number in range(80):
        ring.extend(40)
        taken.append(ring.dump())
        ring.require_few()
        if not number % 40:
            view[5 * number] = -number
            assert ring.dump() > 0
            ring.require_same()
    assert sum(taken) <= len(taken) * (40 + RING_ROWS // 16)
    assert ring.dump() == 0


@pytest.mark.usefixtures("many_blocks")
def test_a_storage_that_fills_up_is_written_a_few_times(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "saved")
    ring.buffer, ring.number = ReplayBuffer(storage=LazyTensorStorage(1 << 20)), 0
    taken = 0
    for _ in range(80):
        ring.extend(50)
        taken += ring.dump()
        assert len(document(ring.path).segments) <= 60
    other = loaded(ring.path, 1 << 20, verify=True)
    assert torch.equal(other.storage[torch.arange(4_000)], torch.arange(4_000))
    assert taken <= 5 * 4_000


# Runs ----------------------------------------------------------------------------------------------

RUNS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9))).map(
    lambda pairs: joined((start, start + count) for start, count in pairs)
)


def rows_in(runs: list[tuple[int, int]]) -> set[int]:
    return {row for start, stop in runs for row in range(start, stop)}


def tidy(runs: list[tuple[int, int]]) -> bool:
    """Whether runs ascend, are not empty and do not overlap."""
    return all(one[0] < one[1] <= other[0] for one, other in itertools.pairwise([*runs, (1 << 20, 0)]))


@given(RUNS, RUNS)
def test_runs_are_sets_of_rows(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    for found, expected in (
        (joined([*one, *other]), rows_in(one) | rows_in(other)),
        (common(one, other), rows_in(one) & rows_in(other)),
        (without(one, other), rows_in(one) - rows_in(other)),
    ):
        assert rows_in(found) == expected
        assert count_of(found) == len(expected)
        assert tidy(found)


@given(RUNS, st.integers(1, 20), st.integers(1, 8))
def test_runs_are_cut_into_parts_of_similar_size(runs: list[tuple[int, int]], most: int, block: int) -> None:
    groups = cut(runs, most, block)
    assert [row for group in groups for start, stop in group for row in range(start, stop)] == sorted(rows_in(runs))
    assert all(tidy(group) and count_of(group) < 2 * most + block for group in groups)


def _segments(draw: random.Random, rows: int) -> Iterator[Segment]:
    for number in range(draw.randint(0, 40)):
        start = draw.randrange(rows)
        yield Segment(number, ((start, draw.randint(start + 1, rows)),))


@given(st.integers(0, 10_000), st.integers(1, 600), st.integers(1, 8))
def test_kept_and_written_segments_have_every_row_once(seed: int, rows: int, block: int) -> None:
    draw = random.Random(seed)
    before = SegmentManifest(None, 1, rows, rows, None, rows, True, (), tuple(_segments(draw, rows)))
    start = draw.randrange(rows)
    left = without([(0, rows)], [(start, draw.randint(start, rows))])
    kept = merged({one: runs for one, runs in before.valid(left) if runs}, rows, block)
    new = written(kept, rows, block, 99)
    found = [row for runs in kept.values() for row in rows_in(list(runs))]
    found += [row for segment in new for row in rows_in(list(segment.runs))]
    assert sorted(found) == list(range(rows))
    assert sum(one.rows - count_of(runs) for one, runs in kept.items()) <= max(rows // 4, block)


@pytest.mark.parametrize("most", [1, 7, 4096, 100_000])
def test_blocks_are_read_whole_in_pieces_of_any_size(tmp_path: Path, monkeypatch, most: int) -> None:
    data = bytes(torch.arange(60_000, dtype=torch.uint8).numpy())
    (tmp_path / "file").write_bytes(data)
    places = [(0, 5), (5, 0), (5, 4091), (4096, 1), (8192, 100), (30_000, 20_000), (59_999, 1)]
    monkeypatch.setattr(segments.os, "preadv", partial(_short, os.preadv, most))
    monkeypatch.setattr(segments, "_MOST_ROOMS", 2)
    blocks = [(start, memoryview(bytearray(size))) for start, size in places]
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        segments.read_blocks(descriptor, blocks)
        assert [bytes(into) for _, into in blocks] == [data[start : start + size] for start, size in places]
        with pytest.raises(CorruptDataError, match="cut while it was read"):
            segments.read_blocks(descriptor, [(59_990, memoryview(bytearray(11)))])
    finally:
        os.close(descriptor)


def _short(read: Callable[..., int], most: int, descriptor: int, rooms: list[memoryview], start: int) -> int:
    """Read no more than `most` bytes, as a system call may."""
    taken, left = [], most
    for room in rooms:
        taken.append(room[:left])
        left -= len(taken[-1])
    return read(descriptor, taken, start)
