from __future__ import annotations

import copy
import multiprocessing
import warnings
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack, tensorclass

from rbtool.core.buffers import tensordict as tensordict_module
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
from rbtool.core.errors import SchemaError, UsageError
from rbtool.core.samplers.slices import SliceSampler
from rbtool.core.samplers.uniform import RandomSampler
from rbtool.core.storages import columns as columns_module
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import ListStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.transforms.base import Transform
from rbtool.core.writers.base import ImmutableDatasetWriter
from rbtool.core.writers.round_robin import RoundRobinWriter, TensorDictRoundRobinWriter


@tensorclass
class Step:
    a: torch.Tensor


class Prioritised(RandomSampler):
    """Draws like any sampler, and keeps the priorities that it is given."""

    reduction = "max"

    def __init__(self) -> None:
        self.given: dict[Any, float] = {}

    def sample(self, storage: Any, batch_size: int) -> Any:
        index, _ = super().sample(storage, batch_size)
        count = len(index)
        return index, {"priority_weight": torch.ones(count), ("next", "truncated"): torch.ones(count, 1).bool()}

    def update_priority(self, index: Any, priority: Any, *, storage: Any = None) -> None:
        self.given |= dict(zip(index.tolist(), priority.tolist(), strict=True))


def steps(count: int = 4, **more: torch.Tensor) -> TensorDict:
    return TensorDict({"a": torch.arange(count), **more}, [count])


def made(rows: int = 0, **arguments: Any) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=Prioritised(), batch_size=6, **arguments)
    if rows:
        buffer.extend(steps(rows))
    return buffer


@pytest.mark.parametrize("data", [torch.zeros(3), [steps(2)], None, "text", Step(torch.zeros(3), batch_size=[3])])
def test_only_tensordicts_are_written(data: object) -> None:
    buffer = made()
    for act in (buffer.extend, buffer.add):
        with pytest.raises(ValueError, match="expected a tensordict, found a"):
            act(data)
    assert len(buffer) == 0


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_dict_of_arrays_and_tensors_becomes_a_tensordict(storage: Any) -> None:
    buffer = TensorDictReplayBuffer(storage=storage(10), batch_size=4)
    reading = np.arange(6, dtype=">f4").reshape(3, 2)[:, ::-1]
    reading.flags.writeable = False
    after = {"reward": np.ones((3, 1)), "done": torch.zeros(3, 1, dtype=torch.bool), "more": steps(3)}
    data = {"observation": reading, "next": after, ("next", "count"): np.arange(3, dtype=np.uint8)}
    assert buffer.extend(data).tolist() == [0, 1, 2]
    one = {"observation": reading[0], "next": {"reward": np.ones(1), "done": torch.zeros(1) > 0, "more": {"a": 7}}}
    assert buffer.add(one | {("next", "count"): np.uint8(9)}) == 3
    rows = buffer[:]
    assert rows["observation"].tolist() == [[1, 0], [3, 2], [5, 4], [1, 0]]
    assert [rows[key].dtype for key in ("observation", ("next", "reward"), ("next", "count"))] == [
        torch.float32, torch.float64, torch.uint8
    ]  # fmt: skip
    assert rows["next", "more", "a"].tolist() == [0, 1, 2, 7]
    assert rows["next", "count"].tolist() == [0, 1, 2, 9]


@pytest.mark.parametrize(
    "kind", [TensorDictReplayBuffer, partial(TensorDictPrioritizedReplayBuffer, alpha=0.7, beta=0.5)]
)
@pytest.mark.parametrize("name", ["tensordicts", "data"])
def test_the_data_has_the_name_of_torchrl_and_ours(kind: Any, name: str) -> None:
    buffer = kind(storage=LazyTensorStorage(5))
    data = TensorDict({"a": torch.arange(3)}, [3])
    assert buffer.extend(**{name: data}).tolist() == buffer.extend(data).sub(3).remainder(5).tolist() == [0, 1, 2]
    with pytest.raises(TypeError):
        buffer.extend(tensordict=data)


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
@pytest.mark.parametrize("transform", [None, lambda rows: rows])
def test_a_batch_without_rows_changes_nothing(storage: Any, transform: Any) -> None:
    buffer = TensorDictReplayBuffer(storage=storage(10), transform=transform)
    buffer.extend(steps(3))
    index = buffer.extend(steps(0))
    assert (index.shape, index.dtype) == ((0,), torch.int64)
    assert (len(buffer), buffer.write_count, buffer.writer.cursor) == (3, 3, 3)
    buffer.extend(steps(3)[:0], update_priority=True)
    assert buffer.extend(steps(1)).tolist() == [3]


