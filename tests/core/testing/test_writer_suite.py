"""A writer written from the documentation passes the suite, and a broken one fails the test of the rule it breaks."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from own_writers import EveryOther, Reservoir, Ring
from suite_runs import failure, failures, names_in
from tensordict import TensorDict

from rbtool import LazyTensorStorage, ReplayBuffer, RoundRobinWriter, SliceSampler, TensorDictRoundRobinWriter, Writer
from rbtool.core.errors import SchemaError
from rbtool.core.testing.writers import RingTests, WriterTests
from rbtool.core.writers import base


def suite_of(kind: type[Writer], parent: type[WriterTests] = RingTests, **options: Any) -> type[WriterTests]:
    return type("Suite", (parent,), {"make": lambda self: kind(), "kinds": ("tensor",), **options})


@pytest.mark.parametrize("kinds", [("tensor", "tree"), ("tensordict", "nested")])
def test_a_writer_from_the_documentation_passes(kinds: tuple[str, ...]) -> None:
    assert failures(suite_of(Ring, kinds=kinds)) == {}
    for kind in (Ring, EveryOther, Reservoir):
        source = inspect.getsource(kind)
        assert source.count("\n") <= 40
        assert re.search(r"\._(?!_init__\()", source) is None


# Each breaks one rule: what breaks it, and the test that fails -----------------------------------------------------


class WrongRows(Ring):
    """Returns the index of other rows than it wrote: past the template, as code from elsewhere may."""

    def extend(self, data):
        return super().extend(data) * 0


class ForgetsTheCursor(Ring):
    def on_written(self, rows, capacity):
        pass


class CountsTwice(Ring):
    def on_written(self, rows, capacity):
        super().on_written(rows, capacity)
        self.write_count += 1


class SkipsMarkUpdate(Ring):
    def _mark_update(self, index):
        self._informed = True


class MarksBeforeItWrites(Ring):
    def place(self, data, count, capacity):
        found = super().place(data, count, capacity)
        self._mark_update(torch.tensor(list(found)) % capacity)
        return found


class MarksOneOnly(Ring):
    def _mark_update(self, index):
        super()._mark_update(torch.as_tensor(index).reshape(-1)[:1])


class CountsNoGenerations(Ring):
    @property
    def _generations(self):
        return None


class MovesBeforeItWrites(Ring):
    def place(self, data, count, capacity):
        found = super().place(data, count, capacity)
        self.cursor = found.stop % capacity
        return found

    def on_written(self, rows, capacity):
        pass


class EditsTheCallersData(Ring):
    def prepare(self, data, rows):
        if isinstance(data, torch.Tensor):
            return data.add_(0.5)
        return data


class StoresOtherData(Ring):
    def prepare(self, data, rows):
        return data * 2 if isinstance(data, torch.Tensor) else data


class LabelsTheCallersData(TensorDictRoundRobinWriter):
    def prepare(self, data, rows):
        return data.set("index", torch.zeros(data.batch_size, dtype=torch.int64))


class SkipsALane(Ring):
    def _replicate_index(self, index):
        return super()._replicate_index(index)[1:]


class OneIndexForAll(Ring):
    """Returns the index that it keeps, and writes into it the next time."""

    def extend(self, data):
        index = super().extend(data)
        if not hasattr(self, "kept") or self.kept.shape != index.shape:
            self.kept = index
        return self.kept.copy_(index)


class ForgetsItsState(EveryOther):
    def save_state(self):
        return {}

    def load_state(self, state):
        pass


class ForgetsOnDisk(Ring):
    def read_state(self, folder):
        return super().read_state(folder) | {"_cursor": 0}


class TakesAnyState(Ring):
    def load_state_dict(self, state_dict):
        self.cursor = self.write_count = 0


class KeepsTheGenerator(Ring):
    def __getstate__(self):
        return self.__dict__ | {"generator": 1}


class DoesNotStartAgain(Ring):
    def reset(self):
        self.cursor = 3


class LosesTheCount(Ring):
    def reset(self):
        self.write_count = 0


class NarrowCounts(Ring):
    @property
    def write_count(self):
        return super().write_count % 2**31

    @write_count.setter
    def write_count(self, value):
        Writer.write_count.fset(self, value)


class TakesEmptyBatches(Ring):
    pass


class WritesBackwards(Ring):
    def place(self, data, count, capacity):
        return torch.arange(self.cursor + count - 1, self.cursor - 1, -1) % capacity

    def on_written(self, rows, capacity):
        last = rows if isinstance(rows, int) else int(rows[0])
        self.cursor = (last + 1) % capacity


class AlwaysFromTheStart(Ring):
    def place(self, data, count, capacity):
        return range(count)


class HidesTheOrder(Ring):
    keeps_order = False


class IgnoresTheTurnOfTheRing(Ring):
    def on_rotate(self, row):
        self.cursor = 0


class CountsForItselfAlone(Ring):
    def __init__(self) -> None:
        super().__init__(compilable=True)


SABOTEURS = [
    (WrongRows, "test_written_rows_are_found_at_their_index"),
    (WrongRows, "test_rows_wrap_around"),
    (ForgetsTheCursor, "test_rows_wrap_around"),
    (ForgetsTheCursor, "test_slices_follow_the_order_of_writes"),
    (CountsTwice, "test_writes_are_counted"),
    (SkipsMarkUpdate, "test_attached_buffers_are_notified_after_a_write"),
    (MarksBeforeItWrites, "test_attached_buffers_are_notified_after_a_write"),
    (MarksOneOnly, "test_attached_buffers_are_notified_after_a_write"),
    (CountsNoGenerations, "test_overwritten_rows_are_counted"),
    (MovesBeforeItWrites, "test_a_failed_write_changes_nothing"),
    (EditsTheCallersData, "test_the_data_of_the_caller_is_unchanged"),
    (StoresOtherData, "test_written_rows_are_found_at_their_index"),
    (SkipsALane, "test_indices_of_two_dimensions_name_each_element"),
    (OneIndexForAll, "test_a_returned_index_is_a_copy"),
    (ForgetsItsState, "test_a_buffer_continues_from_its_checkpoint"),
    (ForgetsOnDisk, "test_state_is_restored"),
    (ForgetsOnDisk, "test_a_buffer_continues_from_its_checkpoint"),
    (TakesAnyState, "test_an_invalid_state_is_refused"),
    (KeepsTheGenerator, "test_an_unpickled_copy_continues_alike"),
    (DoesNotStartAgain, "test_an_emptied_writer_starts_again"),
    (LosesTheCount, "test_an_emptied_writer_starts_again"),
    (NarrowCounts, "test_counts_have_64_bits"),
    (WritesBackwards, "test_rows_wrap_around"),
    (AlwaysFromTheStart, "test_rows_wrap_around"),
    (HidesTheOrder, "test_it_keeps_the_order_of_rows"),
    (IgnoresTheTurnOfTheRing, "test_a_full_ring_continues_in_a_larger_storage"),
    (CountsForItselfAlone, "test_another_process_continues_the_counts"),
]


@pytest.mark.parametrize(("kind", "name"), SABOTEURS, ids=[f"{kind.__name__}-{name}" for kind, name in SABOTEURS])
def test_a_broken_writer_fails(kind: type[Writer], name: str) -> None:
    assert failure(suite_of(kind), name) is not None


def test_a_writer_that_labels_the_callers_data_fails() -> None:
    suite = suite_of(LabelsTheCallersData, kinds=("tensordict",), labels=True)
    assert failure(suite, "test_the_data_of_the_caller_is_unchanged") is not None


@pytest.mark.parametrize(
    ("name", "without", "test"),
    [
        ("register_storage", lambda self, storage: setattr(self, "_storage", storage), "registered_to_another_storage"),
        ("sync_cursor", lambda self: None, "a_storage_expects_the_next_write"),
        ("resume_after", lambda self: None, "a_load_without_a_state"),
        ("rotate", lambda self, row: None, "a_full_ring_continues_in_a_larger_storage"),
        ("empty", lambda self, empty_write_count=True: None, "an_emptied_writer_starts_again"),
        ("_writable", lambda self: self._storage, "without_a_storage_nothing_can_be_written"),
    ],
)
def test_what_the_base_does_by_itself_is_tested_as_well(name: str, without: Any, test: str, monkeypatch: Any) -> None:
    (found,) = [known for known in names_in(RingTests) if test in known]
    assert failure(suite_of(Ring), found) is None
    monkeypatch.setattr(base.Writer, name, without)
    assert failure(suite_of(Ring), found) is not None


# What the base refuses and does -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows",
    [[0, 1], [0, 1, 9], [0, 1, -2], [0.0, 1.0, 2.0], range(2)],
    ids=["too few", "beyond the capacity", "below -1", "no integers", "a short range"],
)
def test_rows_that_cannot_be_are_refused_with_nothing_changed(rows: Any) -> None:
    class Own(Ring):
        def place(self, data, count, capacity):
            return rows if isinstance(rows, range) else torch.tensor(rows)

    writer, storage = Own(), LazyTensorStorage(5)
    writer.register_storage(storage)
    with pytest.raises(SchemaError, match=r"place\(\) of a Own returned the rows .* for 3 elements"):
        writer.extend(torch.arange(3))
    assert (len(storage), writer.cursor, writer.write_count) == (0, 0, 0)


def test_elements_can_be_left_out() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(3), writer=EveryOther())
    assert buffer.extend(torch.arange(5)).tolist() == [0, -1, 1, -1, 2]
    assert buffer.extend(torch.arange(5, 8)).tolist() == [-1, 0, -1]
    assert buffer.add(torch.tensor(8)) == 1
    assert (buffer[:].tolist(), buffer.write_count, buffer.writer.cursor) == ([6, 8, 4], 5, 2)
    data = [{"a": 1}, {"a": 2}, {"a": 3}]
    listed = ReplayBuffer(writer=EveryOther(), collate_fn=list)
    assert (listed.extend(data).tolist(), listed[:]) == ([0, -1, 1], [{"a": 1}, {"a": 3}])


def test_a_writer_without_an_order_is_refused_where_one_is_needed() -> None:
    with pytest.raises(ValueError, match="a Reservoir puts rows anywhere, and a SliceSampler needs them in order"):
        ReplayBuffer(storage=LazyTensorStorage(3), writer=Reservoir(), sampler=SliceSampler(slice_len=2))


def test_a_reservoir_is_fair() -> None:
    counts = torch.zeros(20)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        buffer = ReplayBuffer(storage=LazyTensorStorage(5), writer=Reservoir(), generator=generator)
        buffer.extend(torch.arange(8))
        buffer.extend(torch.arange(8, 20))
        counts[buffer[:]] += 1
    assert 25 < counts.min() <= counts.max() < 75  # 50 are expected, 6 is the standard deviation


def test_a_buffer_of_slices_takes_an_own_ring() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), writer=Ring(), sampler=SliceSampler(slice_len=2), batch_size=8)
    for start in range(0, 12, 3):
        episode = TensorDict({"episode": torch.full((3,), start), "step": torch.arange(3)}, [3])
        buffer.extend(episode)
    for _ in range(20):
        batch = buffer.sample().view(4, 2)
        assert (batch["episode"][:, 0] == batch["episode"][:, 1]).all()
        assert (batch["step"][:, 0] + 1 == batch["step"][:, 1]).all()


# Writers that were written for TorchRL ------------------------------------------------------------------------------


class OfTorchRL(Writer):
    """Overrides what TorchRL's documentation shows."""

    def add(self, data):
        row = self._cursor
        self._storage.set(row, data)
        self._cursor, self._write_count = (row + 1) % self._storage.max_size, self._write_count + 1
        return row

    def extend(self, data):
        index = (self._cursor + torch.arange(len(data))) % self._storage.max_size
        self._storage.set(index.clone(), data)
        self._cursor = (self._cursor + len(data)) % self._storage.max_size
        self._write_count += len(data)
        return index


def test_a_writer_written_for_torchrl_passes_in_one_dimension() -> None:
    assert failures(suite_of(OfTorchRL, ndims=(1,))) == {}


class Counts(RoundRobinWriter):
    written = 0

    def extend(self, data):
        self.written += len(data)
        return super().extend(data)


def test_an_override_can_call_its_parents() -> None:
    assert failures(suite_of(Counts)) == {}


@pytest.mark.parametrize(
    ("name", "instead"), [("empty", "reset"), ("rotate", "on_rotate"), ("resume_after", "on_register")]
)
def test_final_methods_name_what_to_implement(name: str, instead: str) -> None:
    with pytest.raises(TypeError, match=rf"Own overrides {name}\(\).*final\n?.*implement {instead}"):
        type("Own", (RoundRobinWriter,), {name: lambda self: None})


def test_without_a_place_there_is_no_writer() -> None:
    with pytest.raises(TypeError, match="place"):
        type("Own", (Writer,), {})()
    with pytest.raises(TypeError, match="place"):
        type("Own", (Writer,), {"add": lambda self, data: None})()
