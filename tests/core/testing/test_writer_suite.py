"""A writer written from the documentation passes the suite, and a broken one fails the test of the rule it breaks."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from own_writers import EveryOther, Reservoir, Ring
from suite_runs import Broken, failure, failures, names_in
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


# Each breaks one rule -----------------------------------------------------------------------------------------------


def marks_before_it_writes(self, data, count, capacity):
    found = Ring.place(self, data, count, capacity)
    self._mark_update(torch.tensor(list(found)) % capacity)
    return found


def moves_before_it_writes(self, data, count, capacity):
    found = Ring.place(self, data, count, capacity)
    self.cursor = found.stop % capacity
    return found


def counts_twice(self, rows, capacity):
    Ring.on_written(self, rows, capacity)
    self.write_count += 1


def one_index_for_all(self, data):
    """Return the index that is kept, and write into it the next time."""
    index = Ring.extend(self, data)
    if not hasattr(self, "kept") or self.kept.shape != index.shape:
        self.kept = index
    return self.kept.copy_(index)


def takes_any_state(self, state_dict):
    self.cursor = self.write_count = 0


def after_the_first_row(self, rows, capacity):
    self.cursor = ((rows if isinstance(rows, int) else int(rows[0])) + 1) % capacity


class Rolling(Ring):
    """Writes the elements of a batch in an order that depends on how many batches there were."""

    batches = 0

    def place(self, data, count, capacity):
        self.batches, self.stop = self.batches + 1, self.cursor + count
        return torch.arange(self.cursor, self.stop).roll(self.batches // 2) % capacity

    def on_written(self, rows, capacity):
        self.cursor = self.stop % capacity

    def save_state(self):
        return {"batches": self.batches}

    def load_state(self, state):
        self.batches = int(state["batches"])


BROKEN = {
    "returns the index of other rows": Broken(
        Ring, "test_written_rows_are_found_at_their_index test_rows_wrap_around",
        {"extend": lambda self, data: Ring.extend(self, data) * 0}),
    "forgets the cursor": Broken(
        Ring, "test_rows_wrap_around test_slices_follow_the_order_of_writes",
        {"on_written": lambda self, rows, capacity: None}),
    "counts twice": Broken(Ring, "test_writes_are_counted", {"on_written": counts_twice}),
    "notifies nobody": Broken(Ring, "test_attached_buffers_are_notified_after_a_write", {
        "_mark_update": lambda self, index: setattr(self, "_informed", True)}),
    "notifies before it writes": Broken(
        Ring, "test_attached_buffers_are_notified_after_a_write", {"place": marks_before_it_writes}),
    "notifies of one row alone": Broken(Ring, "test_attached_buffers_are_notified_after_a_write", {
        "_mark_update": lambda self, index: Ring._mark_update(self, torch.as_tensor(index).reshape(-1)[:1])}),
    "counts no generations": Broken(
        Ring, "test_overwritten_rows_are_counted", {"_generations": property(lambda self: None)}),
    "moves before it writes": Broken(Ring, "test_a_failed_write_changes_nothing", {
        "place": moves_before_it_writes, "on_written": lambda self, rows, capacity: None}),
    "edits the data of the caller": Broken(Ring, "test_the_data_of_the_caller_is_unchanged", {
        "prepare": lambda self, data, rows: data.add_(0.5) if isinstance(data, torch.Tensor) else data}),
    "stores other data": Broken(Ring, "test_written_rows_are_found_at_their_index", {
        "prepare": lambda self, data, rows: data * 2 if isinstance(data, torch.Tensor) else data}),
    "skips a lane": Broken(Ring, "test_indices_of_two_dimensions_name_each_element", {
        "_replicate_index": lambda self, index: Ring._replicate_index(self, index)[1:]}),
    "returns one index for all": Broken(Ring, "test_a_returned_index_is_a_copy", {"extend": one_index_for_all}),
    "forgets its state": Broken(Rolling, "test_a_buffer_continues_from_its_checkpoint", {
        "save_state": lambda self: {}, "load_state": lambda self, state: None}),
    "forgets its state on the disk": Broken(
        Ring, "test_state_is_restored test_a_buffer_continues_from_its_checkpoint",
        {"read_state": lambda self, folder: Ring.read_state(self, folder) | {"_cursor": 0}}),
    "takes any state": Broken(Ring, "test_an_invalid_state_is_refused", {"load_state_dict": takes_any_state}),
    "pickles the generator": Broken(Ring, "test_an_unpickled_copy_continues_alike", {
        "__getstate__": lambda self: self.__dict__ | {"generator": 1}}),
    "does not start again": Broken(
        Ring, "test_an_emptied_writer_starts_again", {"reset": lambda self: setattr(self, "cursor", 3)}),
    "loses the count": Broken(
        Ring, "test_an_emptied_writer_starts_again", {"reset": lambda self: setattr(self, "write_count", 0)}),
    "counts in 31 bits": Broken(Ring, "test_counts_have_64_bits", {
        "write_count": property(lambda self: Writer.write_count.fget(self) % 2**31, Writer.write_count.fset)}),
    "writes backwards": Broken(Ring, "test_rows_wrap_around", {
        "place": lambda self, data, count, capacity: (
            torch.arange(self.cursor + count - 1, self.cursor - 1, -1) % capacity),
        "on_written": after_the_first_row}),
    "writes from the start, always": Broken(
        Ring, "test_rows_wrap_around", {"place": lambda self, data, count, capacity: range(count)}),
    "hides that it keeps the order": Broken(Ring, "test_it_keeps_the_order_of_rows", {"keeps_order": False}),
    "ignores that the ring turns": Broken(Ring, "test_a_full_ring_continues_in_a_larger_storage", {
        "on_rotate": lambda self, row: setattr(self, "cursor", 0)}),
    "counts for its process alone": Broken(Ring, "test_another_process_continues_the_counts", {
        "__init__": lambda self: Ring.__init__(self, compilable=True)}),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_writer_fails(name: str) -> None:
    BROKEN[name].require_found(suite_of, __name__)


class LabelsTheCallersData(TensorDictRoundRobinWriter):
    def prepare(self, data, rows):
        return data.set("index", torch.zeros(data.batch_size, dtype=torch.int64))


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
