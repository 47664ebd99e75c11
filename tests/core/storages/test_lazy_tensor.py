from __future__ import annotations

import copy
import errno
import gc
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cases import each, in_loops
from processes import run_forked
from tensordict import LazyStackedTensorDict, MemoryMappedTensor, NonTensorData, TensorDict, tensorclass

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.checkpointers.episodes import FlatStorageCheckpointer
from rbtool.core.errors import CorruptDataError, FormatError, OutOfSpaceError, SchemaError, UsageError
from rbtool.core.samplers.slices import SliceSampler
from rbtool.core.storages import columns
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage, Schema
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.rows import same
from rbtool.core.testing.storages import StorageFillTests, StorageTests
from rbtool.core.writers.round_robin import RoundRobinWriter

both = pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
by_every_method = pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])


@tensorclass
class Step:
    observation: torch.Tensor
    action: torch.Tensor


def steps(rows: int = 10, first: int = 0) -> TensorDict:
    numbers = torch.arange(first, first + rows)
    inner = {"reward": -numbers.double().unsqueeze(-1), "done": (numbers % 3 == 0).unsqueeze(-1)}
    observation = torch.stack([numbers, numbers + 0.5], -1).double()
    return TensorDict({"observation": observation, "a/b": numbers, "next": inner}, [rows])


def filled(storage: Any) -> Any:
    storage.set(range(10), steps())
    storage.last_cursor = None
    return storage


class TestOfTensorDicts(StorageTests):
    options: ClassVar[dict[str, Any]] = {}

    def make(self) -> LazyTensorStorage:
        return filled(LazyTensorStorage(25, **self.options))


class TestConsolidated(TestOfTensorDicts):
    options: ClassVar = {"consolidated": True}


class TestWithSharedInit(TestOfTensorDicts):
    options: ClassVar = {"shared_init": True}


class TestMemmap(StorageTests):
    def make(self) -> LazyMemmapStorage:
        return filled(LazyMemmapStorage(25))


class Fills(StorageFillTests):
    kind: ClassVar[type] = LazyTensorStorage
    options: ClassVar[dict[str, Any]] = {}

    def make_empty(self, max_size: int, ndim: int) -> LazyTensorStorage:
        return self.kind(max_size, ndim=ndim, **self.options)


@in_loops
class TestFills(Fills):
    pass


@in_loops
class TestFillsMemmap(Fills):
    kind = LazyMemmapStorage


@in_loops
class TestFillsConsolidated(Fills):
    kinds = ("tensordict", "nested tensordict")
    options: ClassVar = {"consolidated": True}


@in_loops
class TestFillsWithOpenSchema(Fills):
    kinds = ("tensor", "nested tensordict")
    options: ClassVar = {"schema": "open"}

    def test_unfitting_data_are_refused_and_change_nothing(self, case: Any) -> None:
        """Other keys fit here."""


def test_a_new_storage_is_empty() -> None:
    storage = LazyTensorStorage(10)
    assert (len(storage), storage.shape, storage.initialized, list(storage)) == (0, (0,), False, [])
    with pytest.raises(RuntimeError, match="nothing was ever written"):
        storage.get(0)
    assert storage.state_dict() == {"_storage": {}, "_len": 0, "initialized": False}


@pytest.mark.parametrize(("max_size", "lanes", "rows"), [(10, 3, 4), (12, 3, 4), (1, 5, 1), (7, 1, 7)])
def test_the_capacity_is_rounded_up_to_whole_rows(max_size: int, lanes: int, rows: int) -> None:
    storage = LazyTensorStorage(max_size, ndim=2)
    storage.set(0, TensorDict({"x": torch.ones(lanes, 2)}, [lanes]))
    assert (storage.max_size, storage.shape, len(storage)) == (rows * lanes, (1, lanes), lanes)


def test_three_dimensions_count_elements() -> None:
    storage = LazyTensorStorage(30, ndim=3)
    storage.set(range(2), torch.arange(16.0).reshape(2, 2, 2, 2))
    assert (storage.max_size, storage.shape, len(storage)) == (32, (2, 2, 2), 8)
    chosen = storage[torch.tensor([1, 0]), torch.tensor([0, 1]), torch.tensor([1, 1])]
    assert chosen.tolist() == [[10, 11], [6, 7]]


def test_elements_are_named_by_coordinates() -> None:
    storage = LazyTensorStorage(12, ndim=2)
    storage.set(range(4), torch.arange(12.0).reshape(4, 3))
    assert storage[torch.tensor([-1, 1]), torch.tensor([-1, 0])].tolist() == [11, 3]
    for index in (([0, 4], [0, 0]), ([0], [3])):
        with pytest.raises(IndexError):
            storage.get(tuple(map(torch.tensor, index)))


