"""The test suite for buffers. To run it, subclass `BufferTests` and implement `make`."""

from __future__ import annotations

import os
import pickle
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, is_tensor_collection

from ..buffers.replay_buffer import ReplayBuffer
from ..buffers.tensordict import PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer
from ..storages.lazy_tensor import LazyTensorStorage
from .rows import error_of

ROWS, LANES = 12, 3
KNOWN = frozenset({"index", "priority_weight"})  # keys that writers and samplers add to elements
FILLS = {"empty": 0, "partly": 7, "full": 12, "wrapped": 29}
CONTENTS = ("tensor", "tensordict", "nested", "tree")


def leaves_of(data: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], torch.Tensor]:
    """Return the tensors of a nest by path, without the keys that writers and samplers add."""
    if isinstance(data, torch.Tensor):
        return {path: data}
    items: Any = data.items() if is_tensor_collection(data) or isinstance(data, Mapping) else enumerate(data)
    found: dict[tuple[str, ...], torch.Tensor] = {}
    for key, value in items:
        if key not in KNOWN:
            found |= leaves_of(value, (*path, str(key)))
    return found


def alike(one: Any, other: Any) -> bool:
    """Return whether two nests have the same leaves, bit for bit."""
    left, right = leaves_of(one), leaves_of(other)
    return left.keys() == right.keys() and all(
        value.dtype == right[path].dtype and torch.equal(value, right[path]) for path, value in left.items()
    )


def numbered(content: str, numbers: torch.Tensor) -> Any:
    """Make elements of one kind of content from int64 numbers of any shape; no two leaves are alike."""
    position = torch.stack([numbers, -numbers], -1).float()
    reward = (numbers.unsqueeze(-1) + 0.5).double()
    if content == "tensor":
        return position
    if content == "tensordict":
        return TensorDict({"action": numbers.to(torch.int16), "position": position}, numbers.shape)
    if content == "nested":
        inner = TensorDict({"position": position + 1, "reward": reward}, numbers.shape)
        return TensorDict({"position": position, "next": inner, "flag": numbers % 3 == 0}, numbers.shape)
    return {"a": {"b": numbers.to(torch.uint8)}, "c": [position, (reward,)]}


