"""Storages written from the page pass the suites, broken ones fail them, and rows keep every bit in all storages."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import each
from row_storage import ObjectStorage as Objects
from row_storage import RowStorage as Page
from tensordict import TensorDict

import rbtool
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.errors import SchemaError
from rbtool.core.format.contracts import FinalMethodError
from rbtool.core.storages.base import IndexedStorage, Storage, require_like
from rbtool.core.testing.buffers import moved
from rbtool.core.testing.rows import sample_rows
from rbtool.core.testing.storages import FILLS, StorageFillTests, StorageTests

# One broken rule each ----------------------------------------------------------------------------------


class ForgetsToReportAWrite(Page):
    def write_at(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> Any:
        super().write_at(cursor, data, set_cursor=set_cursor)
        return slice(0, 0)


class ReportsOtherRows(Page):
    def write_at(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> Any:
        rows = super().write_at(cursor, data, set_cursor=set_cursor)
        return slice(0, rows.stop - rows.start) if isinstance(rows, slice) else rows


class CountsEveryWrite(Page):
    def write_rows(self, rows: Any, data: Any) -> None:
        before = self.length
        super().write_rows(rows, data)
        self.length = min(before + (1 if isinstance(rows, int) else len(data)), self.max_size)


class CountsItsRoom(Page):
    def __len__(self) -> int:
        return self.max_size if self.length else 0


class KeepsItsLengthWhenEmptied(Page):
    def clear_rows(self) -> None:
        pass


class ReadsViews(Page):
    def read_rows(self, rows: Any) -> Any:
        if isinstance(rows, torch.Tensor) and len(rows) and bool((rows.diff() == 1).all()):
            return self.rows[int(rows[0]) : int(rows[-1]) + 1]
        return super().read_rows(rows)


class KeepsTheDataOfTheCaller(Page):
    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self.kept: dict[int, Any] = {}

    def write_rows(self, rows: Any, data: Any) -> None:
        super().write_rows(rows, data)
        if isinstance(rows, int):
            self.kept[rows] = data
        else:
            self.kept |= dict(zip(torch.arange(self.max_size)[rows].tolist(), data.unbind(0), strict=True))

    def read_rows(self, rows: Any) -> Any:
        if isinstance(rows, int):
            return self.kept[rows].clone()
        wanted = torch.arange(self.length)[rows].tolist()
        return torch.stack([self.kept[row] for row in wanted]) if wanted else super().read_rows(rows)


class WritesHalfOnFailure(Page):
    def write_rows(self, rows: Any, data: Any) -> None:
        if self.rows is not None and data.keys() == self.rows.keys():
            for key in data.keys(True, True):
                require_like(data.select(key), self.rows[rows].select(key))
                self.rows.get(key)[rows] = data.get(key)
        super().write_rows(rows, data)


class GrowsOnFailure(Page):
    def write_rows(self, rows: Any, data: Any) -> None:
        if self.length:
            self.length = self.length_after(rows) if isinstance(rows, torch.Tensor) else self.max_size
        super().write_rows(rows, data)


class TakesAnything(Page):
    def write_rows(self, rows: Any, data: Any) -> None:
        if self.rows is None:
            super().write_rows(rows, data)
            return
        for key in data.keys(True, True):
            self.rows.get(key)[rows] = data.get(key).to(self.rows.get(key).dtype)
        self.length = self.length_after(rows)


class ReadsInOrderOfRows(Page):
    def read_rows(self, rows: Any) -> Any:
        return super().read_rows(rows.sort().values if isinstance(rows, torch.Tensor) else rows)


class IgnoresRowsReplacedByIndex(Page):
    def write_at(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> Any:
        return super().write_at(cursor, data, set_cursor=set_cursor) if set_cursor else slice(0, 0)


class SavesNoLength(Page):
    def save_state(self) -> dict[str, Any]:
        return {"_storage": None if self.rows is None else self.rows.clone(), "_len": self.max_size}


class ForgetsRowsWhenALoadFails(Page):
    def load_state(self, state: Any) -> None:
        self.clear_rows()
        super().load_state(state)


class MovesTheCursorAtEveryWrite(Page):
    def write_at(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> Any:
        rows = super().write_at(cursor, data, set_cursor=set_cursor)
        self.last_cursor = cursor
        return rows


class SharesItsRowsWithItsPickles(Page):
    shelf: dict[int, Any] = {}  # noqa: RUF012

    def __getstate__(self) -> dict[str, Any]:
        SharesItsRowsWithItsPickles.shelf[id(self)] = self.rows
        return super().__getstate__() | {"rows": None, "number": id(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.rows = self.shelf[state["number"]]


SABOTEURS = [
    ForgetsToReportAWrite, ReportsOtherRows, CountsEveryWrite, CountsItsRoom, KeepsItsLengthWhenEmptied, ReadsViews,
    KeepsTheDataOfTheCaller, WritesHalfOnFailure, GrowsOnFailure, TakesAnything, ReadsInOrderOfRows,
    IgnoresRowsReplacedByIndex, SavesNoLength, ForgetsRowsWhenALoadFails, MovesTheCursorAtEveryWrite,
    SharesItsRowsWithItsPickles,
]  # fmt: skip


def suites(kind: Callable[[int], Storage], *, alike: bool = True) -> list[Any]:
    """The suites of a kind of storage."""

    class Fills(StorageFillTests):
        kinds = ("tensordict", "nested tensordict")
        ndims = (1,)
        saves = False

        def make_empty(self, max_size: int, ndim: int) -> Storage:
            return kind(max_size)

        def read(self, storage: Storage, rows: list[int] | None = None) -> Any:
            found = super().read(storage, rows)
            return torch.stack(found) if isinstance(found, list) else found

    class Filled(StorageTests):
        def make(self) -> Storage:
            storage = kind(12)
            storage.set(range(10), sample_rows("nested tensordict", list(range(10))))
            storage.last_cursor = None
            return storage

    Fills.alike = alike
    return [Fills(), Filled()]


def failures(kind: Callable[[int], Storage], **options: Any) -> set[str]:
    """Run the suites; return the names of the tests that fail."""
    found = set()
    for suite in suites(kind, **options):
        for name, test in inspect.getmembers(suite, inspect.ismethod):
            names = inspect.signature(test).parameters.keys()
            if not name.startswith("test_") or "tmp_path" in names:
                continue
            cases = itertools.product(suite.kinds, suite.ndims, FILLS) if "case" in names else [None]
            for case in cases:
                try:
                    test() if case is None else test(case)
                except Exception:  # of any kind: what is tested is broken
                    found.add(name)
    return found


@pytest.mark.parametrize("kind", [Page, Objects])
def test_a_storage_written_from_the_page_passes(kind: type[Storage]) -> None:
    assert failures(kind, alike=kind is Page) == set()
    source = inspect.getsource(kind)
    assert len(source.splitlines()) <= 40
    assert not re.search(r"\b_[a-z]|\._[a-z]", source)


@pytest.mark.parametrize("kind", [Page, rbtool.ListStorage, rbtool.LazyTensorStorage])
def test_a_full_ring_is_loaded_into_a_larger_one_in_the_order_of_time(kind: type[Storage]) -> None:
    small, large = (ReplayBuffer(storage=kind(rows)) for rows in (4, 6))
    small.extend(TensorDict({"step": torch.arange(6)}, [6]))
    large.load_state_dict(small.state_dict())
    assert [int(row["step"]) for row in (large[place] for place in range(4))] == [2, 3, 4, 5]


@pytest.mark.parametrize("saboteur", SABOTEURS, ids=lambda kind: kind.__name__)
def test_a_storage_that_breaks_one_rule_fails(saboteur: type[Storage]) -> None:
    assert failures(saboteur)


@pytest.mark.parametrize("kind", [Page, Objects, rbtool.ListStorage, rbtool.LazyTensorStorage])
def test_no_slice_goes_over_the_end_of_an_episode(kind: type[Storage]) -> None:
    buffer = rbtool.TensorDictReplayBuffer(
        storage=kind(100), sampler=rbtool.SliceSampler(slice_len=4, end_key=("next", "done")), batch_size=320,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    for first in range(0, 350, 35):
        step = torch.arange(first, first + 35)
        done = (step % 7 == 6).unsqueeze(-1)
        buffer.extend(TensorDict({"step": step, "next": TensorDict({"done": done}, [35])}, [35]))
        assert bool((buffer.sample()["step"].reshape(-1, 4).diff(dim=1) == 1).all())


@each("name", ["get", "set", "state_dict", "load_state_dict", "empty", "__getitem__", "notify"])
@each("parent", [Storage, IndexedStorage, Page, rbtool.TensorStorage])
def test_final_methods_cannot_be_overridden(parent: type[Storage], name: str) -> None:
    with pytest.raises(FinalMethodError, match=rf"Own overrides {name}\(\)") as caught:
        type("Own", (parent,), {name: lambda self: None})
    assert isinstance(caught.value, TypeError)
    assert caught.value.hint
    with pytest.raises(FinalMethodError):
        type("Own", (type("Mixin", (), {name: lambda self: None}), parent), {})


def test_the_base_class_checks_what_is_written() -> None:
    storage = Page(5)
    for cursor, data, message in (
        (range(1, 3), sample_rows("tensordict", [1, 2]), "row 2 cannot be written yet"),
        (range(4, 6), sample_rows("tensordict", [1, 2]), "the capacity is 5"),
        (range(3), sample_rows("tensordict", [1, 2]), "2 elements given for 3 rows"),
        (range(3), "abc", "has no rows"),
    ):
        with pytest.raises(SchemaError, match=message):
            storage.set(cursor, data)
    storage.set(torch.tensor([0, 1, 0]), sample_rows("tensordict", [1, 2, 3]))
    assert storage[:]["action"].tolist() == [12, 8]
    storage.set([1, 0], list(sample_rows("tensordict", [4, 5]).unbind(0)))
    assert storage[torch.tensor([[0], [1]])]["action"].tolist() == [[20], [16]]


WORDS = {
    torch.float16: (torch.int16, [0x7E55, -0x8000, -1, 0x7C01, 1]),
    torch.bfloat16: (torch.int16, [0x7FD5, -0x8000, -1, 0x7F81, 1]),
    torch.float32: (torch.int32, [0x7FC12345, -(1 << 31), -1, 0x7F800001, 1]),
    torch.float64: (torch.int64, [0x7FF8000000012345, -(1 << 63), -1, 0x7FF0000000000001, 1]),
}
"""Of each type: quiet NaNs with a payload, minus zero, a signalling NaN, and the smallest number."""

COUNT = 5


def rows(device: str | None, turn: int = 0) -> TensorDict:
    leaves = {str(dtype)[6:]: torch.tensor(words).to(kind).view(dtype) for dtype, (kind, words) in WORDS.items()}
    leaves = {name: leaf.view(kind_of(leaf)).roll(turn).view(leaf.dtype) for name, leaf in leaves.items()}
    done = torch.tensor([[False]] * (COUNT - 1) + [[True]])
    after = {"observation": leaves["float32"].unsqueeze(-1), "done": done, "terminated": done, "truncated": done ^ done}
    leaves["pair"] = torch.complex(leaves["float32"], leaves["float32"])
    return TensorDict({**leaves, "next": TensorDict(after, [COUNT], device=device)}, [COUNT], device=device)


def kind_of(leaf: torch.Tensor) -> torch.dtype:
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[leaf.element_size()]


def bits(data: Any) -> dict[Any, Any]:
    found = {}
    for key, leaf in data.items(True, True):
        if key != "index":
            plain = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            found[key] = (plain.contiguous().view(kind_of(plain)) if plain.is_floating_point() else plain).tolist()
    return found


class TensorDictRows(Storage):
    """A storage of a user, which keeps a tensordict, and has the state that all storages have by default."""

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self.kept: Any = None
        self.length = 0

    def __len__(self) -> int:
        return self.length

    def read_rows(self, rows: Any) -> Any:
        return self.kept[rows]

    def write_rows(self, rows: Any, data: Any) -> None:
        if self.kept is None:
            one = data if isinstance(rows, int) else data[0]
            self.kept = one.expand(self.max_size, *one.shape).apply(torch.zeros_like)
        require_like(data, self.kept[rows])
        self.kept[rows] = data
        self.length = self.length_after(rows)

    def clear_rows(self) -> None:
        self.length = 0


def wrapped(size: int) -> Storage:
    empty = TensorDict({}, [size]).update(rows(None)[:1].expand(size).apply(torch.zeros_like))
    storage = rbtool.TensorStorage(empty)
    storage.set_length(0)
    return storage


STORAGES: dict[str, Callable[[int], Storage]] = {
    "wrapped": wrapped,
    "lazy": rbtool.LazyTensorStorage,
    "memory-mapped": rbtool.LazyMemmapStorage,
    "list": rbtool.ListStorage,
    "lazy stack": rbtool.LazyStackStorage,
    "compressed": rbtool.CompressedListStorage,
    "of a user": TensorDictRows,
}

devices = pytest.mark.parametrize("device", [None, "cpu"])


def filled(name: str, device: str | None) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=STORAGES[name](2 * COUNT), generator=torch.Generator().manual_seed(0))
    given = rows(device)
    buffer.extend(given[:-1])
    buffer.add(given[-1])
    return buffer


@devices
@pytest.mark.parametrize("name", STORAGES)
def test_rows_keep_every_bit(name: str, device: str | None, tmp_path: Path) -> None:
    buffer, expected, others = filled(name, device), rows(device), rows(device, turn=1)
    assert bits(buffer[:]) == bits(expected)
    assert bits(buffer[torch.tensor([1, 3, 0])]) == bits(expected[torch.tensor([1, 3, 0])])
    assert [bits(buffer[row]) for row in range(COUNT)] == [bits(expected[row]) for row in range(COUNT)]
    batch, info = buffer.sample(32, return_info=True)
    assert bits(batch) == bits(expected[info["index"]])
    for way in ("state", "folder") if name != "of a user" else ("state",):
        other = moved(buffer, ReplayBuffer(storage=STORAGES[name](3 * COUNT)), way, tmp_path / "saved")
        assert bits(other[:]) == bits(expected)
    buffer[1:3] = others[1:3]
    buffer[4] = others[4]
    expected = torch.stack([(others if row in (1, 2, 4) else expected)[row] for row in range(COUNT)])
    assert bits(buffer[:]) == bits(expected)
    if name not in ("compressed", "of a user"):
        buffer[0:3] = others[1]
        assert [bits(buffer[number]) for number in range(3)] == [bits(others[1])] * 3


@devices
def test_a_load_that_fails_leaves_every_bit(device: str | None) -> None:
    storage = TensorDictRows(COUNT)
    storage.set(range(COUNT), rows(device))
    with pytest.raises(SchemaError):
        storage.load_state_dict({"_storage": rows(device).exclude("float32"), "_len": COUNT})
    assert bits(storage[:]) == bits(rows(device))


@devices
def test_steps_that_a_transform_holds_back_keep_every_bit(device: str | None) -> None:
    transform = rbtool.MultiStepTransform(n_steps=2, gamma=0.9, reward_keys=())
    buffer = ReplayBuffer(storage=rbtool.LazyTensorStorage(10), transform=transform)
    given = rows(device)
    buffer.extend(given[:3])
    buffer.extend(given[3:])
    buffer.flush()
    stored = buffer[:]
    for name in ("float16", "bfloat16", "float32", "float64", "pair"):
        assert bits(stored.select(name)) == bits(given.select(name))


@pytest.mark.parametrize("name", ["index", "indices", "item"])
def test_an_index_has_the_names_of_torchrl_too(name: str) -> None:
    storage = rbtool.TensorStorage(torch.arange(5))
    assert storage.get(**{name: torch.tensor([3, 1])}).tolist() == [3, 1]
    ensemble = rbtool.StorageEnsemble(storage, storage)
    assert ensemble.get(**{name: 1}) is storage
    with pytest.raises(TypeError):
        storage.get(place=1)  # type: ignore[call-arg]
    for write in (ensemble.add, ensemble.extend):
        with pytest.raises(RuntimeError):
            write(value=torch.zeros(1))