def test_a_batch_without_rows_is_refused_where_entries_are_unknown_or_writes_are() -> None:
    with pytest.raises(IndexError, match="found none"):
        TensorDictReplayBuffer(storage=LazyTensorStorage(10)).extend(steps(0))
    fixed = TensorDictReplayBuffer(storage=TensorStorage(steps(3)), writer=ImmutableDatasetWriter())
    with pytest.raises(RuntimeError, match="allow writing"):
        fixed.extend(steps(0))


def test_batches_of_several_dimensions_may_be_dicts_or_without_rows() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2), batch_size=5)
    assert buffer.extend({"a": np.zeros((3, 4)), "b": torch.zeros(3, 4, 2)}).shape == (12, 2)
    with pytest.raises(UsageError, match=r"'b' is \[3\] and 'a' is \[3, 4\], expected the same 2 leading dimensions"):
        buffer.extend({"a": np.zeros((3, 4)), "b": torch.zeros(3)})
    assert buffer.extend(buffer[:][:, :0]).shape == (0, 2)
    assert (len(buffer), buffer.write_count) == (12, 4)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "no entries"),
        ({"a": np.zeros(3), "b": np.zeros(2)}, r"'b' is \[2\] and 'a' is \[3\], expected the same number of rows"),
        ({"a": 1.0}, r"'a' is \[\]"),
        ({"a": {"b": ["x"] * 3}}, "'a.b' is a list, expected a tensor"),
        ({"a": np.array(["x"])}, "'a' is an array of <U1"),
        ({3: np.zeros(3)}, "the key 3"),
    ],
)
def test_dicts_that_are_no_batches_are_refused(data: Any, words: str) -> None:
    buffer = made()
    with pytest.raises(UsageError, match=words):
        buffer.extend(data)
    assert len(buffer) == 0


def test_batches_have_the_entries_of_the_sampler() -> None:
    buffer = made(4)
    batch, info = buffer.sample(return_info=True)
    assert torch.equal(batch["index"], info["index"])
    assert torch.equal(batch["index"], batch["a"])
    assert batch["priority_weight"].shape == (6,)
    assert batch["next", "truncated"].shape == (6, 1)


def test_the_index_of_several_dimensions_is_one_entry() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2), batch_size=5)
    assert buffer.extend(TensorDict({"a": torch.arange(12).reshape(3, 4)}, [3, 4])).shape == (12, 2)
    batch = buffer.sample()
    assert batch["index"].shape == (5, 2)
    assert torch.equal(batch["a"], batch["index"][:, 1] * 4 + batch["index"][:, 0])


def test_include_info_is_deprecated() -> None:
    buffer = made(4)
    with pytest.warns(DeprecationWarning, match="include_info"):
        assert set(buffer.sample(include_info=False).keys(True, True)) == {"a"}
    with pytest.warns(DeprecationWarning, match="include_info"):
        batch, info = buffer.sample(include_info=True, return_info=True)
    assert torch.equal(batch["index"], info["index"])


def test_stored_elements_have_to_be_tensordicts() -> None:
    buffer = TensorDictReplayBuffer(storage=TensorStorage(torch.arange(4)))
    with pytest.raises(RuntimeError, match="found a Tensor"):
        buffer.sample(2)


def test_a_transform_that_changes_the_shape_does_not_fit_the_info() -> None:
    buffer = made(4, transform=lambda rows: rows.reshape(2, 3))
    with pytest.raises(RuntimeError, match=r"\[6\], expected it to begin with the batch's, \[2, 3\]"):
        buffer.sample()