class BufferTests(ABC):
    """The contract of `ReplayBuffer`, on buffers that are empty, partly filled, exactly full and wrapped around.

    `make` returns an empty buffer of twelve rows, with three lanes if `ndim` is 2. The tests write
    `numbered(content, 100 * lane + row)` as element `(lane, row)`.
    """

    content = "tensordict"
    ndim = 1
    saves = True
    """Whether a buffer of this kind can be written to a folder."""
    one_by_one = False
    """Whether the storage takes elements of any kind one by one; nests are then written as lists of elements."""

    @abstractmethod
    def make(self, **arguments: Any) -> ReplayBuffer:
        """Make an empty buffer; `arguments` go to its constructor."""

    # Written rows and expected contents ------------------------------------------------------------

    def batch(self, start: int, count: int) -> Any:
        """Make rows `start` to `start + count` in the layout in which a user writes them."""
        rows = torch.arange(start, start + count)
        if self.one_by_one and self.content == "tree":
            return [numbered(self.content, row) for row in rows]
        return numbered(self.content, rows if self.ndim == 1 else rows + 100 * torch.arange(LANES).unsqueeze(1))

    def expected(self, written: int) -> Any:
        """Return the contents of a ring after `written` rows were written to it."""
        ring = [max(row for row in range(written) if row % ROWS == slot) for slot in range(min(written, ROWS))]
        rows = torch.tensor(ring, dtype=torch.int64)
        return numbered(self.content, rows if self.ndim == 1 else rows + 100 * torch.arange(LANES).unsqueeze(1))

    def fill(self, buffer: ReplayBuffer, written: int) -> None:
        """Write rows in batches of at most five."""
        for start in range(0, written, 5):
            buffer.extend(self.batch(start, min(5, written - start)))

    def filled(self, **arguments: Any) -> Iterator[tuple[int, ReplayBuffer]]:
        """Yield buffers of every degree of filling except empty, each with the number of rows written."""
        for written in list(FILLS.values())[1:]:
            buffer = self.make(**arguments)
            self.fill(buffer, written)
            yield written, buffer

    def holds(self, buffer: ReplayBuffer, written: int) -> bool:
        """Return whether contents, length, cursor and count are right after `written` rows."""
        elements = min(written, ROWS) * (LANES if self.ndim == 2 else 1)
        counted = (len(buffer), buffer.writer.cursor, buffer.write_count) == (elements, written % ROWS, written)
        return counted and (not written or alike(buffer[:], self.expected(written)))

    # The tests -------------------------------------------------------------------------------------

    def test_it_starts_empty(self) -> None:
        buffer = self.make(batch_size=2)
        assert (len(buffer), buffer.write_count, buffer.writer.cursor) == (0, 0, 0)
        assert isinstance(error_of(buffer.sample), RuntimeError)
        assert (buffer.stats()["size"], buffer.stats()["utilization"]) == (0, 0)

    def test_the_ring(self) -> None:
        assert all(self.holds(buffer, written) for written, buffer in self.filled())

    def test_a_batch_longer_than_the_ring(self) -> None:
        buffer = self.make()
        index = buffer.extend(self.batch(0, 29))
        assert self.holds(buffer, 29)
        assert len(index) == 29 * (LANES if self.ndim == 2 else 1)

    def test_the_index_of_what_was_written(self) -> None:
        for written, buffer in self.filled():
            index = buffer.extend(self.batch(written, 4))
            place: Any = tuple(index.unbind(-1)) if self.ndim == 2 else index
            rows = buffer.storage.get(place)
            rows = rows if buffer.collate_fn is None else buffer.collate_fn(rows)
            numbers = torch.arange(written, written + 4)
            if self.ndim == 2:
                numbers = (numbers.unsqueeze(1) + 100 * torch.arange(LANES)).flatten()
            assert alike(rows, numbered(self.content, numbers))

    def test_added_elements_continue_the_ring(self) -> None:
        for written, buffer in self.filled():
            row = torch.tensor(written) if self.ndim == 1 else written + 100 * torch.arange(LANES)
            index = buffer.add(numbered(self.content, row))
            assert self.holds(buffer, written + 1)
            assert (
                index == written % ROWS
                if self.ndim == 1
                else index.tolist() == [[written % ROWS, lane] for lane in range(LANES)]
            )

    def test_samples_are_elements_and_the_index_names_them(self) -> None:
        for _, buffer in self.filled():
            batch, info = buffer.sample(32, return_info=True)
            rows = buffer.storage.get(info["index"])
            assert alike(batch, rows if buffer.collate_fn is None else buffer.collate_fn(rows))
            assert all(len(leaf) == 32 for leaf in leaves_of(batch).values())

    def test_every_way_to_name_elements(self) -> None:
        for _, buffer in self.filled():
            whole = leaves_of(buffer[:])
            count = len(next(iter(whole.values())))
            mask = torch.arange(count) % 2 == 0
            for index in (0, -1, slice(1, 3), [count - 1, 0], torch.tensor([1, 1]), mask, range(2)):
                found = leaves_of(buffer[index])
                plain = list(index) if isinstance(index, range) else index
                assert all(torch.equal(found[path], leaf[plain]) for path, leaf in whole.items())
            assert isinstance(error_of(partial(buffer.__getitem__, count)), IndexError)

    def test_a_write_that_fails_changes_nothing(self) -> None:
        for written, buffer in self.filled():
            for bad in self.bad_batches():
                assert isinstance(error_of(partial(buffer.extend, bad)), RuntimeError | ValueError)
                assert self.holds(buffer, written)

    def bad_batches(self) -> Iterator[Any]:
        """Yield batches that cannot be stored, because their type, shape or structure differs."""
        good = self.batch(0, 4)
        if self.one_by_one:
            yield from (5, iter([good]))
        elif self.content == "tensor":
            yield from (good.double(), good[..., :1])
        elif self.content == "tree":
            yield from (
                {"a": good["a"]},
                {**good, "d": good["c"][0]},
                {**good, "c": [good["c"][0].double(), good["c"][1]]},
            )
        else:
            position = good["position"]
            yield from (good.exclude("position"), good.copy().set("new", position))
            yield from (good.copy().set("position", position.double()), good.copy().set("position", position[..., :1]))

    def test_elements_are_replaced(self) -> None:
        for written, buffer in self.filled():
            rows = buffer[torch.tensor([1, 2])]
            buffer[torch.tensor([2, 0])] = [buffer[1], buffer[2]] if self.one_by_one else rows
            expected = {path: leaf.clone() for path, leaf in leaves_of(self.expected(written)).items()}
            for leaf in expected.values():
                leaf[torch.tensor([2, 0])] = leaf[torch.tensor([1, 2])]
            assert alike(leaves_of(buffer[:]), expected)
            assert (len(buffer), buffer.write_count) == (len(buffer.storage), written)

    def test_nothing_is_replaced_beyond_the_end(self) -> None:
        if self.ndim > 1:
            return
        buffer = self.make()
        self.fill(buffer, 7)
        for index, count in ((slice(5, 8), 3), (torch.tensor([0, 7]), 2), ([7], 1), (range(6, 8), 2)):
            assert isinstance(error_of(partial(buffer.__setitem__, index, self.batch(0, count))), IndexError)
        assert isinstance(error_of(partial(buffer.__setitem__, 7, buffer[0])), IndexError)
        assert isinstance(error_of(partial(buffer.write_all, self.batch(0, 8))), IndexError)
        assert self.holds(buffer, 7)

    def test_it_can_be_emptied_and_filled_again(self) -> None:
        for _, buffer in self.filled():
            buffer.empty()
            assert (len(buffer), buffer.write_count, buffer.writer.cursor) == (0, 0, 0)
            self.fill(buffer, 7)
            assert self.holds(buffer, 7)

    def test_the_same_seed_gives_the_same_batches(self) -> None:
        def drawn(seed: int, **more: Any) -> list[Any]:
            buffer = self.make(generator=torch.Generator().manual_seed(seed), batch_size=6, **more)
            self.fill(buffer, 29)
            return [leaves_of(buffer.sample()) for _ in range(5)]

        one, again, other, ahead = drawn(3), drawn(3), drawn(4), drawn(3, prefetch=2)
        assert all(map(alike, one, again))
        assert all(map(alike, one, ahead))
        assert not all(map(alike, one, other))

    def test_a_state_restores_and_the_ring_continues(self) -> None:
        for written, buffer in self.filled(generator=torch.Generator().manual_seed(1), batch_size=4):
            for before in (0, 3, 20):
                other = self.make(batch_size=2)
                self.fill(other, before)
                other.load_state_dict(pickle.loads(pickle.dumps(buffer.state_dict())))
                self.continues_like(other, buffer, written)

    def test_a_folder_restores_and_the_ring_continues(self) -> None:
        if not self.saves:
            return
        for written, buffer in self.filled(generator=torch.Generator().manual_seed(1), batch_size=4):
            with tempfile.TemporaryDirectory() as folder:
                buffer.dumps(f"{folder}/saved")
                for before in (3, 20):
                    other = self.make(batch_size=2)
                    self.fill(other, before)
                    other.loads(f"{folder}/saved")
                    self.continues_like(other, buffer, written)

    def test_a_pickle_restores_and_the_ring_continues(self) -> None:
        for written, buffer in self.filled(generator=torch.Generator().manual_seed(1), batch_size=4):
            self.continues_like(pickle.loads(pickle.dumps(buffer)), buffer, written)

    def continues_like(self, other: ReplayBuffer, buffer: ReplayBuffer, written: int) -> None:
        """Check that a restored buffer holds, draws and writes the same as the saved one."""
        assert self.holds(other, written)
        assert other.batch_size == buffer.batch_size
        state = buffer.generator.get_state() if buffer.generator is not None else None
        draws = [(buffer.sample(), other.sample()) for _ in range(3)]
        assert all(alike(one, two) for one, two in draws)
        if buffer.generator is not None and state is not None:
            buffer.generator.set_state(state)
        other.extend(self.batch(written, 4))
        assert self.holds(other, written + 4)


