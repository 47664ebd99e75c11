from __future__ import annotations

import dataclasses
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import Interpreter

from rbtool import TensorStorage
from rbtool.core.errors import CorruptDataError, DatasetNotFoundError, FormatError
from rbtool.core.format import threads
from rbtool.core.format.episodes import EpisodeRow
from rbtool.core.format.files import digest_file
from rbtool.core.format.manifest import MANIFEST, Request
from rbtool.core.format.memmap.builder import DatasetBuilder, Origin
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.memmap.tree import leaf_path
from rbtool.core.format.threads import available_memory
from rbtool.core.storages import packed
from rbtool.core.storages.dataset import Pages, StepStorage, dataset_tensors, exceeds_memory
from rbtool.core.storages.packed import PackedStorage
from rbtool.core.ted.episodes import EndReason
from rbtool.core.ted.schema import DTYPES, Field
from rbtool.core.testing.datasets import write_packed, write_walks
from rbtool.core.testing.rows import same
from rbtool.core.testing.storages import StorageTests

EPISODES = [(4, "terminated"), (1, "truncated"), (5, "open")]
ROWS = 10


@pytest.fixture
def walks(tmp_path: Path) -> Path:
    write_walks(tmp_path / "walks", EPISODES)
    return tmp_path / "walks"


def every_type(folder: Path) -> Path:
    fields = [Field((name,), name, (2,), "observation") for name in DTYPES]
    fields += [Field(("deep", "empty"), "float32", (0, 3), "info"), Field(("scalar",), "int64", (), "info")]
    draw = np.random.default_rng(0)
    with DatasetBuilder(folder, fields) as builder:
        columns = {field.key: draw.integers(0, 2, (ROWS, *field.shape)).astype(field.numpy) for field in fields}
        columns["scalar",] = np.arange(ROWS)
        builder.append(columns)
        row = EpisodeRow(0, ROWS, 0.0, True, False, EndReason.TERMINATED)
        builder.finish([row], Origin(Request("test", "test", "types")))
    return folder


def files_of(folder: Path) -> dict[str, str]:
    return {str(path): digest_file(path) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("copy_on_write", [True, False])
def test_every_leaf_is_mapped_value_for_value(tmp_path: Path, copy_on_write: bool) -> None:
    path = every_type(tmp_path / "types")
    tensors, reader = dataset_tensors(path, copy_on_write=copy_on_write), TedReader(path)
    assert tensors.batch_size == (ROWS,)
    for field in reader.fields:
        tensor = tensors[field.key]
        assert (str(tensor.dtype), tensor.shape) == (f"torch.{field.dtype}", (ROWS, *field.shape))
        bits = tensor.view(torch.uint16) if field.dtype == "bfloat16" else tensor
        assert np.array_equal(bits.numpy(), reader.read(field.key, 0, ROWS))


def test_an_edit_in_place_never_reaches_the_disk(walks: Path) -> None:
    for path in walks.rglob("*.memmap"):
        path.chmod(0o444)  # opening needs no permission to write
    before, tensors = files_of(walks), dataset_tensors(walks)
    storage = TensorStorage(tensors)
    storage[:]["observation"].fill_(-1)
    storage.set(0, storage[9])
    tensors["next", "reward"] += 5
    assert tensors["observation"].eq(-1).all()
    assert files_of(walks) == before
    assert not dataset_tensors(walks)["observation"].eq(-1).any()


def test_maps_that_cannot_be_written_need_no_data_memory(tmp_path: Path, interpreter: Interpreter) -> None:
    code = """
import os, resource, sys
import torch
from rbtool.core.storages.dataset import dataset_tensors
used = int(open("/proc/self/status").read().split("VmData:")[1].split()[0]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + (8 << 20), -1))
print(dataset_tensors(sys.argv[1], copy_on_write=False)["x"][-1].tolist())
try:
    dataset_tensors(sys.argv[1])
except OSError as error:
    print(error.strerror)
"""
    field = Field(("x",), "float64", (1 << 10,), "observation")
    with DatasetBuilder(tmp_path / "big", [field]) as builder:
        for chunk in range(16):
            builder.append({("x",): np.full((256, 1 << 10), float(chunk))})
        row = EpisodeRow(0, 4096, 0.0, True, False, EndReason.TERMINATED)
        builder.finish([row], Origin(Request("test", "test", "big")))
    done = interpreter.run(code, tmp_path / "big")
    assert done.stdout.splitlines()[0].startswith("[15.0, 15.0")
    assert done.stdout.splitlines()[1] == "Cannot allocate memory"


def test_cut_files_other_layouts_and_other_folders_are_refused(walks: Path, tmp_path: Path) -> None:
    path = walks / leaf_path(("observation",))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CorruptDataError, match=r"239 bytes, expected 240"):
        dataset_tensors(walks)
    path.unlink()
    with pytest.raises(CorruptDataError, match="missing"):
        dataset_tensors(walks)
    manifest = dataclasses.replace(TedReader(walks).manifest, layout="flat")
    (walks / MANIFEST).unlink()
    manifest.save(walks)
    with pytest.raises(FormatError, match="has layout flat"):
        dataset_tensors(walks)
    with pytest.raises(DatasetNotFoundError):
        dataset_tensors(tmp_path)