def test_priorities_of_a_sampled_batch_go_to_its_elements() -> None:
    buffer = made(4)
    batch = buffer.sample()
    batch["td_error"] = batch["index"].float() + 0.5
    buffer.update_tensordict_priority(batch)
    assert buffer.sampler.given == {row: row + 0.5 for row in set(batch["index"].tolist())}
    buffer.update_tensordict_priority(batch.exclude("td_error"))
    assert set(buffer.sampler.given.values()) == {1.0}
    with pytest.raises(KeyError, match="not sampled from"):
        buffer.update_tensordict_priority(steps())
    uniform = TensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    uniform.extend(steps(2, td_error=torch.ones(2)))
    uniform.update_tensordict_priority(uniform.sample())  # of no effect


def test_plain_buffers_add_no_info_to_batches() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), writer=RoundRobinWriter(), batch_size=2)
    buffer.extend(steps(3))
    assert set(buffer.sample().keys()) == {"a"}


# Arrays that are written as they are ------------------------------------------------------------------


class Arrays:
    """Draws steps as dicts of arrays and numbers, and now and then something that is refused or cast."""

    def __init__(self, seed: int, *, odd: bool = True) -> None:
        self.rng = np.random.default_rng(seed)
        self.odd = odd

    def number(self, dtype: Any, lead: tuple[int, ...]) -> Any:
        values = self.rng.integers(-3, 4, lead).astype(dtype)
        if lead or self.rng.random() < 0.5:
            return values
        exact = {np.bool_: bool, np.int64: int, np.float32: float}.get(dtype)
        return exact(values) if exact is not None and self.rng.random() < 0.7 else dtype(values)

    def states(self, lead: tuple[int, ...]) -> Any:
        whole = self.rng.standard_normal((*lead, 3)).astype(np.float32)
        return whole if self.rng.random() < 0.8 else np.asfortranarray(whole[..., ::-1])

    def step(self, lead: tuple[int, ...], stored: Any) -> dict[Any, Any]:
        found: dict[Any, Any] = {"state": self.states(lead)}
        found |= {"action": self.number(np.int64, lead), "weight": self.number(np.float64, lead)}
        after = {"reward": self.number(np.float32, lead), "done": self.number(np.bool_, lead)}
        found["next"] = {"state": self.states(lead), **after}
        odd = self.rng.integers(0, 24) if self.odd else -1
        if odd == 0:
            del found["next"]["done"]
        elif odd == 1:
            found["more"] = np.zeros(lead)
        elif odd == 2:
            found["action"] = self.number(np.int32, lead)
        elif odd == 3:
            found["state"] = self.rng.standard_normal((*lead, 3))
        elif odd == 4:
            found["next"]["reward"] = np.full(lead, 1.0, ">f4")
        elif odd == 5:
            found["next"]["reward"] = float(self.rng.choice([np.inf, np.nan, 1e300, -1e-46]))
        elif odd == 6:
            found["action"] = int(self.rng.choice([1 << 62, (1 << 63) - 1])) * int(self.rng.integers(1, 3))
        elif odd == 7:
            found[("next", "reward")] = found["next"].pop("reward")
        elif odd == 8:
            found = {key: found[key] for key in reversed(found)}
        elif odd == 9:
            found["state"] = torch.from_numpy(np.ascontiguousarray(found["state"]))
        elif odd == 10:
            found["state"] = found["state"].tolist()
        elif odd == 11 and len(stored):  # views of the very rows that may be written
            rows = stored[: lead[0]] if lead else stored[int(self.rng.integers(len(stored)))]
            if rows.batch_size == lead:
                found["state"], found["next"]["state"] = rows["next", "state"].numpy(), rows["state"].numpy()
        return found


def outcome(act: Any, *arguments: Any) -> Any:
    try:
        index = act(*arguments)
    except Exception as error:
        return type(error), str(error)
    return index.tolist() if isinstance(index, torch.Tensor) else index


def everything(buffer: TensorDictReplayBuffer) -> list[Any]:
    """All that later calls may depend on."""
    storage, writer = buffer.storage, buffer.writer
    rows = [] if not storage.initialized else [array.tobytes() for array in storage.columns.arrays]
    changes = [(str(change.rows), change.keys) for change in storage.log.since(0) or []]
    last = storage.last_cursor
    last = last.tolist() if isinstance(last, torch.Tensor) else last
    counts = len(storage), storage.log.now, writer.cursor, writer.write_count
    return [rows, changes, last, counts, writer.generations_of(range(9)).tolist()]