@pytest.mark.parametrize("device", ["cpu", "auto", torch.device("cpu")])
def test_tensordicts_say_where_they_are(device: Any) -> None:
    storage = LazyTensorStorage(4, device=device)
    storage.set(0, TensorDict({"a": torch.tensor(1.0)}))
    assert storage[:].device == storage[torch.tensor([0])].device == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="which PyTorch does not find"):
        LazyTensorStorage(10, device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@in_loops
class TestOnCuda(Fills):
    kinds = ("nested tensordict", "pytree")
    options: ClassVar = {"device": "cuda"}

    def read(self, storage: Any, rows: list[int] | None = None) -> Any:
        found = super().read(storage, rows)
        return torch.utils._pytree.tree_map(lambda leaf: leaf.cpu(), found)


def test_a_value_that_is_no_tensor_is_kept_once() -> None:
    storage = LazyTensorStorage(10)
    storage.set(range(2), TensorDict({"a": torch.ones(2), "task": NonTensorData("door")}, [2]))
    storage.set(2, TensorDict({"a": torch.tensor(2.0), "task": NonTensorData("door")}))
    assert (storage[0]["task"], storage[torch.tensor([1, 2])]["task"]) == ("door", ["door", "door"])
    assert [*storage.structure.paths()] == [("a",)]


@pytest.mark.parametrize("kind", [list, lambda rows: LazyStackedTensorDict(*rows)])
def test_the_first_rows_may_come_one_by_one(kind: Any) -> None:
    storage = LazyTensorStorage(10)
    storage.set(range(3), kind([steps()[row] for row in (4, 2, 9)]))
    assert same(storage[:], steps()[[4, 2, 9]])


@each(
    ("cursor", "data", "message"),
    [
        (range(2), torch.tensor(1.0), "without dimensions"),
        (range(2), [], "the first write has no rows"),
        (range(2), TensorDict({"a": torch.ones(2)}), "has the batch size \\[\\], but its first 1 dimension must count"),
        (range(2), {"a": torch.ones(2), "b": torch.ones(3)}, r"b is torch.float32 \[3\], expected torch.float32 \[2\]"),
        (12, torch.tensor(1.0), "row 12 cannot be written"),
        ((0, 0), torch.tensor(1.0), "1 dimension"),
        (range(2), {"a": "text"}, "the entry 'a' is a str"),
        (range(2), {1: torch.ones(2), "1": torch.ones(2)}, "are the same"),
    ],
)
def test_a_first_write_that_fails_leaves_the_storage_empty(cursor: Any, data: Any, message: str) -> None:
    storage = LazyTensorStorage(10)
    with pytest.raises((RuntimeError, IndexError), match=message):
        storage.set(cursor, data)
    assert (storage.initialized, len(storage), storage.log.now, storage.max_size) == (False, 0, (0, 0, 0), 10)
    storage.set(range(2), steps(2))
    assert len(storage) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda td: td.exclude(("next", "done")), "the entry 'next' lacks done, expected the entries reward, done"),
        (lambda td: td.set("extra", torch.ones(2)), "the new extra, expected the entries observation, a/b, next"),
    ],
)
@both
def test_missing_and_new_keys_are_named(kind: Any, change: Any, message: str) -> None:
    storage = filled(kind(20))
    with pytest.raises(RuntimeError, match=message):
        storage.set(range(10, 12), change(steps(2)))
    assert same(storage[:], steps())


@both
def test_an_open_schema_writes_zeros_never_stale_rows(kind: Any) -> None:
    storage = kind(4, schema="open")
    storage.set(range(4), TensorDict({"a": torch.ones(4), "b": torch.ones(4, 2)}, [4]))
    storage.set(range(2), TensorDict({"a": torch.full((2,), 5.0), "c": {"d": torch.tensor([7, 8])}}, [2]))
    storage.set(3, {"a": torch.tensor(6.0)})
    assert storage[:]["a"].tolist() == [5, 5, 1, 6]
    assert storage[:]["b"].tolist() == [[0, 0], [0, 0], [1, 1], [0, 0]]
    assert storage[:]["c", "d"].tolist() == [7, 8, 0, 0]


@both
def test_an_open_schema_that_fails_adds_no_column(kind: Any) -> None:
    storage = kind(4, schema="open")
    storage.set(range(2), TensorDict({"a": torch.ones(2)}, [2]))
    with pytest.raises(SchemaError, match=r"a is torch\.int64"):
        storage.set(range(2), TensorDict({"a": torch.ones(2).long(), "b": torch.ones(2)}, [2]))
    assert list(storage[:].keys()) == ["a"]
    storage.set([2, 3], [{"a": torch.tensor(2.0), "b": torch.tensor(3)}, {"a": torch.tensor(4.0)}])
    assert storage[:]["b"].tolist() == [0, 0, 3, 0]


@both
def test_a_shared_storage_takes_no_new_entries_which_other_processes_would_not_see(kind: Any) -> None:
    storage = kind(6, schema="open")
    buffer = ReplayBuffer(storage=storage, shared=True, batch_size=2)
    rows = TensorDict({"a": torch.ones(2), "b": torch.ones(2)}, [2])
    buffer.extend(rows)
    buffer.extend(rows.select("a"))
    with pytest.raises(SchemaError, match="the new entries c, but other processes"):
        buffer.extend(TensorDict({"a": torch.ones(2), "c": torch.ones(2)}, [2]))
    assert (len(storage), list(storage[:].keys()), storage[:]["b"].tolist()) == (4, ["a", "b"], [1, 1, 0, 0])