def moved(one: Any, other: Any, way: str, path: str | os.PathLike[str]) -> Any:
    """Load the state of a buffer into another one, through a dictionary if `way` is "state", else through a folder."""
    if way == "state":
        other.load_state_dict(one.state_dict())
    else:
        one.dumps(path)
        other.loads(path)
    return other


def make_class(name: str, made: Callable[..., ReplayBuffer], **attributes: Any) -> type[BufferTests]:
    """Make a suite for one kind of buffer and content, for test files that run many of them."""
    return type(name, (BufferTests,), {"make": lambda self, **more: made(**more), "__test__": True, **attributes})


EXPONENTS: dict[str, Any] = {"alpha": 1.0, "beta": 1.0, "eps": 0.0}
"""With these exponents, the weights in the info of a sample are the priorities."""


def draw_many(buffer: ReplayBuffer, draws: int = 4000) -> tuple[Any, dict[str, Any]]:
    """Draw one large batch, whatever the buffer's own batch size, and return it with its info."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that the buffer has another batch size
        found: tuple[Any, dict[str, Any]] = buffer.sample(draws, return_info=True)
    return found


def drawn_weights(buffer: ReplayBuffer) -> list[float]:
    """Return the weights of all elements as fractions of their sum, for a sampler with beta 1 and at most 100 elements.

    They are derived from the importance weights of many draws; an element that was never drawn has weight 0.
    """
    torch.manual_seed(0)
    _, info = draw_many(buffer)
    index = info["index"]
    if isinstance(index, tuple):
        index = torch.from_numpy(np.ravel_multi_index(tuple(map(np.asarray, index)), buffer.storage.shape))
    found = torch.zeros(len(buffer), dtype=torch.float64)
    found[index] = 1 / info["priority_weight"].double()
    return [float(weight) for weight in found / found.sum()]


def plain(size: int = 10, **more: Any) -> PrioritizedReplayBuffer:
    """Make a buffer whose weights are its priorities."""
    return PrioritizedReplayBuffer(**EXPONENTS | {"storage": LazyTensorStorage(size), "batch_size": 4} | more)


def weighted(*priorities: float, size: int = 10, **more: Any) -> PrioritizedReplayBuffer:
    """Make a buffer of as many numbered elements, of these priorities."""
    buffer = plain(size, **more)
    buffer.update_priority(buffer.extend(torch.arange(len(priorities))), torch.tensor(priorities, dtype=torch.float32))
    return buffer


def of_steps(size: int = 10, **more: Any) -> TensorDictPrioritizedReplayBuffer:
    """Make a buffer of tensordicts whose weights are its priorities."""
    return TensorDictPrioritizedReplayBuffer(**EXPONENTS | {"storage": LazyTensorStorage(size), "batch_size": 4} | more)


def steps(count: int = 4, **more: Any) -> TensorDict:
    """Make rows that contain their own numbers."""
    return TensorDict({"a": torch.arange(count), **more}, [count])


def expected(*priorities: float) -> Any:
    """Return what `drawn_weights` should return for elements with these priorities."""
    return pytest.approx([priority / sum(priorities) for priority in priorities], abs=1e-6)