STORAGES: dict[str, Any] = {
    "memory": partial(LazyTensorStorage, 9),
    "memory map": partial(LazyMemmapStorage, 9),
    "open": partial(LazyTensorStorage, 9, schema="open"),
    "own": lambda: TensorStorage(TensorDict(batch_size=[9])),
}
SEVEN = ("action", torch.tensor([7]), slice(0, 1))
PRIORITIZED = partial(TensorDictPrioritizedReplayBuffer, alpha=0.7, beta=0.5)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    ("writer", "kind"),
    [
        (TensorDictRoundRobinWriter, TensorDictReplayBuffer),
        (RoundRobinWriter, TensorDictReplayBuffer),
        (partial(TensorDictRoundRobinWriter, track_generations=True), TensorDictReplayBuffer),
        (TensorDictRoundRobinWriter, PRIORITIZED),
        (TensorDictRoundRobinWriter, partial(PRIORITIZED, priority_key="weight")),
        (TensorDictRoundRobinWriter, partial(TensorDictReplayBuffer, consume_after_n_samples=2)),
    ],
)
def test_dicts_of_arrays_are_written_as_tensordicts_of_them_are(storage: str, writer: Any, kind: Any) -> None:
    """A mapping of another type than dict is always made a tensordict."""
    for seed in range(2):
        draws = [Arrays(seed), Arrays(seed)]
        seeds = [torch.Generator().manual_seed(seed) for _ in draws]
        pair = [kind(storage=STORAGES[storage](), writer=writer(), batch_size=4, generator=one) for one in seeds]
        for turn in range(60):
            chosen, found = draws[0].rng.integers(0, 16), []
            assert draws[1].rng.integers(0, 16) == chosen
            for arrays, buffer, form in zip(draws, pair, (dict, MappingProxyType), strict=True):
                stored = buffer.storage if buffer.storage.initialized else ()
                if chosen < 7:
                    found.append(outcome(buffer.add, form(arrays.step((), stored))))
                elif chosen < 12:
                    count = int(arrays.rng.integers(0, 4)) or int(arrays.rng.integers(0, 13))
                    found.append(outcome(buffer.extend, form(arrays.step((count,), stored))))
                elif chosen == 12:
                    found.append(outcome(lambda buffer=buffer: buffer.sample()["action"]))
                elif chosen == 13:
                    found.append(outcome(buffer.update_priority, torch.tensor([0]), 0.5))
                elif chosen == 14 and turn % 5 == 0:
                    found.append(outcome([buffer.empty, buffer.storage.empty, buffer.writer.empty][turn % 3]))
                elif chosen == 15 and turn % 4 == 0:
                    found.append(outcome(lambda *edit, buffer=buffer: buffer.set_at_(*edit).write_count, *SEVEN))
            assert not found or found[0] == found[1]
            assert everything(pair[0]) == everything(pair[1])


def odd_tensors(rng: np.random.Generator, data: TensorDict, stored: Any) -> TensorDict:
    """Change a tensordict in a way that a write has to notice, or must not mind."""
    lead, after, odd = tuple(data.batch_size), data["next"], rng.integers(0, 26)
    if odd == 0:
        del after["done"]
    elif odd == 1:
        after["more"] = torch.zeros(lead)
    elif odd == 2:
        data["action"] = data["action"].int()
    elif odd == 3:
        after["state"] = after["state"][..., :2]
    elif odd == 4:
        data["state"] = data["state"].unsqueeze(-2)
    elif odd == 5:
        data = data.select(*reversed(list(data.keys())))
    elif odd == 6:
        data["state"] = torch.nn.Parameter(data["state"])
    elif odd == 7:
        after["state"] = torch.complex(after["state"], after["state"]).conj().imag  # marked as negative
    elif odd == 8:
        data["state"] = data["state"].mT.contiguous().mT if lead else data["state"].flip(-1)
    elif odd == 9:
        after["reward"] = torch.ones(()).expand(lead)
    elif odd == 10:
        data["index"] = torch.full(lead, 77)
    elif odd == 11:
        data = data.set_non_tensor("task", "walk")
    elif odd == 12:
        data = TensorDict(data.to_dict(), data.batch_size, device="cpu").lock_()
    elif odd == 13:
        data["action"] = data["action"].float()
    elif odd == 14 and lead and lead[0]:
        data = torch.stack(list(data.unbind(0))) if rng.random() < 0.5 else lazy_stack(list(data.unbind(0)))
    elif odd == 15:
        data["next"] = data["next"].select("state", "done", "reward").select("done", "reward", "state")
    elif odd == 16:
        data["weight"] = data["weight"][..., None]
    elif odd == 17 and lead:
        data = TensorDict({key: torch.cat([data[key]] * 2)[::2] for key in ("action", "weight")}, lead).update(data)
    elif odd == 18:
        data = TensorDict(dict(data.items()), [])
    elif odd < 22 and len(stored):  # views of the very rows that may be written
        rows = stored[: lead[0]] if lead else stored[int(rng.integers(len(stored)))]
        if tuple(rows.batch_size) == lead:
            data["state"], after["state"] = rows["next", "state"], rows["state"]
    return data