def test_leaves_of_a_consolidated_storage_share_one_buffer() -> None:
    storage = filled(LazyTensorStorage(25, consolidated=True))
    assert len({leaf.untyped_storage().data_ptr() for leaf in storage.columns.leaves}) == 1
    with pytest.raises(ValueError, match="needs a tensordict, found a tensor"):
        LazyTensorStorage(5, consolidated=True).set(0, torch.ones(2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schema": "loose"}, "expected 'fixed' or 'open'"),
        ({"schema": "open", "shared_init": True}, "could not agree on new columns"),
        ({"consolidated": True, "shared_init": True}, "exclude each other"),
        ({"ndim": 0}, "ndim is 0"),
    ],
)
def test_arguments_that_contradict(arguments: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LazyTensorStorage(10, **arguments)


def test_an_empty_storage_keeps_its_capacity_when_a_state_is_loaded() -> None:
    state = filled(LazyTensorStorage(20)).state_dict()
    storage = LazyTensorStorage(12)
    storage.load_state_dict(state)
    assert (storage.max_size, len(storage), same(storage[:], steps())) == (12, 10, True)
    with pytest.raises(SchemaError, match="10 saved elements do not fit: this storage has room for 5"):
        LazyTensorStorage(5).load_state_dict(state)
    del state["_structure"]  # it is then taken for a tensordict
    storage = LazyTensorStorage(20)
    storage.load_state_dict(state)
    assert same(storage[:], steps())


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_is_taken_as_rows_are_written() -> None:
    storage, before = LazyTensorStorage(1 << 20), resident()
    storage.set(range(2), torch.ones(2, 1 << 10))  # of 4 GB
    assert storage[torch.tensor([1])].sum() == 1 << 10
    assert resident() - before < 1 << 30


def test_rows_over_32_bits_are_counted() -> None:
    storage = LazyTensorStorage(1 << 33)
    storage.set(range(2), torch.zeros(2, 0))
    storage.set_length(1 << 32)
    storage.set((1 << 32), torch.zeros(0))
    assert len(storage) == (1 << 32) + 1


# Processes -----------------------------------------------------------------------------------------


def extend(storage: LazyTensorStorage) -> None:
    rows = storage.shape[0]
    assert rows == 0 or same(storage[:], steps(rows))
    storage.set(range(rows, rows + 5), steps(5, rows))


def run(method: str, storage: LazyTensorStorage) -> int | None:
    child = multiprocessing.get_context(method).Process(target=extend, args=(storage,))
    child.start()
    child.join()
    return child.exitcode


SHARED: dict[str, Callable[[Path], Any]] = {
    "memory": lambda folder: LazyTensorStorage(20),
    "consolidated memory": lambda folder: LazyTensorStorage(20, consolidated=True),
    "temporary files": lambda folder: LazyMemmapStorage(20),
    "files": lambda folder: LazyMemmapStorage(20, scratch_dir=folder / "maps"),
}


@by_every_method
@pytest.mark.parametrize("rows_in", SHARED)
def test_a_child_extends_the_same_rows(rows_in: str, method: str, tmp_path: Path) -> None:
    storage = filled(SHARED[rows_in](tmp_path))
    in_memory = rows_in.endswith("memory")
    if in_memory:
        storage.share()
    assert run(method, storage) == 0
    assert same(storage[:] if in_memory else storage[torch.arange(15)], steps(15))
    storage.set(range(15, 17), steps(2, 15))
    assert same(storage[torch.arange(17)], steps(17))
    if rows_in == "files":
        assert same(TensorDict.load_memmap(tmp_path / "maps")[:17], steps(17))


@pytest.mark.slow
def test_passing_a_storage_to_a_spawned_child_shares_it() -> None:
    storage = filled(LazyTensorStorage(20))
    assert run("spawn", storage) == 0
    assert (storage.shared, same(storage[torch.arange(15)], steps(15))) == (True, True)


def test_a_forked_child_of_a_storage_that_is_not_shared_has_its_own() -> None:
    storage = filled(LazyTensorStorage(20))
    assert run("fork", storage) == 0
    assert same(storage[:], steps())


@both
def test_an_empty_storage_cannot_be_passed_on(kind: Any) -> None:
    with pytest.raises(RuntimeError, match=f"an empty {kind.__name__} cannot be passed to another process"):
        run("spawn", kind(20))
    with pytest.raises(RuntimeError, match="nothing was ever written"):
        kind(20).share()


@by_every_method
@both
def test_with_shared_init_children_write_first(method: str, kind: Any) -> None:
    storage = kind(20, shared_init=True)
    assert run(method, storage) == 0
    assert same(storage[:], steps(5))
    assert run(method, storage) == 0
    storage.set(range(10, 12), steps(2, 10))
    assert same(storage[:], steps(12))
    with pytest.raises(SchemaError, match="row 24 cannot be written"):
        storage.set(range(15, 25), steps(10))


@pytest.fixture
def pair(tmp_path: Path) -> list[LazyMemmapStorage]:
    """Two storages, as in two processes, that agree on their files in the folder maps."""
    return [LazyMemmapStorage(20, scratch_dir=tmp_path / "maps", shared_init=True) for _ in range(2)]


def test_shared_init_checks_what_others_wrote(pair: list[LazyMemmapStorage]) -> None:
    first, second = pair
    first.set(range(2), steps(2))
    with pytest.raises(SchemaError, match="another process wrote data with other keys"):
        second.set(range(2), torch.ones(2))
    second.set(range(2), steps(2, 3))
    assert same(first[:], steps(2, 3))


@pytest.mark.parametrize(
    ("place", "value"),
    [((), []), (("leaves",), [["../a.memmap", "torch.int64", [20]]]), (("leaves",), [["a.memmap", "load", [20]]]),
     (("leaves",), [["a.memmap", "torch.int64", [-1]]]), (("leaves",), 7), (("structure",), [])],
)  # fmt: skip
def test_an_invalid_description_of_the_files_is_refused(
    place: Any, value: Any, pair: list[LazyMemmapStorage], tmp_path: Path
) -> None:
    first, second = pair
    first.set(range(2), TensorDict({"a": torch.arange(2)}, [2]))
    published = tmp_path / "maps" / ".rbtool" / "maps.json"
    published.write_text(json.dumps(json.loads(published.read_text()) | {place[0]: value} if place else value))
    with pytest.raises(FormatError):
        second.set(range(2), TensorDict({"a": torch.arange(2)}, [2]))


def test_rows_are_not_shared_through_a_symbolic_link(pair: list[LazyMemmapStorage], tmp_path: Path) -> None:
    first, second = pair
    first.set(range(2), TensorDict({"a": torch.arange(2)}, [2]))
    (tmp_path / "maps" / "a.memmap").rename(tmp_path / "outside")
    (tmp_path / "maps" / "a.memmap").symlink_to(tmp_path / "outside")
    before = (tmp_path / "outside").read_bytes()
    with pytest.raises(CorruptDataError, match=r"a\.memmap is a symbolic link"):
        second.set(range(2), TensorDict({"a": torch.arange(2, 4)}, [2]))
    assert (tmp_path / "outside").read_bytes() == before


def test_shared_init_stays_on_the_cpu() -> None:
    with pytest.warns(UserWarning, match="device='meta' is ignored"):
        storage = LazyTensorStorage(5, device="meta", shared_init=True)
    assert storage.device == torch.device("cpu")


@pytest.mark.parametrize("cleanup", [True, False])
def test_cleanup_memmap_decides_about_the_files_of_shared_init(cleanup: bool) -> None:
    storage = filled(LazyTensorStorage(20, shared_init=True, cleanup_memmap=cleanup))
    folder, gone = storage._maps.folder, weakref.ref(storage)
    del storage
    gc.collect()
    assert (gone(), folder.exists()) == (None, not cleanup)
    if not cleanup:
        LazyMemmapStorage(1, scratch_dir=folder, existsok=True)._maps.remove()  # type: ignore[union-attr]


@pytest.mark.parametrize("schema", ["fixed", "open"])
def test_options_survive_a_pickle(schema: Schema) -> None:
    other = pickle.loads(pickle.dumps(LazyTensorStorage(7, ndim=2, schema=schema)))
    assert (other.max_size, other.ndim, other.schema, len(other)) == (7, 2, schema, 0)


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def failing(code: int) -> Callable[..., Any]:
    """A system call that always fails with this code."""

    def fail(*arguments: Any) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_tensordict_opens_the_scratch_dir(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(20, scratch_dir=tmp_path / "maps")
    storage.set(range(10), steps().set("task", NonTensorData("door", batch_size=[10])))
    opened = TensorDict.load_memmap(tmp_path / "maps")
    assert (opened.batch_size, opened["task"]) == ((20,), "door")
    assert same(opened[:10].exclude("task"), steps())
    assert files(tmp_path / "maps") == [
        "a%2Fb.memmap", "meta.json", "next/done.memmap", "next/meta.json", "next/reward.memmap", "observation.memmap",
        "task/meta.json",
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


def test_existing_files_are_left_alone(tmp_path: Path) -> None:
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
    with pytest.raises(ValueError, match="memory maps are on the CPU"):
        LazyMemmapStorage(10, device=device)


# Lanes that differ ---------------------------------------------------------------------------------


def lanes(rows: int = 5, first: int = 0) -> LazyStackedTensorDict:
    """Rows of two lanes with other shapes, the second with an entry of its own."""
    numbers, ones = torch.arange(first, first + rows).float(), torch.ones(rows, 3, 8)
    wide = numbers[:, None, None] + torch.zeros(4, 8)
    left = TensorDict({"a": numbers, "x": wide, "next": {"b": numbers[:, None]}}, [rows])
    right = TensorDict({"a": -numbers, "x": ones, "own": numbers, "next": {"b": ones[:, 0, :5]}}, [rows])
    return LazyStackedTensorDict(left, right, stack_dim=1)


def nested_lanes(rows: int = 5, first: int = 0) -> TensorDict:
    done = torch.arange(first, first + rows)[:, None] % 3 == 2
    return TensorDict({"agents": lanes(rows, first), "next": {"done": done}}, [rows])


def same_lanes(one: Any, other: Any) -> bool:
    if isinstance(one, LazyStackedTensorDict):
        pairs = zip(one.tensordicts, other.tensordicts, strict=True)
        return one.batch_size == other.batch_size and all(same(*pair) for pair in pairs)
    return same_lanes(one["agents"], other["agents"]) and same(one.exclude("agents"), other.exclude("agents"))


@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("made", [lanes, nested_lanes])
def test_lanes_that_differ_are_kept_apart(make: Any, made: Any) -> None:
    buffer = TensorDictReplayBuffer(storage=make(10), batch_size=3, writer=RoundRobinWriter())
    buffer.extend(made(5))
    buffer.extend(made(5, 50))
    assert same_lanes(buffer[:5], made(5))
    assert same_lanes(buffer[5:], made(5, 50))
    buffer.extend(made(1, 7))  # the ring begins anew
    buffer[2] = made(1, 8)[0]
    buffer[3:5] = made(2, 9)
    for place, first in ((0, 7), (2, 8), (4, 10)):
        assert same_lanes(buffer[place : place + 1], made(1, first))
    for rows in ([made(1, 20)[0], made(1, 21)[0]], LazyStackedTensorDict(made(1, 20)[0], made(1, 21)[0])):
        buffer.storage.set(range(6, 8), rows)
        assert same_lanes(buffer[6:8], made(2, 20))
    batch = buffer.sample()
    stack = batch if made is lanes else batch["agents"]
    assert isinstance(stack, LazyStackedTensorDict)
    assert (stack.batch_size, stack[:, 1]["own"].shape, stack[:, 0]["x"].shape) == ((3, 2), (3,), (3, 4, 8))
    assert torch.equal(stack[:, 0]["a"], -stack[:, 1]["a"])  # lanes of one row stay together
    if made is nested_lanes:
        assert same_lanes(buffer.sample(out=batch), batch)


@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("made", [lanes, nested_lanes])
@pytest.mark.parametrize("way", ["folder", "state", "pickle"])
def test_lanes_that_differ_are_saved(tmp_path: Path, make: Any, made: Any, way: str) -> None:
    storage, other = make(10), make(7)
    storage.set(range(5), made(5))
    if way == "folder":
        storage.dumps(tmp_path / "saved")
        other.loads(tmp_path / "saved")
    elif way == "state":
        other.load_state_dict(storage.state_dict())
    else:
        other = pickle.loads(pickle.dumps(storage))
    assert same_lanes(other[:], made(5))


@pytest.mark.parametrize("made", [lanes, nested_lanes])
def test_files_of_lanes_that_differ_are_those_of_a_lazy_stack(tmp_path: Path, made: Any) -> None:
    storage = LazyMemmapStorage(5, scratch_dir=tmp_path)
    storage.set(range(5), made(5))
    assert same_lanes(TensorDict.load_memmap(tmp_path), made(5))


def test_a_sampler_of_slices_finds_the_ends_beside_lanes_that_differ() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=3), batch_size=6)
    buffer.extend(nested_lanes(9))
    first = buffer.sample()["agents"][:, 0]["a"].view(2, 3)
    assert torch.equal(first, first[:, :1] + torch.arange(3))
    assert set(first[:, 0].tolist()) <= {0, 3, 6}


LEFT, RIGHT = lanes().tensordicts


@each(
    "other",
    [
        LazyStackedTensorDict(LEFT, RIGHT, LEFT, stack_dim=1),
        LazyStackedTensorDict(LEFT, RIGHT.exclude("own"), stack_dim=1),
        LazyStackedTensorDict(RIGHT, LEFT, stack_dim=1),
        TensorDict({"a": torch.zeros(5, 2)}, [5, 2]),
        TensorDict({"a": torch.zeros(5)}, [5]),
    ],
)
def test_other_lanes_are_refused_and_change_nothing(other: Any) -> None:
    storage = LazyTensorStorage(10)
    storage.set(range(5), lanes())
    with pytest.raises(SchemaError):
        storage.set(range(5, 10), other)
    assert same_lanes(storage[:], lanes())


@pytest.mark.parametrize("part", [{"a": torch.ones(5), "own": torch.ones(5)}, {"a": torch.ones(5, 3)}])
def test_nothing_of_lanes_that_differ_is_dropped_from_dense_rows(part: dict[str, torch.Tensor]) -> None:
    """A lazy stack shows only the entries that its parts share."""
    storage = LazyTensorStorage(10)
    alike = [TensorDict({"a": torch.ones(5)}, [5])] * 2
    storage.set(range(5), LazyStackedTensorDict(*alike, stack_dim=1))
    assert type(storage[:]) is TensorDict
    with pytest.raises(SchemaError, match=r"brings the new own|differ in shape"):
        storage.set(range(5), LazyStackedTensorDict(alike[0], TensorDict(part, [5]), stack_dim=1))
    assert (storage[:]["a"] == 1).all()


def test_rows_with_lanes_that_differ_are_not_saved_as_episodes(tmp_path: Path) -> None:
    storage = LazyTensorStorage(10)
    storage.set(range(5), nested_lanes())
    with pytest.raises(SchemaError, match="holds lazy stacks, but only tensordicts"):
        FlatStorageCheckpointer().dumps(storage, tmp_path / "flat")


def test_a_lazy_stack_of_lanes_is_wrapped_without_a_copy() -> None:
    data = lanes()
    storage = TensorStorage(data)
    storage[0] = lanes(1, 50)[0]
    assert (storage._storage is data, data[0, 0]["a"]) == (True, 50)


# Names of files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize(
    "read",
    [
        lambda storage: storage[:],
        lambda storage: storage.get(3),
        lambda storage: storage.get(slice(1, 4, 2)),
        lambda storage: ReplayBuffer(storage=storage)[1:3],
        lambda storage: storage._storage,
        lambda storage: storage[:][1:],
        lambda storage: storage[:].unbind(0)[2],
        lambda storage: pickle.loads(ForkingPickler.dumps(storage[1:3])),
    ],
)
def test_views_of_memory_maps_know_their_files(tmp_path: Path, lazy: bool, read: Any) -> None:
    made = filled(LazyMemmapStorage(20, scratch_dir=tmp_path)) if lazy else None
    storage = made or TensorStorage(steps().exclude("a/b").memmap_(tmp_path))
    expected = TensorDict.load_memmap(tmp_path)
    for key, leaf in read(storage).items(True, True):
        assert isinstance(leaf, MemoryMappedTensor)
        assert leaf.filename == expected.get(key).filename
    read(storage)["observation"].fill_(7.0)
    assert (storage[:]["observation"] == 7.0).any()