class TestStepStorage(StorageTests):
    writes = False

    @pytest.fixture(autouse=True)
    def opened(self, walks: Path) -> None:
        self.path = walks

    def make(self) -> StepStorage:
        return StepStorage(TedReader(self.path))


@pytest.mark.parametrize(
    "index",
    [3, -1, slice(2, 9, 3), slice(5, 2), [9, 0, 0, 1, 2, 8], torch.tensor([[1, 2], [9, 1]]), torch.arange(10) > 6],
    ids=str,
)
def test_rows_read_from_disk_are_those_of_the_mapped_tensors(tmp_path: Path, index: object) -> None:
    path = every_type(tmp_path / "types")
    found, expected = StepStorage(TedReader(path))[index], dataset_tensors(path)[index]
    assert found.batch_size == expected.batch_size
    assert same(found, expected)


def test_rows_on_disk_cannot_be_replaced(walks: Path, tmp_path: Path) -> None:
    write_walks(tmp_path / "other", EPISODES, seed=1)
    storage, other = StepStorage(TedReader(walks)), StepStorage(TedReader(tmp_path / "other"))
    with pytest.raises(RuntimeError, match="is read-only"):
        storage[0] = storage[1]
    with pytest.raises(RuntimeError, match="is read-only"):
        storage.empty()
    with pytest.raises(RuntimeError, match="belongs to other data"):
        other.load_state_dict(storage.state_dict())


class Heard:
    """A map that remembers the advice that it was given."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.said: list[tuple[int, ...]] = []

    def __len__(self) -> int:
        return self._size

    def madvise(self, *words: int) -> None:
        self.said.append(words)


def test_available_memory_is_measured() -> None:
    available = available_memory()
    assert available is not None
    assert 1 << 20 < available < 1 << 50
    assert exceeds_memory(1 << 60)
    assert not exceeds_memory(1)


def test_the_limit_of_the_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs" / "mine").mkdir(parents=True)
    (tmp_path / "jobs" / "memory.max").write_text("4096\n")
    (tmp_path / "jobs" / "mine" / "memory.max").write_text("max\n")
    monkeypatch.setattr(threads, "_GROUPS", tmp_path)
    read, group = Path.read_text, Path("/proc/self/cgroup")
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path, *more, **named: "0::/jobs/mine\n" if path == group else read(path, *more, **named),
    )
    assert available_memory() == 4096


def test_neighbouring_pages_are_asked_for_together() -> None:
    page, heard = mmap.PAGESIZE, Heard(20 * mmap.PAGESIZE - 5)
    pages = Pages(heard)  # type: ignore[arg-type]
    starts = np.array([9 * page + 1, 0, page - 2, 4 * page, 19 * page])
    pages.expect(starts, 10)
    need = mmap.MADV_WILLNEED
    assert heard.said[0] == (mmap.MADV_RANDOM,)
    assert heard.said[1:] == [
        (need, 0, 2 * page),
        (need, 4 * page, page),
        (need, 9 * page, page),
        (need, 19 * page, page - 5),
    ]
    pages.expect(np.array([], np.int64), 10)
    assert len(heard.said) == 5


@pytest.mark.parametrize("large", [False, True])
def test_the_kernel_is_advised_only_of_data_that_exceeds_memory(
    tmp_path: Path, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    monkeypatch.setattr(packed, "Pages", lambda pages: made.append(pages) or Pages(pages))
    write_walks(tmp_path / "ted", [(5, "open")])
    write_packed(tmp_path / "ted", tmp_path / "packed")
    monkeypatch.setattr("rbtool.core.storages.packed.exceeds_memory", lambda size: large)
    assert len(PackedStorage(tmp_path / "packed")[:]) == 5
    assert bool(made) is large