class GeneralWriter(RoundRobinWriter):
    """Is not known to put data where it belongs without looking at it."""


class GeneralLabels(TensorDictRoundRobinWriter):
    """The same, with numbers of rows."""


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("writers", [(RoundRobinWriter, GeneralWriter), (TensorDictRoundRobinWriter, GeneralLabels)])
def test_tensordicts_are_written_as_they_are_by_any_path(
    storage: str, compiled: bool, writers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns_module, "_MANY", 0 if compiled else 1 << 40)
    monkeypatch.setattr(columns_module, "warm", lambda importing: compiled)
    monkeypatch.setattr(columns_module, "_SMALL", 150)  # two rows
    for seed in range(3):
        rngs = [np.random.default_rng(seed) for _ in writers]
        pair = [TensorDictReplayBuffer(storage=STORAGES[storage](), writer=kind()) for kind in writers]
        for _ in range(50):
            found = []
            for rng, buffer in zip(rngs, pair, strict=True):
                rows = buffer.storage if buffer.storage.initialized else ()
                count = int(rng.integers(0, 5)) * int(rng.integers(1, 4))
                lead = (count,) if rng.random() < 0.6 else ()
                step = Arrays(int(rng.integers(1 << 30)), odd=False).step(lead, ())
                data = odd_tensors(rng, TensorDict.from_dict(step, batch_size=lead), rows)
                with warnings.catch_warnings(action="ignore", category=UserWarning):
                    found.append(outcome(buffer.extend if lead else buffer.add, data))
                if rng.random() < 0.2 and len(buffer):
                    buffer[int(rng.integers(len(buffer)))]  # lends rows from now on
            assert found[0] == found[1]
            assert everything(pair[0]) == everything(pair[1])
        assert everything(copy.deepcopy(pair[0])) == everything(copy.deepcopy(pair[1]))


@pytest.mark.parametrize("writer", [TensorDictRoundRobinWriter, GeneralLabels, RoundRobinWriter, GeneralWriter])
def test_rows_with_more_dimensions_than_their_numbers_are_refused(writer: Any) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(9), writer=writer())
    for _ in range(2):  # the second one finds out that rows have numbers
        buffer.extend(TensorDict({"a": torch.zeros(1, 3)}, [1]))
    more = TensorDict({"a": torch.ones(2, 3)}, [2, 3])
    if issubclass(writer, TensorDictRoundRobinWriter):
        with pytest.raises(SchemaError, match="index"):
            buffer.extend(more)
    else:
        buffer.extend(more)
    assert buffer[:]["a"].mean(1).tolist() == [0, 0, 1, 1][: len(buffer)]