@pytest.mark.parametrize(
    "read",
    [
        lambda storage: storage.get(torch.tensor([3, 1])),
        lambda storage: storage[[0, 2]],
        lambda storage: storage[torch.arange(10) < 3],
        lambda storage: storage[::-1],
        lambda storage: storage[:].clone(),
        lambda storage: copy.deepcopy(storage[:]),
        lambda storage: pickle.loads(pickle.dumps(storage[:])),
        lambda storage: storage[:] + 1,
        lambda storage: TensorDictReplayBuffer(storage=storage).sample(3),
    ],
)
def test_copies_of_memory_maps_are_plain(read: Any) -> None:
    found = read(filled(LazyMemmapStorage(20)))
    assert {type(leaf) for leaf in found.values(True, True)} == {torch.Tensor}


def test_rows_of_memory_maps_can_be_saved_elsewhere(tmp_path: Path) -> None:
    storage = filled(LazyMemmapStorage(20, scratch_dir=tmp_path / "maps"))
    for number, rows in enumerate((storage[:], storage[1:3])):
        saved = rows.memmap(tmp_path / str(number))
        assert saved["observation"].filename.startswith(str(tmp_path / str(number)))
        assert same(TensorDict.load_memmap(tmp_path / str(number)), rows)


def test_entries_that_are_added_to_memory_maps_leave_the_names_of_the_others(tmp_path: Path) -> None:
    storage = TensorStorage(steps().exclude("a/b").memmap_(tmp_path))
    storage.add_entries({("value",): torch.ones(10)})
    assert type(storage[:]["value"]) is torch.Tensor
    assert storage[:]["observation"].filename == storage._storage["observation"].filename