def test_the_index_of_a_write_belongs_to_the_caller() -> None:
    """What a caller does to it changes neither the ring nor later indices."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(9), sampler=SliceSampler(num_slices=1, traj_key="a"))
    batch = TensorDict({"a": torch.zeros(4, dtype=torch.int64)}, [4])
    for start in (0, 4, 8):  # the last one goes round
        index = buffer.extend(batch)
        assert index.tolist() == [(start + row) % 9 for row in range(4)]
        index.fill_(5)
    assert buffer[:]["index"].tolist() == list(range(9))
    assert (buffer.writer.cursor, buffer.storage.log.now.next_row) == (3, 3)


class Doubled(Transform):
    def inv(self, data: Any) -> Any:
        return data.set("state", data["state"] * 2)


class DoublingWriter(TensorDictRoundRobinWriter):
    def prepare(self, data: Any, rows: Any) -> Any:
        return super().prepare(data.copy().set("state", data["state"] * 2), rows)


def test_arrays_are_written_without_a_tensordict(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, buffer = Arrays(0, odd=False), TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=2)
    step, batch = draw.step((), ()), draw.step((8,), ())
    buffer.add(step)
    buffer.add(step)
    monkeypatch.setattr(tensordict_module, "_tensordict_of", None)
    assert buffer.add(step) == 2
    assert buffer.extend(batch).tolist() == list(range(3, 11))
    assert buffer.storage[:]["index"].tolist() == list(range(11))
    assert buffer.storage[3:]["next", "state"].numpy().tobytes() == batch["next"]["state"].tobytes()


@pytest.mark.parametrize("change", ["transform", "shared", "sampler", "writer", "storage"])
def test_whatever_changes_a_buffer_ends_the_writing_of_arrays_as_they_are(change: str) -> None:
    step = Arrays(1, odd=False).step((), ())
    step["state"] = np.arange(3, dtype=np.float32)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=2)
    for _ in range(3):
        buffer.add(step)
    if change == "transform":
        buffer.transform.append(Doubled())
    elif change == "shared":
        buffer.share()
    elif change == "sampler":
        buffer.set_sampler(Prioritised())
        buffer.priority_key = ("next", "reward")
    elif change == "writer":
        buffer.set_writer(DoublingWriter())
    else:
        buffer.set_storage(LazyTensorStorage(100, ndim=1))
    buffer.add(step | {"next": step["next"] | {"reward": np.float32(5)}})
    first = buffer.storage[-1]["state"].tolist()
    assert first == ([0, 2, 4] if change in {"transform", "writer"} else [0, 1, 2])
    assert len(buffer) == {"storage": 1}.get(change, 4)
    if change == "sampler":
        assert buffer.sampler.given == {3: 5.0}


def test_memory_that_was_moved_is_followed() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=2)
    step = Arrays(1, odd=False).step((), ())
    for _ in range(3):
        buffer.add(step)
    buffer.storage.contents.share_memory_()
    buffer.add(step | {"state": np.full(3, 9, np.float32)})
    assert buffer.storage[3]["state"].tolist() == [9, 9, 9]


def test_an_index_in_a_dict_is_replaced_by_the_row_also_in_the_first_write_after_a_load(tmp_path: Path) -> None:
    saved, loaded = (TensorDictReplayBuffer(storage=LazyTensorStorage(6), batch_size=2) for _ in range(2))
    for row in range(4):
        saved.add({"a": np.int64(row)})
    saved.dumps(tmp_path / "saved")
    loaded.loads(tmp_path / "saved")
    for buffer in (loaded, TensorDictReplayBuffer(storage=saved.storage, batch_size=2)):
        buffer.add({"a": np.int64(9), "index": np.int64(77)})
        assert buffer[:]["index"].tolist() == list(range(len(buffer)))


@pytest.mark.parametrize("spawn", [False, True])
def test_dicts_are_written_to_all_columns_after_sharing_failed_halfway(
    spawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=2)
    steps = [{"a": np.int64(row), "r": np.float32(row), "o": np.full(9, row, np.float32)} for row in range(4)]
    owner, name = (torch.UntypedStorage, "_share_fd_cpu_") if spawn else (torch.Tensor, "share_memory_")
    share, moved = getattr(owner, name), list[Any]()

    def full(memory: Any) -> Any:
        moved.append(memory)
        if len(moved) == 2:
            raise RuntimeError("no space left")
        return share(memory)

    for step in steps[:2]:
        buffer.add(step)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, full)
        child = multiprocessing.get_context("spawn").Process(target=len, args=(buffer.storage,))
        with pytest.raises(RuntimeError, match="no space"):
            (child.start if spawn else buffer.storage.share)()
    for step in steps[2:]:
        buffer.add(step)
    found = buffer[:]
    assert found["a"].tolist() == found["r"].tolist() == found["o"][:, 8].tolist() == [0, 1, 2, 3]