# Removing files ------------------------------------------------------------------------------------


def many_rows(count: int, seed: int) -> TensorDict:
    made = torch.Generator().manual_seed(seed)
    data = {
        "state": torch.rand(count, 40, generator=made, dtype=torch.float64),
        "step": torch.randint(0, 1 << 16, (count,), generator=made).to(torch.uint16),
        "done": torch.rand(count, 1, generator=made) < 0.5,
        "nothing": torch.zeros(count, 0),
        "half": torch.rand(count, 3, generator=made).bfloat16(),
    }
    return TensorDict(data, [count])


@pytest.mark.parametrize("seed", range(4))
def test_new_rows_that_are_written_to_the_files_are_those_in_the_map(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With large pages, system calls write what a map holds: every length, at every offset, new or not."""
    monkeypatch.setattr(columns, "_LARGE", [1, 4096, 20_000, 1][seed])
    monkeypatch.setattr(columns, "_AHEAD", 50_000)
    pair = [ReplayBuffer(storage=kind(500), batch_size=8) for kind in (LazyMemmapStorage, LazyTensorStorage)]
    for turn, count in enumerate([3, 70, 200, 1, 180, 90, 300, 400, 2, 20]):
        for buffer in pair:
            if turn == 7:
                buffer.empty()
            if turn % 3 == 1:
                buffer.add(many_rows(1, turn)[0])
            buffer.extend(many_rows(count, turn + 100 * seed))
        assert same(pair[0][:], pair[1][:])
        files = pair[0].storage.scratch_dir
        assert same(TensorDict.load_memmap(files)[: len(pair[0])], pair[1][:])


def test_new_rows_reach_no_file_that_took_the_place_of_the_storage_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "_LARGE", 1)
    monkeypatch.setattr(columns, "warm", lambda importing: False)
    first, data = LazyMemmapStorage(100, scratch_dir=tmp_path), many_rows(20, 0)
    first.set(range(20), data)
    second = LazyMemmapStorage(100, scratch_dir=tmp_path, existsok=True)
    second.set(range(10), data[10:])
    first.set(range(20, 40), data)
    assert len(second) == 10
    assert same(first[20:], data)
    assert not second.contents[20:40]["state"].any()
    second.cleanup()
    second.set(range(10, 30), data)
    assert same(second[10:], data)


def test_a_disk_that_fills_while_new_rows_are_written_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_LARGE", 1)
    monkeypatch.setattr(columns, "warm", lambda importing: False)
    buffer, data = ReplayBuffer(storage=LazyMemmapStorage(100), batch_size=2), many_rows(20, 0)
    buffer.extend(data)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(errno.ENOSPC))
        with pytest.raises(OutOfSpaceError):
            buffer.extend(data)
    assert (len(buffer), buffer.write_count) == (20, 20)
    buffer.extend(data[5:])
    assert same(buffer[20:], data[5:])


def present(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Whether the page of each row exists in this process; rows end with pages."""
    size, page = tensor.numel() * tensor.element_size(), os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/pagemap", "rb") as words:
        words.seek(tensor.data_ptr() // page * 8)
        found = np.frombuffer(words.read(size // page * 8), np.uint64) >> np.uint64(63) == 1
    return np.repeat(found, len(tensor) // len(found))


def await_pages() -> None:
    for thread in threading.enumerate():
        if thread.name == "rbtool-pages":
            thread.join()


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="needs /proc")
@pytest.mark.parametrize("scarce", [False, True])
def test_rows_that_follow_small_writes_find_their_pages(scarce: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 256 rows of 1 kB, half as many at least, have pages before they are written; none at first, and if memory
    is scarce.
    """
    monkeypatch.setattr(columns, "_LARGE", 1 << 16)
    monkeypatch.setattr(columns, "_AHEAD", 1 << 18)
    monkeypatch.setattr(columns, "available_memory", lambda: (scarce and 1 << 20) or None)
    storage, rows = LazyMemmapStorage(1024), torch.arange(1024 * 256, dtype=torch.int32).view(1024, 256)
    for start in range(0, 1024, 8):
        storage.set(range(start, start + 8), rows[start : start + 8])
        await_pages()
        found, top = present(storage.contents), start + 8
        exact = -(-top // 4) * 4
        assert found[:exact].all()
        assert found[exact:].sum() <= (0 if scarce or top < 64 else 256)
        if not scarce and top > 64:
            assert found[: top + min(top // 4, 120)].all()
    assert same(storage[:], rows)


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="needs /proc")
def test_pages_are_also_made_after_text_has_taken_a_wider_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_LARGE", 1 << 16)
    storage, rows = LazyMemmapStorage(1024), torch.arange(1024 * 256, dtype=torch.int32).view(1024, 256)
    for start in range(0, 700, 4):
        text = ["walk" if start < 100 else "walk to the table"] * 4
        storage.set(range(start, start + 4), TensorDict({"x": rows[start : start + 4], "task": text}, [4]))
        await_pages()
    assert present(storage.columns.leaves[list(storage.structure.paths()).index(("x",))])[700:740].all()
    assert same(storage[torch.arange(700)]["x"], rows[:700])


def test_pages_that_are_being_made_hinder_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes, forks, pickles, and the end of the storage, before the thread has begun."""
    monkeypatch.setattr(columns, "_LARGE", 1 << 12)
    go_on = threading.Event()
    monkeypatch.setattr(columns, "available_memory", lambda: go_on.wait() and None)
    storage, data = LazyMemmapStorage(10_000), torch.arange(64_000).view(1000, 64)
    for start in range(0, 100, 5):
        storage.set(range(start, start + 5), data[start : start + 5])
    assert any(thread.name == "rbtool-pages" for thread in threading.enumerate())
    assert same(pickle.loads(pickle.dumps(storage))[:], data[:100])
    child = multiprocessing.get_context("fork").Process(target=storage.set, args=(range(100, 1000, 1), data[100:]))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert same(storage[torch.arange(1000)], data)
    batch = storage[:]
    del storage
    gc.collect()
    go_on.set()
    await_pages()
    assert same(batch, data)


PAST_THE_END = """
import mmap, sys
import numpy as np
from rbtool.core.storages.columns import _make_pages

with open(sys.argv[1], "w+b") as file:
    file.truncate(1 << 20)
    pages = mmap.mmap(file.fileno(), 1 << 20)
    file.truncate(1 << 16)
    _make_pages(np.frombuffer(pages, np.uint8).ctypes.data, 1 << 20)
"""


def test_pages_that_cannot_be_made_do_not_end_the_process(tmp_path: Path) -> None:
    assert run_forked(PAST_THE_END, tmp_path / "cut").returncode == 0


def test_a_temporary_folder_goes_with_its_storage() -> None:
    storage = filled(LazyMemmapStorage(25))
    folder = storage.scratch_dir
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
    assert not storage.scratch_dir.exists()
    assert storage.cleanup() is False
    assert same(storage[:], steps())


LEAVING = """
import os, signal, sys, torch
from rbtool import LazyMemmapStorage
storage = LazyMemmapStorage(25, scratch_dir=sys.argv[1], auto_cleanup=True)
storage.set(0, torch.ones(3))
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


ENDING = """
import os, signal, sys, threading, torch
from rbtool import LazyMemmapStorage, LazyTensorStorage
number, before = signal.Signals[sys.argv[2]], sys.argv[3]
signal.signal(number, signal.SIG_DFL)  # the process this was forked from may have made storages
if before == "handled":
    signal.signal(number, lambda number, frame: os._exit(7))
elif before == "ignored":
    signal.signal(number, signal.SIG_IGN)
kept = []
def make():
    kept.append(LazyMemmapStorage(25, scratch_dir=sys.argv[1], auto_cleanup=True))
    kept[0].set(0, torch.ones(3))
if before == "thread":
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
else:
    make()
    kept.append(LazyMemmapStorage(25))
    kept[1].set(0, torch.ones(3))
    print(kept[1].scratch_dir, flush=True)
os.kill(os.getpid(), number)
os._exit(5)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
@pytest.mark.parametrize(
    ("before", "code", "left"), [("default", None, False), ("handled", 7, True), ("ignored", 5, True)]
)
def test_signals_that_end_the_process_remove_the_files(
    tmp_path: Path, name: str, before: str, code: int | None, left: bool
) -> None:
    done = run_forked(ENDING, tmp_path / "maps", name, before)
    assert done.returncode == (-signal.Signals[name] if code is None else code), done.stderr
    temporary = Path(done.stdout.strip())
    assert ((tmp_path / "maps").exists(), temporary.exists()) == (left, left)
    shutil.rmtree(temporary, ignore_errors=True)


def test_a_storage_made_in_another_thread_sets_no_handler(tmp_path: Path) -> None:
    done = run_forked(ENDING, tmp_path / "maps", "SIGTERM", "thread")
    assert (done.returncode, (tmp_path / "maps").exists()) == (-signal.SIGTERM, True), done.stderr


COPIED = """
import copy, os, sys, torch
from rbtool import LazyMemmapStorage, LazyTensorStorage
kind, before = sys.argv[1], int(sys.argv[2])
storage = LazyMemmapStorage(1 << 16) if kind == "memmap" else LazyTensorStorage(1 << 16, shared_init=True)
if before:
    storage.set(range(before), torch.ones(before, 1000))
ready, written = os.pipe()
if not (child := os.fork()):
    os.read(ready, 1)
    copied = copy.deepcopy(storage)
    os._exit(0 if len(copied) == before + 4000 and bool((copied[:] == 1).all()) else 1)
storage.set(range(before, before + 4000), torch.ones(4000, 1000))
os.write(written, b".")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(("kind", "before"), [("memmap", 2), ("shared", 0), ("shared", 2)])
def test_a_copy_has_the_rows_that_another_process_has_written(kind: str, before: int) -> None:
    done = run_forked(COPIED, kind, before)
    assert done.returncode == 0, done.stderr


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


def test_a_new_column_has_disk_blocks_for_the_rows_that_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    storage = LazyMemmapStorage(1000, scratch_dir=tmp_path / "maps", schema="open")
    storage.set(range(900), TensorDict({"a": torch.ones(900, 500)}, [900]))
    more = TensorDict({"a": torch.ones(1, 500), "b": torch.ones(1, 500)}, [1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
        with pytest.raises(OutOfSpaceError, match="no space is left"):
            storage.set(range(900, 901), more)
    assert (len(storage), list(storage[:].keys()), (tmp_path / "maps" / "b.memmap").exists()) == (900, ["a"], False)
    storage.set(range(900, 901), more)
    assert (tmp_path / "maps" / "b.memmap").stat().st_blocks * 512 >= 901 * 500 * 4


def test_file_systems_that_take_no_blocks_ahead_get_zeros(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP))
    storage = LazyMemmapStorage(1 << 16, scratch_dir=tmp_path / "maps")
    storage.set(range(10), steps())
    storage.set(range(10, 60_010), steps(60_000))
    assert same(storage[:10], steps())
    assert same(storage[10:], steps(60_000))


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
    os.truncate(tmp_path / "maps" / "observation.memmap", 8)
    with pytest.raises(CorruptDataError, match="8 bytes, expected 320"):
        storage._maps.open()


def test_keys_that_need_the_same_file_are_refused(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(5, scratch_dir=tmp_path / "maps")
    with pytest.raises(SchemaError, match="need the same file"):
        storage.set(0, {"a": torch.ones(2), "a.memmap": [torch.ones(2)]})
    assert files(tmp_path) == []
